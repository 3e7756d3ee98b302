"""Rows of an index by path, in a temporary SQLite database.

SQLite keeps 64 MiB of it in memory and moves the rest to an unnamed file in the temporary folder (SQLITE_TMPDIR), which
is gone when the process ends. A row takes the bytes of its path and about 40 more.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from patchloom.inference.index_rows import IndexRow
from patchloom_runtime.errors import ResourceError

_CACHE_KIB = 64 << 10


class PlacedRow(NamedTuple):
    """A row and where it is in the index."""

    row: IndexRow
    part: int  # number of its part
    at: int  # row in the part


class RowTable:
    """Rows by path. A row that is added replaces the one with the same path.

    Leaving its context removes the table, and raises ResourceError if the disk was full.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("")
        for setting in (f"cache_size = -{_CACHE_KIB}", "journal_mode = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.execute(
            "CREATE TABLE rows (path BLOB PRIMARY KEY, label BLOB, size INT, changed_ns INT, part INT, at INT)"
            " WITHOUT ROWID"
        )

    def __enter__(self) -> "RowTable":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._database.close()
        if isinstance(error, sqlite3.OperationalError):
            raise ResourceError(
                f"the rows of the index cannot be stored in the temporary folder ({error}). Free some space there, or "
                "set SQLITE_TMPDIR to another folder, and run again."
            ) from error

    def add(self, rows: Iterable[PlacedRow]) -> None:
        """Add rows, or replace those with the same paths."""
        values = ((_key(row.path), _key(row.label), *row[2:], part, at) for row, part, at in rows)
        self._database.executemany("REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)", values)

    def get(self, path: str) -> PlacedRow | None:
        """Return the row of a path; None if there is none."""
        values = self._database.execute("SELECT * FROM rows WHERE path = ?", (_key(path),)).fetchone()
        return _placed(values) if values else None

    def remove(self, paths: Iterable[str]) -> None:
        """Remove the rows of paths."""
        self._database.executemany("DELETE FROM rows WHERE path = ?", ((_key(path),) for path in paths))

    def __iter__(self) -> Iterator[PlacedRow]:
        return map(_placed, self._database.execute("SELECT * FROM rows"))


def _key(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # SQLite's texts hold no surrogates, which odd file names have


def _placed(values: tuple[bytes, bytes, int, int, int, int]) -> PlacedRow:
    path, label, size, changed_ns, part, at = values
    row = IndexRow(path.decode("utf-8", "surrogatepass"), label.decode("utf-8", "surrogatepass"), size, changed_ns)
    return PlacedRow(row, part, at)
