"""patchloom: patch-based networks and the training that makes them work.

Importing it loads nothing: each name below imports what it needs when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from patchloom.data.checking.check import check as check
    from patchloom.data.reading import Reading as Reading
    from patchloom.data.sources.source import open_data as open_data
    from patchloom.inference.classifier import Classifier as Classifier
    from patchloom.inference.index import open_index as open_index
    from patchloom.inference.index_build import index as index
    from patchloom.layers.attention import record_attention as record_attention
    from patchloom.models.cost import cost as cost
    from patchloom.models.cuda_graphs import CapturedNetwork as CapturedNetwork
    from patchloom.models.network import absorb as absorb
    from patchloom.models.pretrained.published import load_published as load_published
    from patchloom.models.registry import create_model as create_model
    from patchloom.models.registry import list_models as list_models
    from patchloom.recipes import get_recipe as get_recipe
    from patchloom.recipes import list_recipes as list_recipes
    from patchloom.report.pictures.look import look as look
    from patchloom.report.pictures.pictures import pictures_of as pictures_of
    from patchloom.tasks.classification.levels import evaluate_levels as evaluate_levels
    from patchloom.tasks.classification.pruning import prune as prune
    from patchloom.tasks.classification.several_runs import evaluate as evaluate
    from patchloom.tasks.classification.several_runs import evaluate_runs as evaluate_runs
    from patchloom.tasks.export import export as export
    from patchloom.tasks.load import load as load
    from patchloom.tasks.segmentation.segmenter import Segmenter as Segmenter
    from patchloom.tasks.translation.translator import Translator as Translator
    from patchloom.tasks.translation.translator import load_translator as load_translator
    from patchloom.training.sweeps.sweep import sweep as sweep
    from patchloom.training.train import train as train
    from patchloom_runtime.artifacts.artifact import Artifact as Artifact

_WHERE = {
    "Artifact": "patchloom_runtime.artifacts.artifact",
    "Classifier": "patchloom.inference.classifier",
    "Reading": "patchloom.data.reading",
    "CapturedNetwork": "patchloom.models.cuda_graphs",
    "Segmenter": "patchloom.tasks.segmentation.segmenter",
    "Translator": "patchloom.tasks.translation.translator",
    "absorb": "patchloom.models.network",
    "check": "patchloom.data.checking.check",
    "cost": "patchloom.models.cost",
    "create_model": "patchloom.models.registry",
    "evaluate": "patchloom.tasks.classification.several_runs",
    "evaluate_levels": "patchloom.tasks.classification.levels",
    "evaluate_runs": "patchloom.tasks.classification.several_runs",
    "export": "patchloom.tasks.export",
    "index": "patchloom.inference.index_build",
    "list_models": "patchloom.models.registry",
    "list_recipes": "patchloom.recipes",
    "get_recipe": "patchloom.recipes",
    "load": "patchloom.tasks.load",
    "load_translator": "patchloom.tasks.translation.translator",
    "look": "patchloom.report.pictures.look",
    "open_data": "patchloom.data.sources.source",
    "open_index": "patchloom.inference.index",
    "load_published": "patchloom.models.pretrained.published",
    "pictures_of": "patchloom.report.pictures.pictures",
    "prune": "patchloom.tasks.classification.pruning",
    "record_attention": "patchloom.layers.attention",
    "sweep": "patchloom.training.sweeps.sweep",
    "train": "patchloom.training.train",
}

_RENAMED = {"Artefact": "Artifact", "Recorded": "CapturedNetwork"}  # deprecated name → name

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        import warnings

        warnings.warn(f"patchloom.{name} is now patchloom.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _WHERE:
        raise AttributeError(f"module 'patchloom' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
