"""Exported detectors with the methods of those of runs."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from PIL import Image

from patchloom.tasks.detection.detector import AT_ONCE, ImageDetections, ObjectDetector
from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.artifacts.detector import ArtifactDetector
from patchloom_runtime.errors import UsageError


class ExportedDetector(ObjectDetector):
    """An exported detector."""

    def __init__(self, artifact: ArtifactDetector) -> None:
        self.artifact, self.labels, self.folder = artifact, artifact.labels, artifact.folder

    def _answers(self, frames: Iterable[tuple[str, Image.Image | str]], min_score: float) -> Iterator[ImageDetections]:
        rest = iter(frames)
        while window := list(islice(rest, AT_ONCE)):
            images = [one for _, one in window if not isinstance(one, str)]
            objects = iter(self.artifact.predict(images, min_score=min_score) if images else [])
            for name, one in window:
                if isinstance(one, str):
                    yield ImageDetections(name, error=one)
                else:
                    yield ImageDetections(name, next(objects), (one.height, one.width), picture=one)


def open_exported_detector(folder: Path) -> ExportedDetector:
    """Load an artifact of a detector; raise UsageError for one of another task."""
    artifact = load(folder)
    if not isinstance(artifact, ArtifactDetector):
        raise UsageError(f"{folder} is an artifact of the task {artifact.about.task}, not of detection")
    return ExportedDetector(artifact)
