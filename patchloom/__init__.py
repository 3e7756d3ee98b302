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
    from patchloom.deployment.artefact import Artefact as Artefact
    from patchloom.deployment.classifier import Classifier as Classifier
    from patchloom.deployment.export.export import export as export
    from patchloom.deployment.index import index as index
    from patchloom.deployment.index import open_index as open_index
    from patchloom.deployment.segmenter import Segmenter as Segmenter
    from patchloom.deployment.translator import Translator as Translator
    from patchloom.deployment.translator import load_translator as load_translator
    from patchloom.inspection.cost import cost as cost
    from patchloom.inspection.look import look as look
    from patchloom.inspection.pictures import pictures_of as pictures_of
    from patchloom.judging.levels import evaluate_levels as evaluate_levels
    from patchloom.judging.pruning import prune as prune
    from patchloom.judging.several_runs import evaluate as evaluate
    from patchloom.judging.several_runs import evaluate_runs as evaluate_runs
    from patchloom.layers.attention import record_attention as record_attention
    from patchloom.models.absorb import absorb as absorb
    from patchloom.models.published import load_published as load_published
    from patchloom.models.recorded import Recorded as Recorded
    from patchloom.models.registry import create_model as create_model
    from patchloom.models.registry import list_models as list_models
    from patchloom.recipes import get_recipe as get_recipe
    from patchloom.recipes import list_recipes as list_recipes
    from patchloom.tasks.loading import load as load
    from patchloom.training.sweeps.sweep import sweep as sweep
    from patchloom.training.train import train as train

_WHERE = {
    "Artefact": "patchloom.deployment.artefact",
    "Classifier": "patchloom.deployment.classifier",
    "Reading": "patchloom.data.reading",
    "Recorded": "patchloom.models.recorded",
    "Segmenter": "patchloom.deployment.segmenter",
    "Translator": "patchloom.deployment.translator",
    "absorb": "patchloom.models.absorb",
    "check": "patchloom.data.checking.check",
    "cost": "patchloom.inspection.cost",
    "create_model": "patchloom.models.registry",
    "evaluate": "patchloom.judging.several_runs",
    "evaluate_levels": "patchloom.judging.levels",
    "evaluate_runs": "patchloom.judging.several_runs",
    "export": "patchloom.deployment.export.export",
    "index": "patchloom.deployment.index",
    "list_models": "patchloom.models.registry",
    "list_recipes": "patchloom.recipes",
    "get_recipe": "patchloom.recipes",
    "load": "patchloom.tasks.loading",
    "load_translator": "patchloom.deployment.translator",
    "look": "patchloom.inspection.look",
    "open_data": "patchloom.data.sources.source",
    "open_index": "patchloom.deployment.index",
    "load_published": "patchloom.models.published",
    "pictures_of": "patchloom.inspection.pictures",
    "prune": "patchloom.judging.pruning",
    "record_attention": "patchloom.layers.attention",
    "sweep": "patchloom.training.sweeps.sweep",
    "train": "patchloom.training.train",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'patchloom' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
