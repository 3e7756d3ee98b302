"""What was seen of each picture, kept in the user's cache folder until the picture's file changes.

One SQLite file for each folder of data, in $XDG_CACHE_HOME/patchloom/check or ~/.cache/patchloom/check. Processes that
look through the same folder take turns, so that the later ones find what the first has seen.
"""

import errno
import fcntl
import hashlib
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from patchloom.data.duplicates import DIGEST_BYTES, THUMBNAIL_BYTES
from patchloom.data.sets import Stamp
from patchloom.data.workers import is_stopped

_LAYOUT = 3  # of the cached rows, and of what they were computed by
_ASKED_EVERY_S = 0.3  # while another process looks
_SAID_AFTER = 10  # times asked


class Sight(NamedTuple):
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


_TYPES = (bytes, int, int, str, str, int, int, int, int, bytes, bytes, str)  # of a row


def _is_whole(row: tuple[Any, ...]) -> bool:
    """Whether a row is one that was written here, in which others rely on lengths."""
    if tuple(map(type, row)) != _TYPES:
        return False
    sight = Sight._make(row[3:])
    if sight.error:
        return not sight.thumbnail
    lengths = (len(sight.digest), len(sight.thumbnail))
    return lengths == (DIGEST_BYTES, THUMBNAIL_BYTES) and min(sight.width, sight.height) > 0


class Seen:
    """The sights of one folder. A damaged file is begun anew; one that cannot be written is done without."""

    def __init__(self, home: str) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        name = hashlib.blake2b(os.fsencode(os.path.realpath(home)), digest_size=16).hexdigest()
        self.path = Path(cache, "patchloom", "check", f"{name}-{_LAYOUT}.sqlite")
        self._usable = True

    def read(self) -> dict[Stamp, Sight]:
        """Everything that is kept."""
        try:
            with closing(self._open()) as database:
                found = database.execute("SELECT * FROM sights")
                rows = found.fetchall()
            if len(found.description) != len(_TYPES) or not all(map(_is_whole, rows)):
                raise TypeError("not rows that were written here")
            return {row[:3]: Sight._make(row[3:]) for row in rows}
        except (OSError, sqlite3.OperationalError):
            return {}
        except (sqlite3.DatabaseError, TypeError):
            with suppress(OSError):
                self.path.unlink()
            return {}

    def count(self) -> int:
        """How many are kept."""
        try:
            with closing(self._open()) as database:
                return int(database.execute("SELECT count(*) FROM sights").fetchone()[0])
        except (OSError, sqlite3.Error):
            return 0

    def write(self, sights: Sequence[tuple[Stamp, Sight]]) -> None:
        """Keep these too."""
        if not self._usable or not sights:
            return
        columns = ", ".join(Sight._fields)
        places = ", ".join("?" * (3 + len(Sight._fields)))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(self.path) and not os.path.isfile(self.path):
                raise OSError("not a file: SQLite would wait for a pipe")
            with closing(sqlite3.connect(self.path)) as database, database:
                # Nothing is lost when this process dies; after a power cut the file may be begun anew.
                database.execute("PRAGMA synchronous = OFF")
                key = "path BLOB PRIMARY KEY, bytes INTEGER, state INTEGER"
                database.execute(f"CREATE TABLE IF NOT EXISTS sights ({key}, {columns})")
                rows = [stamp + sight for stamp, sight in sights]
                database.executemany(f"INSERT OR REPLACE INTO sights VALUES ({places})", rows)
        except (OSError, sqlite3.Error):
            self._usable = False

    def _open(self) -> sqlite3.Connection:
        if not os.path.isfile(self.path):
            raise FileNotFoundError(self.path)
        return sqlite3.connect(self.path)


@contextmanager
def taking_turns(kept: Sequence[Seen], waiting: Callable[[int], None]) -> Iterator[None]:
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


def open_lock(path: Path) -> TextIO:
    """The file of a lock, made where there is none; an OSError where it is a link or no file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(descriptor, "r+", errors="replace")


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
