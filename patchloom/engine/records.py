"""What is written while training: metrics.jsonl always, other trackers when asked, and the user's screen.

A record is {"step", "epoch", "kind": "train" or "evaluation", "weights": "model", "ema" or "average",
"values": {name: number}, "time": {…}}; all that depends on the clock is under "time", so two equal runs write equal
lines but for that.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from patchloom.engine.display import Display, Status
from patchloom_runtime.errors import UsageError

Record = dict[str, Any]


class Sink(Protocol):
    """Somewhere records go."""

    def begin(self, kept: int) -> int:
        """Start, or go on after the first `kept` records; how many of them there are."""

    def write(self, record: Record) -> None:
        """Add a record."""

    def sync(self) -> None:
        """Have on disk what was written; a checkpoint that counts on it follows."""

    def close(self) -> None:
        """Finish."""


class TensorBoard:
    """Event files for TensorBoard, in the run's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", "log") from error
        self._folder, self._make = folder, SummaryWriter

    def begin(self, kept: int) -> int:
        """Open a new event file; TensorBoard itself shows the later of two values of a step."""
        self._writer = self._make(str(self._folder))
        return kept

    def write(self, record: Record) -> None:
        """Add scalars."""
        for name, value in record["values"].items():
            self._writer.add_scalar(_label(record, name), value, record["step"])

    def sync(self) -> None:
        """Flush."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """Weights & Biases; its run has the folder's name, so a resumed run goes on in the same one."""

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", "wandb") from error
        self._wandb, self._folder = wandb, folder

    def begin(self, kept: int) -> int:
        """Start or resume."""
        name = self._folder.resolve().name
        self._run = self._wandb.init(dir=str(self._folder), name=name, id=name, resume="allow")
        return kept

    def write(self, record: Record) -> None:
        """Log the values of one record."""
        values = {_label(record, name): value for name, value in record["values"].items()}
        self._run.log(values, step=record["step"])

    def sync(self) -> None:
        """Leave it to wandb, which uploads in the background."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class Records:
    """All sinks and the screen, as one."""

    def __init__(
        self, sinks: Sequence[Sink] = (), display: Display | None = None, restore: Callable[[], str] | None = None
    ) -> None:
        self._sinks, self._display, self._restore = sinks, display, restore
        self.wants_save = False  # the folder is a new one, and has no checkpoint yet

    @property
    def shown(self) -> bool:
        """Whether somebody reads what `tick` is given."""
        return self._display is not None

    def begin(self, kept: int, notes: Sequence[str] = ()) -> int:
        """Start, or go on after the first `kept` records; how many of them every sink still has."""
        left = min([kept, *(sink.begin(kept) for sink in self._sinks)])
        self._show(lambda display: display.begin())
        for text in notes:
            self.note(text)
        if left < kept:
            self.note(f"metrics.jsonl has lost {kept - left} of its {kept} lines; the run goes on without them")
        return left

    def write(self, record: Record) -> None:
        """Hand a record to every sink; before, make the run's folder again where somebody removed it."""
        if self._restore and (said := self._restore()):
            self.note(said)
            self.wants_save = True
        for sink in self._sinks:
            sink.write(record)
        if record["kind"] == "evaluation":
            self._show(lambda display: display.show_values(record))

    def sync(self) -> None:
        """Have on disk what was written."""
        for sink in self._sinks:
            sink.sync()

    def tick(self, status: Status) -> None:
        """Show how far the run is."""
        self._show(lambda display: display.tick(status))

    def note(self, text: str) -> None:
        """Show a line."""
        self._show(lambda display: display.note(text))

    def close(self) -> None:
        """Close every sink and give the screen back."""
        for sink in self._sinks:
            sink.close()
        self._show(lambda display: display.close())

    def _show(self, what: Callable[[Display], None]) -> None:
        if not self._display:
            return
        try:
            what(self._display)
        except OSError:
            # The terminal was closed, or nobody reads the pipe any more: the run goes on unseen.
            self._display = None


TRACKERS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB}


def _label(record: Record, name: str) -> str:
    return "/".join((record["kind"], *([record["weights"]] if record["kind"] == "evaluation" else []), name))


def _missing(package: str, extra: str) -> UsageError:
    return UsageError(f"{package} is not installed. Install it with: pip install 'patchloom[{extra}]'")
