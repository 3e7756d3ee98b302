"""Reading trained detectors from run folders and artifacts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchloom.models.dense.detector import Detector
from patchloom.runs.config import read_run_files
from patchloom.tasks.detection.detector import (
    ImageDetections,
    ObjectDetector,
    load_object_detector,
    open_exported_detector,
)
from patchloom.tasks.detection.run_files import VAL, load_detector, read_val
from patchloom.tasks.task import NONE, ModelLoader

BOX = ("left", "top", "right", "bottom")  # columns


class DetectorLoader(ModelLoader):
    """Models that detect objects."""

    writes_files = True
    threshold_option = "min_score"

    def load_network(self, folder: Path) -> Detector:
        return load_detector(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> ObjectDetector:
        return load_object_detector(folder, device=device)

    def open_artifact(self, folder: Path) -> ObjectDetector:
        return open_exported_detector(folder)

    def columns(self, answers: int) -> dict[str, type]:
        """Return the columns of a table with one row per object; boxes are in pixels of the image."""
        del answers
        return {"path": str, "label": str, "score": float, **dict.fromkeys(BOX, float), "error": str}

    def rows(self, prediction: ImageDetections, answers: int) -> list[dict[str, Any]]:
        del answers
        objects = [
            {
                "path": prediction.path,
                "label": one["name"],
                "score": one["score"],
                **dict(zip(BOX, one["box"], strict=True)),
            }
            for one in prediction.answers
        ]
        return objects or [{"path": prediction.path, "label": None if prediction.error else NONE}]

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {"config.json": lambda: read_run_files(folder), VAL: lambda: read_val(folder)}
