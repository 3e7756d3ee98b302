"""Multi-label classification with an artifact: all labels whose score reaches their threshold."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from patchloom_runtime.artifacts.artifact import ArtifactClassifier
from patchloom_runtime.artifacts.metadata import FILE, LABELS
from patchloom_runtime.calibration import Calibration, ClassScores
from patchloom_runtime.errors import CheckpointError, at_least, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image


class ArtifactMultilabel(ArtifactClassifier):
    """An exported multi-label classifier."""

    settings_shape: ClassVar[Mapping[str, Any]] = {"thresholds": list[float], **ArtifactClassifier.settings_shape}

    @classmethod
    def read_settings(cls, values: Mapping[str, Any]) -> Any:
        """Return the thresholds and the calibration."""
        thresholds = np.array(values["thresholds"], np.float64)
        if not len(thresholds) or not np.all((thresholds >= 0) & (thresholds <= 1)):
            raise ValueError("thresholds are not between 0 and 1")
        return thresholds, super().read_settings(values)

    @property
    def calibration(self) -> Calibration:
        """The temperature; labels have thresholds instead of rules."""
        calibration: Calibration = self.about.settings[1]
        return calibration

    @property
    def thresholds(self) -> np.ndarray:
        """The lowest score with which each label is predicted, (K,)."""
        thresholds: np.ndarray = self.about.settings[0]
        if len(thresholds) != len(self.labels):
            raise CheckpointError(
                f"{self.folder} is damaged: {FILE} has {len(thresholds)} thresholds, {LABELS} {len(self.labels)} "
                "labels. Export it again."
            )
        return thresholds

    @with_near_options
    def predict(self, images: ImagesLike, *, top: int | None = None, threshold: float | None = None) -> Any:
        """Return the labels that apply with their scores, highest first; for several images, one list per image.

        `top` limits the labels per image, and `threshold` replaces the thresholds of all labels.
        """
        if top is not None:
            at_least("top", top, 1)
        limits = self.thresholds if threshold is None else threshold
        batches = [outputs["logits"] for outputs in self._outputs(images)]
        rows = np.concatenate(batches or [np.empty((0, len(self.labels)), np.float32)])
        predictions = [
            labels_above(self.labels, _sigmoid(row / self.calibration.temperature), limits, top) for row in rows
        ]
        return predictions[0] if is_single_image(images) else predictions


def labels_above(
    labels: Sequence[str], scores: np.ndarray, thresholds: np.ndarray | float, top: int | None = None
) -> ClassScores:
    """Return the labels whose score (K,) reaches the threshold, highest first, at most `top`."""
    order = np.argsort(-scores, kind="stable")
    chosen = order[(scores >= thresholds)[order]][:top]
    return ClassScores((labels[number], float(scores[number])) for number in chosen)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
