"""`metrics.jsonl`: one record per line, on disk as soon as it is written; `engine.records` says what a record is.

A line also has "after", the "crc32" of the line before it (0 in the first), so that one that is lost or moved is
noticed, and "crc32", of everything in it but "time", which has one
of its own.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from patchloom.disk import atomic_write, disk_errors
from patchloom.engine.display import make_display
from patchloom.engine.records import TRACKERS, Record, Records, Sink
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

METRICS = "metrics.jsonl"
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

    def sync(self) -> None:
        """Have all lines on disk."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if not self._is_there():
            self._begin_again()
        self._file.close()

    def _next(self, record: Record) -> bytes:
        told = {**record, "after": self._last}
        if "time" in record:
            told["time"] = record["time"] | {"crc32": _crc32(record["time"])}
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
    record.get("time", {}).pop("crc32", None)
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
    # One of an earlier version has no checksum, or none of its time.
    if record.keys() & {"crc32", "after"} and record.get("crc32") != _crc32(record):
        return None
    time = record.get("time")
    return None if time is not None and "after" in record and time.get("crc32") != _crc32(time) else record


def _crc32(record: Record) -> int:
    """Of a record without what the clock says, which equal runs write otherwise; or of that."""
    told = {name: value for name, value in record.items() if name not in ("time", "crc32")}
    if "after" in record:  # one of an earlier version says nothing of it
        told["timed"] = "time" in record
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


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
