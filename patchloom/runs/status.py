"""`.status.json`: what a running training is doing, written about once per second for `patchloom watch`.

The file is a hint, not a result: it is replaced without waiting for the disk, errors are ignored, and nothing that
trains or resumes reads it.
"""

import json
import math
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from patchloom.disk import open_new, rename, temporary_path, this_process
from patchloom.engine.display import Status
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

FILE = ".status.json"
_MOST_BYTES = 1 << 16
_SHAPE = {
    "process": str,
    "at": float,
    "activity": str,
    "step?": int,
    "total_steps?": int,
    "epoch?": int,
    "epochs?": int,
    "images_per_s?": float,
    "data_share?": float,
    "left_s?": float | None,
    "memory_mib?": float,
    "values?": dict[str, float | None],
    "best?": str,
    "unit?": str,
}


class StatusFile:
    """The status of the training in this process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._status: dict[str, Any] = {}

    def write(self, activity: str, status: Status | None = None) -> None:
        """Replace the file. Without `status`, the numbers stay those of the last call."""
        if status:
            values = {name: value if math.isfinite(value) else None for name, value in status.values.items()}
            self._status = asdict(status) | {"values": values}
        content = {"process": this_process(), "at": time.time(), "activity": activity, **self._status}
        with suppress(OSError):
            temporary = temporary_path(self._path)
            with open_new(temporary) as file:
                file.write(json.dumps(content).encode())
            rename(temporary, self._path)


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status of a run folder; empty if there is none or it is damaged."""
    try:
        status = parse_json(read_plain(folder / FILE, _MOST_BYTES), _MOST_BYTES)
        check_shape(status, _SHAPE)
    except (OSError, ValueError):
        return {}
    known = {name.removesuffix("?") for name in _SHAPE}
    return {name: value for name, value in status.items() if name in known}
