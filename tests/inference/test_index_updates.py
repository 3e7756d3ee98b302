"""Updates of an index: the same as with a plain dictionary of all rows, also if stopped, killed or searched."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st

from patchloom.inference import index_build
from patchloom.inference.embedding import EmbeddedFiles
from patchloom.inference.index import ListedFile, open_index
from patchloom.inference.index_build import Collection, index
from patchloom.inference.index_files import IndexMetadata, StoredVectors, read_about, write_about
from patchloom.inference.index_rows import IndexRow
from patchloom.inference.row_table import PlacedRow, RowTable
from patchloom_runtime.errors import ResourceError
from tests.forked import Forked
from tests.messages import refused

State = tuple[int, int]


class DictTable:
    """The same as `RowTable`, in a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[str, PlacedRow] = {}

    def add(self, rows: Iterable[PlacedRow]) -> None:
        self.rows |= {placed.row.path: placed for placed in rows}

    def get(self, path: str) -> PlacedRow | None:
        return self.rows.get(path)

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            del self.rows[path]

    def __iter__(self) -> Iterator[PlacedRow]:
        return iter(self.rows.values())


def vector_of(path: str, state: State) -> torch.Tensor:
    return torch.tensor([sum(path.encode("utf-8", "surrogatepass")), *state], dtype=torch.float32)


def update(
    folder: Path, tables: Any, files: dict[str, tuple[str, State]], prune: set[str] | None, stop_after: int
) -> None:
    """Update an index by made-up files: path → label and state. Those of `prune` are gone only while it prunes."""

    def embed(_: Any, paths: list[str], **__: Any) -> Iterator[EmbeddedFiles]:
        for number, start in enumerate(range(0, len(paths), 2)):
            if number == stop_after:
                raise KeyboardInterrupt
            some = paths[start : start + 2]
            yield EmbeddedFiles(some, torch.stack([vector_of(path, files[path][1]) for path in some]), {})

    there = {path: state for path, (_, state) in files.items() if path not in (prune or ())}
    with (
        patch.object(index_build, "PART_FILES", 3),
        patch.object(index_build, "file_state", lambda path: there.get(path)),
        patch.object(index_build, "embed_files", embed),
    ):
        build = index_build._Build(folder, read_about(folder), *tables)
        if prune is not None:
            build.drop_gone(["/photos/a"])
        there |= {path: state for path, (_, state) in files.items()}
        listed = [ListedFile(path, label) for path, (label, _) in files.items()]
        missing = build.missing(Collection(listed, {}, "", {}))
        build.embed(None, missing, 2, 0, None, {})  # type: ignore[arg-type]


PATHS = st.sampled_from(
    [f"/photos/{folder}/{name}" for folder in "ab" for name in ("1", "2", "é", "\udcff", "a\0b", "")]
)
FILES = st.dictionaries(
    PATHS, st.tuples(st.sampled_from(["", "red", "blue"]), st.tuples(st.integers(0, 2), st.just(7)))
)
STEPS = st.lists(st.tuples(FILES, st.none() | st.sets(PATHS, max_size=3), st.integers(0, 6)), min_size=1, max_size=5)


@given(steps=STEPS)
def test_every_update_is_that_of_a_plain_dictionary(tmp_path_factory: Any, steps: Any) -> None:
    folders = [tmp_path_factory.mktemp("index") for _ in range(2)]
    for folder in folders:
        write_about(folder, IndexMetadata("run", "", {}, 3))
    expected: dict[str, IndexRow] = {}
    for files, prune, stop_after in [*steps, (steps[-1][0], set(), -1)]:
        stopped = []
        with RowTable() as stored, RowTable() as waiting:
            for folder, tables in zip(folders, ((stored, waiting), (DictTable(), DictTable())), strict=True):
                try:
                    update(folder, tables, files, prune, stop_after)
                except KeyboardInterrupt:
                    stopped.append(folder)
        assert stopped in ([], folders)
        one, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
        assert one == other
        if prune is not None:
            there = files.keys() - prune
            expected = {path: row for path, row in expected.items() if path in there or "/a/" not in path}
        about = read_about(folders[0])
        vectors = StoredVectors(folders[0], about)
        rows = vectors.files(torch.arange(len(about))) if len(about) else []
        if stopped:
            expected = {row.path: row for row in rows}
            continue
        for path, (label, state) in files.items():
            before = expected.get(path)
            expected[path] = IndexRow(path, label or (before.label if before else ""), *state)
        assert {row.path: row for row in rows} == expected
        assert len(rows) == len(expected)
        assert about.labels == Counter(row.label for row in rows if row.label)
        for row, vector in zip(rows, vectors.rows(torch.arange(len(rows))), strict=True):
            assert vector.tolist() == vector_of(row.path, row[2:]).tolist()


def test_a_full_temporary_folder_is_one_line() -> None:
    rows = (PlacedRow(IndexRow(f"/photos/{number}.jpg", "", 1, 1), 0, number) for number in range(10_000))
    with refused(ResourceError, "SQLITE_TMPDIR"), RowTable() as table:
        table._database.execute("PRAGMA max_page_count = 9")
        table.add(rows)


def changed_copy(trained: Path, folder: Path) -> None:
    """Change, relabel, add and remove images of a folder."""
    for number in range(10):
        os.utime(folder / "red" / f"{number}.png", ns=(1, 1))
        shutil.copy(trained / "data" / "blue" / f"{number}.png", folder / "red" / f"new-{number}.png")
        (folder / "blue" / f"{number}.png").unlink()


def build_until_the_second_part(marker: Path, **options: Any) -> None:
    write_part, calls = index_build.write_part, []

    def second_is_long(*inputs: Any) -> Any:
        calls.append(inputs)
        part = write_part(*inputs)
        if len(calls) == 2:
            marker.touch()
            time.sleep(600)
        return part

    index_build.PART_FILES, index_build.write_part = 8, second_is_long
    index(**options)


def test_an_update_that_gets_sigkill_goes_on_to_the_same_index(trained: Path, tmp_path: Path, monkeypatch) -> None:
    data = Path(shutil.copytree(trained / "data", tmp_path / "data"))
    options: dict[str, Any] = {"model": str(trained / "a"), "images": [data], "batch": 8, "device": "cpu"}
    index(out=tmp_path / "index", **options)
    shutil.copytree(tmp_path / "index", tmp_path / "whole")
    changed_copy(trained, data)
    process = Forked(
        partial(build_until_the_second_part, tmp_path / "marker", out=tmp_path / "index", prune=True, **options)
    )
    while not (tmp_path / "marker").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    monkeypatch.setattr(index_build, "PART_FILES", 8)
    built = index(out=tmp_path / "index", prune=True, **options)
    assert (built.embedded, built.unchanged, len(built.index)) == (12, 48, 60)
    index(out=tmp_path / "whole", prune=True, **options)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir() if not path.name.startswith("."))
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "index" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_filters_work_while_an_index_is_updated(trained: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(index_build, "PART_FILES", 8)
    data, out = Path(shutil.copytree(trained / "data", tmp_path / "data")), tmp_path / "index"
    (tmp_path / "levels.csv").write_text("label,warmth\nred,warm\nblue,cold\n")
    reading = index_build.Reading(taxonomy=str(tmp_path / "levels.csv"))
    options: dict[str, Any] = {"out": out, "batch": 8, "device": "cpu", "reading": reading}
    index(str(trained / "a"), [data], **options)
    changed_copy(trained, data)
    query, before = trained / "data" / "red" / "20.png", open_index(out, device="cpu")
    filters: list[tuple[dict[str, Any], int, int]] = [
        ({"label": "red"}, 30, 40),
        ({"label": "cold", "level": "warmth"}, 30, 20),
        ({"folder": data / "red"}, 30, 40),
        ({"label": "warm", "level": "warmth", "folder": data / "blue"}, 0, 0),
    ]
    searched: list[int] = []

    def search(opened: Any, options: dict[str, Any]) -> int:
        try:
            return len(opened.search(query, top=99, **options).hits)
        except index_build.UsageError:
            return 0

    def search_all(done: int, _: int) -> None:
        searched.append(done)
        for options, earlier, later in filters:
            assert search(before, options) == earlier
            assert search(open_index(out, device="cpu"), options) in range(min(earlier, later), max(earlier, later) + 1)

    index(str(trained / "a"), [data], prune=True, progress=search_all, **options)
    assert searched == [8, 16, 20]
    after = open_index(out, device="cpu")
    for options, _, later in filters:
        assert search(after, options) == later


PLACED = st.builds(
    PlacedRow, st.builds(IndexRow, PATHS, PATHS, *[st.integers(1 - 2**63, 2**63 - 1)] * 2), *[st.integers(0, 9)] * 2
)


@given(steps=st.lists(st.tuples(st.lists(PLACED), st.sets(PATHS))))
def test_a_table_is_a_dictionary(steps: Any) -> None:
    expected = DictTable()
    with RowTable() as table:
        for added, removed in steps:
            for one in (table, expected):
                one.add(added)
            for path in removed:
                assert table.get(path) == expected.get(path)
            present = [path for path in removed if expected.get(path)]
            table.remove(removed)
            expected.remove(present)
            assert sorted(table) == sorted(expected)
