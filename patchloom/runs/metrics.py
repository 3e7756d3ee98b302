"""`metrics.jsonl`: one record per line, flushed as it is written; `engine.records` defines a record.

Each line also holds "after", the "crc32" of the line before it (0 in the first), so that lost or moved lines are
noticed, and its own "crc32", which covers everything except "time". "time" has a "crc32" of its own.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from patchloom.disk import atomic_write, disk_errors
from patchloom.engine.display import make_display
from patchloom.engine.records import Records, Sink
from patchloom.engine.trackers import TRACKERS, Record, check_trackers
from patchloom.runs.checkpoints import lines_written
from patchloom.runs.status import StatusFile
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import check_shape, open_no_link, open_plain, parse_json, read_plain

METRICS = "metrics.jsonl"
_START = b'{"'  # of every line
MOST_BYTES, MOST_OF_LINE = 1 << 28, 1 << 20  # a year of training writes less
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
    """The file as a sink of records."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, kept: int) -> int:
        """Keep the first `kept` records and drop those after the checkpoint, which the resumed run writes again."""
        records = read_metrics(self.path, kept)
        self._last = 0
        atomic_write(self.path, b"".join(map(self._next, records)))
        self._open()
        return len(records)

    def write(self, record: Record) -> None:
        """Append a record. Values that are not finite become null."""
        finite = {name: v if math.isfinite(v) else None for name, v in record["values"].items()}
        if not self._is_in_place():
            self._write_again()
        with disk_errors(self.path):
            self._file.write(self._next({**record, "values": finite}))

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with disk_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._is_in_place():
            self._write_again()
        self._file.close()

    def _next(self, record: Record) -> bytes:
        line = {**record, "after": self._last}
        if "time" in record:
            line["time"] = record["time"] | {"crc32": _crc32(record["time"])}
        self._last = _crc32(line)
        return (json.dumps(line | {"crc32": self._last}, allow_nan=False) + "\n").encode()

    def _open(self) -> None:
        with disk_errors(self.path):
            # Unbuffered, so that a line that did not fit on the disk is not written again when the file is closed.
            self._file = os.fdopen(open_no_link(self.path, os.O_RDWR | os.O_APPEND), "r+b", buffering=0)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _write_again(self) -> None:
        """Restore a file that was removed or renamed: its contents can be read as long as it is open."""
        self._file.seek(0)
        contents = self._file.read()
        self._file.close()
        atomic_write(self.path, contents)
        self._open()


class MetricsTail:
    """The records of a file that another process may be writing or replacing. Each update reads what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        self._start, self._last = 0, b""  # where the last whole line begins, and its bytes

    def update(self) -> None:
        """Read the lines that were added. A resumed run replaces the file, which is then read from its beginning."""
        try:
            with open_plain(self.path) as file:
                self._read(file)
        except OSError:  # not written yet, removed, or replaced by something else
            self.records, self._start, self._last = [], 0, b""

    def _read(self, file: FileIO) -> None:
        file.seek(self._start)
        if file.read(len(self._last)) != self._last:
            self.records, self._start, self._last = [], 0, b""
            file.seek(0)
        *lines, _ = file.read(MOST_BYTES).split(b"\n")  # the last one is unfinished
        for line in lines:
            self._start, self._last = self._start + len(self._last), line + b"\n"
            if (record := _record(line)) is not None:
                self.records.append(record)


def read_metrics(path: Path, kept: int | None = None) -> list[Record]:
    """Return the intact records of a file, or those of its first `kept` lines. A missing file has none.

    Raise CheckpointError if the file cannot be read.
    """
    lines = _lines(path)[:kept]
    return [record for line in lines if (record := _record(line)) is not None]


def damaged_lines(path: Path) -> list[int]:
    """Return the numbers (from 1) of lines that were changed or moved. The last line may be unfinished."""
    *whole, last = _lines(path)
    damaged: list[int] = []
    before: int | None = 0
    for number, line in enumerate(whole, 1):
        record = _checked(line)
        after = (record or {}).get("after")  # earlier versions wrote none
        if record is None or (after is not None and before is not None and after != before):
            damaged.append(number)
        before = record.get("crc32") if record else None
    # A killed writer leaves the start of a line, never a whole line with another last character.
    # A power cut leaves zeros in place of what was not yet on the disk.
    is_start = _START.startswith(last.rstrip(b"\0")[: len(_START)])
    is_altered = _record(last) is None and _record(last[:-1]) is not None
    return [*damaged, len(whole) + 1] if is_altered or not is_start else damaged


def metrics_fault(folder: Path) -> str:
    """Return one sentence on what is wrong with the `metrics.jsonl` of a run, or '' if it is intact.

    Lines younger than the newest checkpoint may be missing, as after a power cut.
    """
    path = folder / METRICS
    if damaged := damaged_lines(path):
        others = f" and {len(damaged) - 1} others are" if len(damaged) > 1 else " is"
        return f"{path}: line {damaged[0]}{others} damaged or out of order"
    lines, expected = len(read_metrics(path)), lines_written(folder)
    return f"{path} has {lines} lines, but the newest checkpoint counts {expected}" if lines < expected else ""


def _lines(path: Path) -> list[bytes]:
    try:
        return read_plain(path, MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        return [b""]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Restore it, or remove it.") from error


def _record(line: bytes) -> Record | None:
    """Return the record of a line without its checksums, or None if the line is damaged."""
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
    # Earlier versions wrote no checksum, or none for "time".
    if record.keys() & {"crc32", "after"} and record.get("crc32") != _crc32(record):
        return None
    time = record.get("time")
    return None if time is not None and "after" in record and time.get("crc32") != _crc32(time) else record


def _crc32(record: Record) -> int:
    """Return the checksum of a record without "time", which differs between equal runs; or of the "time" itself."""
    covered = {name: value for name, value in record.items() if name not in ("time", "crc32")}
    if "after" in record:  # earlier versions did not cover it
        covered["timed"] = "time" in record
    return zlib.crc32(json.dumps(covered, sort_keys=True).encode())


def open_records(
    folder: Path | None,
    *,
    is_main: bool = True,
    trackers: Sequence[str] = (),
    restore: Callable[[], str] | None = None,
) -> Records:
    """Return the record writer of a run in `folder`, which does nothing on ranks other than 0.

    `restore` restores a removed folder and returns a line that says so, or ''.
    """
    if not is_main:
        return Records()
    check_trackers(trackers)
    sinks: list[Sink] = [MetricsFile(folder / METRICS)] if folder else []
    trackers_by_name = {name: TRACKERS[name](folder) for name in trackers} if folder else {}
    status = StatusFile(folder) if folder else None
    return Records(sinks, make_display(), restore, trackers_by_name, status)
