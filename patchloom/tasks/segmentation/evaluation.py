"""`patchloom evaluate` of segmentation runs: on data or by their val predictions, and compared with each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np

from patchloom.data.checking.scan import scan_bar
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.evaluation.segmentation import SegmentationReport
from patchloom.runs.predictions import fingerprint
from patchloom.tasks.segmentation.data import open_masks
from patchloom.tasks.segmentation.judge import PixelSet, evaluate_pixels
from patchloom.tasks.segmentation.model import Segmenter, load_segmenter, open_exported_segmenter
from patchloom.tasks.segmentation.run_files import ValSegmentation, read_segmented
from patchloom.tasks.task import Scores
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import DataError, UsageError

MODES = ("whole", "slide")


@dataclass(frozen=True)
class SegmentationComparison:
    """Comparison of two runs on the same images."""

    first: str
    second: str
    difference: float  # in mIoU points, first − second
    interval: tuple[float, float]
    p: float  # two-sided, by bootstrap over images
    images_better: int  # images on which the first run is better
    images_worse: int

    def in_words(self) -> str:
        """Return the comparison as one line."""
        low, high = self.interval
        return (
            f"{self.first} − {self.second}: {self.difference:+.2f} points of mIoU ({low:+.2f} … {high:+.2f}, 95 %), "
            f"p {self.p:.3f}; {self.images_better} images better, {self.images_worse} worse"
        )


def evaluate_runs(
    runs: Mapping[str, Path],
    data: str | None,
    *,
    split: str | None = None,
    device: str = "auto",
    multi_scale: bool = False,
    mode: str | None = None,
    reading: Reading = AS_IT_IS,
) -> Scores:
    """Evaluate runs, one row per run, and compare those with the same images image by image."""
    if mode is not None and mode not in MODES:
        raise UsageError(f"--mode is {mode!r}, expected {' or '.join(MODES)}")
    if data is None and (split or multi_scale or mode):
        option = "--split" if split else "--multi-scale" if multi_scale else "--mode"
        first = next(iter(runs.values()))
        raise UsageError(f"{option} needs images: patchloom evaluate {first} DATA {option}")
    results: dict[str, ValSegmentation] = {}
    notes: list[str] = []
    for name, folder in runs.items():
        if data is None:
            if is_artifact(folder):
                raise UsageError(
                    f"{folder} is an artifact and keeps no val predictions: patchloom evaluate {folder} DATA"
                )
            results[name] = read_segmented(folder)
            continue
        if is_artifact(folder):
            if multi_scale or mode:
                raise UsageError(
                    f"{folder} is an artifact: its windows are fixed; use --multi-scale and --mode with the run"
                )
            segmenter: Segmenter = open_exported_segmenter(folder)
        else:
            segmenter = load_segmenter(folder, device=device, multi_scale=multi_scale)
        if mode is not None:
            segmenter.maps.how = replace(segmenter.maps.how, mode=mode)  # type: ignore[arg-type]
        results[name], more = evaluate_on(segmenter, folder, data, split, reading)
        notes += more
    compared = [
        compare(one, results[one].report, other, results[other].report)
        for one, other in combinations(results, 2)
        if results[one].fingerprint == results[other].fingerprint
        and _comparable(results[one].report, results[other].report)
    ]
    if len(results) > 1 and not compared:
        notes.append("the runs have different images or classes, so they are not compared")
    return _scores({name: result.report for name, result in results.items()}, compared, list(dict.fromkeys(notes)))


def evaluate_on(
    segmenter: Segmenter, folder: Path, data: str, split: str | None = None, reading: Reading = AS_IT_IS
) -> tuple[ValSegmentation, list[str]]:
    """Evaluate a model on a split; the classes of the data are matched with the model's by name."""
    images, notes = open_masks(data, split, None if is_artifact(folder) else folder, reading)
    own, known = images.classes.names, {name: i for i, name in enumerate(segmenter.labels)}
    numbers = np.array([known.get(name, -1) for name in own], np.int64)
    if not (numbers >= 0).any():
        raise DataError(f"{data}: none of its classes is one of the model's: {', '.join(own[:5])}")
    if unknown := [name for name in own if name not in known]:
        first = ", ".join(map(repr, unknown[:5]))
        notes.append(f"{len(unknown)} classes that the model does not know do not count: {first}")
    pixels = PixelSet(images)
    ignored = images.layers["mask"].outside
    with scan_bar(what="evaluating") as progress:
        report = evaluate_pixels(
            segmenter.maps, pixels, segmenter.labels, ignored=ignored, numbers=numbers, progress=progress
        )
    if not len(report.index):
        raise DataError(
            f"{data}: no image with a mask can be read; the first: {next(iter(pixels.broken.values()), '')}"
        )
    if pixels.broken:
        notes.append(
            f"{len(pixels.broken)} images cannot be read and do not count: {next(iter(pixels.broken.values()))}"
        )
    return ValSegmentation(report, fingerprint(images)), notes


def compare(first: str, a: SegmentationReport, second: str, b: SegmentationReport) -> SegmentationComparison:
    """Compare two reports by a bootstrap over their images."""
    differences = a.resampled_miou() - b.resampled_miou()
    share = min(float((differences <= 0).mean()), float((differences >= 0).mean()))
    low, high = np.quantile(differences, [0.025, 0.975])
    of_images = a.image_miou - b.image_miou
    return SegmentationComparison(
        first,
        second,
        a.miou - b.miou,
        (float(low), float(high)),
        min(1.0, 2 * share),
        int((of_images > 0).sum()),
        int((of_images < 0).sum()),
    )


def _comparable(a: SegmentationReport, b: SegmentationReport) -> bool:
    return a.classes == b.classes and np.array_equal(a.index, b.index)


def _scores(
    reports: Mapping[str, SegmentationReport], compared: Sequence[SegmentationComparison], notes: Sequence[str]
) -> Scores:
    columns = ["run", "#mIoU", "95 %", "#pixels right", "#mean class", "#boundary IoU", "#images"]
    rows, values = [], {}
    for name, report in reports.items():
        (low, high), metrics = report.miou_interval(), dict(report)
        border = f"{metrics['boundary_iou']:.2f}" if "boundary_iou" in metrics else "–"
        rows.append(
            (
                name, f"{metrics['miou']:.2f}", f"{low:.1f} … {high:.1f}", f"{metrics['pixel_accuracy']:.2f}",
                f"{metrics['mean_class_accuracy']:.2f}", border, f"{len(report.index):,}",
            )
        )  # fmt: skip
        intervals = report.class_intervals()
        values[name] = {
            **metrics,
            "interval": [low, high],
            "images": len(report.index),
            "classes": {
                each: {"iou": _number(iou), "interval": list(map(_number, interval))}
                for each, iou, interval in zip(report.classes, report.iou, intervals, strict=True)
            },
        }
    lines = [_class_lines(reports)] if len(next(iter(reports.values())).classes) <= 40 else []
    lines += [each.in_words() for each in compared]
    if compared:
        values["comparisons"] = [vars(each) for each in compared]  # type: ignore[assignment]
    return Scores(columns=columns, rows=rows, values=values, notes=notes, lines=lines)


def _class_lines(reports: Mapping[str, SegmentationReport]) -> str:
    """Return the IoU of every class, worst first, one line per run."""
    lines = []
    for name, report in reports.items():
        order = sorted(range(len(report.classes)), key=lambda k: np.nan_to_num(report.iou[k], nan=np.inf))
        texts = (f"{report.classes[k]} {report.iou[k]:.1f}" for k in order if not np.isnan(report.iou[k]))
        lines.append(f"IoU of {name}: {', '.join(texts)}")
    return "\n".join(lines)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
