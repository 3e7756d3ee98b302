"""Exported segmentation models with the methods of those of runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.tasks.segmentation.segmenter import Segmenter
from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.artifacts.segmenter import ArtifactSegmenter
from patchloom_runtime.errors import UsageError


class ExportedSegmenter(Segmenter):
    """An exported segmentation model."""

    def __init__(self, artifact: ArtifactSegmenter) -> None:
        self.artifact, self.labels, self._name = artifact, artifact.labels, artifact.about.network
        self.maps: Any = GraphMaps(artifact)

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return torch.device("cpu")

    def numbers(self, picture: Image.Image) -> np.ndarray:
        """Return the class indices (H, W) of an RGB image."""
        return self.artifact.numbers(picture)


class GraphMaps:
    """Class indices of images from a graph: what `PixelClassifier` is for a network."""

    def __init__(self, artifact: ArtifactSegmenter) -> None:
        self._artifact = artifact
        self.device = torch.device("cpu")

    def __call__(self, images: Tensor) -> Tensor:
        """Map (B, 3, H, W) uint8 to class indices (B, H, W), int16."""
        pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
        return torch.from_numpy(np.stack([self._artifact.numbers(Image.fromarray(image)) for image in pixels]))

    def images_at_once(self, size: tuple[int, int]) -> int:
        """Return 1: the graph batches the windows of one image."""
        del size
        return 1


def open_exported_segmenter(folder: Path) -> ExportedSegmenter:
    """Load an artifact of a segmentation model; raise UsageError for one of another task."""
    artifact = load(folder)
    if not isinstance(artifact, ArtifactSegmenter):
        raise UsageError(f"{folder} is an artifact of the task {artifact.about.task}, not of segmentation")
    return ExportedSegmenter(artifact)
