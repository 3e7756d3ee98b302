"""Reading trained classifiers and embedding networks from run folders and artifacts."""

from collections.abc import Callable
from pathlib import Path

from patchloom.inference.classifier import Classifier, load
from patchloom.models.network import Network
from patchloom.runs.calibration import FILE as CALIBRATION
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import load_network
from patchloom.tasks.task import ModelLoader


class ClassifierLoader(ModelLoader):
    """Models of whole images, with or without a classifier."""

    def load_network(self, folder: Path) -> Network:
        return load_network(folder)[0]

    def load(self, folder: Path, *, device: str = "auto") -> Classifier:
        return load(folder, device=device)

    def open_artifact(self, folder: Path) -> Classifier:
        from patchloom.tasks.classification.exported import open_exported_classifier  # needless for runs

        return open_exported_classifier(folder)

    def readers(self, folder: Path) -> dict[str, Callable[[], object]]:
        from patchloom.runs.predictions import (
            FILE,
            check_predictions,
        )  # loads the metrics, which predicting does not need

        return {
            "config.json": lambda: read_run_files(folder),
            FILE: lambda: check_predictions(folder),
            CALIBRATION: lambda: read_calibration(folder),
        }
