"""What a segmentation run answered about each image of its val split: `segmented.safetensors`.

Counts of each image and class, with which runs are compared image by image without their data; and a fingerprint of the
images, which tells whether two runs saw the same.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.evaluation.segmentation import SegmentationReport
from patchloom.runs.files import read_columns, write_columns
from patchloom_runtime.errors import UsageError

FILE = "segmented.safetensors"
FORMAT = 1
MOST_BYTES = 1 << 31
_ABOUT = {"format": int, "fingerprint": str, "classes": list[str]}


@dataclass(frozen=True, eq=False)
class ValSegmentation:
    """A report, and which images it is about."""

    report: SegmentationReport
    fingerprint: str


def keep_segmented(folder: Path, kept: ValSegmentation) -> None:
    """Write the file of a run folder, whole or not at all."""
    report = kept.report
    columns = {"index": report.index, "counts": report.counts, "confusion": report.confusion}
    if report.borders is not None:
        columns["borders"] = report.borders
    columns = {name: np.ascontiguousarray(values, np.int64) for name, values in columns.items()}
    about = {"format": FORMAT, "fingerprint": kept.fingerprint, "classes": list(report.classes)}
    write_columns(folder, FILE, columns, about)


def read_segmented(folder: Path) -> ValSegmentation:
    """What `keep_segmented` wrote; a UsageError where there is none, a CheckpointError where it is damaged."""
    path = folder / FILE
    if not os.path.lexists(path):
        raise UsageError(
            f"{folder} keeps no answers about its val images ({FILE}): it was not trained to its end. "
            "Give the data too: patchloom evaluate RUN… DATA"
        )
    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, _kept)


def _kept(columns: dict[str, np.ndarray], about: Any) -> ValSegmentation:
    _check(columns, len(about["classes"]))
    report = SegmentationReport(
        tuple(about["classes"]), columns["index"], columns["counts"], columns["confusion"], columns.get("borders")
    )
    return ValSegmentation(report, about["fingerprint"])


def _check(columns: dict[str, np.ndarray], classes: int) -> None:
    """A ValueError where the columns are not counts of images and so many classes."""
    images = len(columns["index"])
    shapes = {"index": (images,), "counts": (images, classes, 3), "confusion": (classes, classes)}
    if "borders" in columns:
        shapes["borders"] = (images, classes, 2)
    for name, shape in shapes.items():
        if columns[name].shape != shape or columns[name].dtype != np.int64 or columns[name].min(initial=0) < 0:
            raise ValueError(f"{name} is {columns[name].shape} {columns[name].dtype}, expected {shape} counts")
