"""`Regressor`: predicts the numbers of images, with a run or an artifact."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.inference.classifier import Classifier, NamedPixels, Prediction, load
from patchloom.models.network import Network
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import load_network
from patchloom.tasks.classification.exported import ExportedClassifier
from patchloom.tasks.regression.run_files import FILE, SCALE, read_scale, read_val_numbers
from patchloom.tasks.task import ModelLoader
from patchloom_runtime.artifacts import artifact as exported
from patchloom_runtime.artifacts.regression import NumberScale
from patchloom_runtime.errors import not_finite, with_near_options
from patchloom_runtime.images.inputs import ImagesLike, is_single_image
from patchloom_runtime.printable import printable


def number_text(name: str, number: float) -> str:
    """Return a number with its name."""
    return f"{name} {number:.4g}"


@dataclass(frozen=True, repr=False)
class NumberPrediction(Prediction):
    """The predicted numbers of one image file: `answers` holds (name, number) pairs."""

    grade: float | None = None  # the nearest grade of an ordinal label

    def in_words(self) -> str:
        """Return the numbers with their names."""
        numbers = "  ".join(starmap(number_text, self.answers))
        return numbers if self.grade is None else f"{self.answers[0][0]} {self.grade:g}  ({self.answers[0][1]:.2f})"

    def __repr__(self) -> str:
        return f"Prediction({printable(self.path)}: {printable(self.error) if self.error else self.in_words()})"


class Regressor:
    """A network with the scale of its numbers and its preprocessing."""

    def __init__(self, classifier: Classifier, scale: NumberScale) -> None:
        self.classifier, self.scale = classifier, scale
        self.labels, self.model, self.folder = classifier.labels, classifier.model, classifier.folder
        self.name, self.preprocessing = classifier.name, classifier.preprocessing

    def __repr__(self) -> str:
        height, width = self.preprocessing.image_size
        return f"Regressor({self.name}, {height}×{width} pixels: {', '.join(self.labels)})"

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.classifier.device

    @property
    def neutral(self) -> Tensor:
        """Outputs (K,) of an image with the mean numbers of the training images."""
        return torch.zeros(len(self.labels))

    @with_near_options
    def predict(self, images: ImagesLike) -> Any:
        """Return the numbers of images as (name, number) pairs: one list for one image, else one per image."""
        numbers = self.classifier.predict_with(images, self._predict_batch)
        return numbers[0] if is_single_image(images) else numbers

    def predict_files(
        self, paths: Iterable[str | os.PathLike[str]], *, top: int | None = None, every: int | None = None
    ) -> Iterator[Prediction]:
        """Yield one prediction per file, in order; folders are searched, and an unreadable file has an `error`."""
        del top  # every number is predicted
        return self.classifier.predict_files_with(paths, every, self._predict_batch)

    def embed(self, images: ImagesLike) -> Any:
        """Return the vectors that images are compared by, as `Classifier.embed` does."""
        return self.classifier.embed(images)  # type: ignore[arg-type]

    def numbers(self, images: Iterable[Image.Image]) -> np.ndarray:
        """Return the numbers (N, K) of RGB images."""
        transform = self.classifier.transform()
        return self._numbers([transform(image) for image in images])

    def _predict_batch(self, batch: NamedPixels) -> list[Prediction]:
        numbers = self._numbers([pixels for _, pixels in batch])
        predictions: list[Prediction] = []
        for (name, _), row in zip(batch, numbers, strict=True):
            if not np.isfinite(row).all():
                raise not_finite(printable(name))
            grade = float(self.scale.grade_of(row[0])) if self.scale.grades else None
            predictions.append(NumberPrediction(name, list(zip(self.labels, row.tolist(), strict=True)), grade=grade))
        return predictions

    @torch.inference_mode()
    def _numbers(self, pixels: list[np.ndarray]) -> np.ndarray:
        if not pixels:
            return np.empty((0, len(self.labels)))
        images = ImageBatch.of_pixels(pixels).images.to(self.device)
        outputs = self.model(normalize(images, self.preprocessing.mean, self.preprocessing.std))
        return self.scale.numbers(outputs.float().cpu().numpy())


class RegressorLoader(ModelLoader):
    """Models that predict numbers."""

    most_answers = None
    scores_classes = False

    def load_network(self, folder: Path) -> Network:
        return load_network(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> Regressor:
        classifier = load(folder, device=device)
        return Regressor(classifier, read_scale(folder, classifier.labels))

    def open_artifact(self, folder: Path) -> Regressor:
        artifact = exported.load(folder)
        return Regressor(ExportedClassifier(artifact), artifact.scale)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {
            "config.json": lambda: read_run_files(folder),
            SCALE: lambda: read_scale(folder, read_run_files(folder).labels),
            FILE: lambda: read_val_numbers(folder),
        }

    def columns(self, answers: int) -> dict[str, type]:
        del answers
        return {"path": str, "label": str, "number": float, "grade": float, "reason": str, "error": str}

    def rows(self, prediction: Any, answers: int) -> list[dict[str, Any]]:
        """Return one row per number; `label` is its name, `grade` the nearest grade of an ordinal label."""
        del answers
        shared = {"path": prediction.path, "grade": getattr(prediction, "grade", None)}
        rows = [{**shared, "label": name, "number": number} for name, number in prediction.answers]
        return rows or [{"path": prediction.path, "label": None}]
