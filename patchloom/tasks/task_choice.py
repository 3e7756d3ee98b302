"""Which task a training is of: as the recipe says, as the user asks with --task, else as the data suggest."""

from dataclasses import fields
from typing import Any

from patchloom.data.labels.unlabeled import task_of_data
from patchloom.data.sources.source import find_source
from patchloom.tasks.plan import OpenedSettings, TrainingSettings, method_of_settings
from patchloom.tasks.table import TASKS, WORDS, task_named, task_of_method
from patchloom.tasks.task import Task
from patchloom_runtime.errors import DataError, UsageError, nearest


def choose_task(settings: TrainingSettings) -> tuple[Task[Any], TrainingSettings]:
    """The task of a training; and the settings, with the data where they were opened to know it."""
    known = {word: name for word, name in WORDS.items() if name in TASKS}
    if settings.task is not None and settings.task not in known:
        words = ", ".join(known)
        raise UsageError(f"--task is {settings.task!r}, expected one of {words}.{nearest(settings.task, list(known))}")
    method = method_of_settings(settings)
    if method is not None:
        task = task_of_method(method)
        if settings.task and known[settings.task] != task.name:
            raise UsageError(
                f"--task {settings.task}, but recipe {settings.recipe} is of the task {task.name}; leave one of "
                "the two out"
            )
        return task, settings
    if settings.task:
        return task_named(known[settings.task]), _with(settings, task=settings.task, why_task="as asked")
    try:
        source = find_source(settings.data, reading=settings.reading, strict=settings.strict)
    except (DataError, UsageError):
        return task_of_method(None), settings  # what is wrong with the data is said where they are planned with
    word, why = task_of_data(source)
    word = word if word in known else "classify"
    return task_named(known[word]), _with(settings, task=word, why_task=why, source=source)


def _with(settings: TrainingSettings, **more: Any) -> OpenedSettings:
    given = {each.name: getattr(settings, each.name) for each in fields(TrainingSettings)}
    return OpenedSettings(**given | more)
