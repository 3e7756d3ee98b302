"""Reading trained segmentation models from run folders and artifacts."""

from collections.abc import Callable
from pathlib import Path

from patchloom.models.dense.upernet import SegmentationNetwork
from patchloom.runs.calibration import FILE as CALIBRATION
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import read_run_files
from patchloom.tasks.segmentation.run_files import FILE, read_segmented
from patchloom.tasks.segmentation.segmenter import Segmenter, load_segmentation, load_segmenter, open_exported_segmenter
from patchloom.tasks.task import ModelLoader


class SegmenterLoader(ModelLoader):
    """Models that give every pixel a class."""

    writes_files = True

    def load_network(self, folder: Path) -> SegmentationNetwork:
        return load_segmentation(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> Segmenter:
        return load_segmenter(folder, device=device)

    def open_artifact(self, folder: Path) -> Segmenter:
        return open_exported_segmenter(folder)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        return {
            "config.json": lambda: read_run_files(folder),
            FILE: lambda: read_segmented(folder),
            CALIBRATION: lambda: read_calibration(folder),
        }
