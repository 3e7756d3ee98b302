"""`report.html` of a run, from what its folder holds. What is missing or damaged is a note, and the rest is shown."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image

from patchloom.build import is_run
from patchloom.checkpoint import RunFiles, load_network, read_run_files
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sets import ImageSet
from patchloom.data.source import open_data
from patchloom.deployment.classifier import load
from patchloom.deployment.evaluations import Shown, evaluate_on
from patchloom.deployment.run_record import RunRecord, read_run_record
from patchloom.engine.records import Record, damaged_lines, read_metrics
from patchloom.errors import DataError, PatchloomError, UsageError
from patchloom.evaluation.classification import ClassificationReport, Mistake
from patchloom.evaluation.intervals import LEVEL
from patchloom.evaluation.predictions import Predictions, fingerprint, load_predictions
from patchloom.inspection.cost import Cost, cost
from patchloom.inspection.pictures import Picture, pictures_of
from patchloom.inspection.report import RecipeRow, Summary, neighbours_of, recipe_rows, write_report
from patchloom.models.from_config import make_frame
from patchloom.models.network import Network
from patchloom.models.registry import create_model

WORST_SHOWN = 24
# Enough for t-SNE to show groups; a few seconds on a CPU.
LOOKED_AT = 300

T = TypeVar("T")


@dataclass
class RunParts:
    """What could be read of a run's folder, and notes on what could not."""

    folder: Path
    files: RunFiles
    record: RunRecord | None = None
    predictions: Predictions | None = None
    network: Network | None = None
    metrics: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` gives; where it cannot, its reason becomes a note."""
        try:
            return read()
        except PatchloomError as error:
            self.notes.append(str(error))
            return None


def read_run(folder: Path) -> RunParts:
    """A run's folder as far as it can be read; only its config must be there."""
    if not is_run(str(folder)):
        raise UsageError(f"{folder} is not the folder of a run: it has no config.json")
    parts = RunParts(folder, read_run_files(folder))
    parts.record = parts.attempt(lambda: read_run_record(folder))
    if parts.files.decides:
        parts.predictions = parts.attempt(lambda: load_predictions(folder, len(parts.files.labels)))
    parts.network = parts.attempt(lambda: load_network(folder)[0])
    parts.metrics = parts.attempt(lambda: read_metrics(folder / "metrics.jsonl")) or []
    return parts


def report_run(
    folder: Path,
    *,
    data: str | None = None,
    val: ImageSet | None = None,
    out: Path | None = None,
    split: str | None = None,
    reading: Reading = AS_IT_IS,
    level: str | None = None,
) -> Path:
    """Write the report of a run and return its path.

    `val` are the pictures its predictions are about, where the caller has them; otherwise they are looked for where
    the run was trained, or in `data`. With a `split` such as test the page is about those pictures of the data,
    evaluated now; `reading` and `level` say how they are read.
    """
    parts = read_run(folder)
    if split is not None:
        val = _evaluate_split(parts, data, Shown(split=split, reading=reading, level=level))
    elif val is None:
        val = parts.attempt(lambda: val_of(parts, data, reading))
    record, judged = parts.record, parts.predictions.report if parts.predictions else None
    page = out or folder / (f"report-{split}.html" if split else "report.html")
    looked = parts.attempt(lambda: _pictures(parts, val)) or []
    mistakes = _mistakes(parts, val, judged)
    metrics = parts.metrics
    if damaged := parts.attempt(lambda: damaged_lines(folder / "metrics.jsonl")):
        parts.notes.append(f"{folder / 'metrics.jsonl'}: {len(damaged)} damaged lines are left out of the curves")
    if not metrics:
        parts.notes.append(f"{folder / 'metrics.jsonl'} has no records: there are no curves")
    recipe = parts.files.recipe
    name = recipe.model.name if recipe else parts.files.network
    write_report(
        page,
        title=(f"{name} on {record.data_name}" if record else f"{name}, {folder.name}")
        + (f": {split} of {data or 'its data'}" if split else ""),
        summary=_summary(parts, name, judged, metrics, split),
        curves=metrics,
        confusion=judged.confusion if judged else None,
        class_names=judged.classes if judged else parts.files.labels,
        per_class=judged.class_accuracy if judged else None,
        mistakes=mistakes,
        pictures=looked,
        recipe=_recipe_rows(parts),
        cost=count_cost(parts),
        notes=list(dict.fromkeys([*(record.notes if record else []), *parts.notes])),
        numbers=number_rows(judged, split or "val") if judged else [],
        environment=_environment(record),
    )
    return page


def _evaluate_split(parts: RunParts, data: str | None, shown: Shown) -> ImageSet:
    """The pictures of a split; what the run decides about them now takes the place of what it decided about val."""
    place = data or (parts.record.data if parts.record else None)
    if place is None:
        raise UsageError("where the data lie was not recorded; say it with --data")
    classifier = load(parts.folder)
    classifier.check_decides()
    pictures = shown.open(place, classifier)
    found = evaluate_on(classifier, pictures, shown)
    parts.predictions = Predictions(found.report, found.fingerprint)
    parts.notes += found.notes
    return pictures


def number_rows(report: ClassificationReport, split: str = "val") -> list[tuple[str, str, str]]:
    """(name, value, what it is) of each number."""
    low, high = report.top_interval()
    values = dict(report)
    rows = [("top-1", f"{values['top1']:.2f} %", f"{low:.2f} … {high:.2f}, the {100 * LEVEL:.0f} % interval (Wilson)")]
    if "top5" in values:
        rows.append(("top-5", f"{values['top5']:.2f} %", "label among the five likeliest classes"))
    return [
        *rows,
        ("mean class accuracy", f"{values['mean_class_accuracy']:.2f} %", "every class counts the same"),
        ("loss", f"{values['loss']:.4f}", "cross-entropy, in nats"),
        ("calibration error", f"{values['calibration_error']:.2f} %", "confidence and accuracy apart, 15 bins"),
        ("images", f"{len(report.index):,}", f"of the {split} split"),
    ]


def _summary(
    parts: RunParts,
    name: str,
    judged: ClassificationReport | None,
    metrics: Sequence[Mapping[str, Any]],
    split: str | None,
) -> Summary:
    record, folder = parts.record, parts.folder
    top1, measure = judged.top(1) if judged else None, f"top-1 on {split}" if split else "best top-1"
    if by_neighbours := neighbour_score(parts, metrics):
        neighbours, top1 = by_neighbours
        measure = f"best top-1 of the {neighbours} nearest"
    return Summary(
        model=name,
        data=record.data_name if record else "not recorded",
        top1=top1,
        measure=measure,
        interval=judged.top_interval() if judged else None,
        weights="ema" if record and record.best_weights == "ema" else "model",
        epochs=record.epochs if record else None,
        seconds=record.seconds if record else None,
        command=record.command(folder) if record else "",
        next_command=f"patchloom look {shlex.quote(str(folder))} IMAGE",
    )


def neighbour_score(parts: RunParts, metrics: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """How many neighbours judged a run that names no classes, and its best top-1; None where none did."""
    neighbours = 0 if parts.files.decides else neighbours_of(metrics)
    key = f"knn{neighbours}_top1"
    scores = [value for r in metrics if (value := r["values"].get(key)) is not None] if neighbours else []
    return (neighbours, max(scores)) if scores else None


def val_of(parts: RunParts, data: str | None, given: Reading = AS_IT_IS) -> ImageSet | None:
    """The pictures the run was validated on, from where it was trained or from `data`."""
    if parts.predictions is None and parts.files.decides:
        return None
    record = parts.record
    place = data or (record.data if record else None)
    if place is None:
        raise UsageError("where the data lie was not recorded: no pictures are shown; say it with --data")
    level, reading = (record.level, given.filled_from(record.reading)) if record else (None, given)
    try:
        val: ImageSet = open_data(place, level=level, reading=reading, labelled=parts.files.decides).val
    except PatchloomError as error:
        raise DataError(f"no pictures are shown, since the data cannot be opened: {error}") from error
    if parts.predictions and fingerprint(val) != parts.predictions.fingerprint:
        raise DataError(f"no pictures are shown: those of {place} are not those the run was validated on")
    if parts.predictions and parts.predictions.report.index[-1] >= len(val):
        raise DataError(f"no pictures are shown: the run decided about more than the {len(val):,} of {place}")
    return val


def _readable(parts: RunParts, val: ImageSet, indices: Sequence[int]) -> list[tuple[int, Image.Image]]:
    """Pictures that can be read, with their places; how many cannot is a note."""
    found, lost = [], 0
    for index in indices:
        try:
            found.append((index, val.read(index)))
        except DataError:
            lost += 1
    if lost:
        parts.notes.append(f"{lost} of the pictures to be shown cannot be read any more")
    return found


def _mistakes(
    parts: RunParts, val: ImageSet | None, judged: ClassificationReport | None
) -> list[tuple[Image.Image, Mistake]]:
    if val is None or judged is None:
        return []
    worst = {mistake.index: mistake for mistake in judged.worst(WORST_SHOWN)}
    return [(picture, worst[index]) for index, picture in _readable(parts, val, list(worst))]


def _pictures(parts: RunParts, val: ImageSet | None) -> list[Picture]:
    if parts.network is None:
        return []
    if val is None or not len(val):
        return pictures_of(parts.network, None, parts.files.labels)
    # From all over the set, which often lies class by class.
    step = max(1, len(val) // LOOKED_AT)
    shown = _readable(parts, val, range(0, len(val), step)[:LOOKED_AT])
    labels = [int(val.labels[index]) for index, _ in shown]
    return pictures_of(
        parts.network,
        [picture for _, picture in shown],
        parts.files.labels or val.classes.names,
        preprocessing=parts.files.preprocessing,
        labels=labels,
    )


def _recipe_rows(parts: RunParts) -> list[RecipeRow]:
    recipe = parts.files.recipe
    if recipe is None:
        parts.notes.append("the run kept no recipe.yaml: its settings are not shown")
        return []
    why = parts.record.choices if parts.record else {}
    return [RecipeRow(row.key, row.value, why.get(row.key, row.why)) for row in recipe_rows(recipe)]


def count_cost(parts: RunParts) -> Cost | None:
    """Of the network the config tells, so also where its weights are lost."""

    def counted() -> Cost:
        options = parts.files.options
        frame = make_frame(
            lambda: create_model(parts.files.network, **options), options, config=str(parts.folder / "config.json")
        )
        with torch.device("meta"):
            return cost(frame)

    return parts.attempt(counted)


def _environment(record: RunRecord | None) -> dict[str, str] | None:
    if record is None or not record.versions:
        return None
    machine: dict[str, Any] = {"machine": record.machine} if record.machine else {}
    return record.versions | machine
