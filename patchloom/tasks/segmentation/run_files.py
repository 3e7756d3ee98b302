"""The val predictions of a segmentation run: `segmented.safetensors`.

The file holds pixel counts per image and class, which compare runs image by image without their data, and a fingerprint
of the images, which tells whether two runs were evaluated on the same ones.
"""

from pathlib import Path
from typing import Any

import numpy as np

from patchloom.evaluation.segmentation import SegmentationReport
from patchloom.runs.files import read_columns, write_columns
from patchloom.runs.predictions import ValReport, require_val_file

FILE = "segmented.safetensors"
FORMAT = 1
MOST_BYTES = 1 << 31
_ABOUT = {"format": int, "fingerprint": str, "classes": list[str]}


ValSegmentation = ValReport[SegmentationReport]


def write_segmented(folder: Path, val: ValSegmentation) -> None:
    """Write the val predictions into a run folder."""
    report = val.report
    columns = {"index": report.index, "counts": report.counts, "confusion": report.confusion}
    if report.borders is not None:
        columns["borders"] = report.borders
    columns = {name: np.ascontiguousarray(values, np.int64) for name, values in columns.items()}
    about = {"format": FORMAT, "fingerprint": val.fingerprint, "classes": list(report.classes)}
    write_columns(folder, FILE, columns, about)


def read_segmented(folder: Path) -> ValSegmentation:
    """Read the val predictions; raise UsageError if there are none, CheckpointError if they are damaged."""
    require_val_file(folder, FILE, "val predictions")
    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, _from_columns)


def _from_columns(columns: dict[str, np.ndarray], about: Any) -> ValSegmentation:
    _check(columns, len(about["classes"]))
    report = SegmentationReport(
        tuple(about["classes"]), columns["index"], columns["counts"], columns["confusion"], columns.get("borders")
    )
    return ValSegmentation(report, about["fingerprint"])


def _check(columns: dict[str, np.ndarray], classes: int) -> None:
    """Raise ValueError if the columns are not counts of images and classes."""
    images = len(columns["index"])
    shapes = {"index": (images,), "counts": (images, classes, 3), "confusion": (classes, classes)}
    if "borders" in columns:
        shapes["borders"] = (images, classes, 2)
    for name, shape in shapes.items():
        if columns[name].shape != shape or columns[name].dtype != np.int64 or columns[name].min(initial=0) < 0:
            raise ValueError(f"{name} is {columns[name].shape} {columns[name].dtype}, expected {shape} counts")
