"""What the report of a run on images shows: its decisions and mistakes, and what goes on inside the network."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from patchloom.data.checking.scan import scan_bar
from patchloom.data.datasets import ImageSet
from patchloom.evaluation.classification import ClassificationReport, Mistake, overfitting_note
from patchloom.evaluation.intervals import LEVEL
from patchloom.inference.classifier import load
from patchloom.inference.evaluations import EvaluationSettings, evaluate_on
from patchloom.models.cost import cost_rows
from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe
from patchloom.report.pictures.branches import branch_epoch_charts
from patchloom.report.pictures.pictures import Picture, pictures_of
from patchloom.report.run_report import Charts, neighbor_count, training, validation
from patchloom.report.sections import class_section, confusion_section, mistake_section, picture_section
from patchloom.runs.branch_norms import read_branch_norms
from patchloom.runs.predictions import Predictions
from patchloom.tasks.images.run_contents import LOOKED_AT, RunParts, count_cost, neighbour_score, read_run, val_of
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import TaskPage
from patchloom_runtime.errors import DataError, UsageError

WORST_SHOWN = 24


def image_page(folder: Path, asked: ReportSettings) -> TaskPage:
    """The pictures of val, or of the split that is asked for, from where the run was trained or from the data given."""
    parts = read_run(folder, asked.network)
    plan: Any = asked.plan
    val = plan.splits.val if plan else None
    if asked.split is not None or asked.v2:
        shown = EvaluationSettings(split=asked.split, reading=asked.reading, level=asked.level, v2=asked.v2)
        val = _evaluate_split(parts, asked.data, shown)
    elif val is None:
        val = parts.attempt(lambda: val_of(parts, asked.data, asked.reading))
    judged = parts.predictions.report if parts.predictions else None
    looked = [*(parts.attempt(lambda: _pictures(parts, val)) or []), *_branches(parts)]
    metrics = parts.metrics
    if judged and not asked.part:
        started = parts.record is not None and bool(parts.record.init)
        parts.notes += filter(None, [overfitting_note(metrics, judged, pretrained=started)])
    best = f"{judged.top(1):.2f} %" if judged else ""
    measure = f"top-1 on {asked.part or 'val'}"
    if by_neighbours := neighbour_score(parts, metrics):
        best, measure = f"{by_neighbours[1]:.2f} %", f"best top-1 by the {by_neighbours[0]} nearest images"
    return TaskPage(
        best=best,
        measure=measure,
        interval=judged.top_interval() if judged else None,
        numbers=number_rows(judged, asked.part or "val") if judged else [],
        charts=_charts(parts.files.recipe, metrics),
        sections=_sections(parts, val, judged, looked),
        cost=cost_rows(cost) if (cost := count_cost(parts)) else (),
        notes=parts.notes,
        next_command=f"patchloom look {shlex.quote(str(folder))} IMAGE",
    )


def _charts(recipe: Recipe | None, metrics: Sequence[Mapping[str, Any]]) -> Charts:
    """Accuracy, and what the method's own module says is worth watching."""
    neighbours = neighbor_count(metrics)
    own = import_module(method_of(recipe.objective.method).objective).CHARTS if recipe else {}
    return {
        "Validation top-1, %": validation("top1"),
        f"Top-1 of the {neighbours} nearest, %": validation(f"knn{neighbours}_top1"),
        **training(own),
    }


def _sections(
    parts: RunParts, val: ImageSet | None, judged: ClassificationReport | None, looked: Sequence[Picture]
) -> list[Markup]:
    sections = []
    if judged:
        names, mistakes = judged.classes, _mistakes(parts, val, judged)
        sections += [confusion_section(judged.confusion, names)]
        sections += [class_section(judged.class_accuracy, names, judged.confusion)]
        sections += [mistake_section(mistakes, names)] if mistakes else []
    return [*sections, *([picture_section(looked)] if looked else [])]


def _evaluate_split(parts: RunParts, data: str | None, shown: EvaluationSettings) -> ImageSet:
    """The pictures of a split; what the run decides about them now takes the place of what it decided about val."""
    place = data or (parts.record.data if parts.record else None)
    if place is None:
        raise UsageError(f"{parts.folder} does not record its data path; pass --data")
    classifier = load(parts.folder)
    classifier.check_decides()
    pictures = shown.open(place, classifier)
    with scan_bar(what="evaluating") as progress:
        found = evaluate_on(classifier, pictures, replace(shown, progress=progress))
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
) -> list[tuple[Image.Image, Mistake, str]]:
    if val is None or judged is None:
        return []
    worst = {mistake.index: mistake for mistake in judged.worst(WORST_SHOWN)}
    return [(picture, worst[index], val.where(index)) for index, picture in _readable(parts, val, list(worst))]


def _branches(parts: RunParts) -> list[Picture]:
    """Thesis figure 3.6, where the run was trained with `--pictures`."""
    norms = parts.attempt(lambda: read_branch_norms(parts.folder)) or {}
    caption = (
        f"Norm of what a {{}} branch adds over the norm of what it is added to, in percent; epochs {_span(norms)}."
    )
    return [
        Picture(f"Residual branches by epoch: {kind}", chart, caption.format(kind))
        for kind, chart in branch_epoch_charts({parts.folder.name: norms} if len(norms) > 1 else {})
    ]


def _span(norms: Mapping[int, Any]) -> str:
    return f"{min(norms)} (faint) to {max(norms)}" if norms else ""


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
