"""Reading trained multi-label models from run folders and artifacts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchloom.inference.classifier import load
from patchloom.models.network import Network
from patchloom.runs.calibration import FILE as CALIBRATION
from patchloom.runs.calibration import read_calibration
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import load_network
from patchloom.tasks.classification.exported import ExportedClassifier
from patchloom.tasks.multilabel.classifier import MultilabelClassifier
from patchloom.tasks.multilabel.run_files import FILE, THRESHOLDS, read_thresholds, read_val_labels
from patchloom.tasks.task import NONE, ModelLoader
from patchloom_runtime.artifacts import artifact as exported

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
