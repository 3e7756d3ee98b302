"""Export of classification and embedding runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from patchloom.data.datasets import ImageSet
from patchloom.data.images.image_batch import normalize
from patchloom.data.sources.source import open_data
from patchloom.exporters.graph import EMBEDDING, LOGITS, ClassifierGraph, EmbeddingGraph, FromPixels, state_bytes
from patchloom.exporters.parity import Outputs
from patchloom.exporters.subject import ExportSettings, ExportSubject, class_summary, data_of, spread
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import EvaluationData
from patchloom_runtime.artifacts.metadata import FEATURES
from patchloom_runtime.calibration import UNCALIBRATED
from patchloom_runtime.errors import DataError, UsageError


class ClassifierSubject(ExportSubject):
    """A classifier, compared by its most likely class; or an embedding, compared by the nearest other image."""

    measure = "accuracy"
    usage = 'model.predict("photo.jpg")  # names and probabilities; also bytes, PIL images, arrays, folders, lists'

    def __init__(self, folder: Path, settings: ExportSettings) -> None:
        self.classifier = _at_size(load(folder, device="cpu"), settings.size)
        files = self.classifier._files
        self.decides, self.network, self.preprocessing = files.decides, files.model, files.preprocessing
        rules = self.classifier.calibration.rules
        self.metadata = {} if rules == UNCALIBRATED else {"calibration": rules.to_dict()}
        self.labels = files.labels if self.decides else ()
        self.task = "classification" if self.decides else "embedding"
        self.weights = state_bytes(self.classifier.model)
        self._data = settings.data or data_of(self.classifier.folder)
        self._images, self.notes = self._open(settings.split)
        self.rows, self._truth = self._pixels(self._images, settings.images or self.most)
        if self.decides:
            self.summary = f"{len(self.labels)} classes: {class_summary(self.labels)}"
        else:
            self.summary = "One vector per image."
            self.usage = 'model.embed("photo.jpg")  # a vector; also bytes, PIL images, arrays, folders, lists'

    def files(self) -> Mapping[str, bytes]:
        """Return the stored vectors of the distance rule, if there is one."""
        features = self.classifier.calibration.features
        return {} if features is None else {FEATURES: features.astype("<f2").tobytes()}

    def module(self, *, half: bool) -> FromPixels:
        graph = ClassifierGraph if self.decides else EmbeddingGraph
        return graph(self.classifier.model, self.preprocessing.mean, self.preprocessing.std, half=half)

    @torch.inference_mode()
    def run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Return logits and embeddings, computed as `patchloom predict` and `index` do."""
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        network = self.classifier.model
        features = network.features(normalize(images, self.preprocessing.mean, self.preprocessing.std))
        logits = {LOGITS: network.head(features).numpy()} if self.decides else {}
        return logits | {EMBEDDING: network.projector(network.vectors(features)).numpy()}

    def calibration(self, count: int) -> np.ndarray:
        try:
            images = open_data(self._data, reading=self.classifier.reading_of(self._data), labeled=False).train
        except (DataError, UsageError):
            images = self._images
        return self._pixels(images, count)[0]

    def agreement(self, outputs: Outputs, expected: Outputs) -> float:
        return 100 * float((decisions(outputs) == decisions(expected)).mean())

    def quality(self, outputs: Outputs) -> float | None:
        """Return top-1 accuracy, or how often the nearest other image has the same class."""
        known = self._truth >= 0
        if not known.any() or len(self._truth) < 2:
            return None
        decided = decisions(outputs)
        chosen = decided if LOGITS in outputs else self._truth[decided]
        return 100 * float((chosen == self._truth)[known].mean())

    def _open(self, split: str | None) -> tuple[ImageSet, tuple[str, ...]]:
        if self.decides:
            own = EvaluationSettings(split=split)
            images = EvaluationData(self._data, own, [self.classifier.folder]).open(self.classifier)
            return images, tuple(images.notes)
        splits = open_data(self._data, reading=self.classifier.reading_of(self._data), labeled=False)
        named = {"train": splits.train, "val": splits.val, None: splits.val}
        if split not in named:
            raise UsageError(f"--split is {split!r}, expected train or val for a run without classes")
        return named[split], tuple(splits.notes)

    def _pixels(self, images: ImageSet, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels (N, H, W, 3) and labels."""
        transform = self.classifier.transform()
        samples = spread(images, most, lambda row: transform(images.read(row)))
        return np.stack([pixels for _, pixels in samples]), np.array([int(images.labels[row]) for row, _ in samples])


def decisions(outputs: Outputs) -> np.ndarray:
    """Return the most likely class per image, or without a classifier the nearest other image by cosine."""
    if LOGITS in outputs:
        return outputs[LOGITS].argmax(1)
    vectors = outputs[EMBEDDING].astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    return similarity.argmax(1)


def _at_size(classifier: Classifier, size: int | None) -> Classifier:
    if size is None:
        return classifier
    preprocessing = replace(classifier.preprocessing, image_size=(size, size))
    files = replace(classifier._files, preprocessing=preprocessing)
    # What was promised for the images of one size was not tested at another.
    rules = replace(classifier.calibration.rules, promise=None, distance=None)
    calibration = replace(classifier.calibration, rules=rules, features=None)
    return Classifier(classifier.model.for_images_of(size), files, classifier.folder, calibration)
