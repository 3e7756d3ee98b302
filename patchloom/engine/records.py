"""Metrics output during training: always to metrics.jsonl, optionally to trackers, and to the user's screen.

A record is {"step", "epoch", "kind": "train" or "evaluation", "weights": "model", "ema" or "average",
"values": {name: number}, "time": {…}}. Everything that depends on the clock is under "time", so two equal runs write
equal records except for that key.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from patchloom.engine.display import Display, Status
from patchloom_runtime.errors import UsageError

Record = dict[str, Any]


class Sink(Protocol):
    """A destination for records."""

    def begin(self, count: int) -> int:
        """Start, or continue after the first `count` records. Return how many of them exist."""

    def write(self, record: Record) -> None:
        """Append a record."""

    def sync(self) -> None:
        """Flush to disk. A checkpoint that relies on it follows."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoard:
    """Event files for TensorBoard in the run folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "log") from error
        self._folder, self._make = folder, SummaryWriter

    def begin(self, count: int) -> int:
        """Open a new event file. TensorBoard shows the later of two values of a step."""
        self._writer = self._make(str(self._folder))
        return count

    def write(self, record: Record) -> None:
        """Add the values as scalars."""
        for name, value in record["values"].items():
            self._writer.add_scalar(_label(record, name), value, record["step"])

    def sync(self) -> None:
        """Flush the event file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """Weights & Biases. Its run is named after the folder, so a resumed run continues the same one."""

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", "wandb") from error
        self._wandb, self._folder = wandb, folder

    def begin(self, count: int) -> int:
        """Start or resume the run."""
        name = self._folder.resolve().name
        self._run = self._wandb.init(dir=str(self._folder), name=name, id=name, resume="allow")
        return count

    def write(self, record: Record) -> None:
        """Log the values of one record."""
        values = {_label(record, name): value for name, value in record["values"].items()}
        self._run.log(values, step=record["step"])

    def sync(self) -> None:
        """Do nothing: wandb uploads in the background."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class Records:
    """All sinks and the display as one."""

    def __init__(
        self, sinks: Sequence[Sink] = (), display: Display | None = None, restore: Callable[[], str] | None = None
    ) -> None:
        self._sinks, self._display, self._restore = sinks, display, restore
        self.wants_save = False  # the folder was recreated and has no checkpoint yet

    @property
    def has_display(self) -> bool:
        """Return whether `tick` is displayed."""
        return self._display is not None

    def begin(self, count: int, notes: Sequence[str] = ()) -> int:
        """Start, or continue after the first `count` records. Return how many of them every sink still has."""
        left = min([count, *(sink.begin(count) for sink in self._sinks)])
        self._show(lambda display: display.begin())
        for text in notes:
            self.note(text)
        if left < count:
            self.note(f"metrics.jsonl has lost {count - left} of its {count} lines; the run continues without them")
        return left

    def write(self, record: Record) -> None:
        """Write a record to every sink. Recreate the run folder first if it was removed."""
        if self._restore and (message := self._restore()):
            self.note(message)
            self.wants_save = True
        for sink in self._sinks:
            sink.write(record)
        if record["kind"] == "evaluation":
            self._show(lambda display: display.show_values(record))

    def sync(self) -> None:
        """Flush every sink to disk."""
        for sink in self._sinks:
            sink.sync()

    def tick(self, status: Status) -> None:
        """Show the progress."""
        self._show(lambda display: display.tick(status))

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._show(lambda display: display.note(text))

    def close(self) -> None:
        """Close every sink and the display."""
        for sink in self._sinks:
            sink.close()
        self._show(lambda display: display.close())

    def _show(self, what: Callable[[Display], None]) -> None:
        if not self._display:
            return
        try:
            what(self._display)
        except OSError:
            # The terminal was closed or the pipe has no reader: the run continues without display.
            self._display = None


TRACKERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB}


def _label(record: Record, name: str) -> str:
    return "/".join((record["kind"], *([record["weights"]] if record["kind"] == "evaluation" else []), name))


def _missing(package: str, extra: str) -> UsageError:
    return UsageError(f"{package} is not installed. Install it with: pip install 'patchloom[{extra}]'")
