"""The readable contents of a run folder: a missing or damaged file becomes a note, and the rest can be reported."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from patchloom.data.datasets import ImageSet
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data
from patchloom.engine.records import Record
from patchloom.models.cost import Cost, cost
from patchloom.models.from_config import make_frame
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom.report.run_report import neighbor_count
from patchloom.runs.calibration import RunCalibration, read_calibration
from patchloom.runs.checksums import reading_once
from patchloom.runs.config import RunFiles, is_run, read_run_files
from patchloom.runs.metrics import read_metrics
from patchloom.runs.predictions import Predictions, fingerprint, load_predictions
from patchloom.runs.run_metadata import RunMetadata, data_path, read_run_metadata
from patchloom.runs.weights import load_network
from patchloom_runtime.errors import DataError, PatchloomError, UsageError, attempted

MAX_IMAGES = 300  # enough for t-SNE to show groups; a few seconds on a CPU
T = TypeVar("T")


@dataclass
class RunContents:
    """The files of a run folder that could be read, and notes on those that could not."""

    folder: Path
    files: RunFiles
    record: RunMetadata | None = None
    predictions: Predictions | None = None
    network: Network | None = None
    calibration: RunCalibration = field(default_factory=RunCalibration)
    metrics: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, read: Callable[[], T]) -> T | None:
        """Return the result of `read`, or None after adding the reason of its failure to the notes."""
        return attempted(read, self.notes)


@reading_once()
def read_run(folder: Path, network: Network | None = None) -> RunContents:
    """Read a run folder; only its config is required. `network` is the run's network, if it is loaded already."""
    if not is_run(folder):
        raise UsageError(f"{folder} is not a run folder: it has no config.json")
    contents = RunContents(folder, read_run_files(folder))
    contents.record = contents.attempt(lambda: read_run_metadata(folder))
    if contents.files.decides:
        contents.predictions = contents.attempt(lambda: load_predictions(folder, len(contents.files.labels)))
        calibration = contents.attempt(lambda: read_calibration(folder))
        contents.calibration = calibration or RunCalibration()
    contents.network = network or contents.attempt(lambda: load_network(folder)[0])
    contents.metrics = contents.attempt(lambda: read_metrics(folder / "metrics.jsonl")) or []
    return contents


def neighbor_score(contents: RunContents, metrics: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """Return k and the best top-1 of the k-NN evaluations of a run without a classifier; None without any."""
    k = 0 if contents.files.decides else neighbor_count(metrics)
    scores = [value for r in metrics if (value := r["values"].get(f"knn{k}_top1")) is not None] if k else []
    return (k, max(scores)) if scores else None


def val_images(contents: RunContents, data: str | None, reading: Reading = AS_IT_IS) -> ImageSet | None:
    """Open the images the run was validated on, at `data` or at the recorded data path."""
    predictions, record = contents.predictions, contents.record
    if predictions is None and contents.files.decides:
        return None
    path = data_path(contents.folder, record, data)
    level = record.level if record else None
    reading = reading.filled_from(record.reading) if record else reading
    try:
        val: ImageSet = open_data(path, level=level, reading=reading, labeled=contents.files.decides).val
    except PatchloomError as error:
        raise DataError(f"no images are shown, since the data cannot be opened: {error}") from error
    if predictions and fingerprint(val) != predictions.fingerprint:
        raise DataError(f"no images are shown: those of {path} are not the ones the run was validated on")
    if predictions and predictions.report.index[-1] >= len(val):
        raise DataError(f"no images are shown: the run has predictions for more than the {len(val):,} of {path}")
    return val


def count_cost(contents: RunContents) -> Cost | None:
    """Count the cost of the network in the config, which works without its weights too."""

    def counted() -> Cost:
        options = contents.files.options
        frame = make_frame(
            lambda: build_model(contents.files.network, **options),
            options,
            config=str(contents.folder / "config.json"),
        )
        with torch.device("meta"):
            return cost(frame)

    return contents.attempt(counted)
