"""A run's folder as far as it can be read. What is missing or damaged is a note, and the rest can be shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from patchloom.data.datasets import ImageSet
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data
from patchloom.engine.records import Record
from patchloom.models.cost import Cost, cost
from patchloom.models.from_config import make_frame
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom.report.run_report import neighbor_count
from patchloom.runs.config import RunFiles, is_run, read_run_files
from patchloom.runs.metrics import read_metrics
from patchloom.runs.predictions import Predictions, fingerprint, load_predictions
from patchloom.runs.run_metadata import RunMetadata, read_run_metadata
from patchloom.runs.weights import load_network
from patchloom_runtime.errors import DataError, PatchloomError, UsageError, attempted

# Pictures: enough for t-SNE to show groups; a few seconds on a CPU.
LOOKED_AT = 300
T = TypeVar("T")


@dataclass
class RunParts:
    """What could be read of a run's folder, and notes on what could not."""

    folder: Path
    files: RunFiles
    record: RunMetadata | None = None
    predictions: Predictions | None = None
    network: Network | None = None
    metrics: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, read: Callable[[], T]) -> T | None:
        """What `read` gives; where it cannot, its reason becomes a note."""
        return attempted(read, self.notes)


def read_run(folder: Path, network: Network | None = None) -> RunParts:
    """A run's folder as far as it can be read; only its config must be there. `network` is its own, if it is known."""
    if not is_run(folder):
        raise UsageError(f"{folder} is not the folder of a run: it has no config.json")
    parts = RunParts(folder, read_run_files(folder))
    parts.record = parts.attempt(lambda: read_run_metadata(folder))
    if parts.files.decides:
        parts.predictions = parts.attempt(lambda: load_predictions(folder, len(parts.files.labels)))
    parts.network = network or parts.attempt(lambda: load_network(folder)[0])
    parts.metrics = parts.attempt(lambda: read_metrics(folder / "metrics.jsonl")) or []
    return parts


def neighbour_score(parts: RunParts, metrics: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """How many neighbours judged a run that names no classes, and its best top-1; None where none did."""
    neighbours = 0 if parts.files.decides else neighbor_count(metrics)
    key = f"knn{neighbours}_top1"
    scores = [value for r in metrics if (value := r["values"].get(key)) is not None] if neighbours else []
    return (neighbours, max(scores)) if scores else None


def val_of(parts: RunParts, data: str | None, given: Reading = AS_IT_IS) -> ImageSet | None:
    """The pictures the run was validated on, from where it was trained or from `data`."""
    if parts.predictions is None and parts.files.decides:
        return None
    record = parts.record
    place = data or (record.data if record else None)
    if place is None:
        raise UsageError("where the data lie was not recorded: no pictures are shown; say it with --data")
    level, reading = (record.level, given.filled_from(record.reading)) if record else (None, given)
    try:
        val: ImageSet = open_data(place, level=level, reading=reading, labeled=parts.files.decides).val
    except PatchloomError as error:
        raise DataError(f"no pictures are shown, since the data cannot be opened: {error}") from error
    if parts.predictions and fingerprint(val) != parts.predictions.fingerprint:
        raise DataError(f"no pictures are shown: those of {place} are not those the run was validated on")
    if parts.predictions and parts.predictions.report.index[-1] >= len(val):
        raise DataError(f"no pictures are shown: the run decided about more than the {len(val):,} of {place}")
    return val


def count_cost(parts: RunParts) -> Cost | None:
    """Of the network the config tells, so also where its weights are lost."""

    def counted() -> Cost:
        options = parts.files.options
        frame = make_frame(
            lambda: build_model(parts.files.network, **options), options, config=str(parts.folder / "config.json")
        )
        with torch.device("meta"):
            return cost(frame)

    return parts.attempt(counted)
