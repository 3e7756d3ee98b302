"""The evaluation of detectors on data, the table of several runs, and the report of a run."""

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.data.batches.loader import Loader
from patchloom.data.checking.scan import scan_bar
from patchloom.data.datasets import LabeledImages
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.evaluation.detection import (
    DetectionReport,
    Detections,
    Kind,
    difference,
    find_objects,
    truth_of,
)
from patchloom.machine import cores
from patchloom.objectives.detection import CHARTS
from patchloom.report.charts import Series, line_chart
from patchloom.report.run_report import training, validation
from patchloom.report.sections import picture_section, table_section
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom.tasks.detection.data import open_objects
from patchloom.tasks.detection.drawings import confused_section, gallery, worst_first
from patchloom.tasks.detection.model import load_object_detector, open_exported_detector
from patchloom.tasks.detection.run_files import VAL, DetectedImage, ValDetections, read_val
from patchloom.tasks.task import Scores, TaskPage
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.artifacts.detector import MASKS
from patchloom_runtime.errors import DataError, UsageError, attempted

INTERVALS = ("ap", "ap50", "mask_ap", "mask_ap50")
GALLERY_IMAGES = 4  # worst, and as many best
MAX_CURVES = 8  # classes with most objects
BATCH = 8
_COLUMNS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "recall")
_MEANINGS = {
    "ap": "mean over classes and IoU 0.50 … 0.95",
    "ap50": "at IoU 0.50",
    "ap75": "at IoU 0.75",
    "ap_small": "of objects up to 32×32 pixels",
    "ap_medium": "of objects up to 96×96 pixels",
    "ap_large": "of larger objects",
    "recall": "share of objects found by 100 detections, mean over IoU",
    "objects": "in them",
}


def interval_words(report: DetectionReport) -> str:
    """Return the confidence intervals of AP50 as text."""
    names = {"ap50": "box AP50", **({"mask_ap50": "mask AP50"} if report.has_masks else {})}
    intervals = [
        f"{title} {low:.1f} … {high:.1f}" for name, title in names.items() for low, high in [report.interval(name)]
    ]
    return f"95 % intervals over images: {', '.join(intervals)}"


# evaluate -------------------------------------------------------------------------------------------------------------


def evaluate_detectors(
    runs: Mapping[str, Path], data: str | None, *, split: str | None, device: str, reading: Reading = AS_IT_IS
) -> Scores:
    """Return one row per run and kind; without data, from the val predictions of the training."""
    judged: dict[str, DetectionReport] = {}
    pictures: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    for name, folder in runs.items():
        if data is None:
            if is_artifact(folder):
                raise UsageError(f"{folder} is an artifact without val predictions: patchloom evaluate {folder} DATA")
            val = read_val(folder)
            if val is None:
                raise UsageError(f"{folder} has no {VAL}; pass data: patchloom evaluate {folder} DATA")
        else:
            val, run_notes = judge_on(folder, data, split=split, device=device, reading=reading)
            notes += [f"{name}: {note}" for note in run_notes]
        judged[name], pictures[name] = val.report, val.names
    rows = [
        (name, kind, f"{len(report.truths):,}", *_cells(report.summary(kind)), _interval(report, kind))
        for name, report in judged.items()
        for kind in report.kinds
    ]
    return Scores(
        columns=["run", "kind", "#images", *(f"#{column}" for column in _COLUMNS), "ap50, 95 %"],
        rows=rows,
        notes=list(dict.fromkeys(notes)),
        lines=[
            *(line for name, report in judged.items() for line in _class_lines(name, report)),
            *_differences(judged, pictures),
        ],
        values={name: _values(report) for name, report in judged.items()},
    )


def judge_on(
    folder: Path, data: str, *, split: str | None, device: str, reading: Reading = AS_IT_IS
) -> tuple[ValDetections, list[str]]:
    """Return the detections of a run in a split, by default val, and notes."""
    if is_artifact(folder):
        return _judge_exported(folder, data, split, reading)
    detector = load_object_detector(folder, device=device)
    images, notes = open_objects(folder, data, split, detector.labels, reading)
    loader = Loader(
        images,
        detector.view,
        batch_size=min(BATCH, len(images)),
        shuffle=False,
        drop_last=False,
        workers=min(8, cores()) if len(images) > 4 * BATCH else 0,
        skip_broken=True,
    )
    judged: dict[int, DetectedImage] = {}
    with scan_bar(what="evaluating") as progress:
        for index, size, detections in find_objects(detector.network, loader.epoch(0)):
            judged[index] = truth_of(images.objects(index), size), detections, size
            if progress:
                progress(len(judged), len(images))
    loader.close()
    notes += [f"not counted: {why}" for why in loader.broken.values()]
    return ValDetections.of(judged, images, detector.labels), notes


def _judge_exported(
    folder: Path, data: str, split: str | None, reading: Reading = AS_IT_IS
) -> tuple[ValDetections, list[str]]:
    """Return the detections of an artifact, image by image, and notes."""
    detector = open_exported_detector(folder)
    images, notes = open_objects(None, data, split, detector.labels, reading)
    numbers = {name: number for number, name in enumerate(detector.labels)}
    judged: dict[int, DetectedImage] = {}
    with scan_bar(what="evaluating") as progress:
        for index in range(len(images)):
            try:
                picture = images.read(index)
            except DataError as error:
                notes.append(f"not counted: {error}")
                continue
            objects, size = detector.predict(picture, min_score=0.0), (picture.height, picture.width)
            detections = Detections(
                np.array([one.box for one in objects], np.float64).reshape(-1, 4),
                np.array([numbers[one.name] for one in objects], np.int64),
                np.array([one.score for one in objects], np.float64),
                [one.outline for one in objects] if MASKS in detector.artifact.about.parts else None,
            )
            judged[index] = truth_of(images.objects(index), size), detections, size
            if progress:
                progress(index + 1, len(images))
    return ValDetections.of(judged, images, detector.labels), notes


def _differences(judged: Mapping[str, DetectionReport], pictures: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Compare the first run with each other one on the same images."""
    (first, one), *others = judged.items()
    lines = []
    for name, other in others:
        if len(one.truths) != len(other.truths) or pictures.get(first) != pictures.get(name):
            lines.append(f"{first} and {name} were evaluated on different images, so they are not compared; pass data")
            continue
        for measure in ("ap50", "mask_ap50"):
            if measure == "ap50" or (one.has_masks and other.has_masks):
                more, low, high = difference(one, other, measure)
                sure = "" if low <= 0 <= high else ", beyond chance"
                lines.append(f"{first} − {name}: {measure} {more:+.1f}, 95 % {low:+.1f} … {high:+.1f}{sure}")
    return lines


def _cells(values: Mapping[str, float]) -> list[str]:
    return [f"{values[name]:.1f}" if name in values else "–" for name in _COLUMNS]


def _interval(report: DetectionReport, kind: Kind) -> str:
    low, high = report.interval("ap50" if kind == "box" else "mask_ap50")
    return "–" if math.isnan(low) else f"{low:.1f} … {high:.1f}"


def _class_lines(name: str, report: DetectionReport) -> list[str]:
    if len(report.classes) < 2:
        return []
    of_class = zip(report.classes, report.class_ap(), strict=True)
    scores = [f"{label} {values['ap50']:.1f}" for label, values in of_class if not math.isnan(values["ap50"])]
    return [f"{name}, AP50 of boxes by class: {', '.join(scores[:20])}{' …' if len(scores) > 20 else ''}"]


def _values(report: DetectionReport) -> dict[str, Any]:
    """Return the metrics of a report for JSON."""
    intervals = {
        name: [round(value, 4) for value in report.interval(name)]
        for name in INTERVALS
        if not name.startswith("mask_") or report.has_masks
    }
    return {
        **dict(report),
        "intervals": {name: ends for name, ends in intervals.items() if not any(map(math.isnan, ends))},
        "classes": {
            kind: dict(zip(report.classes, map(_finite, report.class_ap(kind)), strict=True)) for kind in report.kinds
        },
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


# The page -------------------------------------------------------------------------------------------------------------


def detection_page(folder: Path, settings: Any) -> TaskPage:
    """Return metrics, a table of classes, precision over recall, and the worst and best images next to the truth."""
    notes: list[str] = []
    val = attempted(lambda: read_val(folder), notes)
    if settings.split is not None:
        record = read_run_metadata(folder)
        place = data_path(folder, record, settings.data)
        val, notes = judge_on(folder, place, split=settings.split, device="auto", reading=settings.reading)
    elif val is None and not notes:
        notes.append(f"{folder} has no {VAL}: val predictions are not shown")
    report = val.report if val else None
    images = attempted(lambda: images_of(folder, settings, report), notes) if report else None
    return TaskPage(
        best=f"{report.summary()['ap']:.1f}" if report else "",
        measure=f"box AP on {settings.split or 'val'}",
        interval=report.interval("ap") if report else None,
        numbers=_numbers(report, settings.split or "val") if report else [],
        charts={
            "Validation box AP50": validation("ap50"),
            "Validation box AP": validation("ap"),
            "Validation mask AP": validation("mask_ap"),
            **training(CHARTS),
        },
        trained_on="augmented images, all losses added up",
        sections=_sections(val, images) if val else [],
        notes=notes,
        next_command=f"patchloom predict {shlex.quote(str(folder))} IMAGE --out FOLDER",
    )


def _numbers(report: DetectionReport, split: str) -> list[tuple[str, str, str]]:
    rows, meanings = [], _MEANINGS | {"images": f"of the {split} split"}
    for name, value in report:
        plain = name.removeprefix("mask_")
        what = meanings[plain] + (", by masks" if name != plain else "")
        if name in INTERVALS:
            low, high = report.interval(name)
            what += "" if math.isnan(low) else f"; {low:.1f} … {high:.1f}, the 95 % interval (bootstrap over images)"
        rows.append(
            (name.replace("_", " "), f"{value:,.0f}" if plain in ("images", "objects") else f"{value:.2f}", what)
        )
    return rows


def _sections(val: ValDetections, images: LabeledImages | None) -> list[Markup]:
    report = val.report
    caption = "One curve per class. Further right, more objects are found; further up, fewer detections are wrong."
    curves = [(f"By {'boxes' if kind == 'box' else 'masks'}", _curves(report, kind), caption) for kind in report.kinds]
    return [
        _class_table(report),
        *confused_section(report),
        picture_section(curves, "Precision over recall at IoU 0.50", "precision"),
        *(_worst_and_best(val, images) if images is not None else []),
    ]


def _class_table(report: DetectionReport) -> Markup:
    columns = ["class", "objects", *(f"{kind} {name}" for kind in report.kinds for name in ("AP", "AP50", "AP75"))]
    by_kind = [report.class_ap(kind) for kind in report.kinds]
    order = sorted(range(len(report.classes)), key=lambda i: (math.isnan(by_kind[0][i]["ap"]), by_kind[0][i]["ap"]))

    def cell(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:.1f}"

    rows = [
        [
            report.classes[i],
            f"{by_kind[0][i]['objects']:,}",
            *(cell(of[i][name]) for of in by_kind for name in ("ap", "ap50", "ap75")),
        ]
        for i in order
    ]
    return table_section("Classes, worst first", columns, rows)


def _curves(report: DetectionReport, kind: Kind) -> Markup:
    counts = np.array([int(matches.objects[0].sum()) for matches in report.matches(kind)])
    chosen = [int(i) for i in np.argsort(-counts, kind="stable")[:MAX_CURVES] if counts[i]]
    series = []
    for color, number in enumerate(chosen):
        curve = report.curve(number, kind=kind)
        points = [(0.0, float(curve.precision[0]) if len(curve.precision) else 0.0)]
        points += list(zip(curve.recall.tolist(), curve.precision.tolist(), strict=True))
        step = -(-len(points) // 200)
        series.append(Series(report.classes[number], points[::step], color))
    return line_chart(series, x_label="recall", y_label="precision")


def _worst_and_best(val: ValDetections, images: LabeledImages) -> list[Markup]:
    """Return galleries of images next to the truth."""
    report, places = val.report, {images.key(i): i for i in range(len(images))}
    _, order = worst_first(report)
    worst = order[:GALLERY_IMAGES]
    best = [i for i in reversed(order) if i not in worst and len(report.truths[i].boxes)][:GALLERY_IMAGES]

    def read(number: int) -> Image.Image:
        return images.read(places[val.names[number]])

    return [
        *gallery("Worst images", worst, report, val.names, read),
        *gallery("Best images", best, report, val.names, read),
    ]


def images_of(folder: Path, settings: Any, report: DetectionReport) -> LabeledImages | None:
    """Return the images of a report, from the plan of the training or from the data path."""
    if settings.plan is not None:
        val: LabeledImages = settings.plan.splits.val
        return val
    record = read_run_metadata(folder)
    place = settings.data or (record.data if record else None)
    return None if place is None else open_objects(folder, place, settings.split, report.classes, settings.reading)[0]
