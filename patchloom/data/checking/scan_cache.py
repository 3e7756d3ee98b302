"""Cache of image scans, in the user's cache folder. An entry is valid until the image's file changes.

There is one SQLite file per data folder, in $XDG_CACHE_HOME/patchloom/check or ~/.cache/patchloom/check. Processes that
scan the same folder take turns, so that later ones use the results of the first.
"""

import hashlib
import marshal
import os
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from patchloom.data.annotations.faults import AnnotationFault
from patchloom.data.batches.workers import is_stopped
from patchloom.data.checking.duplicates import DIGEST_BYTES, THUMBNAIL_BYTES
from patchloom.data.images.image_store import Stamp
from patchloom.disk import hold_lock, lock_holder, open_lock

_LAYOUT = 4  # version of the cached rows, and of the code that computed them
_POLL_EVERY_S = 0.3  # while another process scans
_REPORT_AFTER = 10  # polls


class ImageScan(NamedTuple):
    """Result of scanning one image. If it could not be read, `error` says why and the other fields are empty."""

    error: str = ""
    mode: str = ""  # of the file; '' if the source has no files
    width: int = 0  # of the upright image
    height: int = 0
    rotated: bool = False
    animated: bool = False
    digest: bytes = b""  # of the file; of the pixels if the source has no files
    thumbnail: bytes = b""
    faults: tuple[AnnotationFault, ...] = ()  # of its mask and boxes


_KEY = "path BLOB PRIMARY KEY, bytes INTEGER, state INTEGER"
_TABLE = f"CREATE TABLE sights ({_KEY}, {', '.join(ImageScan._fields)}, crc32 INTEGER)"
# All that a file written here contains. In a foreign file, a view, a trigger or a computed column could run forever.
_SCHEMA = [("table", "sights", _TABLE), ("index", "sqlite_autoindex_sights_1", None)]
_MIN_ROW_BYTES = 16
# Budget of a query: SQLite steps between checks, number of checks, and bytes of the file per additional check.
_STEPS_PER_CHECK, _CHECKS, _BYTES_PER_CHECK = 10_000, 10_000, 1_000
# Errors raised by files that were not written here; MemoryError if they declare absurd sizes.
_DAMAGE = (sqlite3.Error, TypeError, UnicodeDecodeError, MemoryError)
_TYPES = (bytes, int, int, str, str, int, int, int, int, bytes, bytes, str)  # of a row, without its checksum


def _crc32(row: tuple[Any, ...]) -> int:
    """Return the checksum of a row. SQLite has none, and a flipped bit would change the size of an image."""
    return zlib.crc32(marshal.dumps(row, 2))


def _row(stamp: Stamp, scan: ImageScan) -> tuple[Any, ...]:
    """Return a row as SQLite returns it (without bool), with its checksum. Faults are lines of kind, tab, detail."""
    faults = "\n".join(f"{fault.kind}\t{' '.join(fault.detail.splitlines())}" for fault in scan.faults)
    values = tuple(int(value) if isinstance(value, bool) else value for value in (*stamp, *scan[:-1], faults))
    return (*values, _crc32(values))


def _scan_of_row(row: tuple[Any, ...]) -> ImageScan:
    """Return the scan in a row. Raise TypeError if the row was not written here: readers rely on its lengths."""
    *values, crc32 = row
    if tuple(map(type, values)) != _TYPES or _crc32(tuple(values)) != crc32:
        raise TypeError("not a row that was written here")
    lines = [line.partition("\t") for line in values[-1].split("\n") if line]
    scan = ImageScan._make([*values[3:-1], tuple(AnnotationFault(kind, detail) for kind, _, detail in lines)])
    lengths = (len(scan.digest), len(scan.thumbnail))
    if scan.error:
        intact = not scan.thumbnail
    else:
        intact = lengths == (DIGEST_BYTES, THUMBNAIL_BYTES) and min(scan.width, scan.height) > 0
    if not intact:
        raise TypeError("not a row that was written here")
    return scan


class ScanCache:
    """The scans of one data folder. A damaged file is replaced; if the file cannot be written, nothing is cached."""

    def __init__(self, home: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = hashlib.blake2b(os.fsencode(os.path.realpath(home)), digest_size=16).hexdigest()
        self.path = Path(cache, "patchloom", "check", f"{name}-{_LAYOUT}.sqlite")
        self._usable = True

    def read(self) -> dict[Stamp, ImageScan]:
        """Return all cached scans."""
        try:
            with closing(self._open()) as database:
                return dict(_rows(database, self.path))
        except (OSError, sqlite3.OperationalError):
            return {}
        except _DAMAGE:
            with suppress(OSError):
                self.path.unlink()
            return {}

    def count(self) -> int:
        """Return the number of cached scans."""
        try:
            with closing(self._open()) as database:
                _has_table(database)
                return int(database.execute("SELECT count(*) FROM sights").fetchone()[0])
        except (OSError, *_DAMAGE):
            return 0

    def write(self, scans: Sequence[tuple[Stamp, ImageScan]]) -> None:
        """Add scans to the cache."""
        if not self._usable or not scans:
            return
        places = ", ".join("?" * (len(_TYPES) + 1))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.path) and not os.path.isfile(self.path):
                raise OSError("not a file: SQLite would wait for a pipe")
            with closing(self._connect()) as database, database:
                # Nothing is lost when this process dies; after a power cut the file may be damaged and is replaced.
                database.execute("PRAGMA synchronous = OFF")
                if not _has_table(database):
                    database.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS"))
                database.executemany(
                    f"INSERT OR REPLACE INTO sights VALUES ({places})", (_row(*entry) for entry in scans)
                )
        except (OSError, *_DAMAGE):
            self._usable = False

    def _open(self) -> sqlite3.Connection:
        if not os.path.isfile(self.path):
            raise FileNotFoundError(self.path)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Connect to the database. Queries end if they take more steps than a file of its size can need."""
        size = os.path.getsize(self.path) if os.path.isfile(self.path) else 0
        budget = iter(range(_CHECKS + size // _BYTES_PER_CHECK))
        database = sqlite3.connect(self.path)
        database.set_progress_handler(lambda: next(budget, None) is None, _STEPS_PER_CHECK)
        return database


def _has_table(database: sqlite3.Connection) -> bool:
    """Return whether the table exists. Raise TypeError if the file contains anything else."""
    schema = database.execute("SELECT type, name, sql FROM sqlite_master LIMIT 3").fetchall()
    if schema and schema != _SCHEMA:
        raise TypeError("not a file that was written here")
    return bool(schema)


def _rows(database: sqlite3.Connection, path: Path) -> Iterator[tuple[Stamp, ImageScan]]:
    """Yield all rows. Raise TypeError if one was not written here, or if pages that form a circle repeat rows."""
    if not _has_table(database):
        return
    rows = database.execute("SELECT * FROM sights")
    remaining = os.path.getsize(path)  # bytes; no process writes during the query
    for row in rows:
        scan = _scan_of_row(row)
        remaining -= _MIN_ROW_BYTES + sum(len(value) for value in row if isinstance(value, str | bytes))
        if remaining < 0:
            raise TypeError("more rows than the size of the file")
        yield row[:3], scan


@contextmanager
def taking_turns(caches: Sequence[ScanCache], waiting: Callable[[int], None]) -> Iterator[None]:
    """Lock these caches. While another process holds a lock, call `waiting` with the number of cached images."""
    with ExitStack() as stack:
        for cache in sorted(caches, key=lambda cache: cache.path):
            try:
                cache.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open_lock(cache.path.with_suffix(".lock")))
                polls = 0
                while not hold_lock(file, wait=False):
                    waiting(sum(other.count() for other in caches))
                    time.sleep(_POLL_EVERY_S)
                    polls += 1
                    if polls == _REPORT_AFTER:
                        _report_holder(file)
            except OSError:
                continue  # a cache that cannot be written, or a file system without locks
        yield


def _report_holder(file: FileIO) -> None:
    """Print which process holds the lock: waiting for a stopped process would never end."""
    holder = lock_holder(file)
    if holder.isdecimal() and is_stopped(int(holder)):
        advice = f"it is stopped; resume it with kill -CONT {holder}, or end it"
    else:
        advice = "its results will be used"
    print(f"waiting for process {holder}, which scans the same images: {advice}", file=sys.stderr)
