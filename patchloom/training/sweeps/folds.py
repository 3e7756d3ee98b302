"""`train --folds K`: cross-validation, one ordinary run per fold, and the predictions for the images of each fold."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import ImageSet
from patchloom.data.reading_options import MAX_FOLDS, MIN_FOLDS
from patchloom.disk import locked
from patchloom.engine.display import duration
from patchloom.engine.rendezvous import place_from
from patchloom.evaluation.feature_distances import neighbor_distances
from patchloom.evaluation.intervals import LEVEL, student
from patchloom.inference.classifier import load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import embed_on
from patchloom.machine import resolve_device
from patchloom.report.notebook import html_card, number_texts, numbers_line
from patchloom.report.page import write_page
from patchloom.runs.config import read_recipe
from patchloom.runs.out_of_fold import FILE as OUT_OF_FOLD
from patchloom.runs.out_of_fold import OutOfFold, load_out_of_fold, save_out_of_fold
from patchloom.tasks.classification import TASK as CLASSIFICATION
from patchloom.tasks.images.plan import ImagePlan
from patchloom.tasks.images.training import ImageTraining
from patchloom.tasks.plan import folder_name, seconds_of
from patchloom.tasks.provenance import OtherRunError, refuse_fewer_options, start_of
from patchloom.tasks.settings import TrainingSettings
from patchloom.tasks.task_choice import choose_task
from patchloom.training.run import TrainingResult, make_plan, printer
from patchloom.training.sweeps.grid import in_words
from patchloom.training.sweeps.page import score_and_time
from patchloom.training.sweeps.planning import SweepRun, estimated_s, updates_of
from patchloom.training.sweeps.record import RunResult, read_results
from patchloom.training.sweeps.sweep import SweepState, train_runs
from patchloom_runtime.errors import CheckpointError, UsageError

FOLD = "fold"  # the field of a run's setting
_ABOUT = (
    "Each image is in one fold, and scores are {metric} on the fold that a run did not train on. Copies and "
    "near-duplicates of an image are in one fold. The interval is that of the mean over folds; their training images "
    "overlap, so it is somewhat too narrow, and each run chose its best epoch on its own fold."
)


@dataclass(frozen=True)
class FoldsResult(TrainingResult):
    """The result of cross-validation: `metrics` are means over the folds, with the interval of the main one."""

    runs: Mapping[str, RunResult] = ()  # type: ignore[assignment]  # folder below `folder` → result of the run

    @property
    def model(self) -> Any:
        """Not available: each fold has its own model."""
        raise UsageError(
            f"{self.folder} has one model per fold; load one of them: {self.folder / next(iter(self.runs))}"
        )

    classifier = translator = model

    @property
    def predictions(self) -> OutOfFold | None:
        """The prediction for each image by the run that did not train on it; None if the task has no classes."""
        return load_out_of_fold(self.folder) if (self.folder / OUT_OF_FOLD).is_file() else None

    @property
    def failed(self) -> dict[str, str]:
        """Folder of each failed run, with the reason."""
        return {name: run.failed for name, run in self.runs.items() if run.failed}

    @property
    def page(self) -> Path:
        """Path of the page."""
        return self.folder / "folds.html"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return columns, '#' before those of numbers, and one row per fold, then mean and deviation."""
        columns = ["fold", f"#{self.metric or 'score'}", "#images", "#time", ""]
        rows = []
        for run in self.runs.values():
            images = run.metrics.get("images")
            cells = [_number(run.score), f"{images:,.0f}" if images is not None else "–"]
            status = "failed" if run.failed else "" if run.metrics else "not trained yet"
            rows.append([str(run.setting[FOLD]), *cells, duration(run.seconds) if run.seconds else "–", status])
        if self.metrics:
            low, high = (self.metrics[f"{self.metric}_{end}"] for end in ("low", "high"))
            rows.append(
                [
                    "mean",
                    _number(self.metrics[self.metric]),
                    "",
                    "",
                    f"{100 * LEVEL:.0f} % interval {_number(low)} … {_number(high)}",
                ]
            )
            rows.append(["std", _number(self.metrics[f"{self.metric}_std"]), "", "", "over folds"])
        return columns, rows

    def summary(self) -> dict[str, Any]:
        """Return the result for `--json`."""
        folds = [
            {"folder": str(self.folder / name), "fold": run.setting[FOLD], "failed": run.failed or None}
            | {"seconds": run.seconds, **run.metrics}
            for name, run in self.runs.items()
        ]
        return {"folder": str(self.folder), "metric": self.metric, **self.metrics, "folds": folds, **self.plan}

    def __repr__(self) -> str:
        return (
            f"FoldsResult({self.folder}, {len(self.runs)} folds{': ' * bool(self.metrics)}{numbers_line(self.metrics)})"
        )

    def _repr_html_(self) -> str:
        columns, rows = self.table()
        titles = [column.removeprefix("#") for column in columns]
        facts = list(number_texts(self.metrics).items())
        return html_card(str(self.folder), detail="cross-validation", facts=facts, columns=titles, rows=rows)


def train_folds(
    settings: TrainingSettings, *, dry_run: bool = False, say: Callable[[str], None] = print
) -> FoldsResult:
    """Train one run per fold, predict the images of each fold, and summarize. The same settings resume."""
    _refuse_incompatible(settings)
    device = resolve_device(settings.device)
    say = printer(say)
    say(f"folds      planning {settings.folds} runs, each validated on another part of train")
    task, _ = choose_task(settings)
    if not isinstance(task.training, ImageTraining):
        raise UsageError(f"--folds divides images, and {settings.data_text} is learned as {task.name}")
    folder, runs, vals = _plan(replace(settings, device=device), device)
    done, note = read_results(folder)
    state = FoldsState(folder, runs, {run.name: done[run.name] for run in runs if _is_done(folder, run, done)})
    say(f"folds      {state.counts()}")
    if note:
        say(f"note: {note}")
    if settings.time:
        say(f"time       {runs[0].settings.time} per fold, {settings.time} in all")
    if dry_run:
        seconds = estimated_s(runs, state.done, say)
        say(f"time       about {duration(sum(seconds.values()))} for the {len(seconds)} runs that are left")
        say("Nothing was trained.   Next: the same command without --dry-run")
        return replace(state.result(), plan={"seconds": {name: round(s, 1) for name, s in seconds.items()}})
    with locked(folder):
        train_runs(state, say)
        result: FoldsResult = state.write()
        if vals and not result.failed:
            write_out_of_fold(folder, runs, vals, device, settings.workers)
    if result.metrics:
        low, high = (result.metrics[f"{result.metric}_{end}"] for end in ("low", "high"))
        mean, std = result.metrics[result.metric], result.metrics[f"{result.metric}_std"]
        say(
            f"folds      {result.metric} {_number(mean)} ± {_number(std)} over {len(runs)} folds, "
            f"{100 * LEVEL:.0f} % interval of the mean {_number(low)} … {_number(high)}"
        )
    say(f"{result.page}")
    if vals and not result.failed:
        data, place = shlex.quote(settings.data_text), shlex.quote(str(folder))
        say(f"Next: patchloom audit {data}{settings.reading.options()} --folds-run {place}")
    return result


def _is_done(folder: Path, run: SweepRun, done: Mapping[str, RunResult]) -> bool:
    """Return whether a run has a result; not if it is to be trained for more epochs than it was."""
    before = read_recipe(folder / run.name)
    return run.name in done and before is not None and before.schedule.epochs == run.recipe.schedule.epochs


class FoldsState(SweepState):
    """State of a running cross-validation, saved in its folder."""

    def __init__(self, folder: Path, runs: list[SweepRun], done: dict[str, RunResult]) -> None:
        super().__init__(folder, [run.setting for run in runs], runs, done, [])

    def result(self) -> FoldsResult:
        """Return the result so far; it has metrics once all folds have finished."""
        runs = {run.name: self.done.get(run.name) or RunResult(data=run.data, setting=run.setting) for run in self.runs}
        scored = [run for run in runs.values() if run.score is not None]
        metric = scored[0].metric if scored else ""
        metrics = dict(_means(metric, scored)) if len(scored) == len(runs) else {}
        lower = any(run.lower_is_better for run in scored)
        return FoldsResult(self.folder, None, metrics, metric=metric, lower_is_better=lower, runs=runs)

    def write(self) -> FoldsResult:
        """Write the page and return the result so far."""
        result = self.result()
        _write_page(result, self.runs[0].data)
        return result


def _write_page(result: FoldsResult, data: str) -> None:
    """Write the page of a cross-validation."""
    columns, rows = result.table()
    metric = result.metric or "score"
    finished = [run for run in result.runs.values() if run.score is not None]
    best = None
    if result.metrics:
        low, high = result.metrics[f"{metric}_low"], result.metrics[f"{metric}_high"]
        best = f"{result.metrics[metric]:.4g}", f"95 % interval of the mean: {low:.4g} … {high:.4g} (Student's t)"
    write_page(
        result.page,
        "sweep.html.j2",
        title=f"{len(result.runs)}-fold cross-validation of {data}",
        best=best,
        best_title=f"mean {metric} over folds",
        table_title="Folds",
        about=_ABOUT.format(metric=metric),
        metric=metric,
        facts=[
            ("data", data),
            ("runs", f"{len(finished)} of {len(result.runs)} finished"),
            ("time", duration(sum(run.seconds for run in result.runs.values()))),
        ],
        columns=[(name.removeprefix("#"), name.startswith("#")) for name in columns],
        rows=[(row, row[0] == "mean") for row in rows],
        best_of_sets=[],
        curves=[],
        failed=[(run.data, name, run.failed) for name, run in result.runs.items() if run.failed],
        runs=[(run.data, in_words(run.setting), name, *score_and_time(run)) for name, run in result.runs.items()],
        notes=[],
    )


def _means(metric: str, runs: Sequence[RunResult]) -> Iterator[tuple[str, float]]:
    """Yield the mean of each metric that all folds have; deviation and interval follow the main one."""
    for name in runs[0].metrics:
        values = [run.metrics[name] for run in runs if name in run.metrics]
        if len(values) < len(runs):
            continue
        yield name, sum(values) if name == "images" else float(np.mean(values))
        if name == metric:
            low, high = student(values)
            yield from ((f"{name}_std", float(np.std(values, ddof=1))), (f"{name}_low", low), (f"{name}_high", high))


def fold_folders(folder: Path, folds: int) -> list[Path]:
    """Return the run folder of each fold."""
    return [folder / f"fold-{number}" for number in range(1, folds + 1)]


def _refuse_incompatible(settings: TrainingSettings) -> None:
    assert settings.folds is not None
    if not MIN_FOLDS <= settings.folds <= MAX_FOLDS:
        raise UsageError(f"--folds is {settings.folds}, expected a number from {MIN_FOLDS} to {MAX_FOLDS}")
    if settings.val is not None:
        raise UsageError(f"--folds divides train into its own val splits; drop --val {settings.val}, or drop --folds")
    if settings.stop_after is not None:
        raise UsageError(
            "--stop-after ends a single run; with --folds, stop with Ctrl-C and resume with the same command, or plan "
            "all folds into a time with --time"
        )
    if place_from(os.environ).world > 1:
        raise UsageError(
            "--folds trains its runs one after the other in one process; start it without torchrun or srun"
        )


def _plan(settings: TrainingSettings, device: str) -> tuple[Path, list[SweepRun], list[ImageSet]]:
    """Return the folder, the runs, and the val images of each if it predicts classes.

    The folder is --out, or the first of runs/NAME-folds-K, runs/NAME-folds-K-2 … without other runs.
    """
    number = 1
    while True:
        default = Path("runs", f"{folder_name(settings.data)}-folds-{settings.folds}" + f"-{number}" * (number > 1))
        folder = Path(settings.out) if settings.out else default
        try:
            return folder, *_plan_in(folder, settings, device)
        except OtherRunError:
            if settings.out:
                raise
            number += 1


def _plan_in(folder: Path, settings: TrainingSettings, device: str) -> tuple[list[SweepRun], list[ImageSet]]:
    folds, total_s = settings.folds or 0, seconds_of(settings.time)
    time = f"{total_s / folds:g}s" if total_s else None
    runs, vals = [], []
    for fold in range(1, folds + 1):
        place = fold_folders(folder, folds)[fold - 1]
        own = replace(settings, folds=None, val=f"{fold}/{folds}", time=time, out=str(place))
        plan = make_plan(own, device)
        assert isinstance(plan, ImagePlan)
        if settings.out is None and plan.record is not None:
            refuse_fewer_options(plan.folder, plan.record)
        runs.append(SweepRun(settings.data_text, {FOLD: fold}, place.name, own, plan.recipe, updates_of(plan)))
        vals += [plan.splits.val] if plan.task is CLASSIFICATION else []
    return runs, vals


# Out-of-fold predictions ----------------------------------------------------------------------------------------------


def write_out_of_fold(
    folder: Path, runs: Sequence[SweepRun], vals: Sequence[ImageSet], device: str, workers: int | None
) -> None:
    """Predict the val images of each run and write them to one file, unless the file has these predictions."""
    weights = tuple(start_of(str(folder / run.name))[1] for run in runs)
    try:
        if (folder / OUT_OF_FOLD).is_file() and load_out_of_fold(folder).weights == weights:
            return
    except CheckpointError:
        pass  # damaged: it is written again
    parts = [_predict_fold(folder / run.name, val, device, workers) for run, val in zip(runs, vals, strict=True)]
    keys, labels, probabilities, distances = zip(*parts, strict=True)
    folds = [np.full(len(part), number) for number, part in enumerate(keys, 1)]
    classes = tuple(vals[0].classes.names)
    arrays = (np.concatenate(part) for part in (labels, folds, probabilities, distances))
    save_out_of_fold(folder, OutOfFold(classes, weights, tuple(key for part in keys for key in part), *arrays))


def _predict_fold(
    run: Path, val: ImageSet, device: str, workers: int | None
) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Return names, labels, probabilities and feature distances of the readable images that a run did not train on."""
    embeddings = embed_on(load(run, device=device), val, EvaluationSettings(workers=workers or 0), logits=True)
    assert embeddings.logits is not None
    probabilities = embeddings.logits.softmax(dim=1).cpu().numpy()
    index = embeddings.index.cpu().numpy()
    keys = [val.key(int(i)) for i in index]
    return keys, val.labels[index], probabilities, neighbor_distances(embeddings.vectors.cpu().numpy())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"
