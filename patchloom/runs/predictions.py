"""What a run decided about each image of its val split, kept in its folder: `predictions.safetensors`.

24 bytes per image: place in the set, label, prediction, rank of the label, confidence and loss. With them runs are
compared image by image without their data or a GPU. A fingerprint of the images tells whether two runs saw the same.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.classification import ClassificationReport
from patchloom.runs.image_rows import read_columns, write_columns
from patchloom_runtime.errors import CheckpointError, UsageError

FILE = "predictions.safetensors"
FORMAT = 2  # 1 named the ks of its top-k too
MOST_BYTES = 1 << 31  # 24 an image
_ABOUT = {"format": int, "fingerprint": str, "classes": list[str]}
_WHOLE = ("index", "labels", "predictions", "ranks")
_REAL = ("confidence", "losses")


@dataclass(frozen=True, eq=False)
class Predictions:
    """A report, and which images it is about."""

    report: ClassificationReport
    fingerprint: str


def fingerprint(pictures: ImageSet) -> str:
    """Equal for two sets with the same images, by name, in the same order and with the same labels.

    Names are those within the data set, so a set that moves to another folder stays the same. Pixels are not read.
    """
    digest = hashlib.sha256()
    names = (*pictures.classes.names, "")  # an unlabelled image has number −1
    for i, label in enumerate(pictures.labels.tolist()):
        digest.update(json.dumps([pictures.key(i), names[label]]).encode())
    return digest.hexdigest()


def save_predictions(folder: Path, predictions: Predictions) -> Path:
    """Write the file of a run folder, whole or not at all."""
    report = predictions.report
    columns = {name: getattr(report, name).astype(np.int32) for name in _WHOLE}
    columns |= {name: getattr(report, name).astype(np.float32) for name in _REAL}
    about = {
        "format": FORMAT,
        "fingerprint": predictions.fingerprint,
        "classes": report.classes,
    }
    write_columns(folder, FILE, columns, about)
    return folder / FILE


def load_predictions(folder: Path, classes: int | None = None) -> Predictions:
    """What `save_predictions` wrote, of so many `classes` where these are known; a UsageError where there is none."""
    path = folder / FILE
    if not os.path.lexists(path):
        raise UsageError(
            f"{folder} keeps no decisions ({FILE}): it was not trained to its end by this version. "
            "Give the data too: patchloom evaluate RUN… DATA"
        )

    def made(columns: dict[str, np.ndarray], about: Any) -> Predictions:
        if classes not in (None, len(about["classes"])):
            raise ValueError(f"it is about {len(about['classes']):,} classes, the run tells {classes:,} apart")
        _check_columns(columns, len(about["classes"]))
        whole = [columns[name].astype(np.int64) for name in _WHOLE]
        real = [columns[name] for name in _REAL]
        report = ClassificationReport(tuple(about["classes"]), *whole, *real)
        return Predictions(report, about["fingerprint"])

    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, made)


def _check_columns(columns: Mapping[str, np.ndarray], classes: int) -> None:
    """A ValueError where the columns are not rows about images of so many classes."""
    for name in (*_WHOLE, *_REAL):
        if name not in columns:
            raise ValueError(f"it has no column {name}")
        column, expected = columns[name], np.int32 if name in _WHOLE else np.float32
        if column.dtype != expected or column.shape != columns["index"].shape or column.ndim != 1 or not len(column):
            shape = columns["index"].shape[:1]
            raise ValueError(f"{name} is {column.shape} {column.dtype}, expected {shape} {np.dtype(expected)}")
        # Places rise, since an image counts once; the others are numbers of classes.
        low, high = (0, None) if name == "index" else (0, classes - 1)
        if name in _WHOLE and (column.min() < low or (high is not None and column.max() > high)):
            raise ValueError(f"{name} has {column.min()} to {column.max()}, expected {low} to {high or 'any'}")
    if (np.diff(columns["index"]) <= 0).any():
        raise ValueError("index names an image twice, or not in their order")
    if not ((columns["confidence"] >= 0) & (columns["confidence"] <= 1 + 1e-3)).all():
        raise ValueError("confidence is no probability")


def check_predictions(folder: Path) -> None:
    """A CheckpointError where the numbers that were kept are not what they were, or not finite."""
    report = load_predictions(folder).report
    if not (np.isfinite(report.losses).all() and np.isfinite(report.confidence).all()):
        raise CheckpointError(f"{folder / FILE} holds numbers that are not finite")
