"""The tasks by name, and the task of a method or of a run. A new task is a row here and a file beside it."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from patchloom.runs.config import read_config, read_recipe
from patchloom.tasks.task import Task
from patchloom_runtime.errors import CheckpointError, UsageError, nearest

DEFAULT = "classification"  # what `auto` trains
TASKS = {
    "classification": "patchloom.tasks.classification.task:Classification",
    "embedding": "patchloom.tasks.embedding.task:Embedding",
    "segmentation": "patchloom.tasks.segmentation.task:Segmentation",
    "translation": "patchloom.tasks.translation.task:Translation",
    "detection": "patchloom.tasks.detection.task:Detection",
}
# What --task calls those that pictures can be trained for.
WORDS = {"classify": "classification", "segment": "segmentation", "detect": "detection"}


@cache
def task_named(name: str) -> Task[Any]:
    """The task of that name; its file is imported when it is first asked for."""
    if name not in TASKS:
        raise UsageError(f"There is no task {name!r}, expected one of {', '.join(TASKS)}.{nearest(name, list(TASKS))}")
    module, _, attribute = TASKS[name].partition(":")
    task: Task[Any] = getattr(import_module(module), attribute)()
    return task


def task_of_method(method: str | None) -> Task[Any]:
    """The task that a method solves; that of `auto`, None, is classification."""
    from patchloom.recipes.methods import method_of  # which predicting does not need

    return task_named(method_of(method).task if method else DEFAULT)


def task_of_run(folder: Path) -> Task[Any]:
    """The task of a run's folder."""
    config = read_config(folder)
    name = config.get("task") or _of_an_earlier_version(folder, config)
    if name not in TASKS:
        raise CheckpointError(
            f"{folder / 'config.json'} is of the task {name!r}, which this patchloom does not know "
            f"({', '.join(TASKS)}). Update patchloom."
        )
    return task_named(name)


def _of_an_earlier_version(folder: Path, config: dict[str, Any]) -> str:
    """The task of a run from before `config.json` named it: that of its recipe, else of what its network ends with."""
    from patchloom.recipes.methods import method_of

    if recipe := read_recipe(folder):
        return method_of(recipe.objective.method).task
    if "vocabulary" in config:
        return "translation"
    options = config.get("options")
    return "classification" if isinstance(options, dict) and options.get("num_classes") else "embedding"
