"""Reading trained detectors from run folders and artifacts."""

from collections.abc import Callable
from pathlib import Path

from patchloom.models.dense.detector import Detector
from patchloom.runs.config import read_run_files
from patchloom.tasks.detection.detector import ObjectDetector, load_object_detector
from patchloom.tasks.detection.exported import open_exported_detector
from patchloom.tasks.detection.run_files import VAL, load_detector, read_val
from patchloom.tasks.task import ModelLoader


class DetectorLoader(ModelLoader):
    """Models that detect objects."""

    writes_files = True

    def load_network(self, folder: Path) -> Detector:
        return load_detector(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> ObjectDetector:
        return load_object_detector(folder, device=device)

    def open_artifact(self, folder: Path) -> ObjectDetector:
        return open_exported_detector(folder)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {"config.json": lambda: read_run_files(folder), VAL: lambda: read_val(folder)}
