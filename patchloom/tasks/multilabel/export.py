"""Export of multi-label runs."""

from pathlib import Path

import numpy as np

from patchloom.data.datasets import ImageSet
from patchloom.evaluation.multilabel import MultilabelReport, Thresholds
from patchloom.exporters.graph import LOGITS
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, spread
from patchloom.tasks.classification.export import ClassifierSubject
from patchloom.tasks.multilabel.evaluation import LABELS
from patchloom.tasks.multilabel.run_files import read_thresholds


class MultilabelSubject(ClassifierSubject):
    """A multi-label classifier, compared by its decisions on all labels."""

    measure = "mAP"
    usage = 'model.predict("photo.jpg")  # labels and scores; also bytes, PIL images, arrays, folders, lists'

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        super().__init__(folder, settings)
        self.task = "multilabel"
        self.thresholds: Thresholds = read_thresholds(folder, self.labels)
        self.metadata = {**self.metadata, "thresholds": self.thresholds.values.tolist()}
        self.summary = f"Any of {self.summary.replace('classes', 'labels', 1)}"

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        """Return the percentage of equal decisions on labels."""
        ours, theirs = (self._scores(each) >= self.thresholds.values for each in (outputs, expected))
        return 100 * float((ours == theirs).mean())

    def quality(self, outputs: Outputs) -> float | None:
        """Return the mean average precision."""
        scores = self._scores(outputs).astype(np.float32)
        report = MultilabelReport(self.labels, np.arange(len(scores)), self._truth, scores, self.thresholds)
        return None if np.isnan(report.mean_ap) else report.mean_ap

    def _open(self, split: str | None) -> tuple[ImageSet, tuple[str, ...]]:
        images = LABELS.open(self._data, self.labels, split=split, folder=self.classifier.folder)
        return images, tuple(images.notes)

    def _pixels(self, images: ImageSet, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels (N, H, W, 3) and targets (N, K)."""
        transform = self.classifier.transform()
        samples = spread(images, most, lambda row: transform(images.read(row)))
        values = images.targets.values if images.targets is not None else np.full((len(images), 0), np.nan, np.float32)
        return np.stack([pixels for _, pixels in samples]), values[[row for row, _ in samples]]

    def _scores(self, outputs: Outputs) -> np.ndarray:
        logits = outputs[LOGITS].astype(np.float64) / self.classifier.calibration.rules.temperature
        return 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
