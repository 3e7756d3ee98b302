"""Rows of integers, stored and sorted on disk in bounded memory. A large check has billions of them.

`RowFile` appends rows of uint64 to a file and reads them back in blocks. `RowSorter` collects rows, writes a sorted run
whenever it holds ROWS_IN_MEMORY of them, and merges the runs: memory does not depend on the number of rows, nor on how
many of them are equal. Both live in a scratch folder that its owner removes.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROWS_IN_MEMORY = 1 << 21  # of up to four columns; sorting takes about 90 bytes for each
_FEWEST = 256  # rows of a run that are read at once


class RowFile:
    """Rows of uint64 in a file, in the order in which they were added."""

    def __init__(self, path: Path, columns: int) -> None:
        self.path, self.columns, self.count = path, columns, 0

    def add(self, rows: np.ndarray) -> None:
        """Append (n, columns) rows."""
        rest = np.ascontiguousarray(rows, np.uint64).data.cast("B") if len(rows) else b""
        with open(self.path, "ab", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
        self.count += len(rows)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return some of the rows."""
        at = 8 * self.columns * start
        return np.fromfile(self.path, np.uint64, count * self.columns, offset=at).reshape(-1, self.columns)

    def blocks(self, size: int | None = None) -> Iterator[np.ndarray]:
        """Yield all rows in blocks."""
        size = size or ROWS_IN_MEMORY
        for start in range(0, self.count, size):
            yield self.read(start, min(size, self.count - start))

    def remove(self) -> None:
        """Free the disk before the scratch folder is removed."""
        self.path.unlink(missing_ok=True)


class _Run(NamedTuple):
    """A sorted run in a file of runs."""

    start: int
    end: int


class RowSorter:
    """Rows of uint64 that are sorted by their first `by` columns. Rows that agree in these have no certain order.

    If rows are `numbered`, they are added in the order of the last of these columns, and sorting takes half the time.
    """

    _numbers = itertools.count()

    def __init__(self, scratch: Path, columns: int, by: int | None = None, *, numbered: bool = False) -> None:
        self.columns, self._by = columns, by or columns
        self._sorted_columns = self._by - numbered
        self._runs: list[_Run] = []
        self._file: RowFile | None = None
        self._path = scratch / f"runs-{next(self._numbers)}"
        self._held: list[np.ndarray] = []
        self._held_rows = 0

    def add(self, rows: np.ndarray) -> None:
        """Add (n, columns) rows."""
        for start in range(0, len(rows), ROWS_IN_MEMORY):
            block = rows[start : start + ROWS_IN_MEMORY]
            if self._held_rows + len(block) > ROWS_IN_MEMORY:
                self._write_run()
            self._held.append(np.array(block, np.uint64))
            self._held_rows += len(block)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows in order, in blocks of at most about ROWS_IN_MEMORY, and forget them."""
        if self._file is None:
            if self._held_rows:
                yield self._take_sorted()
            return
        self._write_run()
        yield from self._merged(self._file)
        self._file.remove()

    def _take_sorted(self) -> np.ndarray:
        rows = np.concatenate(self._held)
        self._held, self._held_rows = [], 0
        return self._sorted(rows)

    def _sorted(self, rows: np.ndarray) -> np.ndarray:
        return rows[np.lexsort(rows.T[self._sorted_columns - 1 :: -1])]  # stable: runs are merged in their order

    def _write_run(self) -> None:
        if not self._held_rows:
            return
        self._file = self._file or RowFile(self._path, self.columns)
        start = self._file.count
        self._file.add(self._take_sorted())
        self._runs.append(_Run(start, self._file.count))

    def _merged(self, file: RowFile) -> Iterator[np.ndarray]:
        """Merge the runs: of each, a block is held; all rows up to the first end of a block are next."""
        size = max(_FEWEST, ROWS_IN_MEMORY // len(self._runs))
        next_at = [run.start for run in self._runs]
        held = [np.zeros((0, self.columns), np.uint64) for _ in self._runs]
        while True:
            for number, run in enumerate(self._runs):
                if not len(held[number]) and next_at[number] < run.end:
                    count = min(size, run.end - next_at[number])
                    held[number] = file.read(next_at[number], count)
                    next_at[number] += count
            unread = [number for number, run in enumerate(self._runs) if next_at[number] < run.end]
            if not unread:
                break
            bound = min(tuple(held[number][-1, : self._by].tolist()) for number in unread)
            counts = [_rows_up_to(rows, bound) for rows in held]
            yield self._sorted(np.concatenate([rows[:count] for rows, count in zip(held, counts, strict=True)]))
            held = [rows[count:] for rows, count in zip(held, counts, strict=True)]
        if any(map(len, held)):
            yield self._sorted(np.concatenate(held))


def _rows_up_to(rows: np.ndarray, bound: tuple[int, ...]) -> int:
    """Return the number of sorted rows whose first columns are at most `bound`."""
    low, high = 0, len(rows)
    for column, value in enumerate(bound):
        values, limit = rows[low:high, column], np.uint64(value)
        low, high = low + int(np.searchsorted(values, limit)), low + int(np.searchsorted(values, limit, side="right"))
    return high
