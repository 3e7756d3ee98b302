"""`out_of_fold.safetensors`: the prediction of cross-validation for each image, by the run that did not train on it.

One row per image: its name in the dataset, label, fold, probability of each class before calibration (the temperature
of a run is fitted to the images of its fold), and how far its features are from those of the other images of its fold
(1 is the median).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.runs.files import read_columns, write_columns
from patchloom_runtime.errors import UsageError

FILE = "out_of_fold.safetensors"
FORMAT = 1
MOST_BYTES = 1 << 33  # 4 per image and class
_ABOUT = {"format": int, "classes": list[str], "weights": list[str]}
_TYPES = {"keys": np.uint8, "labels": np.int32, "folds": np.int32, "probabilities": np.float32, "distances": np.float32}


@dataclass(frozen=True, eq=False)
class OutOfFold:
    """Predictions for N images of K classes, each by the run that did not train on it."""

    classes: tuple[str, ...]
    weights: tuple[str, ...]  # digest of the weights of each fold's run
    keys: tuple[str, ...]  # N names of images within the dataset
    labels: np.ndarray  # (N,) int64
    folds: np.ndarray  # (N,) int64, counted from 1
    probabilities: np.ndarray  # (N, K) float32
    distances: np.ndarray  # (N,) float32, to the nearest images of the fold; 1 is the median

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        folds = len(self.weights)
        return f"OutOfFold({len(self):,} images, {len(self.classes)} classes, {folds} folds: top1 {self.top1:.2f} %)"

    @property
    def predictions(self) -> np.ndarray:
        """Predicted class of each image, (N,)."""
        return self.probabilities.argmax(axis=1)

    @property
    def top1(self) -> float:
        """Percentage of images whose label is predicted."""
        return 100 * float(np.mean(self.predictions == self.labels))


def save_out_of_fold(folder: Path, predictions: OutOfFold) -> None:
    """Write `out_of_fold.safetensors` atomically, with its checksum."""
    names = "\0".join(predictions.keys).encode("utf-8", "surrogateescape")
    columns = {"keys": np.frombuffer(names, np.uint8)}
    columns |= {name: getattr(predictions, name).astype(kind) for name, kind in _TYPES.items() if name != "keys"}
    about = {"format": FORMAT, "classes": predictions.classes, "weights": predictions.weights}
    write_columns(folder, FILE, columns, about)


def load_out_of_fold(folder: Path) -> OutOfFold:
    """Return the out-of-fold predictions in a folder. Raise UsageError if there are none."""
    if not os.path.lexists(folder / FILE):
        raise UsageError(
            f"{folder} has no {FILE}: it is not the folder of a finished cross-validation of a classifier "
            "(patchloom train DATA --folds 5)"
        )
    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, _make)


def _make(columns: dict[str, np.ndarray], about: Any) -> OutOfFold:
    for name, kind in _TYPES.items():
        if name not in columns or columns[name].dtype != kind:
            raise ValueError(f"its column {name} is missing or not {np.dtype(kind)}")
    classes, weights = tuple(about["classes"]), tuple(about["weights"])
    keys = tuple(columns["keys"].tobytes().decode("utf-8", "surrogateescape").split("\0"))
    shapes = {"keys": columns["keys"].shape[:1], "probabilities": (len(keys), len(classes))}
    for name in _TYPES:
        if columns[name].shape != shapes.get(name, (len(keys),)):
            raise ValueError(f"{name} has the shape {columns[name].shape}, expected {shapes.get(name, (len(keys),))}")
    if len(set(keys)) < len(keys):
        raise ValueError("it names an image twice")
    for name, low, high in (("labels", 0, len(classes) - 1), ("folds", 1, len(weights))):
        if columns[name].min() < low or columns[name].max() > high:
            raise ValueError(f"{name} are {columns[name].min()} to {columns[name].max()}, expected {low} to {high}")
    probabilities, distances = columns["probabilities"], columns["distances"]
    sums_to_one = np.abs(probabilities.sum(axis=1, dtype=np.float64) - 1) < 1e-3  # False for NaN
    if not (sums_to_one.all() and (probabilities >= 0).all() and np.isfinite(distances).all()):
        raise ValueError("its probabilities are negative or do not sum to 1, or its distances are not finite")
    labels, folds = (columns[name].astype(np.int64) for name in ("labels", "folds"))
    return OutOfFold(classes, weights, keys, labels, folds, probabilities, distances)
