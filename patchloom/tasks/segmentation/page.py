"""What the report of a segmentation run shows: its classes, what is taken for what, images beside both masks."""

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
from patchloom.report.sections import gallery_section, table_section
from patchloom.runs.config import read_run_files
from patchloom.runs.predictions import fingerprint
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.segmentation.data import open_masks
from patchloom.tasks.segmentation.evaluation import evaluate_on
from patchloom.tasks.segmentation.run_files import ValSegmentation, read_segmented
from patchloom.tasks.segmentation.segmenter import Segmenter, load_segmentation
from patchloom.tasks.task import TaskPage
from patchloom_runtime.errors import DataError, UsageError, attempted
from patchloom_runtime.images.samples import Sample

SHOWN = 4  # worst images, and as many best ones
CONFUSED = 12  # pairs of classes
HEIGHT = 168  # pixels of a picture in the gallery: two beside each other on a phone


def segmentation_page(folder: Path, asked: ReportSettings) -> TaskPage:
    """The images of val, or of the split that is asked for, from where the run was trained or from the data given."""
    notes: list[str] = []

    files = read_run_files(folder)
    network = asked.network or attempted(lambda: load_segmentation(folder)[0], notes)
    segmenter = Segmenter(network, files) if network is not None else None
    record = attempted(lambda: read_run_metadata(folder), notes)
    place = asked.data or (record.data if record else None)
    if asked.split is not None:
        place = data_path(folder, record, asked.data)
        if segmenter is None:
            raise UsageError(f"{folder} has no weights that can be read: {notes[-1]}")
        kept, said = evaluate_on(segmenter, folder, place, asked.split, asked.reading)
        notes += said
    else:
        kept = attempted(lambda: read_segmented(folder), notes)  # type: ignore[assignment]
    images = attempted(lambda: images_of(folder, asked, place, kept), notes) if kept else None
    report = kept.report if kept else None
    sections = [*_tables(report)] if report else []
    if report is not None and images is not None and segmenter is not None:
        sections += _galleries(segmenter, images, report)
    return TaskPage(
        best=f"{report.miou:.2f} %" if report else "",
        measure=f"mIoU on {asked.split or 'val'}",
        interval=report.miou_interval() if report else None,
        numbers=_numbers(report, asked.split or "val") if report else [],
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


def images_of(folder: Path, asked: ReportSettings, place: str | None, kept: ValSegmentation) -> ImageSet:
    """The set that the answers are about; a DataError where it is another by now."""
    plan: Any = asked.plan
    if plan is not None:
        val: ImageSet = plan.splits.val
        return val
    place = data_path(folder, None, place)
    images, _ = open_masks(place, asked.split, folder, asked.reading)
    if fingerprint(images) != kept.fingerprint:
        raise DataError(f"no pictures are shown: those of {place} are not those the run was validated on")
    return images


def _numbers(report: SegmentationReport, split: str) -> list[tuple[str, str, str]]:
    (low, high), told = report.miou_interval(), dict(report)
    rows = [
        ("mIoU", f"{told['miou']:.2f} %", f"{low:.2f} … {high:.2f}, the {100 * LEVEL:.0f} % interval over images"),
        ("pixels right", f"{told['pixel_accuracy']:.2f} %", "of those that are labelled"),
        ("mean class accuracy", f"{told['mean_class_accuracy']:.2f} %", "every class counts the same"),
    ]
    if "boundary_iou" in told:
        rows.append(("boundary IoU", f"{told['boundary_iou']:.2f} %", "within 2 % of the diagonal from a border"))
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
            _told(report.iou[k]),
            f"{intervals[k][0]:.1f} … {intervals[k][1]:.1f}" if not np.isnan(report.iou[k]) else "",
            _told(report.class_accuracy[k]),
            _told(borders[k]),
            f"{share[k]:.1f} %",
        )
        for k in order
    ]
    columns = ["class", "IoU", "95 % interval", "recall", "boundary IoU", "share of pixels"]
    return [table_section("Classes, worst first", columns, rows), *confused_section(report)]


def confused_section(report: SegmentationReport) -> list[Any]:
    """Which classes are taken for which, by the share of their pixels."""
    shares = 100 * report.confusion / np.maximum(report.confusion.sum(axis=1, keepdims=True), 1)
    np.fill_diagonal(shares, 0)
    pairs = [divmod(int(place), len(shares)) for place in np.argsort(-shares, axis=None, kind="stable")[:CONFUSED]]
    rows = [(report.classes[i], report.classes[j], f"{shares[i, j]:.1f} %") for i, j in pairs if shares[i, j] >= 0.05]
    return [table_section("What is taken for what", ["class", "taken for", "of its pixels"], rows)] if rows else []


def _galleries(segmenter: Segmenter, images: ImageSet, report: SegmentationReport) -> list[Any]:
    """The worst and the best images with their true and predicted masks."""
    order = np.argsort(report.image_miou, kind="stable")
    chosen = {"worst": order[:SHOWN], "best": order[::-1][:SHOWN]}
    told = "The image, its true mask, the predicted mask; file and mean IoU of the classes in it."
    made = []
    for name, places in chosen.items():
        drawn = [one for place in places if (one := _strip(segmenter, images, report, int(place)))]
        if drawn:
            strips, seen = [one[:2] for one in drawn], {number for *_, numbers in drawn for number in numbers}
            title = f"{name.capitalize()} images"
            made.append(gallery_section(name, title, told, strips, legend(segmenter.labels, seen)))
    return made


def _strip(
    segmenter: Segmenter, images: ImageSet, report: SegmentationReport, place: int
) -> tuple[list[Image.Image], str, set[int]] | None:
    """Image, true and predicted mask, their caption, and the classes in them, −1 for none."""
    row = int(report.index[place])
    try:
        sample = images.sample(row)
    except DataError:
        return None
    known, names = true_numbers(sample, images, segmenter.labels), segmenter.labels
    answer = segmenter.numbers(sample.image)
    pictures = [sample.image, color_mask(known, len(names)), color_mask(answer, len(names))]
    shown = {int(number) for numbers in (known, answer) for number in np.unique(numbers)}
    return of_one_height(pictures), f"{images.where(row)}: {report.image_miou[place]:.1f} %", shown


def true_numbers(sample: Sample, images: ImageSet, labels: Sequence[str]) -> np.ndarray:
    """(H, W) numbers that the model's classes have in the mask of a sample; −1 for what is none of them."""
    truth, ignored = sample.layers["mask"]
    known = truth.astype(np.int64)
    known[known == ignored] = -1
    names, own = list(labels), images.classes.names
    numbers = np.array([*(names.index(name) if name in names else -1 for name in own), -1])
    return numbers[np.where((known >= 0) & (known < len(own)), known, len(own))]


def of_one_height(pictures: Sequence[Image.Image], height: int = HEIGHT) -> list[Image.Image]:
    """Pictures of one size as large as they are shown, pixels kept crisp where they are enlarged."""
    width = max(1, round(pictures[0].width * height / pictures[0].height))
    way = Image.Resampling.NEAREST if height >= pictures[0].height else Image.Resampling.BILINEAR
    return [picture.convert("RGB").resize((width, height), way) for picture in pictures]


def legend(classes: Sequence[str], numbers: Collection[int]) -> list[tuple[str, tuple[int, int, int]]]:
    """Name and colour of the classes that are shown; −1 is what has none."""
    colors = [*map(tuple, palette(len(classes)).tolist()), NO_CLASS]
    return [
        ((*classes, "not labelled")[number], colors[number]) for number in sorted(numbers, key=lambda n: (n < 0, n))
    ]


def _told(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.1f} %"
