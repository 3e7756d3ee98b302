"""`calibration.json`: the temperature of a run and the rules by which it abstains, with the vectors of one of them.

Training fits the temperature on val, and `patchloom calibrate` fits the rest. The file names the weights it was fitted
to: after further training, a calibration of earlier weights is ignored. Runs of earlier versions have none.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.files import json_bytes, parsed, read_run_file, refuse_format, refuse_shape
from patchloom_runtime.calibration import UNCALIBRATED, Calibration, Reliability, TemperatureFit
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import open_plain, parse_json

FILE, FEATURES = "calibration.json", "training_features.safetensors"
FORMAT = 1
_MOST_HEADER = 100 << 20  # bytes, the limit of safetensors
_MOST_FEATURES = 1 << 30  # bytes
_FIT = {"fitted": float, "loss_without": float, "loss_with": float}
_SHAPE = {"format": int, "weights": str, "images": int, "before?": dict, "after?": dict, "fit?": _FIT, "rules": dict}


@dataclass(frozen=True, eq=False)
class RunCalibration:
    """The calibration of a run, and how reliable its predictions for val are without and with the temperature."""

    rules: Calibration = UNCALIBRATED
    images: int = 0  # of val that it was fitted on; 0 for a run without a calibration
    before: Reliability | None = None
    after: Reliability | None = None
    fit: TemperatureFit | None = None  # None in runs of earlier versions
    features: np.ndarray | None = field(default=None, repr=False)  # (M, C) float16 unit vectors of the distance rule

    @property
    def temperature_in_words(self) -> str:
        """How the logits become probabilities, as a sentence."""
        if self.fit is None or self.fit.helps:
            return f"Logits are divided by {self.rules.temperature:.3g}, fitted on val."
        return (
            f"Logits are used as they are: a temperature of {self.fit.fitted:.3g} does not lower the loss of images "
            f"it was not fitted to ({self.fit.loss_without:.4g} → {self.fit.loss_with:.4g})."
        )


def write_calibration(folder: Path, calibration: RunCalibration) -> None:
    """Write `calibration.json` and the stored vectors for the weights that are in the folder."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "weights": stored_digest(folder),
        "images": calibration.images,
        "rules": calibration.rules.to_dict(),
    }
    for name in ("before", "after"):
        if (measured := getattr(calibration, name)) is not None:
            values[name] = measured.to_dict()
    if calibration.fit is not None:
        values["fit"] = asdict(calibration.fit)
    files = {} if calibration.features is None else {FEATURES: save({"vectors": calibration.features})}
    write_checked(folder, files | {FILE: json_bytes(values)})


def read_calibration(folder: Path) -> RunCalibration:
    """Return the calibration of a run; an empty one if it has none, or one of other weights."""
    path = folder / FILE
    if not os.path.lexists(path):
        return RunCalibration()
    values = parsed(read_run_file(folder, FILE), path, {"format": int})
    refuse_format(values, path)
    refuse_shape(values, _SHAPE, path)
    try:
        rules = Calibration.from_dict(values["rules"])
        measured = {name: Reliability.from_dict(values[name]) for name in ("before", "after") if name in values}
        fit = TemperatureFit(**{name: values["fit"][name] for name in _FIT}) if "fit" in values else None
        if values["images"] < 0:
            raise ValueError("it counts images below 0")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Fit it again: patchloom calibrate {folder}") from error
    digest = stored_digest(folder)
    if values["weights"] and not digest:
        raise CheckpointError(
            f"{path} names the weights it was fitted to, and weights.safetensors has no checksum to compare. Fit it "
            f"again: patchloom calibrate {folder}"
        )
    if values["weights"] != digest:
        return RunCalibration()
    features = _read_features(folder, rules.distance.stored) if rules.distance else None
    return RunCalibration(rules, values["images"], fit=fit, features=features, **measured)


def _read_features(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    path = folder / FEATURES
    try:
        vectors: np.ndarray = load(read_checked(folder, FEATURES, _MOST_FEATURES))["vectors"]
        if vectors.shape != shape or vectors.dtype != np.float16 or not np.isfinite(vectors).all():
            raise ValueError(f"it has vectors {vectors.shape} {vectors.dtype}, expected finite float16 {shape}")
        return vectors
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Fit it again: patchloom calibrate {folder}") from error


def stored_digest(folder: Path) -> str:
    """Return the checksum in the header of `weights.safetensors`, or "" if there is none."""
    try:
        with open_plain(folder / "weights.safetensors") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(size)) if size <= _MOST_HEADER else {}
        digest = parse_json(header["__metadata__"]["patchloom"])["sha256"]
        return digest if isinstance(digest, str) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
