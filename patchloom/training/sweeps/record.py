"""`sweep.json`: the results of the runs of a sweep, so that none is trained or tested twice."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchloom.disk import atomic_write
from patchloom.runs.files import json_bytes, parsed, read_whole, refuse_shape
from patchloom.runs.run_metadata import FILE as RUN_METADATA
from patchloom_runtime.errors import CheckpointError

FILE = "sweep.json"
_RUN = {
    "data": str,
    "setting": dict,
    "metric": str,
    "lower_is_better": bool,
    "metrics": dict[str, float],
    "seconds": float,
    "failed": str,
    "test": dict[str, float],
}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of one run of a sweep."""

    data: str  # as it was given
    setting: dict[str, Any]
    metric: str = ""  # what the best is chosen by
    lower_is_better: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)  # on val
    seconds: float = 0.0
    failed: str = ""  # why; '' where it is finished
    test: Mapping[str, float] = field(default_factory=dict)  # where it was tested

    @property
    def score(self) -> float | None:
        """The metric on val that selects the best; None if the run failed or was not evaluated."""
        return None if self.failed else self.metrics.get(self.metric)


def read_results(out: Path) -> tuple[dict[str, RunResult], str]:
    """Return the results by run folder below `out`; an empty dict and a note if the file cannot be read."""
    path = out / FILE
    if not os.path.lexists(path):
        return {}, ""
    try:
        entries = parsed(read_whole(path), path, {"format": int, "runs": dict})["runs"]
        for values in entries.values():
            refuse_shape(values, _RUN, path)
        runs = {name: RunResult(**{key: values[key] for key in _RUN}) for name, values in entries.items()}
    except CheckpointError as error:
        return {}, f"{error} Runs that have finished are evaluated again"
    return {name: run for name, run in runs.items() if run.failed or (out / name / RUN_METADATA).is_file()}, ""


def write_results(out: Path, results: Mapping[str, RunResult]) -> None:
    """Write `sweep.json`."""
    atomic_write(out / FILE, json_bytes({"format": 1, "runs": {name: asdict(run) for name, run in results.items()}}))
