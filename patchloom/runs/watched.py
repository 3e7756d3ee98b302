"""The state of a run folder that may be training right now, for `patchloom watch`."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from patchloom.disk import lock_holder, process_is_running
from patchloom.engine.display import duration
from patchloom.engine.records import ENDED
from patchloom.runs.checkpoints import newest_progress
from patchloom.runs.metrics import METRICS, MetricsTail
from patchloom.runs.status import read_status
from patchloom_runtime.untrusted import open_plain

_ELSEWHERE_S = 60.0  # a run of another machine that wrote its status this recently is running
_STARTING_S = 600.0  # an older lock may name a process that is something else by now
_STILL_S = 15.0  # training without a step for this long is worth a word


@dataclass(frozen=True)
class RunState:
    """What is known about a run now."""

    run: str
    state: str  # "not begun", "starting", "running", "finished", "ended", "stopped" or "killed"
    activity: str = ""  # of a run that is running: "training", "evaluating", "saving", "writing the report"
    reason: str = ""  # why it ended
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    epochs: int = 0
    images_per_s: float = 0.0
    data_share: float = 0.0  # share of the time spent waiting for data
    left_s: float | None = None
    memory_mib: float = 0.0
    values: dict[str, float | None] = field(default_factory=dict)  # running means of the training
    best: str = ""
    unit: str = "img"
    silent_s: float = 0.0  # seconds since the run last wrote its status
    evaluation: dict[str, Any] | None = None  # the last record of an evaluation
    picture: str | None = None  # the last picture of `train --pictures`

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected of the run."""
        return self.state in ("finished", "ended")

    def headline(self) -> str:
        """Return the state and the position as one line."""
        parts = [self._now()]
        if self.total_steps:
            parts += [f"epoch {self.epoch}/{self.epochs}"] * bool(self.epochs)
            parts += [f"step {self.step:,}/{self.total_steps:,}"]
        elif self.step:
            parts.append(f"step {self.step:,}")
        if self.state == "running" and self.activity == "training":
            parts.append(f"{duration(self.left_s)} left")
        return "  ".join(parts)

    def numbers(self) -> str:
        """Return the current numbers as one line; '' if the run is not running."""
        if self.state != "running":
            return self.best
        parts = [f"{name} {value:.4g}" for name, value in self.values.items() if value is not None]
        if self.images_per_s:
            parts += [f"{self.images_per_s:,.0f} {self.unit}/s", f"data {self.data_share:.0%}"]
        parts += [f"{self.memory_mib:,.0f} MiB"] * bool(self.memory_mib)
        return "  ".join([*parts, *([self.best] if self.best else [])])

    def _now(self) -> str:
        if self.state == "running":
            if self.activity == "training" and self.silent_s > _STILL_S:
                return f"no step for {duration(self.silent_s)}: waiting for data or the device"
            return f"{self.activity}, mostly waiting for data" if self.data_share > 0.5 else self.activity
        resume = "the same command resumes it"
        words = {
            "ended": f"ended: {self.reason}",
            "stopped": f"stopped; {resume}",
            "killed": f"killed: its process is gone; {resume}",
        }
        return words.get(self.state, self.state)


class WatchedRun:
    """A run folder that is read again and again. The folder may not exist yet, and may be resumed or removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tail = MetricsTail(folder / METRICS)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records as of the last call of `update`."""
        return self._tail.records

    def update(self) -> RunState:
        """Read what is new and return the state of the run."""
        self._tail.update()
        status = read_status(self.folder)
        last: dict[str, Any] = self.records[-1] if self.records else {}
        evaluations = [record for record in self.records[-50:] if record.get("kind") == "evaluation"]
        facts = {"step": last.get("step", 0), "epoch": last.get("epoch", 0)}
        facts |= {name: status[name] for name in {each.name for each in fields(RunState)} & status.keys()}
        facts["step"] = max(facts["step"], last.get("step", 0))  # the status is up to a second old
        state, activity, reason = _state_of(self.folder, status, has_records=bool(self.records))
        now = {"state": state, "activity": activity, "reason": reason}
        return RunState(
            run=str(self.folder),
            **facts | now,
            silent_s=max(0.0, time.time() - status["at"]) if status else 0.0,
            evaluation=evaluations[-1] if evaluations else None,
            picture=_newest_picture(self.folder),
        )


def watch(runs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[RunState]:
    """Return the state of each run now: what it is doing, how far it is and how fast.

    A folder that does not exist has not begun. `patchloom watch` shows the same again and again.

    runs  Run folders, which need not exist yet.
    """
    folders = [runs] if isinstance(runs, str | os.PathLike) else runs
    return [WatchedRun(Path(folder)).update() for folder in folders]


def _state_of(folder: Path, status: dict[str, Any], *, has_records: bool) -> tuple[str, str, str]:
    """Return state, activity and the reason of the end."""
    if status and status["activity"] != ENDED and _is_running(status):
        return "running", status["activity"], ""
    if _is_starting(folder, status):
        return "starting", "", ""
    ended = newest_progress(folder).get("ended", "")
    if ended:
        return ("finished", "", "") if ended == "finished" else ("ended", "", ended)
    if status:
        return ("stopped" if status["activity"] == ENDED else "killed"), "", ""
    return ("stopped" if has_records else "not begun"), "", ""


def _is_running(status: dict[str, Any]) -> bool:
    is_running = process_is_running(status["process"])
    return time.time() - status["at"] < _ELSEWHERE_S if is_running is None else is_running


def _is_starting(folder: Path, status: dict[str, Any]) -> bool:
    """Return whether a process holds the folder that has not written its status yet."""
    with suppress(OSError, ValueError):
        with open_plain(folder / ".lock") as file:
            process = int(lock_holder(file))
        own = str(status.get("process", "")).split("-")
        is_new = time.time() - os.stat(folder / ".lock").st_mtime < _STARTING_S
        return is_new and str(process) not in own[1:2] and process_is_running(process) is True
    return False


def _newest_picture(folder: Path) -> str | None:
    with suppress(OSError):
        names = [
            name for name in os.listdir(folder / "pictures") if name.startswith("epoch_") and name.endswith(".png")
        ]
        return str(folder / "pictures" / max(names)) if names else None
    return None
