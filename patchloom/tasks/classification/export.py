"""Runs that name classes, or give vectors that images are compared by."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from patchloom.data.datasets import ImageSet
from patchloom.data.images.image_batch import normalize
from patchloom.data.sources.source import open_data
from patchloom.exporters.graph import EMBEDDING, LOGITS, ClassifierGraph, EmbeddingGraph, FromPixels
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, data_of, spread
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.evaluations import EvaluationSettings
from patchloom_runtime.errors import DataError, UsageError


class ClassifierSubject(ExportSubject):
    """An answer is the likeliest class; where there is no classifier, the nearest other image by cosine."""

    measure = "accuracy"
    use = 'model.predict("photo.jpg")  # names and probabilities; also bytes, PIL images, arrays, folders, lists'

    def __init__(self, folder: Path, asked: ExportSettings) -> None:
        self.classifier = _at_size(load(folder, device="cpu"), asked.size)
        files = self.classifier._files
        self.decides, self.network, self.shown, self.told = files.decides, files.model, files.preprocessing, {}
        self.labels = files.labels if self.decides else ()
        self.task = "classification" if self.decides else "embedding"
        self.weights = sum(v.numel() * v.element_size() for v in self.classifier.model.state_dict().values())
        self._place = asked.data or data_of(self.classifier.folder)
        self._pictures, self.notes = self._open(asked.split)
        self.rows, self._truth = self._pixels(self._pictures, asked.images or self.most)
        names = ", ".join(self.labels[:20]) + (" …" if len(self.labels) > 20 else "")
        self.answers = f"{len(self.labels)} classes: {names}" if self.decides else "One vector per image."
        if not self.decides:
            self.use = 'model.embed("photo.jpg")  # a vector; also bytes, PIL images, arrays, folders, lists'

    def module(self, *, half: bool) -> FromPixels:
        """Logits and vectors, or vectors alone."""
        made = ClassifierGraph if self.decides else EmbeddingGraph
        return made(self.classifier.model, self.shown.mean, self.shown.std, half=half)

    @torch.inference_mode()
    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """As it answers `patchloom predict` and `index`."""
        images = normalize(torch.from_numpy(pixels).permute(0, 3, 1, 2), self.shown.mean, self.shown.std)
        network = self.classifier.model
        features = network.features(images)
        found = {LOGITS: network.head(features).numpy()} if self.decides else {}
        return found | {EMBEDDING: network.projector(network.vectors(features)).numpy()}

    def calibration(self, count: int) -> np.ndarray:
        """Of train, which nothing is measured on."""
        try:
            pictures = open_data(self._place, reading=self.classifier.reading_of(self._place), labeled=False).train
        except (DataError, UsageError):
            pictures = self._pictures
        return self._pixels(pictures, count)[0]

    def same(self, found: Outputs, expected: Outputs) -> float:
        """Of images."""
        return 100 * float((decisions(found) == decisions(expected)).mean())

    def right(self, found: Outputs) -> float | None:
        """Top-1, or how often the nearest other image has the same class."""
        known = self._truth >= 0
        if not known.any() or len(self._truth) < 2:
            return None
        decided = decisions(found)
        chosen = decided if LOGITS in found else self._truth[decided]
        return 100 * float((chosen == self._truth)[known].mean())

    def _open(self, split: str | None) -> tuple[ImageSet, tuple[str, ...]]:
        """The images both are shown, and what is to be said of them."""
        if self.decides:
            found = EvaluationSettings(split=split).open(self._place, self.classifier)
            return found, tuple(found.notes)
        splits = open_data(self._place, reading=self.classifier.reading_of(self._place), labeled=False)
        named = {"train": splits.train, "val": splits.val, None: splits.val}
        if split not in named:
            raise UsageError(f"--split is {split!r}, expected train or val for a run that names no classes")
        return named[split], tuple(splits.notes)

    def _pixels(self, pictures: ImageSet, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels (N, H, W, 3) and labels."""
        transform = self.classifier.transform()
        found = spread(pictures, most, lambda row: transform(pictures.read(row)))
        return np.stack([pixels for _, pixels in found]), np.array([int(pictures.labels[row]) for row, _ in found])


def decisions(found: Outputs) -> np.ndarray:
    """Per image the likeliest class, or the nearest other image by cosine where there is no classifier."""
    if LOGITS in found:
        return found[LOGITS].argmax(1)
    vectors = found[EMBEDDING].astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    alike = vectors @ vectors.T
    np.fill_diagonal(alike, -np.inf)
    return alike.argmax(1)


def _at_size(classifier: Classifier, size: int | None) -> Classifier:
    if size is None:
        return classifier
    shown = replace(classifier.preprocessing, image_size=(size, size))
    files = replace(classifier._files, preprocessing=shown)
    return Classifier(classifier.model.for_images_of(size), files, classifier.folder)
