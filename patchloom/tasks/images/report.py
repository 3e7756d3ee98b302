"""The report of an image classification run: results, mistakes, and pictures of the network."""

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
from patchloom.evaluation.classification import MACRO_METRICS, ClassificationReport, Mistake, overfitting_note
from patchloom.evaluation.intervals import LEVEL
from patchloom.inference.classifier import load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import EvaluationData, evaluate_on
from patchloom.models.cost import cost_rows
from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe
from patchloom.report.pictures.augmentation import read_preview
from patchloom.report.pictures.branches import branch_epoch_charts
from patchloom.report.pictures.pictures import Picture, pictures_of
from patchloom.report.run_report import Charts, neighbor_count, training, validation
from patchloom.report.sections import (
    class_section,
    confusion_section,
    mistake_section,
    picture_section,
    reliability_section,
)
from patchloom.runs.branch_norms import read_branch_norms
from patchloom.runs.calibration import RunCalibration
from patchloom.runs.predictions import Predictions
from patchloom.runs.run_metadata import data_path
from patchloom.tasks.images.run_contents import (
    MAX_IMAGES,
    RunContents,
    count_cost,
    neighbor_score,
    read_run,
    val_images,
)
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import TaskPage
from patchloom_runtime.calibration import Reliability
from patchloom_runtime.errors import DataError

MAX_MISTAKES = 24


def image_page(folder: Path, settings: ReportSettings) -> TaskPage:
    """Return the page of a run on val or on another split, at the recorded data path or at `settings.data`."""
    contents = read_run(folder, settings.network)
    plan: Any = settings.plan
    images = plan.splits.val if plan else None
    if settings.split is not None or settings.v2:
        evaluation = EvaluationSettings(
            split=settings.split, reading=settings.reading, level=settings.level, v2=settings.v2
        )
        images = _evaluate_split(contents, settings.data, evaluation)
    elif images is None:
        images = contents.attempt(lambda: val_images(contents, settings.data, settings.reading))
    report = contents.predictions.report if contents.predictions else None
    pictures = [*(contents.attempt(lambda: _pictures(contents, images)) or []), *_branch_pictures(contents)]
    pictures += contents.attempt(lambda: read_preview(contents.folder)) or []
    metrics = contents.metrics
    if report and not settings.part:
        pretrained = contents.record is not None and bool(contents.record.init)
        contents.notes += filter(None, [overfitting_note(metrics, report, pretrained=pretrained)])
    best = f"{report.top(1):.2f} %" if report else ""
    measure = f"top-1 on {settings.part or 'val'}"
    if by_neighbors := neighbor_score(contents, metrics):
        best, measure = f"{by_neighbors[1]:.2f} %", f"best top-1 by the {by_neighbors[0]} nearest images"
    return TaskPage(
        best=best,
        measure=measure,
        interval=report.top_interval() if report else None,
        more_scores=[row[:2] for row in _macro_rows(dict(report))] if report and report.is_imbalanced else [],
        numbers=number_rows(report, settings.part or "val", contents.calibration.before) if report else [],
        charts=_charts(contents.files.recipe, metrics, uneven=bool(report and report.is_imbalanced)),
        sections=_sections(contents, images, report, pictures),
        cost=cost_rows(cost) if (cost := count_cost(contents)) else (),
        notes=contents.notes,
        next_command=f"patchloom look {shlex.quote(str(folder))} IMAGE",
    )


def _charts(recipe: Recipe | None, metrics: Sequence[Mapping[str, Any]], *, uneven: bool) -> Charts:
    """Return the charts of accuracy and those that the method defines; `uneven`: the classes of val."""
    k = neighbor_count(metrics)
    own = import_module(method_of(recipe.objective.method).objective).CHARTS if recipe else {}
    return {
        "Validation top-1, %": validation("top1"),
        **({"Validation mean class accuracy, %": validation("mean_class_accuracy")} if uneven else {}),
        f"Top-1 of the {k} nearest, %": validation(f"knn{k}_top1"),
        **training(own),
    }


def _sections(
    contents: RunContents, images: ImageSet | None, report: ClassificationReport | None, pictures: Sequence[Picture]
) -> list[Markup]:
    sections = []
    if report:
        names = report.classes
        sections.append(confusion_section(report.confusion, names))
        sections.append(class_section(report.class_accuracy, names, report.confusion))
        if (calibration := contents.calibration).before and calibration.after:
            sections.append(reliability_section(calibration.before, calibration.after, _rule_notes(calibration)))
        if mistakes := _mistakes(contents, images, report):
            sections.append(mistake_section(mistakes, names))
    if pictures:
        sections.append(picture_section(pictures))
    return sections


def _rule_notes(calibration: RunCalibration) -> list[str]:
    """Return sentences on the temperature and on when the model abstains."""
    rules, notes = calibration.rules, [calibration.temperature_in_words]
    if rules.promise:
        notes.append(f"Promise: {rules.promise.in_words()}. Below {rules.promise.threshold:.1%} it does not answer.")
    if rules.distance:
        share = f"{rules.distance.rejects:.1%}"
        notes.append(f"It rejects at most {share} of images like those of val as unlike the training images.")
    if rules.negatives:
        notes.append(f"Predictions of {', '.join(rules.negatives)} count as none of these.")
    return notes


def _evaluate_split(contents: RunContents, data: str | None, settings: EvaluationSettings) -> ImageSet:
    """Evaluate the run on a split; its predictions replace the stored ones of val."""
    path = data_path(contents.folder, contents.record, data)
    classifier = load(contents.folder)
    classifier.check_decides()
    images = EvaluationData(path, settings, [classifier.folder]).open(classifier)
    with scan_bar(what="evaluating") as progress:
        evaluation = evaluate_on(classifier, images, replace(settings, progress=progress))
    contents.predictions = Predictions(evaluation.report, evaluation.fingerprint)
    contents.notes += evaluation.notes
    return images


def number_rows(
    report: ClassificationReport, split: str = "val", before: Reliability | None = None
) -> list[tuple[str, str, str]]:
    """Return (name, value, explanation) of each number; `before` are those of val without calibration."""
    uncalibrated = f"; on val {before.calibration_error:.2f} % before calibration" if before else ""
    low, high = report.top_interval()
    values = dict(report)
    rows = [("top-1", f"{values['top1']:.2f} %", f"{low:.2f} … {high:.2f}, the {100 * LEVEL:.0f} % interval (Wilson)")]
    if "top5" in values:
        rows.append(("top-5", f"{values['top5']:.2f} %", "label among the five most likely classes"))
    return [
        *rows,
        *_macro_rows(values),
        ("loss", f"{values['loss']:.4f}", "cross-entropy, in nats"),
        (
            "calibration error",
            f"{values['calibration_error']:.2f} %",
            f"difference between confidence and accuracy, 15 bins{uncalibrated}",
        ),
        ("images", f"{len(report.index):,}", f"of the {split} split"),
    ]


def _macro_rows(values: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Return the rows of the metrics that count every class equally."""
    why = {"mean_class_accuracy": "balanced accuracy: mean over classes", "macro_f1": "mean over classes"}
    return [(name, f"{values[key]:.2f} %", why[key]) for key, name in MACRO_METRICS.items()]


def _readable(contents: RunContents, images: ImageSet, indices: Sequence[int]) -> list[tuple[int, Image.Image]]:
    """Return the readable images with their indices; add a note on the number of unreadable ones."""
    readable, lost = [], 0
    for index in indices:
        try:
            readable.append((index, images.read(index)))
        except DataError:
            lost += 1
    if lost:
        contents.notes.append(f"{lost} of the images to show cannot be read any more")
    return readable


def _mistakes(
    contents: RunContents, images: ImageSet | None, report: ClassificationReport
) -> list[tuple[Image.Image, Mistake, str]]:
    if images is None:
        return []
    worst = {mistake.index: mistake for mistake in report.worst(MAX_MISTAKES)}
    readable = _readable(contents, images, list(worst))
    return [(image, worst[index], images.where(index)) for index, image in readable]


def _branch_pictures(contents: RunContents) -> list[Picture]:
    """Draw thesis figure 3.6, for a run trained with `--pictures`."""
    norms = contents.attempt(lambda: read_branch_norms(contents.folder)) or {}
    if len(norms) < 2:
        return []
    epochs = f"epochs {min(norms)} (faint) to {max(norms)}"
    return [
        Picture(
            f"Residual branches by epoch: {kind}",
            chart,
            f"Norm of the output of a {kind} branch relative to the norm of its input, in percent; {epochs}.",
        )
        for kind, chart in branch_epoch_charts({contents.folder.name: norms})
    ]


def _pictures(contents: RunContents, images: ImageSet | None) -> list[Picture]:
    if contents.network is None:
        return []
    if images is None or not len(images):
        return pictures_of(contents.network, None, contents.files.labels)
    step = max(1, len(images) // MAX_IMAGES)  # spread over the dataset, which is often sorted by class
    readable = _readable(contents, images, range(0, len(images), step)[:MAX_IMAGES])
    return pictures_of(
        contents.network,
        [image for _, image in readable],
        contents.files.labels or images.classes.names,
        preprocessing=contents.files.preprocessing,
        labels=[int(images.labels[index]) for index, _ in readable],
    )
