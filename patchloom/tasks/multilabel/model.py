"""`MultilabelClassifier`: predicts all labels that apply to an image, with a run or an artifact."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.inference.classifier import Classifier, ClassScores, NamedPixels, Prediction, load
from patchloom.models.network import Network
from patchloom.runs.calibration import FILE as CALIBRATION
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import load_network
from patchloom.tasks.classification.exported import ExportedClassifier
from patchloom.tasks.multilabel.run_files import FILE, THRESHOLDS, read_thresholds, read_val_labels
from patchloom.tasks.task import NONE, ModelLoader
from patchloom_runtime.artifacts import artifact as exported
from patchloom_runtime.artifacts.multilabel import labels_above
from patchloom_runtime.errors import at_least, not_finite, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image
from patchloom_runtime.printable import printable


class MultilabelClassifier:
    """A network with its labels, their thresholds and its preprocessing."""

    def __init__(self, classifier: Classifier, thresholds: np.ndarray) -> None:
        self.classifier = classifier
        self.thresholds = thresholds  # (K,): a label is predicted from this score on
        self.labels, self.model, self.folder = classifier.labels, classifier.model, classifier.folder
        self.name, self.preprocessing = classifier.name, classifier.preprocessing

    def __repr__(self) -> str:
        height, width = self.preprocessing.image_size
        return f"MultilabelClassifier({self.name}, {height}×{width} pixels, {len(self.labels)} labels)"

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.classifier.device

    @property
    def neutral(self) -> Tensor:
        """Logits (K,) of an image whose scores are the thresholds."""
        logits = torch.special.logit(torch.as_tensor(self.thresholds, dtype=torch.float32), eps=1e-6)
        return logits * self.classifier.calibration.rules.temperature

    @with_near_options
    def predict(self, images: ImagesLike, *, top: int | None = None, threshold: float | None = None) -> Any:
        """Return the labels that apply with their scores, highest first: one list for one image, else one per image.

        Args:
            images: What `Classifier.predict` takes.
            top: Return at most so many labels per image (default: all).
            threshold: Lowest score of every label (default: the thresholds that were chosen on val).
        """
        scores = self.classifier.predict_with(images, self._batch_predictor(top, threshold))
        return scores[0] if is_single_image(images) else scores

    def predict_files(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        top: int | None = None,
        every: int | None = None,
        threshold: float | None = None,
    ) -> Iterator[Prediction]:
        """Yield one prediction per file, in order; folders are searched, and an unreadable file has an `error`."""
        return self.classifier.predict_files_with(paths, every, self._batch_predictor(top, threshold))

    def embed(self, images: ImagesLike) -> Any:
        """Return the vectors that images are compared by, as `Classifier.embed` does."""
        return self.classifier.embed(images)  # type: ignore[arg-type]

    def scores(self, images: Iterable[Image.Image]) -> np.ndarray:
        """Return the scores (N, K) of all labels for RGB images."""
        transform = self.classifier.transform()
        return self._scores([transform(image) for image in images])

    def answers(self, scores: np.ndarray, top: int | None = None, threshold: float | None = None) -> ClassScores:
        """Return the labels that apply, given the scores (K,) of one image."""
        return labels_above(self.labels, scores, self.thresholds if threshold is None else threshold, top)

    def _batch_predictor(self, top: int | None, threshold: float | None) -> Callable[[NamedPixels], list[Prediction]]:
        if top is not None:
            at_least("top", top, 1)

        def predict_batch(batch: NamedPixels) -> list[Prediction]:
            scores = self._scores([pixels for _, pixels in batch])
            for (name, _), row in zip(batch, scores, strict=True):
                if not np.isfinite(row).all():
                    raise not_finite(printable(name))
            names = (name for name, _ in batch)
            return [
                Prediction(name, self.answers(row, top, threshold)) for name, row in zip(names, scores, strict=True)
            ]

        return predict_batch

    def _scores(self, pixels: list[np.ndarray]) -> np.ndarray:
        if not pixels:
            return np.empty((0, len(self.labels)), np.float32)
        images = ImageBatch.of_pixels(pixels).images.to(self.device)
        return self.scores_of(normalize(images, self.preprocessing.mean, self.preprocessing.std))

    @torch.inference_mode()
    def scores_of(self, images: Tensor) -> np.ndarray:
        """Return the scores (N, K) of all labels for normalized images (N, 3, H, W)."""
        logits: Tensor = self.model(images)
        return (logits.float() / self.classifier.calibration.rules.temperature).sigmoid().cpu().numpy()


SEPARATOR = "|"  # as a labels file may have it


class MultilabelLoader(ModelLoader):
    """Models that give every image any number of labels."""

    threshold_option = "threshold"
    most_answers = None

    def load_network(self, folder: Path) -> Network:
        return load_network(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> MultilabelClassifier:
        classifier = load(folder, device=device)
        return MultilabelClassifier(classifier, read_thresholds(folder, classifier.labels).values)

    def open_artifact(self, folder: Path) -> MultilabelClassifier:
        artifact = exported.load(folder)
        return MultilabelClassifier(ExportedClassifier(artifact), artifact.thresholds)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {
            "config.json": lambda: read_run_files(folder),
            THRESHOLDS: lambda: read_thresholds(folder, read_run_files(folder).labels),
            FILE: lambda: read_val_labels(folder),
            CALIBRATION: lambda: read_calibration(folder),
        }

    def columns(self, answers: int) -> dict[str, type]:
        del answers
        return {"path": str, "label": str, "score": float, "labels": str, "scores": str, "reason": str, "error": str}

    def rows(self, prediction: Any, answers: int) -> list[dict[str, Any]]:
        """Return one row with the first label, and all of them in one cell as a labels file has them."""
        row: dict[str, Any] = {"path": prediction.path, "label": None if prediction.error else NONE}
        chosen = prediction.answers[:answers]
        if chosen:
            row |= {"label": chosen[0][0], "score": chosen[0][1]}
        labels, scores = SEPARATOR.join(name for name, _ in chosen), SEPARATOR.join(f"{s:.4f}" for _, s in chosen)
        return [row | {"labels": labels, "scores": scores}]
