"""Rows of parts of an index: parquet and JSON, whole and a few of them, damaged and foreign files."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchloom.inference.index_rows import IndexRow, encode_rows, read_rows
from patchloom_runtime.errors import UsageError
from tests.messages import refused

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

INT64 = st.integers(1 - 2**63, 2**63 - 1)
TEXT = st.text(max_size=8) | st.sampled_from(["", "\udcff.png", "/photos/é, 1.jpg", "a\0b"])
ROWS = [IndexRow(f"/data/train.tar, {number}.jpg", "red" * (number % 2), number, -number) for number in range(2500)]


def stored(folder: Path, rows: list[IndexRow], *, parquet: bool = True) -> Path:
    path = folder / ("rows.parquet" if parquet else "rows.json")
    path.write_bytes(encode_rows(rows, parquet=parquet))
    return path


@given(rows=st.lists(st.builds(IndexRow, TEXT, TEXT, INT64, INT64), min_size=1, max_size=9), data=st.data())
@pytest.mark.parametrize("parquet", [True, False])
def test_rows_are_read_as_they_were_written(tmp_path_factory: Any, parquet: bool, rows: list[IndexRow], data: Any):
    path = stored(tmp_path_factory.mktemp("rows"), rows, parquet=parquet)
    assert read_rows(path, len(rows)) == rows
    wanted = sorted(data.draw(st.lists(st.integers(0, len(rows) - 1))))
    assert read_rows(path, len(rows), np.array(wanted, np.int64)) == [rows[number] for number in wanted]


def test_only_the_groups_of_the_wanted_rows_are_read(tmp_path: Path, monkeypatch) -> None:
    path, read = stored(tmp_path, ROWS), []
    original = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda table, number: read.append(number) or original(table, number)
    )
    wanted = np.array([0, 3, 2047, 2048, 2499])
    assert read_rows(path, 2500, wanted) == [ROWS[number] for number in wanted]
    assert read == [0, 1, 2]
    read.clear()
    assert read_rows(path, 2500, np.array([1500])) == [ROWS[1500]]
    assert read == [1]
    assert read_rows(path, 2500) == ROWS


def table(**columns: Any) -> Any:
    """The columns of three rows, some of them replaced; None drops one."""
    fields = {
        "path": pa.array([b"a", b"b", b"c"]),
        "label": pa.array([b"", b"red", b"red"]),
        "size": pa.array([1, 2, 3]),
        "changed_ns": pa.array([4, 5, 6]),
    }
    kept = {name: column for name, column in (fields | columns).items() if column is not None}
    schema = pa.schema([pa.field(name, column.type, column.null_count > 0) for name, column in kept.items()])
    return pa.table(list(kept.values()), schema=schema)


def packed(content: Any, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(content, sink, **{"use_dictionary": False, "store_schema": False} | options)
    return sink.getvalue()


def test_a_table_of_the_expected_columns_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(packed(table()))
    rows = [IndexRow("a", "", 1, 4), IndexRow("b", "red", 2, 5), IndexRow("c", "red", 3, 6)]
    assert read_rows(tmp_path / "a.parquet", 3) == rows


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: b"no parquet", "parquet"),
        (lambda: packed(table())[:-9], "parquet"),
        (lambda: packed(table(label=None)), "label"),
        (lambda: packed(table(size=pa.array([0.5] * 3))), "size"),
        (lambda: packed(table(path=pa.array([b"a", None, b"c"]))), "path"),
        (lambda: packed(table(path=pa.array([b"a", b"\xff", b"c"]))), "0xff"),
        (lambda: packed(table(more=pa.array([1, 2, 3]))), "changed_ns"),
        (lambda: packed(table().slice(0, 2)), 2),
        (lambda: packed(table(path=pa.array([bytes(25 << 20)] * 3)), compression="zstd"), 64 << 20),
    ],
)
def test_damaged_and_foreign_rows_are_refused(tmp_path: Path, make: Callable[[], bytes], fact: Any) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(make())
    with refused(ValueError, fact) as error:
        read_rows(path, 3)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [2**63, 1.0, True, "1", None])
def test_json_holds_whole_numbers_of_64_bits(tmp_path: Path, value: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps([["a", "", 1, 1], ["b", "", value, 1]]))
    with refused(ValueError, "size"):
        read_rows(tmp_path / "a.json", 2)


def test_without_pyarrow_rows_of_files_are_written_and_read(tmp_path: Path, monkeypatch) -> None:
    path = stored(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert read_rows(stored(tmp_path, ROWS, parquet=False), 2500) == ROWS
    with refused(UsageError, path, "patchloom[parquet]"):
        read_rows(path, 2500)
    with refused(UsageError, "patchloom[parquet]"):
        encode_rows(ROWS, parquet=True)


def test_equal_texts_stored_once_are_one_text(tmp_path: Path) -> None:
    long, count = "x" * (1 << 20), 5000  # 5 GB if it was expanded
    path = tmp_path / "a.parquet"
    columns = {"path": pa.array([long.encode()] * 9).dictionary_encode().take(np.zeros(count, np.int64))}
    columns |= {"label": pa.array([b"red"] * count), "size": pa.array([1] * count), "changed_ns": pa.array([1] * count)}
    path.write_bytes(packed(table(**columns), use_dictionary=True))
    assert path.stat().st_size < 2 << 20
    rows = read_rows(path, count)
    assert rows[-1] == IndexRow(long, "red", 1, 1)
    assert len({id(row.path) for row in rows}) == 1
