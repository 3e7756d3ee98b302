"""After a power cut at any moment a run, an index, an export and a sweep are as before or as after the write.

The whole of the trials is `benchmarks/power_cuts.py`.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from patchloom.disk import atomic_write, sync_folder
from patchloom.inference.index_files import IndexMetadata, StoredVectors, read_about, write_about, write_part
from patchloom.inference.index_rows import IndexRow
from patchloom.runs.folders import new_folder
from patchloom.training.sweeps.record import RunResult, read_results, write_results
from patchloom_runtime.errors import CheckpointError
from tests.forked import Forked
from tests.reliability.cut_runs import check_run, left_by, train_tiny
from tests.reliability.power_cuts import (
    Disk,
    Operation,
    Replayed,
    Tree,
    mark,
    materialized,
    recorded,
    replayed,
    why_not_here,
)

NOT_HERE = why_not_here()
strace = pytest.mark.skipif(bool(NOT_HERE), reason=NOT_HERE)
CREATED = [Operation("create", "new"), Operation("write", "new", data=b"new")]
RENAMED = Operation("rename", "new", "file")


def left(operations: list[Operation], how: str, before: Tree | None = None) -> Tree:
    disk = Disk(before or {})
    for operation in operations:
        disk.do(operation)
    return disk.left(how, random.Random(0))


@pytest.mark.parametrize(
    ("operations", "how", "expected"),
    [
        (CREATED, "what is synced", {}),
        (CREATED, "names without bytes", {"new": b""}),
        (CREATED, "names and sizes", {"new": b"\0\0\0"}),
        ([*CREATED, Operation("sync", "new")], "what is synced", {}),
        ([*CREATED, Operation("sync", "")], "what is synced", {"new": b""}),
        ([*CREATED, Operation("sync", "new"), Operation("sync", "")], "what is synced", {"new": b"new"}),
        ([Operation("mkdir", "a"), Operation("mkdir", "a/b"), Operation("sync", "a")], "what is synced", {}),
        ([Operation("mkdir", "a"), Operation("mkdir", "a/b"), Operation("sync", "")], "what is synced", {"a": None}),
    ],
)
def test_what_is_not_synced_may_be_lost(operations: list[Operation], how: str, expected: Tree) -> None:
    assert left(operations, how) == expected


def test_a_rename_may_come_before_the_bytes_that_were_not_synced() -> None:
    old: Tree = {"file": b"old"}
    assert left([*CREATED, RENAMED], "names without bytes", old) == {"file": b""}
    assert left([*CREATED, RENAMED], "what is synced", old) == old
    whole = [*CREATED, Operation("sync", "new"), RENAMED]
    assert left(whole, "names without bytes", old) == {"file": b"new"}
    assert left(whole, "what is synced", old) == old


def stands(root: Path, work: Callable[[], object], check: Callable[[Path, list[str]], str]) -> Replayed:
    root.mkdir()
    return replayed({}, recorded(root, work), check, chances=1)


@strace
def test_a_writer_that_does_not_sync_is_noticed(tmp_path: Path) -> None:
    def write(sync: Callable[[int], None]) -> Callable[[], None]:
        def work() -> None:
            for text in (b"old", b"new"):
                with open(tmp_path / "root" / "temporary", "wb") as file:
                    file.write(text)
                    file.flush()
                    sync(file.fileno())
                os.replace(tmp_path / "root" / "temporary", tmp_path / "root" / "file")
                sync_folder(tmp_path / "root")
                mark(text.decode())

        return work

    def check(folder: Path, marks: list[str]) -> str:
        file = folder / "file"
        held = file.read_bytes() if file.exists() else b""
        allowed = {b"old", b"new"} if marks == ["old"] else {b"new"} if marks else {b"", b"old"}
        return "" if held in allowed else f"{held!r}"

    without = stands(tmp_path / "root", write(lambda _: None), check)
    assert any("b''" in fault for fault in without.faults.values())
    (tmp_path / "root" / "file").unlink()
    (tmp_path / "root").rmdir()
    assert stands(tmp_path / "root", write(os.fsync), check).faults == {}


@strace
def test_a_run_has_its_last_checkpoint_and_all_that_it_counts_on(tmp_path: Path) -> None:
    root = tmp_path / "root"
    found = stands(
        root, lambda: train_tiny(root / "runs" / "a", 1), lambda at, marks: check_run(at / "runs" / "a", marks)
    )
    assert found.faults == {}
    assert len(found.states) > 200
    # One that is cut in the middle is continued to the same bytes.
    tree, marks = list(found.states.values())[len(found.states) // 2]
    assert marks
    with materialized(tree) as folder:
        process = Forked(lambda: train_tiny(folder / "runs" / "a", 1))
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert left_by(folder / "runs" / "a") == left_by(root / "runs" / "a")


@strace
def test_an_index_an_export_and_a_sweep_are_old_or_new(tmp_path: Path) -> None:
    root = tmp_path / "root"
    index, artifact, sweep = (Path("new", name) for name in ("index", "artifact", "sweep"))

    def write() -> None:
        about = IndexMetadata("run", "", {}, 2)
        for number in range(2):
            part = write_part(
                root / index, f"part-{number:05d}", np.zeros((1, 2), np.float32), [IndexRow(f"/{number}", "", 1, 1)]
            )
            about = IndexMetadata("run", "", {}, 2, parts=(*about.parts, part))
            write_about(root / index, about)
            mark(f"index {number + 1}")
        with new_folder(root / artifact) as folder:
            (folder / "graph").write_bytes(b"by a library that does not sync")
            atomic_write(folder / "about", b"whole")
        mark("artifact")
        for number in (1, 2):
            runs = {str(each): RunResult(data="d", setting={}, failed="yes") for each in range(number)}
            write_results(root / sweep, runs)
            mark(f"sweep {number}")

    def check(folder: Path, marks: list[str]) -> str:
        promised = {name: text for name, _, text in (each.partition(" ") for each in marks)}
        files = 0
        if (folder / index / "index.json").exists():
            try:
                about = read_about(folder / index)
                files = len(StoredVectors(folder / index, about).rows(torch.arange(len(about))))
            except CheckpointError as error:
                return str(error)
        results, note = read_results(folder / sweep)
        graph = (folder / artifact / "graph").read_bytes() if (folder / artifact).exists() else None
        if files < int(promised.get("index", 0)) or note or len(results) < int(promised.get("sweep", 0)):
            return f"{files} files, {len(results)} results of {promised}; {note}"
        is_there = graph is not None or "artifact" not in promised
        return "" if is_there and graph in (None, b"by a library that does not sync") else f"the graph is {graph!r}"

    assert stands(root, write, check).faults == {}
