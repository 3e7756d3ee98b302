"""Predictions as CSV, parquet, and copies of images in folders by class.

A table is written to a temporary file and renamed when it is complete, a folder likewise, so that an interrupted
`predict` leaves neither. Rows are written as they come: memory does not grow with the number of images.
"""

import csv
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from patchloom.disk import atomic_file, open_new
from patchloom.runs.folders import new_folder
from patchloom_runtime.errors import UsageError
from patchloom_runtime.untrusted import open_plain

ROWS_PER_GROUP = 10_000  # of a parquet file; this many rows are held in memory
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet runs cells that begin like this
_NOT_IN_NAMES = re.compile(r"[^\w .,()&'+-]+")
# Windows opens a device for these, with any ending.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?", re.IGNORECASE)
_NAME_BYTES = 120  # of a class folder, and of a copied file before its ending

Row = Mapping[str, Any]
Columns = Mapping[str, type]
WriteRow = Callable[[Row], None]


@contextmanager
def open_csv(path: Path, columns: Columns) -> Iterator[WriteRow]:
    """Yield a function that writes a row.

    A relative path that begins like a formula gets ./ in front, other text an apostrophe.
    """
    with atomic_file(path) as temporary, io.BufferedWriter(open_new(temporary)) as file:
        text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        yield lambda row: writer.writerow([_csv_cell(name, row.get(name)) for name in columns])
        text.flush()
        os.fsync(file.fileno())
        text.detach()


@contextmanager
def open_parquet(path: Path, columns: Columns) -> Iterator[WriteRow]:
    """Yield a function that writes a row, in row groups of `ROWS_PER_GROUP`."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"--parquet {path} needs pyarrow; pip install 'patchloom[parquet]'") from None
    schema = pa.schema([(name, pa.float64() if kind is float else pa.string()) for name, kind in columns.items()])
    rows: list[Row] = []
    with atomic_file(path) as temporary, io.BufferedWriter(open_new(temporary)) as file:
        with parquet.ParquetWriter(file, schema) as writer:

            def write(row: Row) -> None:
                rows.append({name: _parquet_cell(row.get(name)) for name in columns})
                if len(rows) == ROWS_PER_GROUP:
                    flush()

            def flush() -> None:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()

            yield write
            if rows:
                flush()
        file.flush()
        os.fsync(file.fileno())


OPENERS: dict[str, Callable[[Path, Columns], AbstractContextManager[WriteRow]]] = {
    "csv": open_csv,
    "parquet": open_parquet,
}


@contextmanager
def class_folders(out: Path) -> Iterator[Callable[[str, str], bool]]:
    """Yield a function (path, label) that copies a file into the folder of its label in the new folder `out`.

    It returns False if the path is not a file, such as a frame of a video. Originals are only read.
    """
    with new_folder(out) as folder:
        yield _ClassFolders(folder).copy


class _ClassFolders:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[str, Path] = {}  # label → folder
        self._taken: dict[tuple[Path, str], int] = {}  # the last number of names that occurred more than once

    def copy(self, path: str, label: str) -> bool:
        if not os.path.isfile(path):
            return False
        folder = self._folder_of(label)
        stem, ending = os.path.splitext(os.path.basename(path))
        with open_plain(path) as source:
            target = self._create(folder, _safe(stem), ending)
            with target:
                shutil.copyfileobj(source, target, 1 << 20)
            times = os.fstat(source.fileno())
            os.utime(target.name, ns=(times.st_atime_ns, times.st_mtime_ns))
        return True

    def _folder_of(self, label: str) -> Path:
        """Return the folder of a label; its name has no characters that a path or a terminal would act on."""
        if label not in self._names:
            name = _safe(_NOT_IN_NAMES.sub("_", label).strip(". ")) or "_"
            used = {folder.name.casefold() for folder in self._names.values()}
            number, unique = 1, name
            while unique.casefold() in used:
                number += 1
                unique = f"{name}-{number}"
            self._names[label] = self._folder / unique
            self._names[label].mkdir()
        return self._names[label]

    def _create(self, folder: Path, stem: str, ending: str) -> io.BufferedWriter:
        """Create a file that does not exist yet: rose.jpg, rose-2.jpg, …"""
        key = folder, f"{stem}{ending}".casefold()
        number = self._taken.get(key, 1)
        while True:
            path = folder / (f"{stem}{ending}" if number == 1 else f"{stem}-{number}{ending}")
            try:
                return open(path, "xb")
            except FileExistsError:
                number += 1
                self._taken[key] = number


def _safe(name: str) -> str:
    """Return a name that is short enough, and on Windows not that of a device."""
    name = os.fsdecode(os.fsencode(name)[:_NAME_BYTES]) if len(os.fsencode(name)) > _NAME_BYTES else name
    return f"_{name}" if _DEVICE.fullmatch(name) else name


def _csv_cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    text = "" if value is None else str(value)
    if len(text) < 2 or not text.startswith(_FORMULA):
        return text
    return os.path.join(".", text) if name == "path" else f"'{text}"


def _parquet_cell(value: Any) -> Any:
    # A file name that is not UTF-8 has characters that parquet cannot store.
    return (value.encode("utf-8", "backslashreplace").decode() or None) if isinstance(value, str) else value
