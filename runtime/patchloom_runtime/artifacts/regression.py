"""Regression with an artifact: one or several numbers per image."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from patchloom_runtime.artifacts.artifact import ArtifactClassifier
from patchloom_runtime.artifacts.metadata import FILE, LABELS
from patchloom_runtime.calibration import UNCALIBRATED, Calibration
from patchloom_runtime.errors import CheckpointError, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image


@dataclass(frozen=True, eq=False)
class NumberScale:
    """The scale of the numbers that a network predicts: its outputs are in standard deviations from the mean."""

    names: tuple[str, ...]
    mean: np.ndarray  # (K,) float64, of the training images
    std: np.ndarray  # (K,)
    grades: tuple[float, ...] = ()  # of an ordinal label, increasing; empty for other numbers

    def numbers(self, outputs: np.ndarray) -> np.ndarray:
        """Return the numbers (N, K) of network outputs (N, K)."""
        return np.asarray(outputs, np.float64) * self.std + self.mean

    def grade_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the nearest grade of each number; the lower of two."""
        grades = np.array(self.grades)
        return grades[np.abs(np.asarray(numbers)[..., None] - grades).argmin(axis=-1)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "grades": list(self.grades)}

    @classmethod
    def from_values(cls, names: tuple[str, ...], values: Mapping[str, Any]) -> "NumberScale":
        """Return the scale that `to_dict` described. Raises ValueError if it is not one of these numbers."""
        mean, std = (np.array(values[key], np.float64) for key in ("mean", "std"))
        grades = tuple(map(float, values["grades"]))
        finite = all(np.isfinite(each).all() for each in (mean, std, np.array(grades)))
        if not finite or mean.shape != (len(names),) or std.shape != (len(names),) or np.any(std <= 0):
            raise ValueError(f"expected mean and std of {len(names)} numbers, std above 0")
        if grades != tuple(sorted(set(grades))):
            raise ValueError("grades are not increasing")
        return cls(names, mean, std, grades)


SHAPE: Mapping[str, Any] = {"mean": list[float], "std": list[float], "grades": list[float]}


class ArtifactRegressor(ArtifactClassifier):
    """An exported regression model."""

    settings_shape: ClassVar[Mapping[str, Any]] = SHAPE

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> Any:
        return NumberScale.from_values(tuple(map(str, range(len(values["mean"])))), values)

    @property
    def calibration(self) -> Calibration:
        """No temperature and no rules: numbers have no probabilities."""
        return UNCALIBRATED

    @property
    def scale(self) -> NumberScale:
        """The scale of the numbers."""
        scale: NumberScale = self.about.settings
        if len(scale.names) != len(self.labels):
            raise CheckpointError(
                f"{self.folder} is damaged: {FILE} has {len(scale.names)} numbers, {LABELS} {len(self.labels)} names. "
                "Export it again."
            )
        return NumberScale(self.labels, scale.mean, scale.std, scale.grades)

    @with_near_options
    def predict(self, images: ImagesLike) -> Any:  # type: ignore[override]
        """Return the numbers with their names; for several images, one list per image."""
        batches = [outputs["logits"] for outputs in self._outputs(images)]
        rows = self.scale.numbers(np.concatenate(batches or [np.empty((0, len(self.labels)), np.float32)]))
        predictions = [list(zip(self.labels, row.tolist(), strict=True)) for row in rows]
        return predictions[0] if is_single_image(images) else predictions
