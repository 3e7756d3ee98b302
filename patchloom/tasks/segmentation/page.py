"""The report of a segmentation run: classes, confusions, and images next to their masks."""

import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.intervals import LEVEL
from patchloom.evaluation.segmentation import SegmentationReport
from patchloom.objectives.segmentation import CHARTS
from patchloom.report.pictures.overlays import NO_CLASS, color_mask, palette
from patchloom.report.run_report import training, validation
from patchloom.report.sections import gallery_section, reliability_section, table_section
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import read_run_files
from patchloom.runs.predictions import fingerprint
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.segmentation.data import open_masks
from patchloom.tasks.segmentation.evaluation import evaluate_on
from patchloom.tasks.segmentation.model import Segmenter, load_segmentation
from patchloom.tasks.segmentation.run_files import ValSegmentation, read_segmented
from patchloom.tasks.task import TaskPage
from patchloom_runtime.errors import DataError, UsageError, attempted
from patchloom_runtime.images.samples import Sample

GALLERY = 4  # worst images, and as many best ones
CONFUSED = 12  # pairs of classes
HEIGHT = 168  # of an image in the gallery, in pixels: two fit next to each other on a phone


def segmentation_page(folder: Path, settings: ReportSettings) -> TaskPage:
    """Return the report on val, or on the split in the settings."""
    notes: list[str] = []

    files = read_run_files(folder)
    network = settings.network or attempted(lambda: load_segmentation(folder)[0], notes)
    segmenter = Segmenter(network, files) if network is not None else None
    record = attempted(lambda: read_run_metadata(folder), notes)
    place = settings.data or (record.data if record else None)
    if settings.split is not None:
        place = data_path(folder, record, settings.data)
        if segmenter is None:
            raise UsageError(f"{folder} has no weights that can be read: {notes[-1]}")
        val, more = evaluate_on(segmenter, folder, place, settings.split, settings.reading)
        notes += more
    else:
        val = attempted(lambda: read_segmented(folder), notes)  # type: ignore[assignment]
    images = attempted(lambda: images_of(folder, settings, place, val), notes) if val else None
    report = val.report if val else None
    sections = [*_tables(report)] if report else []
    calibration = attempted(lambda: read_calibration(folder), notes)
    if calibration and calibration.before and calibration.after:
        note = f"Random pixels of val. {calibration.temperature_in_words}"
        sections.append(reliability_section(calibration.before, calibration.after, [note]))
    if report is not None and images is not None and segmenter is not None:
        sections += _galleries(segmenter, images, report)
    return TaskPage(
        best=f"{report.miou:.2f} %" if report else "",
        measure=f"mIoU on {settings.split or 'val'}",
        interval=report.miou_interval() if report else None,
        numbers=_numbers(report, settings.split or "val") if report else [],
        charts={
            "Validation mIoU, %": validation("miou"),
            "Pixels of val right, %": validation("pixel_accuracy"),
            **training(CHARTS),
        },
        trained_on="augmented windows, with that of the auxiliary head",
        sections=sections,
        notes=notes,
        next_command=f"patchloom predict {shlex.quote(str(folder))} IMAGE --out masks",
    )


def images_of(folder: Path, settings: ReportSettings, place: str | None, val: ValSegmentation) -> ImageSet:
    """Return the images of the predictions; raise DataError if the data has changed."""
    plan: Any = settings.plan
    if plan is not None:
        dataset: ImageSet = plan.splits.val
        return dataset
    place = data_path(folder, None, place)
    images, _ = open_masks(place, settings.split, folder, settings.reading)
    if fingerprint(images) != val.fingerprint:
        raise DataError(f"images are not shown: those of {place} are not the ones the run was validated on")
    return images


def _numbers(report: SegmentationReport, split: str) -> list[tuple[str, str, str]]:
    (low, high), metrics = report.miou_interval(), dict(report)
    rows = [
        ("mIoU", f"{metrics['miou']:.2f} %", f"{low:.2f} … {high:.2f}, the {100 * LEVEL:.0f} % interval over images"),
        ("pixels right", f"{metrics['pixel_accuracy']:.2f} %", "of the labeled pixels"),
        ("mean class accuracy", f"{metrics['mean_class_accuracy']:.2f} %", "mean over classes"),
    ]
    if "boundary_iou" in metrics:
        rows.append(
            ("boundary IoU", f"{metrics['boundary_iou']:.2f} %", "within 2 % of the image diagonal from a boundary")
        )
    return [*rows, ("images", f"{len(report.index):,}", f"of the {split} split")]


def _tables(report: SegmentationReport) -> list[Any]:
    pixels = report.counts.sum(axis=0)[:, 0]
    share = 100 * pixels / max(1, pixels.sum())
    borders = report.class_boundary_iou if report.borders is not None else np.full(len(share), np.nan)
    order = sorted(range(len(report.classes)), key=lambda k: np.nan_to_num(report.iou[k], nan=np.inf))
    intervals = report.class_intervals()
    rows = [
        (
            report.classes[k],
            _percent(report.iou[k]),
            f"{intervals[k][0]:.1f} … {intervals[k][1]:.1f}" if not np.isnan(report.iou[k]) else "",
            _percent(report.class_accuracy[k]),
            _percent(borders[k]),
            f"{share[k]:.1f} %",
        )
        for k in order
    ]
    columns = ["class", "IoU", "95 % interval", "recall", "boundary IoU", "share of pixels"]
    return [table_section("Classes, worst first", columns, rows), *confused_section(report)]


def confused_section(report: SegmentationReport) -> list[Any]:
    """Return a table of the most confused classes, by the share of their pixels."""
    shares = 100 * report.confusion / np.maximum(report.confusion.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(shares, 0)
    pairs = [divmod(int(place), len(shares)) for place in np.argsort(-shares, axis=None, kind="stable")[:CONFUSED]]
    rows = [(report.classes[i], report.classes[j], f"{shares[i, j]:.1f} %") for i, j in pairs if shares[i, j] >= 0.05]
    return [table_section("What is taken for what", ["class", "taken for", "of its pixels"], rows)] if rows else []


def _galleries(segmenter: Segmenter, images: ImageSet, report: SegmentationReport) -> list[Any]:
    """Return galleries of the worst and the best images with their true and predicted masks."""
    order = np.argsort(report.image_miou, kind="stable")
    chosen = {"worst": order[:GALLERY], "best": order[::-1][:GALLERY]}
    caption = "The image, its true mask, the predicted mask; file and mean IoU of the classes in it."
    sections = []
    for name, places in chosen.items():
        drawn = [one for place in places if (one := _strip(segmenter, images, report, int(place)))]
        if drawn:
            strips, present = [one[:2] for one in drawn], {number for *_, numbers in drawn for number in numbers}
            title = f"{name.capitalize()} images"
            sections.append(gallery_section(name, title, caption, strips, legend(segmenter.labels, present)))
    return sections


def _strip(
    segmenter: Segmenter, images: ImageSet, report: SegmentationReport, place: int
) -> tuple[list[Image.Image], str, set[int]] | None:
    """Return image, true and predicted mask, their caption, and the classes in them, −1 for none."""
    row = int(report.index[place])
    try:
        sample = images.sample(row)
    except DataError:
        return None
    known, names = true_numbers(sample, images, segmenter.labels), segmenter.labels
    predicted = segmenter.numbers(sample.image)
    pictures = [sample.image, color_mask(known, len(names)), color_mask(predicted, len(names))]
    present = {int(number) for numbers in (known, predicted) for number in np.unique(numbers)}
    return of_one_height(pictures), f"{images.where(row)}: {report.image_miou[place]:.1f} %", present


def true_numbers(sample: Sample, images: ImageSet, labels: Sequence[str]) -> np.ndarray:
    """Return the mask (H, W) of a sample in the class indices of the model; −1 for other classes."""
    truth, ignored = sample.layers["mask"]
    known = truth.astype(np.int64)
    known[known == ignored] = -1
    names, own = list(labels), images.classes.names
    numbers = np.array([*(names.index(name) if name in names else -1 for name in own), -1])
    return numbers[np.where((known >= 0) & (known < len(own)), known, len(own))]


def of_one_height(pictures: Sequence[Image.Image]) -> list[Image.Image]:
    """Resize pictures of one size to the height of the gallery; enlarged pixels stay sharp."""
    width = max(1, round(pictures[0].width * HEIGHT / pictures[0].height))
    way = Image.Resampling.NEAREST if pictures[0].height <= HEIGHT else Image.Resampling.BILINEAR
    return [picture.convert("RGB").resize((width, HEIGHT), way) for picture in pictures]


def legend(classes: Sequence[str], numbers: Collection[int]) -> list[tuple[str, tuple[int, int, int]]]:
    """Return name and color of classes; −1 is unlabeled."""
    colors = [*map(tuple, palette(len(classes)).tolist()), NO_CLASS]
    return [((*classes, "not labeled")[number], colors[number]) for number in sorted(numbers, key=lambda n: (n < 0, n))]


def _percent(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1f} %"
