"""The files of multi-label runs: `thresholds.json` and `labeled.safetensors`.

`thresholds.json` holds the lowest score with which each label is predicted, as chosen on val at the end of training.
`labeled.safetensors` holds the scores and labels of the val images, which compare runs without their data, and a
fingerprint of the images, which tells whether two runs were validated on the same ones.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.evaluation.multilabel import MultilabelReport, Thresholds
from patchloom.runs.checksums import write_checked
from patchloom.runs.files import (
    json_bytes,
    parsed,
    read_columns,
    read_run_file,
    refuse_format,
    write_columns,
)
from patchloom.runs.predictions import ValReport, require_val_file
from patchloom_runtime.errors import CheckpointError

THRESHOLDS, FILE = "thresholds.json", "labeled.safetensors"
FORMAT = 1
MOST_BYTES = 1 << 32
_SHAPE = {"format": int, "shared": float, "thresholds": dict[str, float], "own": list[str]}
_ABOUT = {"format": int, "fingerprint": str, "classes": list[str]}


ValLabels = ValReport[MultilabelReport]


def write_val_labels(folder: Path, val: ValLabels) -> None:
    """Write the thresholds and the scores of val into a run folder."""
    report, thresholds = val.report, val.report.thresholds
    named = dict(zip(report.classes, thresholds.values.tolist(), strict=True))
    own = [name for name, is_own in zip(report.classes, thresholds.own, strict=True) if is_own]
    values = {"format": FORMAT, "shared": thresholds.shared, "thresholds": named, "own": own}
    write_checked(folder, {THRESHOLDS: json_bytes(values)})
    columns = {"index": report.index.astype(np.int64)}
    columns |= {name: np.ascontiguousarray(getattr(report, name), np.float32) for name in ("targets", "scores")}
    about = {"format": FORMAT, "fingerprint": val.fingerprint, "classes": list(report.classes)}
    write_columns(folder, FILE, columns, about)


def read_thresholds(folder: Path, labels: Sequence[str]) -> Thresholds:
    """Return the thresholds of a run; 0.5 for every label if its training did not finish."""
    path = folder / THRESHOLDS
    if not os.path.lexists(path):
        return Thresholds.undecided(len(labels))
    values = parsed(read_run_file(folder, THRESHOLDS), path, _SHAPE)
    refuse_format(values, path)
    named = values["thresholds"]
    if set(named) != set(labels) or not all(0 <= value <= 1 for value in (values["shared"], *named.values())):
        raise CheckpointError(f"{path} is damaged: expected a threshold from 0 to 1 for each label of the run.")
    own = np.array([name in values["own"] for name in labels], bool)
    return Thresholds(np.array([named[name] for name in labels], np.float64), own, float(values["shared"]))


def read_val_labels(folder: Path) -> ValLabels:
    """Read the val scores; raise UsageError if there are none, CheckpointError if they are damaged."""
    require_val_file(folder, FILE, "val scores")

    def make(columns: dict[str, np.ndarray], about: Any) -> ValLabels:
        classes = tuple(about["classes"])
        _check(columns, len(classes))
        index, targets, scores = (columns[name] for name in ("index", "targets", "scores"))
        report = MultilabelReport(classes, index, targets, scores, read_thresholds(folder, classes))
        return ValLabels(report, about["fingerprint"])

    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, make)


def _check(columns: dict[str, np.ndarray], classes: int) -> None:
    """Raise ValueError if the columns are not scores and labels of images."""
    images = len(columns["index"])
    shapes = {"index": (images,), "targets": (images, classes), "scores": (images, classes)}
    for name, shape in shapes.items():
        wanted = np.int64 if name == "index" else np.float32
        if columns[name].shape != shape or columns[name].dtype != wanted:
            raise ValueError(f"{name} is {columns[name].shape} {columns[name].dtype}, expected {shape}")
    if not images or np.any(np.diff(columns["index"]) <= 0) or columns["index"][0] < 0:
        raise ValueError("index has no image, one twice, or is not sorted")
    targets, scores = columns["targets"], columns["scores"]
    if not np.all(np.isin(targets, (0, 1)) | np.isnan(targets)) or not np.all((scores >= 0) & (scores <= 1)):
        raise ValueError("labels are not 0, 1 or unknown, or scores are not between 0 and 1")
