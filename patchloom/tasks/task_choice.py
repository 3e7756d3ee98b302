"""The choice of the task: that of the recipe, of --task, or what the data suggest."""

from dataclasses import fields
from typing import Any

from patchloom.data.labels.unlabeled import task_of_data
from patchloom.data.sources.source import find_source
from patchloom.tasks.plan import OpenedSettings, TrainingSettings, method_of_settings
from patchloom.tasks.table import TASKS, task_of_method
from patchloom.tasks.task import Task
from patchloom_runtime.errors import DataError, UsageError, nearest


def choose_task(settings: TrainingSettings) -> tuple[Task, TrainingSettings]:
    """Return the task of a training run and its settings, with the source if it was opened to choose the task."""
    known = {task.word: task for task in TASKS.values() if task.word}
    if settings.task is not None and settings.task not in known:
        words = ", ".join(known)
        raise UsageError(f"--task is {settings.task!r}, expected one of {words}.{nearest(settings.task, list(known))}")
    method = method_of_settings(settings)
    if method is not None:
        task = task_of_method(method)
        if settings.task and known[settings.task] is not task:
            raise UsageError(
                f"--task {settings.task}, but recipe {settings.recipe} is for {task.name}; drop one of the two"
            )
        return task, settings
    if settings.task:
        return _fitting(known[settings.task], settings), _with(
            settings, task=settings.task, why_task="as set by --task"
        )
    try:
        source = find_source(settings.data, reading=settings.reading, strict=settings.strict)
    except (DataError, UsageError):
        return task_of_method(None), settings  # planning raises the error
    word, why = task_of_data(source)
    if word not in known:
        return task_of_method(None), settings  # planning raises an error about the targets
    return _fitting(known[word], settings), _with(settings, task=word, why_task=why, source=source)


def _fitting(task: Task, settings: TrainingSettings) -> Task:
    """Return the task; raise UsageError for an objective.method of another one."""
    method = settings.changes.get("objective.method")
    if method is not None and (other := task_of_method(str(method))) is not task:
        raise UsageError(
            f"objective.method={method} is for {other.name}, and the automatic recipe is for {task.name} here; choose "
            f"a recipe with that method (--recipe){', or --task ' + other.word if other.word else ''}"
        )
    return task


def _with(settings: TrainingSettings, **more: Any) -> OpenedSettings:
    values = {each.name: getattr(settings, each.name) for each in fields(TrainingSettings)}
    return OpenedSettings(**values | more)
