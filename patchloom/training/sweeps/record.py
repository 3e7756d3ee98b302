"""`sweep.json` of a sweep's folder: how each of its runs went, so that none is done or tested twice."""

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
    """One run of a sweep."""

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
        """What it is chosen by, on val; None where it failed or nothing judges it."""
        return None if self.failed else self.metrics.get(self.metric)


def read_results(out: Path) -> tuple[dict[str, RunResult], str]:
    """Folder of a run below `out` → how it went; a note where the file is of no use, and then nothing."""
    path = out / FILE
    if not os.path.lexists(path):
        return {}, ""
    try:
        found = parsed(read_whole(path), path, {"format": int, "runs": dict})["runs"]
        for values in found.values():
            refuse_shape(values, _RUN, path)
        runs = {name: RunResult(**{key: values[key] for key in _RUN}) for name, values in found.items()}
    except CheckpointError as error:
        return {}, f"{error} Runs that have finished are evaluated again"
    return {name: run for name, run in runs.items() if run.failed or (out / name / RUN_METADATA).is_file()}, ""


def write_results(out: Path, results: Mapping[str, RunResult]) -> None:
    """Write the file, whole or not at all."""
    atomic_write(out / FILE, json_bytes({"format": 1, "runs": {name: asdict(run) for name, run in results.items()}}))
