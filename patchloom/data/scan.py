"""Every picture of a data set decoded once, in several processes; what was seen is kept in the user's cache folder.

A file is decoded again when its size or time of change differs. The cache is one SQLite file for each data folder, in
$XDG_CACHE_HOME/patchloom/check or ~/.cache/patchloom/check; a scan that was interrupted goes on where it stopped.
"""

import hashlib
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from patchloom.data.decode import decode, facts
from patchloom.data.duplicates import digest, thumbnail
from patchloom.data.folder import FilePictures
from patchloom.data.sets import Pictures
from patchloom.errors import DataError, ResourceError

Progress = Callable[[int, int], None]  # pictures done, of so many
NOT_OPENED = "cannot be read ("  # rights or a failing disk, which may change while the file does not
_LAYOUT = 1  # of the cached rows, and of what they were computed by
_CHUNK = 32  # pictures a process takes at a time
_FEW = 4 * _CHUNK  # up to here starting processes costs more than it saves
_KEPT_EVERY = 2_000  # pictures between writes of the cache


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


class Task(NamedTuple):
    """A picture to look at: the number of its store, and its row there."""

    store: int
    row: int


def scan(
    stores: Sequence[Pictures],
    tasks: Sequence[Task],
    *,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> tuple[list[Sight], int]:
    """What each task shows, and how many pictures had to be decoded for it."""
    stamps = [_stamp(stores[task.store], task.row) if cache else None for task in tasks]
    files = _Cache(stores) if cache else None
    known = files.read() if files else {}
    sights = [known.get(stamp) if stamp else None for stamp in stamps]
    missing = [position for position, sight in enumerate(sights) if sight is None]
    unsaved: list[tuple[Stamp, Sight]] = []
    done = len(tasks) - len(missing)
    try:
        with closing(_look_at(stores, [tasks[i] for i in missing], workers)) as fresh:
            for position, sight in zip(missing, fresh, strict=True):
                sights[position] = sight
                done += 1
                stamp = stamps[position]
                if stamp and not sight.error.startswith(NOT_OPENED):
                    unsaved.append((stamp, sight))
                if files and len(unsaved) >= _KEPT_EVERY:
                    files.write(unsaved)
                    unsaved = []
                if progress:
                    progress(done, len(tasks))
    finally:
        if files:
            files.write(unsaved)
    return [sight for sight in sights if sight is not None], len(missing)


def look(pictures: Pictures, row: int) -> Sight:
    """Decode one picture."""
    where = pictures.where(row)
    mode, rotated, animated = "", False, False
    try:
        data = pictures.encoded(row)
        if data is None:
            picture = pictures.read(row)
        else:
            header = facts(data, where)
            mode, rotated, animated = header.mode, header.rotated, header.animated
            picture = decode(data, where)
    except DataError as error:
        return Sight(error=str(error).removeprefix(f"{where}: "))
    return Sight("", mode, *picture.size, rotated, animated, digest(data or picture), thumbnail(picture))


def _look_at(stores: Sequence[Pictures], tasks: Sequence[Task], workers: int | None) -> Generator[Sight, None, None]:
    """In order. Processes, since two threads were slower than one (benchmarks/LOG.md)."""
    workers = len(os.sched_getaffinity(0)) if workers is None and hasattr(os, "sched_getaffinity") else workers
    workers = workers or os.cpu_count() or 1
    if workers == 1 or len(tasks) <= _FEW:
        yield from (look(stores[task.store], task.row) for task in tasks)
        return
    chunks = [tasks[i : i + _CHUNK] for i in range(0, len(tasks), _CHUNK)]
    context = multiprocessing.get_context()
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(stores,))
    try:
        for sights in pool.map(_look_at_chunk, chunks):
            yield from sights
    except BrokenProcessPool as error:
        raise ResourceError("a process that reads pictures was killed (out of memory?); try one worker") from error
    finally:
        pool.shutdown(cancel_futures=True)


_stores: Sequence[Pictures] = ()  # of a worker process


def _start_worker(stores: Sequence[Pictures]) -> None:
    global _stores
    _stores = stores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers


def _look_at_chunk(tasks: Sequence[Task]) -> list[Sight]:
    return [look(_stores[task.store], task.row) for task in tasks]


# What is kept ---------------------------------------------------------------------------------------------------------

Stamp = tuple[bytes, int, int]  # path below the root, bytes, ns of its last change


def _stamp(pictures: Pictures, row: int) -> Stamp | None:
    """None for what is no file of its own, or has gone."""
    if not isinstance(pictures, FilePictures):
        return None
    key = pictures.key(row)
    try:
        status = os.stat(os.path.join(pictures.root, key))
    except OSError:
        return None
    return os.fsencode(key), status.st_size, status.st_mtime_ns


class _Cache:
    """One SQLite file. A damaged one is begun anew; one that cannot be written (full disk, no rights) is let be."""

    def __init__(self, stores: Sequence[Pictures]) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        roots = sorted({os.path.realpath(store.root) for store in stores if isinstance(store, FilePictures)})
        name = hashlib.blake2b(os.fsencode("\0".join(roots)), digest_size=16).hexdigest()
        self.path = Path(home, "patchloom", "check", f"{name}-{_LAYOUT}.sqlite")
        self._usable = bool(roots)

    def read(self) -> dict[Stamp, Sight]:
        if not self._usable or not self.path.exists():
            return {}
        try:
            with closing(sqlite3.connect(self.path)) as database:
                rows = database.execute("SELECT * FROM sights").fetchall()
            return {row[:3]: Sight._make(row[3:]) for row in rows}
        except sqlite3.OperationalError:
            return {}
        except (sqlite3.DatabaseError, TypeError):
            self.path.unlink(missing_ok=True)
            return {}

    def write(self, sights: Sequence[tuple[Stamp, Sight]]) -> None:
        if not self._usable or not sights:
            return
        columns = ", ".join(Sight._fields)
        places = ", ".join("?" * (3 + len(Sight._fields)))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path)) as database, database:
                key = "path BLOB PRIMARY KEY, bytes INTEGER, changed_ns INTEGER"
                database.execute(f"CREATE TABLE IF NOT EXISTS sights ({key}, {columns})")
                rows = [stamp + sight for stamp, sight in sights]
                database.executemany(f"INSERT OR REPLACE INTO sights VALUES ({places})", rows)
        except (OSError, sqlite3.Error):
            self._usable = False
