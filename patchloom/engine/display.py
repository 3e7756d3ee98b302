"""Training progress for the user: a bar on a terminal, occasional plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from patchloom_runtime.printable import for_rich, printable

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Status:
    """Progress and speed of a run."""

    step: int
    total_steps: int
    epoch: int  # from 1
    epochs: int
    lr: float
    images_per_s: float
    data_share: float  # share of the time spent waiting for data
    left_s: float | None
    memory_mib: float
    values: dict[str, float]  # running training means
    best: str = ""
    unit: str = "img"

    def line(self) -> str:
        """Return everything as one line."""
        parts = [f"epoch {self.epoch}/{self.epochs}", f"step {self.step}/{self.total_steps}", self.numbers()]
        return "  ".join(parts) + f"  {duration(self.left_s)} left"

    def numbers(self) -> str:
        """Return the current numbers without the position."""
        parts = [f"{name} {value:.4g}" for name, value in self.values.items()]
        parts += [f"lr {self.lr:.2e}", f"{self.images_per_s:,.0f} {self.unit}/s", f"data {self.data_share:.0%}"]
        parts += [f"{self.memory_mib:,.0f} MiB"] if self.memory_mib else []
        return "  ".join(parts + ([self.best] if self.best else []))


class Display(Protocol):
    """A view of a running training."""

    def begin(self) -> None:
        """Open the view."""

    def tick(self, status: Status) -> None:
        """Show the newest status."""

    def show_values(self, record: dict[str, Any]) -> None:
        """Show the result of an evaluation."""

    def note(self, text: str) -> None:
        """Show one line of text."""

    def close(self) -> None:
        """Close the view."""


class Lines:
    """Plain lines for logs: the first status, then one every ten seconds."""

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print, self._clock = print_line, clock
        self._printed_at: float | None = None

    def begin(self) -> None:
        """Do nothing: there is nothing to open."""

    def tick(self, status: Status) -> None:
        """Print a line every ten seconds and at the end of the run."""
        now = self._clock()
        due = self._printed_at is None or now - self._printed_at >= SECONDS_BETWEEN_LINES
        if due or status.step == status.total_steps:
            self._printed_at = now
            self._print(status.line())

    def show_values(self, record: dict[str, Any]) -> None:
        """Print one line per evaluation."""
        self._print(evaluation_line(record))

    def note(self, text: str) -> None:
        self._print(printable(text))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Bar:
    """A progress bar over the whole run, redrawn in place; evaluation results scroll above it."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}  {task.fields[left]} left"),
            console=Console(file=for_rich(sys.stdout)),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", epoch="", numbers="", left="?", total=None)

    def begin(self) -> None:
        self._progress.start()

    def tick(self, status: Status) -> None:
        """Redraw with the newest numbers."""
        self._progress.update(
            self._task,
            completed=status.step,
            total=status.total_steps,
            epoch=f"{status.epoch}/{status.epochs}",
            numbers=status.numbers(),
            left=duration(status.left_s),
        )

    def show_values(self, record: dict[str, Any]) -> None:
        """Print one line per evaluation above the bar."""
        self.note(evaluation_line(record))

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        """Stop redrawing and leave the last state on the screen."""
        self._progress.stop()


def make_display() -> Display:
    """Return a bar if stdout is a terminal, else plain lines."""
    return Bar() if sys.stdout.isatty() else Lines(lambda line: print(line, flush=True))


def evaluation_line(record: dict[str, Any]) -> str:
    """Return one evaluation as a line of text."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in record["values"].items())
    average = {"ema": " (EMA)", "average": " (average of epochs)"}.get(record["weights"], "")
    return f"epoch {record['epoch']} evaluated{average}: {values}"


def duration(seconds: float | None) -> str:
    """Format seconds as h:mm:ss, or as ? if unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
