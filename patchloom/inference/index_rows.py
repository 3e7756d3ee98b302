"""The rows of an index: which file each vector is of.

    part-00000.json                            image files: a list of [path, label, size, changed_ns]
    part-train-000000-3f9a1c02-77b0e1.parquet  the images of a shard: the same as columns, in groups of 1,024 rows

A shard may hold any number of images, of which a search needs a few: parquet is read group by group. It takes pyarrow
(the extra `parquet`). A part of image files has a few thousand rows, which JSON is quick enough for. So an index of a
folder needs no extra, and the format depends on what is indexed, not on the machine. Both formats are read everywhere:
earlier versions wrote JSON for shards too.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from patchloom.data.sources.parquet import PARQUET_FAULTS, fault_line
from patchloom_runtime.errors import UsageError
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, open_plain, parse_json, read_plain

GROUP_ROWS = 1024  # of parquet, read at once
_ROW = {"path": str, "label": str, "size": int, "changed_ns": int}


class IndexRow(NamedTuple):
    """A file as it was when it was embedded."""

    path: str  # absolute
    label: str  # '' for none
    size: int  # bytes
    changed_ns: int


def encode_rows(rows: Sequence[IndexRow], *, parquet: bool) -> bytes:
    """Return the file of these rows."""
    if not parquet:
        return json.dumps(rows).encode()  # ASCII, so that names that are not UTF-8 survive
    pyarrow = import_parquet("an index of shards")
    paths, labels, sizes, changed = zip(*rows, strict=True)
    columns = [list(map(_encoded, paths)), list(map(_encoded, labels)), sizes, changed]
    packed = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table(columns, schema=_schema(pyarrow)),
        packed,
        row_group_size=GROUP_ROWS,
        compression="zstd",
        use_dictionary=["label"],
        write_statistics=False,
        store_schema=False,
    )
    return packed.getvalue()


def read_rows(path: Path, count: int, wanted: np.ndarray | None = None) -> list[IndexRow]:
    """Read the rows with the numbers `wanted` (sorted), or all `count` rows; from parquet, only the groups of these.

    Raises OSError, or ValueError if the file is damaged or has another number of rows.
    """
    if path.suffix == ".json":
        rows = _parse_rows(read_plain(path))
        _check_count(len(rows), count)
        return rows if wanted is None else [rows[number] for number in wanted.tolist()]
    pyarrow = import_parquet(str(path))
    try:
        with open_plain(path) as file, pyarrow.parquet.ParquetFile(file, read_dictionary=["path", "label"]) as table:
            return list(_read_groups(table, _schema(pyarrow, read=True), count, wanted))
    except PARQUET_FAULTS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"it cannot be read as rows in parquet ({fault_line(error)})") from error


def import_parquet(what: str) -> ModuleType:
    """Return pyarrow; raise UsageError, which says that `what` needs it, if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{what} needs pyarrow; pip install 'patchloom[parquet]'") from None
    return pyarrow


def _parse_rows(data: bytes) -> list[IndexRow]:
    rows = parse_json(data)
    check_shape(rows, list)
    types = list(_ROW.values())
    for row in rows:
        if type(row) is not list or list(map(type, row)) != types or max(map(int.bit_length, row[2:])) > 63:
            check_shape(row, list)
            check_shape(dict(zip(_ROW, row, strict=True)), _ROW)  # says which value is wrong
    return list(map(IndexRow._make, rows))


def _read_groups(table: Any, schema: Any, count: int, wanted: np.ndarray | None) -> Iterator[IndexRow]:
    if not table.schema_arrow.equals(schema):
        raise ValueError(f"its columns are not {', '.join(f'{name} ({kind.__name__})' for name, kind in _ROW.items())}")
    groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
    sizes = [group.num_rows for group in groups]
    if min(sizes, default=0) < 0 or sum(sizes) != count:
        raise ValueError(f"its groups have {sum(sizes):,} rows, expected {count:,}")
    starts = np.cumsum([0, *sizes])
    numbers = np.arange(count) if wanted is None else wanted
    bounds = np.searchsorted(numbers, starts).tolist()
    for place, (group, first, last) in enumerate(zip(groups, bounds, bounds[1:], strict=False)):
        if first == last:
            continue
        if group.total_byte_size > MOST_BYTES:
            raise ValueError(f"it has a group of {group.total_byte_size:,} bytes, expected at most {MOST_BYTES:,}")
        rows = table.read_row_group(place)
        _check_count(rows.num_rows, group.num_rows)
        if wanted is not None:
            rows = rows.take(numbers[first:last] - starts[place])
        paths, labels, sizes, changed = rows.columns
        yield from map(IndexRow, _texts(paths), _texts(labels), sizes.to_numpy().tolist(), changed.to_numpy().tolist())


def _texts(column: Any) -> Iterator[str]:
    """Yield the texts of a column. Equal ones are one object, so that a file with many takes no more memory than it."""
    for chunk in column.chunks:
        texts = [text.decode("utf-8", "surrogatepass") for text in chunk.dictionary.to_numpy(False).tolist()]
        yield from map(texts.__getitem__, chunk.indices.to_numpy().tolist())


def _check_count(rows: int, expected: int) -> None:
    if rows != expected:
        raise ValueError(f"it has {rows:,} rows, expected {expected:,}")


def _schema(pyarrow: Any, *, read: bool = False) -> Any:
    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.binary()) if read else pyarrow.binary()
    types = {str: text, int: pyarrow.int64()}
    return pyarrow.schema([pyarrow.field(name, types[kind], nullable=False) for name, kind in _ROW.items()])


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # names that are not UTF-8 hold surrogates
