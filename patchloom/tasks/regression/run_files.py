"""The files of regression runs: `scale.json` and `numbers.safetensors`.

`scale.json` holds mean and standard deviation of each number in the training images, by which the outputs of the
network are converted to numbers. `numbers.safetensors` holds the predictions and targets of the val images, which
compare runs without their data, and a fingerprint of the images, which tells whether two runs were validated on the
same ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.evaluation.regression import RegressionReport
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
from patchloom_runtime.artifacts.regression import SHAPE, NumberScale
from patchloom_runtime.errors import CheckpointError

SCALE, FILE = "scale.json", "numbers.safetensors"
FORMAT = 1
MOST_BYTES = 1 << 32
_ABOUT = {"format": int, "fingerprint": str, "names": list[str]}


ValNumbers = ValReport[RegressionReport]


def write_scale(folder: Path, scale: NumberScale) -> None:
    """Write the scale of the numbers into a run folder."""
    write_checked(folder, {SCALE: json_bytes({"format": FORMAT, **scale.to_dict()})})


def read_scale(folder: Path, names: Sequence[str]) -> NumberScale:
    """Return the scale of a run; `names` are those of its labels.json."""
    path = folder / SCALE
    values = parsed(read_run_file(folder, SCALE), path, {"format": int, **SHAPE})
    refuse_format(values, path)
    try:
        return NumberScale.from_values(tuple(names), values)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def write_val_numbers(folder: Path, val: ValNumbers) -> None:
    """Write the predictions of val into a run folder."""
    report = val.report
    columns = {"index": report.index.astype(np.int64)}
    columns |= {name: np.ascontiguousarray(getattr(report, name)) for name in ("targets", "predictions")}
    about = {"format": FORMAT, "fingerprint": val.fingerprint, "names": list(report.scale.names)}
    write_columns(folder, FILE, columns, about)


def read_val_numbers(folder: Path) -> ValNumbers:
    """Read the val predictions; raise UsageError if there are none, CheckpointError if they are damaged."""
    require_val_file(folder, FILE, "val predictions")

    def make(columns: dict[str, np.ndarray], about: Any) -> ValNumbers:
        scale = read_scale(folder, about["names"])
        index, targets, predictions = (columns[name] for name in ("index", "targets", "predictions"))
        shape = (len(index), len(scale.names))
        if index.dtype != np.int64 or not len(index) or index[0] < 0 or np.any(np.diff(index) <= 0):
            raise ValueError("index has no image, one twice, or is not sorted")
        for name, values in (("targets", targets), ("predictions", predictions)):
            if values.shape != shape or values.dtype != np.float64:
                raise ValueError(f"{name} is {values.shape} {values.dtype}, expected {shape} float64")
        if not np.isfinite(predictions).all() or np.isinf(targets).any():
            raise ValueError("a prediction or a target is not finite")
        return ValNumbers(RegressionReport(scale, index, targets, predictions), about["fingerprint"])

    return read_columns(folder, FILE, _ABOUT, FORMAT, MOST_BYTES, make)
