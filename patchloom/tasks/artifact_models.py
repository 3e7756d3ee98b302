"""An artifact wherever the model of a run is taken: the same classes, which ask its graph instead of a network."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from patchloom.inference.classifier import Classifier
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom.tasks.detection.detector import AT_ONCE, ImageDetections, ObjectDetector
from patchloom.tasks.segmentation.segmenter import Segmenter
from patchloom_runtime.artifacts.artifact import ArtifactClassifier, load
from patchloom_runtime.artifacts.detector import ArtifactDetector
from patchloom_runtime.artifacts.segmenter import ArtifactSegmenter
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.evaluation_transform import as_size


class GraphNetwork(nn.Module):
    """The graph of an artifact as a module: images of 0…1 in, logits out."""

    has_distillation_token = False

    def __init__(self, artifact: ArtifactClassifier) -> None:
        super().__init__()
        self.artifact = artifact
        self.config = SimpleNamespace(name=artifact.about.network, num_classes=len(artifact.labels))
        self.no_weights = nn.Parameter(torch.empty(0), requires_grad=False)  # tells where it is: on the CPU

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → logits (B, K)."""
        pixels = (images * 255).round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        return torch.from_numpy(self.artifact.outputs(np.ascontiguousarray(pixels.numpy()))["logits"])

    def for_images_of(self, size: int | tuple[int, int]) -> "GraphNetwork":
        """Itself: a graph has one size."""
        own = self.artifact.about.transform.image_size
        if as_size(size) != own:
            raise UsageError(
                f"{self.artifact.folder} is an artifact for images of {own[0]}×{own[1]} pixels; "
                "leave --size out, or use the run that it was exported from"
            )
        return self


class ExportedClassifier(Classifier):
    """An exported classifier."""

    def __init__(self, artifact: ArtifactClassifier) -> None:
        seen = artifact.about.transform
        preprocessing = Preprocessing(
            (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), seen.image_size, seen.crop_ratio, seen.interpolation, seen.resize
        )
        options = {"num_classes": len(artifact.labels) if "logits" in artifact.about.outputs else 0}
        files = RunFiles(artifact.about.network, options, preprocessing, None, artifact.labels)
        super().__init__(GraphNetwork(artifact), files)  # type: ignore[arg-type]


class ExportedSegmenter(Segmenter):
    """An exported segmentation model."""

    def __init__(self, artifact: ArtifactSegmenter) -> None:
        self.artifact, self.labels, self._name = artifact, artifact.labels, artifact.about.network
        self.maps: Any = GraphMaps(artifact)

    @property
    def device(self) -> torch.device:
        """Where the graph is."""
        return torch.device("cpu")

    def numbers(self, picture: Image.Image) -> np.ndarray:
        """Class numbers (H, W) of an RGB picture."""
        return self.artifact.numbers(picture)


class GraphMaps:
    """Class numbers of images as bytes, from a graph: what `ClassMaps` is for a network."""

    def __init__(self, artifact: ArtifactSegmenter) -> None:
        self._artifact = artifact
        self.device = torch.device("cpu")

    def __call__(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 → class numbers (B, H, W), int16."""
        pictures = (Image.fromarray(one) for one in images.permute(0, 2, 3, 1).contiguous().numpy())
        return torch.from_numpy(np.stack([self._artifact.numbers(picture) for picture in pictures]))

    def pictures_at_once(self, size: tuple[int, int]) -> int:
        """One: the graph sees windows of it together."""
        del size
        return 1


class ExportedDetector(ObjectDetector):
    """An exported detector."""

    def __init__(self, artifact: ArtifactDetector) -> None:
        self.artifact, self.labels, self.folder = artifact, artifact.labels, artifact.folder

    def _answers(self, frames: Iterable[tuple[str, Image.Image | str]], min_score: float) -> Iterator[ImageDetections]:
        rest = iter(frames)
        while window := list(islice(rest, AT_ONCE)):
            pictures = [one for _, one in window if not isinstance(one, str)]
            objects = iter(self.artifact.predict(pictures, min_score=min_score) if pictures else [])
            for name, one in window:
                if isinstance(one, str):
                    yield ImageDetections(name, error=one)
                else:
                    yield ImageDetections(name, next(objects), (one.height, one.width), picture=one)


def open_exported(folder: Path) -> Any:
    """The model of an artifact's folder with the methods of that of a run."""
    artifact = load(folder)
    if isinstance(artifact, ArtifactClassifier):
        return ExportedClassifier(artifact)
    if isinstance(artifact, ArtifactSegmenter):
        return ExportedSegmenter(artifact)
    if isinstance(artifact, ArtifactDetector):
        return ExportedDetector(artifact)
    raise UsageError(f"{folder} is an artifact of the task {artifact.about.task}; images are nothing to it")
