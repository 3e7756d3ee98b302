"""The pages of a multi-label run: its report, and predictions on single images."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.intervals import LEVEL
from patchloom.evaluation.multilabel import RARE, LabelMistake, MultilabelReport
from patchloom.models.network import Network
from patchloom.objectives.multilabel import CHARTS
from patchloom.report.pictures.look import ImageLook, looks, network_inputs
from patchloom.report.pictures.sheets import displayed
from patchloom.report.run_report import training, validation
from patchloom.report.sections import gallery_section, reliability_section, table_section
from patchloom.runs.calibration import read_calibration
from patchloom.runs.predictions import fingerprint
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom.tasks.images.look_page import (
    COUNT,
    LookPage,
    LookRequest,
    NamedImage,
    chosen_files,
    readable,
    write_look_page,
)
from patchloom.tasks.multilabel.classifier import MultilabelClassifier
from patchloom.tasks.multilabel.evaluation import evaluate_on, open_labels
from patchloom.tasks.multilabel.run_files import ValLabels, read_val_labels
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.task import ModelLoader, TaskPage
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import DataError, UsageError, at_least, attempted
from patchloom_runtime.printable import plural

MISTAKES = 24
SIDE = 168  # pixels of an image in the gallery


def multilabel_page(loader: ModelLoader, folder: Path, settings: ReportSettings) -> TaskPage:
    """Return the report of a run on val, or on the split in the settings."""
    notes: list[str] = []
    place = data_path(folder, attempted(lambda: read_run_metadata(folder), notes), settings.data)
    images: ImageSet | None = None
    val: ValLabels | None
    if settings.split is not None:
        model = loader.load(folder, device="cpu")
        opened = open_labels(place, model.labels, split=settings.split, folder=folder, reading=settings.reading)
        val, broken = evaluate_on(model, opened)
        images, notes = opened, [*notes, *opened.notes, *broken]
    else:
        val = attempted(lambda: read_val_labels(folder), notes)
        images = attempted(partial(_val_images, folder, settings, place, val), notes) if val else None
    report = val.report if val else None
    split = settings.split or "val"
    if report is not None and report.left_out:
        listed = ", ".join(report.left_out[:8]) + (" …" if len(report.left_out) > 8 else "")
        notes.append(f"{plural(len(report.left_out), 'label')} without an image in {split} are left out: {listed}")
    return TaskPage(
        best=f"{report.mean_ap:.2f} %" if report else "",
        measure=f"mAP on {split}",
        interval=report.map_interval() if report else None,
        numbers=_numbers(report, split) if report else [],
        charts={
            "Validation mAP, %": validation("map"),
            "Validation micro-F1 at a threshold of 0.5, %": validation("micro_f1"),
            **training(CHARTS),
        },
        sections=[_label_table(report), *_reliability(folder, notes), *_mistakes(report, images)] if report else [],
        notes=notes,
        next_command=f"patchloom predict {shlex.quote(str(folder))} IMAGE",
    )


def _reliability(folder: Path, notes: list[str]) -> list[Markup]:
    calibration = attempted(lambda: read_calibration(folder), notes)
    if calibration is None or calibration.before is None or calibration.after is None:
        return []
    note = f"Every label of every val image. Logits are divided by {calibration.rules.temperature:.3g}, fitted on val."
    return [reliability_section(calibration.before, calibration.after, [note])]


def _val_images(folder: Path, settings: ReportSettings, place: str, val: ValLabels) -> ImageSet:
    """Return the images of the val scores; raise DataError if the data have changed."""
    plan: Any = settings.plan
    if plan is not None:
        images: ImageSet = plan.splits.val
        return images
    images = open_labels(place, val.report.classes, split="val", folder=folder, reading=settings.reading)
    if fingerprint(images) != val.fingerprint:
        raise DataError(f"images are not shown: those of {place} are not the ones the run was validated on")
    return images


def _numbers(report: MultilabelReport, split: str) -> list[tuple[str, str, str]]:
    (low, high), metrics = report.map_interval(), dict(report)
    precision, recall = (np.nanmean(report.precision_recall_f1[:, column]) for column in (0, 1))
    interval = f"{low:.2f} … {high:.2f}, the {100 * LEVEL:.0f} % interval over images"
    chosen = "at the thresholds in the table, which were chosen on val"
    return [
        ("mAP", f"{metrics['map']:.2f} %", f"mean over {plural(int(metrics['labels']), 'label')}; {interval}"),
        ("macro-F1", f"{metrics['macro_f1']:.2f} %", f"mean over labels, {chosen}"),
        ("micro-F1", f"{metrics['micro_f1']:.2f} %", "of all decisions together, at the same thresholds"),
        ("precision and recall", f"{precision:.1f} % and {recall:.1f} %", "means over labels"),
        ("loss", f"{metrics['loss']:.4f}", "binary cross-entropy, in nats"),
        ("images", f"{len(report.index):,}", f"of the {split} split"),
    ]


def _label_table(report: MultilabelReport) -> Markup:
    order = np.argsort(np.nan_to_num(report.average_precision, nan=np.inf), kind="stable")
    thresholds = report.thresholds
    known = (~np.isnan(report.targets)).sum(axis=0)
    rows = [
        (
            report.classes[k],
            _percent(report.average_precision[k]),
            *map(_percent, report.precision_recall_f1[k]),
            f"{thresholds.values[k]:.3f}{'' if thresholds.own[k] else ' (shared)'}",
            f"{report.counts[k]:,} of {known[k]:,}",
        )
        for k in order.tolist()
    ]
    columns = ["label", "AP", "precision", "recall", "F1", "threshold", "images"]
    title = f"Labels, worst first (shared: fewer than {RARE} images to choose a threshold on)"
    return table_section(title, columns, rows)


def _mistakes(report: MultilabelReport, images: ImageSet | None) -> list[Markup]:
    """Return a gallery of the images with the most surprising missing and spurious labels."""
    if images is None:
        return []
    pictures, captions = [], []
    for mistake in report.worst(MISTAKES):
        try:
            picture = images.read(mistake.index)
        except DataError:
            continue
        pictures.append(displayed(picture, SIDE))
        captions.append(f"{Path(images.key(mistake.index)).name}: {_in_words(mistake)}")
    text = "Labels that apply and were not predicted (missing) and the reverse (spurious), with their scores."
    return [gallery_section("mistakes", "Worst mistakes", text, [(pictures, captions)])] if pictures else []


def _in_words(mistake: LabelMistake) -> str:
    parts = {"missing": mistake.missing, "spurious": mistake.spurious}
    return "; ".join(
        f"{what} {', '.join(f'{name} {score:.0%}' for name, score in labels)}"
        for what, labels in parts.items()
        if labels
    )


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1f} %"


# Single images --------------------------------------------------------------------------------------------------------


def look_at_labels(
    loader: ModelLoader,
    folder: Path,
    paths: Sequence[str] = (),
    *,
    data: str | None = None,
    out: Path,
    top: int = 5,
    count: int = COUNT,
) -> LookPage:
    """Write predictions with maps on the images at `paths`, or on the run's worst mistakes on val."""
    at_least("count", count, 1)
    notes: list[str] = []
    if is_artifact(folder):
        if not paths:
            raise UsageError(f"{folder} is an artifact without val scores; pass images: patchloom look {folder} IMAGE…")
        model = loader.open_artifact(folder)
        notes.append("an artifact has no attention maps; use the run that it was exported from")
    else:
        model = loader.load(folder, device="cpu")
    if paths:
        requests = chosen_files(paths, (), count, notes)
        title = f"Labels by {folder.name} on {plural(len(requests), 'image')}"
    else:
        requests, title = _val_requests(folder, data, count), f"Mistakes of {folder.name}, worst first"
    named_images = readable(requests, notes)
    results = _label_looks(model, named_images, top)
    write_look_page(out, title, notes, [result.card(name, detail) for name, detail, result in results])
    return LookPage(out, [*results], notes)


@dataclass(frozen=True, eq=False)
class LabelLook(ImageLook):
    """The predicted labels and the maps of one image; `truth` lists its labels in order."""

    @property
    def right(self) -> bool | None:
        """Whether exactly the labels that apply are predicted; None if they are unknown."""
        return ", ".join(sorted(name for name, _ in self.answers)) == self.truth if self.truth else None

    def in_words(self) -> str:
        """Return all predicted labels."""
        return "  ".join(f"{label} {score:.1%}" for label, score in self.answers) or "none"


def _label_looks(
    model: MultilabelClassifier, named_images: Sequence[NamedImage], top: int
) -> list[tuple[str, str, LabelLook]]:
    """Return the look at each image: the labels that apply and, for a run, the maps of its most likely ones."""
    images = [one.image for one in named_images]
    scores = model.scores(images)
    if isinstance(model.model, Network):
        inputs = network_inputs(model.model, model.preprocessing, images)
        drawn = [(one.input_image, one.maps) for one in looks(replace(inputs, probabilities=scores), model.labels)]
    else:
        transform = model.classifier.transform()
        drawn = [(Image.fromarray(transform(image)), []) for image in images]
    result = []
    for one, row, (seen, maps) in zip(named_images, scores, drawn, strict=True):
        answers = model.answers(row, top)
        best = model.answers(row, 1, threshold=0.0)[0]
        detail = "" if answers else f"no label reaches its threshold; the highest score is {best[1]:.1%} of {best[0]}"
        result.append((one.name, detail, LabelLook(seen, answers, maps, one.truth)))
    return result


def _val_requests(folder: Path, data: str | None, count: int) -> list[LookRequest]:
    """Return the run's worst mistakes on val."""
    val = read_val_labels(folder)
    place = data_path(folder, read_run_metadata(folder), data)
    images = _val_images(folder, ReportSettings(), place, val)
    worst = val.report.worst(count)
    if not worst:
        raise UsageError(f"{folder} made no mistake on its val split; pass images to look at")
    return [
        LookRequest(images.where(one.index), ", ".join(sorted(one.labels)), partial(images.read, one.index))
        for one in worst
    ]
