"""`predictions.safetensors`: the prediction of a classifier for each validation image.

24 bytes per image: index, label, prediction, rank of the label, confidence and loss. They allow comparing runs image by
image without the data or a GPU. Confidence and loss are those at the temperature of the run. A fingerprint of the
images tells whether two runs were validated on the same ones.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.classification import ClassificationReport
from patchloom.runs.files import read_columns, write_columns
from patchloom_runtime.errors import CheckpointError, UsageError

R = TypeVar("R")

FILE = "predictions.safetensors"
FORMAT = 2  # format 1 also had the values of k for top-k
MOST_BYTES = 1 << 31  # 24 per image
_ABOUT = {"format": int, "fingerprint": str, "classes": list[str], "temperature?": float}
_INTEGERS = ("index", "labels", "predictions", "ranks")
_FLOATS = ("confidence", "losses")


@dataclass(frozen=True, eq=False)
class ValReport(Generic[R]):
    """A report and the fingerprint of its images."""

    report: R
    fingerprint: str


Predictions = ValReport[ClassificationReport]


def require_val_file(folder: Path, file: str, content: str) -> None:
    """Raise UsageError if a run has no such file with its val predictions."""
    if not os.path.lexists(folder / file):
        raise UsageError(
            f"{folder} has no {content} ({file}): its training did not finish, or an earlier version trained it. "
            "Pass the data as well: patchloom evaluate RUN… DATA"
        )


def fingerprint(images: ImageSet) -> str:
    """Return a digest of image names and labels, in order.

    Names are relative to the dataset, so moving it does not change the fingerprint. Pixels are not read.
    """
    digest = hashlib.sha256()
    names = (*images.classes.names, "")  # an unlabeled image has label −1
    for i, label in enumerate(images.labels.tolist()):
        digest.update(json.dumps([images.key(i), names[label]]).encode())
        if images.targets is not None:
            digest.update(images.targets.values[i].tobytes())
    return digest.hexdigest()


def save_predictions(folder: Path, predictions: Predictions) -> Path:
    """Write `predictions.safetensors` atomically and return its path."""
    report = predictions.report
    columns = {name: getattr(report, name).astype(np.int32) for name in _INTEGERS}
    columns |= {name: getattr(report, name).astype(np.float32) for name in _FLOATS}
    about = {
        "format": FORMAT,
        "fingerprint": predictions.fingerprint,
        "classes": report.classes,
        **({} if report.temperature == 1 else {"temperature": report.temperature}),
    }
    write_columns(folder, FILE, columns, about)
    return folder / FILE


def load_predictions(folder: Path, classes: int | None = None) -> Predictions:
    """Return the predictions of a run. Raise UsageError if there are none.

    If `classes`, the number of classes of the run, is given, the file must have as many.
    """
    require_val_file(folder, FILE, "val predictions")

    def make(columns: dict[str, np.ndarray], about: Any) -> Predictions:
        if classes not in (None, len(about["classes"])):
            raise ValueError(f"it has {len(about['classes']):,} classes, the run has {classes:,}")
        _check_columns(columns, len(about["classes"]))
        index, labels, predictions, ranks = (columns[name].astype(np.int64) for name in _INTEGERS)
        confidence, losses = (columns[name] for name in _FLOATS)
        report = ClassificationReport(
            tuple(about["classes"]), index, labels, predictions, ranks, confidence, losses,
            temperature=float(about.get("temperature", 1.0)),
        )  # fmt: skip
        return Predictions(report, about["fingerprint"])

    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, make)


def _check_columns(columns: Mapping[str, np.ndarray], classes: int) -> None:
    """Raise ValueError if a column has the wrong type, length or values for this number of classes."""
    for name in (*_INTEGERS, *_FLOATS):
        if name not in columns:
            raise ValueError(f"it has no column {name}")
        column, expected = columns[name], np.int32 if name in _INTEGERS else np.float32
        if column.dtype != expected or column.shape != columns["index"].shape or column.ndim != 1 or not len(column):
            shape = columns["index"].shape[:1]
            raise ValueError(f"{name} is {column.shape} {column.dtype}, expected {shape} {np.dtype(expected)}")
        # The index rises, since each image occurs once; the other integers are class indices.
        low, high = (0, None) if name == "index" else (0, classes - 1)
        if name in _INTEGERS and (column.min() < low or (high is not None and column.max() > high)):
            raise ValueError(f"{name} has {column.min()} to {column.max()}, expected {low} to {high or 'any'}")
    if (np.diff(columns["index"]) <= 0).any():
        raise ValueError("index has an image twice, or is not sorted")
    if not ((columns["confidence"] >= 0) & (columns["confidence"] <= 1 + 1e-3)).all():
        raise ValueError("confidence is not between 0 and 1")


def check_predictions(folder: Path) -> None:
    """Raise CheckpointError if the predictions are damaged or not finite."""
    report = load_predictions(folder).report
    if not (np.isfinite(report.losses).all() and np.isfinite(report.confidence).all()):
        raise CheckpointError(f"{folder / FILE} holds numbers that are not finite")
