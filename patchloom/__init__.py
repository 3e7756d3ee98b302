"""patchloom: patch-based networks and the training that makes them work.

Importing it loads nothing: each name below is imported when it is first used.
"""

import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from patchloom.data.batches.decoded_dataset import make_evaluation_loader as make_evaluation_loader
    from patchloom.data.batches.decoded_dataset import make_loader as make_loader
    from patchloom.data.checking.check import check as check
    from patchloom.data.images.image_batch import normalize as normalize
    from patchloom.data.packing import pack as pack
    from patchloom.data.reading_options import Reading as Reading
    from patchloom.data.sources.source import open_data as open_data
    from patchloom.engine.callbacks import Callback as Callback
    from patchloom.engine.ema import Ema as Ema
    from patchloom.engine.optimization import Schedule as Schedule
    from patchloom.engine.optimization import make_optimizer as make_optimizer
    from patchloom.engine.optimization import set_rates as set_rates
    from patchloom.errors import BucketError as BucketError
    from patchloom.errors import CheckpointError as CheckpointError
    from patchloom.errors import DataError as DataError
    from patchloom.errors import DeviceError as DeviceError
    from patchloom.errors import NumericalError as NumericalError
    from patchloom.errors import PatchloomError as PatchloomError
    from patchloom.errors import ResourceError as ResourceError
    from patchloom.errors import UsageError as UsageError
    from patchloom.inference.classifier import Classifier as Classifier
    from patchloom.inference.index import Index as Index
    from patchloom.inference.index import open_index as open_index
    from patchloom.inference.index import search as search
    from patchloom.inference.index_build import index as index
    from patchloom.layers.attention import record_attention as record_attention
    from patchloom.models.bench import bench as bench
    from patchloom.models.cost import cost as cost
    from patchloom.models.cuda_graphs import CapturedNetwork as CapturedNetwork
    from patchloom.models.network import absorb as absorb
    from patchloom.models.pretrained.published import load_published as load_published
    from patchloom.models.registry import create_model as create_model
    from patchloom.models.registry import list_models as list_models
    from patchloom.objectives.classification import ClassificationObjective as ClassificationObjective
    from patchloom.plugins import register as register
    from patchloom.recipes import get_recipe as get_recipe
    from patchloom.recipes import list_recipes as list_recipes
    from patchloom.recipes.schema import Recipe as Recipe
    from patchloom.report.pictures.look import look as look
    from patchloom.report.pictures.pictures import pictures_of as pictures_of
    from patchloom.runs.convert import convert as convert
    from patchloom.runs.watched import watch as watch
    from patchloom.serving.verbs import app as app
    from patchloom.serving.verbs import serve as serve
    from patchloom.tasks.classification.calibrate import calibrate as calibrate
    from patchloom.tasks.classification.levels import evaluate_levels as evaluate_levels
    from patchloom.tasks.classification.pruning import prune as prune
    from patchloom.tasks.classification.several_runs import probe as probe
    from patchloom.tasks.classification.soup import soup as soup
    from patchloom.tasks.detection.model import ObjectDetector as ObjectDetector
    from patchloom.tasks.evaluate import compare as compare
    from patchloom.tasks.evaluate import evaluate as evaluate
    from patchloom.tasks.export import export as export
    from patchloom.tasks.load import load as load
    from patchloom.tasks.predict import predict as predict
    from patchloom.tasks.segmentation.model import Segmenter as Segmenter
    from patchloom.tasks.translation.model import Translator as Translator
    from patchloom.tasks.translation.model import translate as translate
    from patchloom.tasks.verify import sign as sign
    from patchloom.tasks.verify import verify as verify
    from patchloom.training.auditing.audit import audit as audit
    from patchloom.training.sweeps.sweep import sweep as sweep
    from patchloom.training.train import train as train
    from patchloom_runtime.artifacts.artifact import Artifact as Artifact

# Name → module, or module:attribute if it has another name there.
_WHERE = {
    "Artifact": "patchloom_runtime.artifacts.artifact",
    "BucketError": "patchloom.errors",
    "Callback": "patchloom.engine.callbacks",
    "CapturedNetwork": "patchloom.models.cuda_graphs",
    "CheckpointError": "patchloom.errors",
    "ClassificationObjective": "patchloom.objectives.classification",
    "Classifier": "patchloom.inference.classifier",
    "DataError": "patchloom.errors",
    "DeviceError": "patchloom.errors",
    "Ema": "patchloom.engine.ema",
    "Index": "patchloom.inference.index",
    "NumericalError": "patchloom.errors",
    "ObjectDetector": "patchloom.tasks.detection.model",
    "PatchloomError": "patchloom.errors",
    "Reading": "patchloom.data.reading_options",
    "Recipe": "patchloom.recipes.schema",
    "ResourceError": "patchloom.errors",
    "Schedule": "patchloom.engine.optimization",
    "Segmenter": "patchloom.tasks.segmentation.model",
    "Translator": "patchloom.tasks.translation.model",
    "UsageError": "patchloom.errors",
    "absorb": "patchloom.models.network",
    "app": "patchloom.serving.verbs",
    "audit": "patchloom.training.auditing.audit",
    "bench": "patchloom.models.bench",
    "calibrate": "patchloom.tasks.classification.calibrate",
    "check": "patchloom.data.checking.check",
    "compare": "patchloom.tasks.evaluate",
    "convert": "patchloom.runs.convert",
    "cost": "patchloom.models.cost",
    "create_model": "patchloom.models.registry",
    "evaluate": "patchloom.tasks.evaluate",
    "evaluate_levels": "patchloom.tasks.classification.levels",
    "export": "patchloom.tasks.export",
    "get_recipe": "patchloom.recipes",
    "index": "patchloom.inference.index_build",
    "list_models": "patchloom.models.registry",
    "list_recipes": "patchloom.recipes",
    "load": "patchloom.tasks.load",
    "load_published": "patchloom.models.pretrained.published",
    "look": "patchloom.report.pictures.look",
    "make_evaluation_loader": "patchloom.data.batches.decoded_dataset",
    "make_loader": "patchloom.data.batches.decoded_dataset",
    "make_optimizer": "patchloom.engine.optimization",
    "normalize": "patchloom.data.images.image_batch",
    "open_data": "patchloom.data.sources.source",
    "open_index": "patchloom.inference.index",
    "pack": "patchloom.data.packing",
    "pictures_of": "patchloom.report.pictures.pictures",
    "predict": "patchloom.tasks.predict",
    "probe": "patchloom.tasks.classification.several_runs",
    "prune": "patchloom.tasks.classification.pruning",
    "record_attention": "patchloom.layers.attention",
    "register": "patchloom.plugins",
    "search": "patchloom.inference.index",
    "serve": "patchloom.serving.verbs",
    "set_rates": "patchloom.engine.optimization",
    "sign": "patchloom.tasks.verify",
    "soup": "patchloom.tasks.classification.soup",
    "sweep": "patchloom.training.sweeps.sweep",
    "train": "patchloom.training.train",
    "translate": "patchloom.tasks.translation.model",
    "verify": "patchloom.tasks.verify",
    "watch": "patchloom.runs.watched",
}
# Verbs whose name is that of a package: the package itself can be called.
_CALLED = {
    "models": "patchloom.models.registry:list_models",
    "recipes": "patchloom.recipes:list_recipes",
    "report": "patchloom.tasks.report:report",
}
# Names of earlier releases: module and the name to use instead.
_DEPRECATED = {
    "Artefact": ("patchloom_runtime.artifacts.artifact:Artifact", "Artifact"),
    "Recorded": ("patchloom.models.cuda_graphs:CapturedNetwork", "CapturedNetwork"),
    "evaluate_runs": ("patchloom.tasks.evaluate:evaluate", "evaluate"),
    "load_translator": ("patchloom.tasks.translation.model", "load"),
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _DEPRECATED:
        where, new = _DEPRECATED[name]
        warnings.warn(f"patchloom.{name} is now patchloom.{new}", DeprecationWarning, stacklevel=2)
    elif name in _WHERE:
        where = _WHERE[name]
    elif name in _CALLED:
        return importlib.import_module(f"patchloom.{name}")
    else:
        raise AttributeError(f"module 'patchloom' has no attribute {name!r}")
    return _imported(where, name)


def _imported(where: str, name: str) -> Any:
    module, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _CallablePackage(ModuleType):
    """A package that is called as the verb of its name: patchloom.report("runs/a")."""

    def __call__(self, *values: Any, **options: Any) -> Any:
        verb = self.__name__.rpartition(".")[2]
        return _imported(_CALLED[verb], verb)(*values, **options)


class _Package(ModuleType):
    """This package, which makes the packages of `_CALLED` callable when they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
