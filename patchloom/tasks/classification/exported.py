"""Exported classifiers with the methods of those of runs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from patchloom.inference.classifier import Classifier
from patchloom.runs.calibration import RunCalibration
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom_runtime.artifacts.artifact import ArtifactClassifier, load
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.evaluation_transform import as_size


class GraphNetwork(nn.Module):
    """The graph of an artifact as a module: images of 0…1 in, logits out."""

    has_distillation_token = False

    def __init__(self, artifact: ArtifactClassifier) -> None:
        super().__init__()
        self.artifact = artifact
        self.config = SimpleNamespace(name=artifact.about.network, num_classes=len(artifact.labels))
        self.no_weights = nn.Parameter(torch.empty(0), requires_grad=False)  # gives the device: the CPU

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, 3, H, W) to logits (B, K)."""
        return self.outputs(images)["logits"]

    def outputs(self, images: Tensor) -> dict[str, Tensor]:
        """Map (B, 3, H, W) to all outputs of the graph."""
        pixels = (images * 255).round().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        outputs = self.artifact.outputs(np.ascontiguousarray(pixels.numpy()))
        return {name: torch.from_numpy(values) for name, values in outputs.items()}

    def for_images_of(self, size: int | tuple[int, int]) -> "GraphNetwork":
        """Return self; raise UsageError for another size than that of the graph."""
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
        transform = artifact.about.transform
        preprocessing = Preprocessing(
            (0.0, 0.0, 0.0),
            (1.0, 1.0, 1.0),
            transform.image_size,
            transform.crop_ratio,
            transform.interpolation,
            transform.resize,
        )
        options = {"num_classes": len(artifact.labels) if "logits" in artifact.about.outputs else 0}
        files = RunFiles(artifact.about.network, options, preprocessing, None, artifact.labels)
        calibration = RunCalibration(artifact.calibration, features=artifact.features)
        super().__init__(GraphNetwork(artifact), files, calibration=calibration)  # type: ignore[arg-type]

    def classify(self, images: Tensor, *, model: Any = None, tta: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the logits of normalized images and, if a rule needs them, distances from the training images."""
        if tta:
            return super().classify(images, model=model, tta=True)
        graph: Any = model or self.model
        outputs = graph.outputs(images)
        vectors = outputs.get("embedding")
        return outputs["logits"], None if vectors is None else self.distances(vectors)


def open_exported_classifier(folder: Path) -> ExportedClassifier:
    """Load an artifact of a classifier; raise UsageError for one of another task."""
    artifact = load(folder)
    if not isinstance(artifact, ArtifactClassifier):
        raise UsageError(f"{folder} is an artifact of the task {artifact.about.task}, not of classification")
    return ExportedClassifier(artifact)
