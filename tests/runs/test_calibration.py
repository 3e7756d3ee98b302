"""`calibration.json`: read as it was written, refused if damaged, ignored for other weights."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from patchloom.runs.calibration import FEATURES, FILE, RunCalibration, read_calibration, write_calibration
from patchloom.runs.checksums import accept
from patchloom.runs.weights import read_weights, save_weights
from patchloom_runtime.calibration import (
    Calibration,
    DistanceRule,
    Promise,
    Reliability,
    ReliabilityBin,
    TemperatureFit,
)
from patchloom_runtime.errors import CheckpointError

RULES = Calibration(1.5, ("green",), Promise(0.05, 0.9, 0.7, 0.91, 100), DistanceRule(0.3, 2, 0.01, 50, (4, 3)))
MEASURED = Reliability(0.5, (ReliabilityBin(10, 0.25, 0.5), ReliabilityBin(0, 0.0, 0.0)))
FIT = TemperatureFit(1.5, 0.75, 0.5)
FEATURES_OF_RULES = np.eye(4, 3, dtype=np.float16)


@pytest.fixture
def calibrated(run: Callable[[str], Path]) -> Path:
    folder = run("a")
    write_calibration(folder, RunCalibration(RULES, 12, MEASURED, MEASURED, FIT, FEATURES_OF_RULES))
    return folder


def test_reading_returns_what_was_written(calibrated: Path) -> None:
    read = read_calibration(calibrated)
    assert (read.rules, read.images, read.before, read.after, read.fit) == (RULES, 12, MEASURED, MEASURED, FIT)
    np.testing.assert_array_equal(read.features, FEATURES_OF_RULES)


def test_a_calibration_of_other_weights_is_ignored(calibrated: Path) -> None:
    weights = read_weights(calibrated / "weights.safetensors")
    save_weights(calibrated, {name: 2 * value for name, value in weights.items()}, {})
    assert read_calibration(calibrated).rules == Calibration()


def test_a_run_without_one_is_not_calibrated(calibrated: Path) -> None:
    (calibrated / FILE).unlink()
    assert read_calibration(calibrated).rules == Calibration()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", "hot"),
        ("negatives", [1]),
        ("promise", {"max_error": 0.05}),
        ("promise", {"max_error": 5, "confidence": 0.9, "threshold": 0.7, "answers": 0.9, "images": 1}),
        ("distance", {"limit": 0.3, "neighbors": 9, "rejects": 0.01, "images": 5, "stored": [4, 3]}),
        ("distance", {"limit": 0.3, "neighbors": 2, "rejects": 0.01, "images": 5, "stored": [5, 3]}),
        ("distance", {"limit": 0.3, "neighbors": 2, "rejects": 0.01, "images": 5, "stored": [1 << 40, 3]}),
    ],
)
def test_values_out_of_range_are_refused(calibrated: Path, field: str, value: object) -> None:
    values = json.loads((calibrated / FILE).read_text())
    values["rules"][field] = value
    (calibrated / FILE).write_text(json.dumps(values))
    accept(calibrated, [FILE])
    with pytest.raises(CheckpointError) as error:
        read_calibration(calibrated)
    assert str(calibrated) in str(error.value)


@pytest.mark.parametrize("name", [FILE, FEATURES])
def test_a_changed_byte_is_noticed(calibrated: Path, name: str) -> None:
    data = bytearray((calibrated / name).read_bytes())
    data[-3] ^= 1
    (calibrated / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=name):
        read_calibration(calibrated)
