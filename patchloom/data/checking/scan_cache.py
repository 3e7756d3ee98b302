"""What was seen of each picture, kept in the user's cache folder until the picture's file changes.

One SQLite file for each folder of data, in $XDG_CACHE_HOME/patchloom/check or ~/.cache/patchloom/check. Processes that
look through the same folder take turns, so that the later ones find what the first has seen.
"""

import fcntl
import hashlib
import marshal
import os
import sqlite3
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from patchloom.data.batches.workers import is_stopped
from patchloom.data.checking.duplicates import DIGEST_BYTES, THUMBNAIL_BYTES
from patchloom.data.datasets import Stamp
from patchloom.disk import open_lock

_LAYOUT = 4  # of the cached rows, and of what they were computed by
_ASKED_EVERY_S = 0.3  # while another process looks
_SAID_AFTER = 10  # times asked


class ImageScan(NamedTuple):
    """What one look at a picture showed; everything after `error` is empty where it could not be read."""

    error: str = ""
    mode: str = ""  # of the file; '' where the source has no files
    width: int = 0  # upright
    height: int = 0
    rotated: bool = False
    animated: bool = False
    digest: bytes = b""  # of the file; of the pixels where the source has no files
    thumbnail: bytes = b""
    faults: str = ""  # of its mask and boxes: lines of kind, tab, detail


_KEY = "path BLOB PRIMARY KEY, bytes INTEGER, state INTEGER"
_TABLE = f"CREATE TABLE sights ({_KEY}, {', '.join(ImageScan._fields)}, crc32 INTEGER)"
# All that a file of ours has. A view, a trigger or a column that is computed could go on for ever.
_SCHEMA = [("table", "sights", _TABLE), ("index", "sqlite_autoindex_sights_1", None)]
_LEAST_OF_ROW = 16  # bytes
# Steps of SQLite between looks at their number; looks; bytes of the file for one look more.
_OFTEN, _LOOKS, _BYTES_OF_LOOK = 10_000, 10_000, 1_000
# What a file raises that was not written here; MemoryError where it declares absurd sizes.
_DAMAGE = (sqlite3.Error, TypeError, UnicodeDecodeError, MemoryError)
_TYPES = (bytes, int, int, str, str, int, int, int, int, bytes, bytes, str)  # of a row, without its checksum


def _crc32(row: tuple[Any, ...]) -> int:
    """The checksum of a row, which SQLite does not keep: a flipped bit would be another size of a picture."""
    return zlib.crc32(marshal.dumps(row, 2))


def _row(sight: tuple[Stamp, ImageScan]) -> tuple[Any, ...]:
    """A row as SQLite returns it, which has no bool, and its checksum."""
    values = tuple(int(value) if isinstance(value, bool) else value for part in sight for value in part)
    return (*values, _crc32(values))


def _is_whole(row: tuple[Any, ...]) -> bool:
    """Whether a row is one that was written here, in which others rely on lengths."""
    *values, crc32 = row
    if tuple(map(type, values)) != _TYPES or _crc32(tuple(values)) != crc32:
        return False
    sight = ImageScan._make(values[3:])
    if sight.error:
        return not sight.thumbnail
    lengths = (len(sight.digest), len(sight.thumbnail))
    return lengths == (DIGEST_BYTES, THUMBNAIL_BYTES) and min(sight.width, sight.height) > 0


class ScanCache:
    """The sights of one folder. A damaged file is begun anew; one that cannot be written is done without."""

    def __init__(self, home: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = hashlib.blake2b(os.fsencode(os.path.realpath(home)), digest_size=16).hexdigest()
        self.path = Path(cache, "patchloom", "check", f"{name}-{_LAYOUT}.sqlite")
        self._usable = True

    def read(self) -> dict[Stamp, ImageScan]:
        """Everything that is kept."""
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
        """How many are kept."""
        try:
            with closing(self._open()) as database:
                _has_table(database)
                return int(database.execute("SELECT count(*) FROM sights").fetchone()[0])
        except (OSError, *_DAMAGE):
            return 0

    def write(self, sights: Sequence[tuple[Stamp, ImageScan]]) -> None:
        """Keep these too."""
        if not self._usable or not sights:
            return
        places = ", ".join("?" * (len(_TYPES) + 1))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.path) and not os.path.isfile(self.path):
                raise OSError("not a file: SQLite would wait for a pipe")
            with closing(self._connect()) as database, database:
                # Nothing is lost when this process dies; after a power cut the file may be begun anew.
                database.execute("PRAGMA synchronous = OFF")
                if not _has_table(database):
                    database.execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS"))
                database.executemany(f"INSERT OR REPLACE INTO sights VALUES ({places})", map(_row, sights))
        except (OSError, *_DAMAGE):
            self._usable = False

    def _open(self) -> sqlite3.Connection:
        if not os.path.isfile(self.path):
            raise FileNotFoundError(self.path)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """The database, whose queries are ended where they take more steps than a file of its size can need."""
        size = os.path.getsize(self.path) if os.path.isfile(self.path) else 0
        looks = iter(range(_LOOKS + size // _BYTES_OF_LOOK))
        database = sqlite3.connect(self.path)
        database.set_progress_handler(lambda: next(looks, None) is None, _OFTEN)
        return database


def _has_table(database: sqlite3.Connection) -> bool:
    """Whether there is our table; a TypeError where there is anything else."""
    found = database.execute("SELECT type, name, sql FROM sqlite_master LIMIT 3").fetchall()
    if found and found != _SCHEMA:
        raise TypeError("not a file that was written here")
    return bool(found)


def _rows(database: sqlite3.Connection, path: Path) -> Iterator[tuple[Stamp, ImageScan]]:
    """What is kept; a TypeError where it is not of our kind, or more than its file, as pages that form a circle are."""
    if not _has_table(database):
        return
    rows = database.execute("SELECT * FROM sights")
    most = os.path.getsize(path)  # from now on nobody writes
    for row in rows:
        if not _is_whole(row):
            raise TypeError("not rows that were written here")
        most -= _LEAST_OF_ROW + sum(len(value) for value in row if isinstance(value, str | bytes))
        if most < 0:
            raise TypeError("more rows than its size")
        yield row[:3], ImageScan._make(row[3:-1])


@contextmanager
def taking_turns(kept: Sequence[ScanCache], waiting: Callable[[int], None]) -> Iterator[None]:
    """Be the only process that looks into these folders; `waiting` hears how many pictures the other one has seen."""
    with ExitStack() as stack:
        for one in sorted(kept, key=lambda one: one.path):
            try:
                one.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open_lock(one.path.with_suffix(".lock")))
                asked = 0
                while not _locked(file.fileno()):
                    waiting(sum(other.count() for other in kept))
                    time.sleep(_ASKED_EVERY_S)
                    asked += 1
                    if asked == _SAID_AFTER:
                        _say_who(file)
                file.seek(0)
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            except OSError:
                continue  # a cache that cannot be written, or a file system without locks
        yield


def _say_who(file: TextIO) -> None:
    """Who holds the lock, on stderr: a wait for a process that is stopped would never end."""
    file.seek(0)
    holder = file.read(32).strip()
    if holder.isdecimal() and is_stopped(int(holder)):
        advice = f"it is stopped; let it go on with kill -CONT {holder}, or end it"
    else:
        advice = "its looks are shared"
    print(f"waiting for process {holder or '?'}, which looks through the same pictures: {advice}", file=sys.stderr)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
