"""`evaluate` and `compare`: runs of any task on the same data, with the numbers of the task."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

from patchloom.data.sources.specs import Data, as_spec
from patchloom.inference.evaluation_methods import EvaluationKeywords, EvaluationSettings
from patchloom.options import keywords_of
from patchloom.report.notebook import html_card
from patchloom.runs.config import is_run
from patchloom.tasks.classification import several_runs
from patchloom.tasks.classification.several_runs import RunEvaluations, Runs, runs_by_name
from patchloom.tasks.table import task_named, task_of_method, task_of_run
from patchloom.tasks.task import Scores, Task
from patchloom_runtime.artifacts.metadata import is_artifact, read_about
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

KEYWORDS_OF_EVERY_TASK = ("split", "reading", "batch", "workers", "strict", "progress")


@dataclass(frozen=True)
class TaskEvaluations:
    """Evaluations of runs that do not classify images: the metrics of each run, and the table of the command."""

    folders: dict[str, Path]
    scores: Scores

    def values(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of each run as a dict of dicts: run name, then metric name."""
        return {name: dict(self.scores.values[name]) for name in self.folders}

    def __repr__(self) -> str:
        rows = "; ".join(" ".join(map(str, row)) for row in self.scores.rows)
        return f"TaskEvaluations({printable(', '.join(self.scores.columns))}: {printable(rows)})"

    def _repr_html_(self) -> str:
        columns = [column.removeprefix("#") for column in self.scores.columns]
        rows = [[printable(str(cell)) for cell in row] for row in self.scores.rows]
        return html_card("Evaluations", columns=columns, rows=rows, notes=[*self.scores.lines, *self.scores.notes])


@with_near_options
@keywords_of(EvaluationSettings)
def evaluate(
    runs: Runs,
    data: Data | None = None,
    *,
    device: str = "auto",
    heads: bool = False,
    **options: Unpack[EvaluationKeywords],
) -> RunEvaluations | TaskEvaluations:
    """Evaluate one or several runs on the same data; without `data`, use the val predictions stored by training.

    Runs of classes and vectors return a `RunEvaluations`, those of other tasks a `TaskEvaluations`, which read only the
    options device, split, reading, batch and workers. Both have `values()`, the metrics of each run.

    runs        Run folders or published weights; one or several.
    data        Images with their classes, matched by name. Default: the val predictions that training saved.
    device      'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    heads       Evaluate each head of distilled networks too.
    split       'train', 'val', 'test' or 'all'. Default: val, or the images the run held out. Otherwise all.
    size        Image size in pixels. Default: the run's.
    crop_ratio  Share of the short side that is kept. Default: the run's.
    real        ImageNet-ReaL's real.json, for ImageNet's val.
    v2          Folder names are class numbers, as in ImageNet-V2.
    batch       Images per batch.
    workers     Processes that read images.
    strict      Fail if the data have classes that the model does not know.
    reading     How to read the data. Default: as in training.
    level       Label level to compare with. Default: that of the model's classes.
    tta         Average the probabilities of each image and its mirror image.
    progress    Called with the number of images done and their total.
    """
    folders = runs_by_name(runs)
    task = task_of_runs([str(folder) for folder in folders.values()])
    if task.whole_images:
        return several_runs.evaluate(runs, data, device=device, heads=heads, **options)
    settings, plain = EvaluationSettings(**options), EvaluationSettings()
    changed = [each.name for each in fields(plain) if getattr(settings, each.name) != getattr(plain, each.name)]
    changed += ["heads"] * heads
    if unread := [name for name in changed if name not in KEYWORDS_OF_EVERY_TASK]:
        raise UsageError(f"{unread[0]} {task.refusal}")
    spec = None if data is None else as_spec(data)
    own = {"reading": settings.reading} if settings.reading.chosen() else {}
    scores = task.report.evaluate(folders, spec, split=settings.split, device=device, **own)
    return TaskEvaluations(folders, scores)


@with_near_options
@keywords_of(EvaluationSettings, omit=("progress",))
def compare(
    runs: Runs,
    data: Data | None = None,
    *,
    agreement: bool = False,
    device: str = "auto",
    **options: Unpack[EvaluationKeywords],
) -> RunEvaluations | TaskEvaluations:
    """Evaluate two or more runs on the same images, or on the val predictions saved in training.

    For classes, the result has `comparisons()` of all pairs, `spreads()` over seeds, `disagreement()` and `tradeoffs()`
    with cost; for other tasks, `scores` has the comparisons. With `agreement`, the heads of distilled networks are
    evaluated too.

    runs        Two or more runs.
    data        Images with their classes, matched by name. Default: the val predictions that training saved.
    agreement   How often runs, their heads and the labels disagree.
    device      'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    split       'train', 'val', 'test' or 'all'. Default: val, or the images the run held out.
    size        Image size in pixels. Default: the run's.
    crop_ratio  Share of the short side that is kept. Default: the run's.
    real        ImageNet-ReaL's real.json, for ImageNet's val.
    v2          Folder names are class numbers, as in ImageNet-V2.
    batch       Images per batch.
    workers     Processes that read images.
    strict      Fail if the data have classes that the model does not know.
    reading     How to read the data. Default: as in training.
    level       Label level to compare with. Default: that of the model's classes.
    tta         Average the probabilities of each image and its mirror image.
    """
    if len(runs_by_name(runs)) < 2:
        raise UsageError("compare takes two or more runs; evaluate takes one")
    return evaluate(runs, data, device=device, heads=agreement, **options)


def task_of_runs(runs: Sequence[str]) -> Task:
    """Return the task of runs and artifacts: one for all, or any of `whole_images`."""
    tasks = {run: task_of_run(Path(run)) for run in runs if is_run(run)}
    tasks |= {run: task_named(read_about(Path(run)).task) for run in runs if is_artifact(run)}
    if not tasks:  # published weights are fetched, and errors about them raised, where they are opened
        return task_of_method(None)
    first, *others = tasks.items()
    for run, task in others:
        if task is not first[1] and not (task.whole_images and first[1].whole_images):
            raise UsageError(
                f"{first[0]} is a run of the task {first[1].name}, {run} of {task.name}: evaluate them one by one"
            )
    return first[1]
