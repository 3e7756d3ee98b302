"""The table of tasks, and the task of a method or a run. A new task is a folder of `tasks/` and a row here."""

from pathlib import Path
from typing import Any

from patchloom.runs.config import read_config, read_recipe
from patchloom.tasks import classification, detection, embedding, multilabel, regression, segmentation, translation
from patchloom.tasks.task import Task
from patchloom_runtime.errors import CheckpointError, UsageError, nearest

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK
    for module in (classification, multilabel, regression, embedding, segmentation, translation, detection)
}
DEFAULT = classification.TASK.name  # the task of `auto`


def task_named(name: str) -> Task:
    """Return the task of that name."""
    if name not in TASKS:
        raise UsageError(f"There is no task {name!r}, expected one of {', '.join(TASKS)}.{nearest(name, list(TASKS))}")
    return TASKS[name]


def task_of_method(method: str | None) -> Task:
    """Return the task of an objective.method; None, the method of `auto`, is classification."""
    from patchloom.recipes.methods import method_of  # predicting does not need recipes

    return task_named(method_of(method).task if method else DEFAULT)


def task_of_run(folder: Path) -> Task:
    """Return the task of a run folder."""
    config = read_config(folder)
    name = config.get("task") or _task_of_old_run(folder, config)
    if name not in TASKS:
        raise CheckpointError(
            f"{folder / 'config.json'} is of the task {name!r}, which this patchloom does not know "
            f"({', '.join(TASKS)}). Update patchloom."
        )
    return TASKS[name]


def check_classifies(verb: str, folder: Path) -> None:
    """Raise UsageError if a run predicts something else than a class or a vector per image."""
    task = task_of_run(folder)
    if not task.whole_images:
        raise UsageError(f"{verb} is for runs with one class per image; {folder} is a run of the task {task.name}")


def _task_of_old_run(folder: Path, config: dict[str, Any]) -> str:
    """Return the task of a run whose config.json does not name it: by its recipe, else by the end of its network."""
    if recipe := read_recipe(folder):
        return task_of_method(recipe.objective.method).name
    if "vocabulary" in config:
        return translation.TASK.name
    options = config.get("options")
    has_classes = isinstance(options, dict) and options.get("num_classes")
    return (classification if has_classes else embedding).TASK.name
