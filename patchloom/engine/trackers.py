"""Trackers: records of a run in TensorBoard, Weights & Biases, MLflow or Trackio, in addition to metrics.jsonl.

A tracker is a subclass of `Tracker` and a row in `TRACKERS`. Its package is imported when a run uses
it. Trackers write to local files unless the user has configured them otherwise.
"""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from patchloom_runtime.errors import UsageError, nearest

Record = dict[str, Any]  # see `engine.records`
PROJECT = "patchloom"


class Tracker(ABC):
    """A destination for the records of one run, besides the run folder."""

    package: ClassVar[str]
    extra: ClassVar[str]  # of patchloom, which installs the package

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def begin(self, *, resumed: bool) -> None:
        """Start, or continue what the same run folder wrote before. Some records may be written again."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write one record."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left and close."""


class TensorBoard(Tracker):
    """Event files for TensorBoard in the run folder."""

    package, extra = "tensorboard", "log"

    def begin(self, *, resumed: bool) -> None:
        """Open a new event file. TensorBoard shows the later of two values of a step."""
        del resumed
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder))

    def write(self, record: Record) -> None:
        """Add the values as scalars."""
        for name, value in values_of(record).items():
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """Weights & Biases. Its run is named after the folder; a resumed run continues the same one."""

    package, extra = "wandb", "wandb"

    def begin(self, *, resumed: bool) -> None:
        """Start or resume the run."""
        del resumed
        name = self.folder.resolve().name
        identity = f"{name}-{folder_id(self.folder)[:6]}"
        self._run = import_module("wandb").init(dir=str(self.folder), name=name, id=identity, resume="allow")

    def write(self, record: Record) -> None:
        """Log the values of one record."""
        self._run.log(values_of(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow, where its own settings say: MLFLOW_TRACKING_URI, by default local files in the current folder."""

    package, extra = "mlflow", "mlflow"

    def begin(self, *, resumed: bool) -> None:
        """Create a run of the experiment "patchloom", or reopen that of the folder."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = import_module("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        identity = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        tags = {"patchloom.folder": str(self.folder.resolve()), "patchloom.id": folder_id(self.folder)}
        query = f"tags.`patchloom.id` = '{tags['patchloom.id']}'"
        earlier = self._client.search_runs([identity], query, max_results=1) if resumed else []
        if earlier:  # the newest comes first
            self._run_id = earlier[0].info.run_id
            self._client.update_run(self._run_id, "RUNNING")
        else:
            self._run_id = self._client.create_run(identity, tags=tags, run_name=self.folder.name).info.run_id

    def write(self, record: Record) -> None:
        """Log the values of one record."""
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, record["step"]) for name, value in values_of(record).items()]
        self._client.log_batch(self._run_id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio(Tracker):
    """Trackio, in its local database; `trackio show --project patchloom` displays it."""

    package, extra = "trackio", "trackio"

    def begin(self, *, resumed: bool) -> None:
        """Start or resume the run, without sampling the hardware in the background."""
        name = f"{self.folder.resolve().name}-{folder_id(self.folder)[:6]}"
        self._run = import_module("trackio").init(
            project=PROJECT,
            name=name,
            resume="allow" if resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: Record) -> None:
        """Log the values of one record."""
        self._run.log(values_of(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UsageError for a tracker that is unknown or not installed."""
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise UsageError(f"There is no tracker {name!r}. Choose from: {known}.{nearest(name, list(TRACKERS))}")
        if find_spec(TRACKERS[name].package) is None:
            extra = TRACKERS[name].extra
            raise UsageError(
                f"--log {name}: {TRACKERS[name].package} is not installed. Install it with: "
                f"pip install 'patchloom[{extra}]'"
            )


def values_of(record: Record) -> dict[str, float]:
    """Return the values of a record by the names that trackers show: train/loss, evaluation/ema/top1."""
    weights = [record["weights"]] if record["kind"] == "evaluation" else []
    return {"/".join((record["kind"], *weights, name)): value for name, value in record["values"].items()}


def folder_id(folder: Path) -> str:
    """Return an id of a run folder: the same whenever the run is resumed there."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
