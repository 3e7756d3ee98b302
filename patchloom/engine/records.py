"""What is written while training: metrics.jsonl always, other trackers when asked, and the user's screen.

A record is {"step", "epoch", "kind": "train" or "evaluation", "weights": "model", "ema" or "average",
"values": {name: number}, "time": {…}}; all that depends on the clock is under "time", so two equal runs write equal
lines but for that. A line also has "after", the "crc32" of the line before it (0 in the first), so that one that is
lost or moved is noticed, and "crc32", of everything in it but "time".
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from patchloom.engine.disk import atomic_write, disk_errors
from patchloom.engine.display import Display, Status, make_display
from patchloom.errors import CheckpointError, UsageError
from patchloom.foreign import check_shape, parse_json, read_plain

MOST_BYTES, MOST_OF_LINE = 1 << 28, 1 << 20  # of metrics.jsonl; a year of steps has less
_SHAPE = {
    "step?": int,
    "epoch?": int,
    "kind?": str,
    "weights?": str,
    "values": dict[str, float | None],
    "time?": dict[str, float | None],
    "after?": int,
}

Record = dict[str, Any]


class Sink(Protocol):
    """Somewhere records go."""

    def begin(self, kept: int) -> int:
        """Start, or go on after the first `kept` records; how many of them there are."""

    def write(self, record: Record) -> None:
        """Add a record."""

    def close(self) -> None:
        """Finish."""


class MetricsFile:
    """One JSON object a line, on disk as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, kept: int) -> int:
        """Drop what an interrupted run wrote after its checkpoint: the resumed run writes it again."""
        records = read_metrics(self.path, kept)
        self._last = 0
        atomic_write(self.path, b"".join(map(self._next, records)))
        self._open()
        return len(records)

    def write(self, record: Record) -> None:
        """Add a line; a value that is not finite becomes null, which JSON can hold."""
        finite = {name: v if math.isfinite(v) else None for name, v in record["values"].items()}
        if not self._is_there():
            self._begin_again()
        with disk_errors(self.path):
            self._file.write(self._next({**record, "values": finite}))

    def close(self) -> None:
        """Close the file."""
        if not self._is_there():
            self._begin_again()
        self._file.close()

    def _next(self, record: Record) -> bytes:
        told = {**record, "after": self._last}
        self._last = _crc32(told)
        return (json.dumps(told | {"crc32": self._last}, allow_nan=False) + "\n").encode()

    def _open(self) -> None:
        with disk_errors(self.path):
            # Unbuffered: a line that did not fit on the disk must not be tried again when the file is closed.
            flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.fdopen(os.open(self.path, flags), "r+b", buffering=0)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _begin_again(self) -> None:
        """Somebody removed or renamed the file: what it held can still be read, and is written again."""
        held = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        self._file.close()
        atomic_write(self.path, held)
        self._open()


def read_metrics(path: Path, kept: int | None = None) -> list[Record]:
    """The records of a metrics.jsonl, or its first `kept`; lines that are damaged or unfinished are left out.

    A CheckpointError where it is there and cannot be read.
    """
    lines = _lines(path)[:kept]
    return [record for line in lines if (record := _record(line)) is not None]


def damaged_lines(path: Path) -> list[int]:
    """Numbers, from 1, of the lines of a metrics.jsonl that are not as or not where they were written.

    The last one may be unfinished.
    """
    *whole, last = _lines(path)
    damaged: list[int] = []
    before: int | None = 0
    for number, line in enumerate(whole, 1):
        read = _checked(line)
        told = (read or {}).get("after")  # one of an earlier version has none
        if read is None or (told is not None and before is not None and told != before):
            damaged.append(number)
        before = read.get("crc32") if read else None
    # A killed writer leaves the beginning of a line; a whole one and a letter more had another end.
    return [*damaged, len(whole) + 1] if _record(last) is None and _record(last[:-1]) is not None else damaged


def _lines(path: Path) -> list[bytes]:
    try:
        return read_plain(path, MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return [b""]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Restore it, or remove it.") from error


def _record(line: bytes) -> Record | None:
    """The record of a line, without its checksums; None where it is none, or is not as it was written."""
    if (record := _checked(line)) is None:
        return None
    known = {name.removesuffix("?") for name in _SHAPE} - {"after"}
    return {name: value for name, value in record.items() if name in known}


def _checked(line: bytes) -> Record | None:
    try:
        record = parse_json(line, MOST_OF_LINE)
        check_shape(record, _SHAPE)
    except ValueError:
        return None
    if min(record.get("step", 0), record.get("epoch", 0)) < 0:
        return None
    # One of an earlier version has no checksum.
    return None if "crc32" in record and record["crc32"] != _crc32(record) else record


def _crc32(record: Record) -> int:
    """Of all but what the clock says: equal runs write equal lines but for that."""
    told = {name: value for name, value in record.items() if name not in ("time", "crc32")}
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


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


def open_records(
    folder: Path | None,
    *,
    is_main: bool = True,
    trackers: Sequence[str] = (),
    restore: Callable[[], str] | None = None,
) -> Records:
    """The records of a run in `folder`; ranks other than 0 write and show nothing.

    `restore` makes the folder again where it is gone, and returns a line that says so, or ''.
    """
    if not is_main:
        return Records()
    for name in trackers:
        if name not in TRACKERS:
            raise UsageError(f"No tracker is called {name!r}. Known: {', '.join(TRACKERS)}.")
    sinks: list[Sink] = []
    if folder:
        sinks = [MetricsFile(folder / "metrics.jsonl"), *(TRACKERS[name](folder) for name in trackers)]
    return Records(sinks, make_display(), restore)


def _label(record: Record, name: str) -> str:
    return "/".join((record["kind"], *([record["weights"]] if record["kind"] == "evaluation" else []), name))


def _missing(package: str, extra: str) -> UsageError:
    return UsageError(f"{package} is not installed. Install it with: pip install 'patchloom[{extra}]'")
