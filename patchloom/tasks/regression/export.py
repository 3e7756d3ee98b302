"""Export of regression runs."""

from pathlib import Path

import numpy as np

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.regression import RegressionReport, explained
from patchloom.exporters.graph import LOGITS
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, spread
from patchloom.tasks.classification.export import ClassifierSubject
from patchloom.tasks.regression.evaluation import NUMBERS
from patchloom.tasks.regression.run_files import read_scale

SAME = 0.05  # standard deviations of the training data up to which two predictions agree


class RegressorSubject(ClassifierSubject):
    """A regression model, compared by its numbers."""

    measure = "R²"
    usage = 'model.predict("photo.jpg")  # names and numbers; also bytes, PIL images, arrays, folders, lists'

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        super().__init__(folder, settings)
        self.task = "regression"
        self.scale = read_scale(folder, self.labels)
        self.metadata = self.scale.to_dict()
        self.summary = f"{len(self.labels)} numbers: {', '.join(self.labels)}"

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        """Return the percentage of numbers that differ by at most 0.05 standard deviations."""
        return 100 * float((np.abs(outputs[LOGITS] - expected[LOGITS]) <= SAME).mean())

    def quality(self, outputs: Outputs) -> float | None:
        """Return R² in percent, mean over the numbers."""
        numbers = self.scale.numbers(outputs[LOGITS])
        report = RegressionReport(self.scale, np.arange(len(numbers)), self._truth, numbers)
        value = float(np.mean(report.of_each(explained)))
        return None if np.isnan(value) else 100 * value

    def _open(self, split: str | None) -> tuple[ImageSet, tuple[str, ...]]:
        images = NUMBERS.open(self._data, self.labels, split=split, folder=self.classifier.folder)
        return images, tuple(images.notes)

    def _pixels(self, images: ImageSet, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels (N, H, W, 3) and targets (N, K)."""
        transform = self.classifier.transform()
        samples = spread(images, most, lambda row: transform(images.read(row)))
        values = images.targets.values if images.targets is not None else np.full((len(images), 0), np.nan)
        return np.stack([pixels for _, pixels in samples]), values[[row for row, _ in samples]].astype(np.float64)
