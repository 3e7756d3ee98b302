"""What a user can get wrong before a run: one line, the right exit code, nothing written."""

import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.commands import OPTIONS, class_folders, command

# The exit code, regular expressions for the facts in the line, DATA and options.
Case = tuple[int, tuple[str, ...], Callable[[Path], tuple[Any, ...]]]


def data(root: Path) -> Path:
    return class_folders(root / "data")


def with_data(*options: Any) -> Callable[[Path], tuple[Any, ...]]:
    return lambda root: (data(root), *options)


def recipe(content: bytes) -> Callable[[Path], tuple[Any, ...]]:
    def arguments(root: Path) -> tuple[Any, ...]:
        (root / "recipe.yaml").write_bytes(content)
        return data(root), "--recipe", root / "recipe.yaml"

    return arguments


def splits(train: tuple[str, ...], val: tuple[str, ...], *options: str) -> Callable[[Path], tuple[Any, ...]]:
    def arguments(root: Path) -> tuple[Any, ...]:
        class_folders(root / "data" / "train", train)
        class_folders(root / "data" / "val", val)
        return root / "data", *options

    return arguments


def empty_class(root: Path) -> tuple[Any, ...]:
    (data(root) / "green").mkdir()
    return root / "data", "--strict"


def shard_that_escapes(root: Path) -> tuple[Any, ...]:
    with tarfile.open(root / "data.tar", "w") as archive:
        member = tarfile.TarInfo("../escaped.jpg")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    return (root / "data.tar",)


def pipe(root: Path) -> tuple[Any, ...]:
    os.mkfifo(root / "pipe")
    return (root / "pipe",)


def output_in_a_file(root: Path) -> tuple[Any, ...]:
    (root / "file").touch()
    return data(root), "--out", root / "file" / "run"


ATTACK = b"name: !!python/object/apply:os.system ['touch escaped']\n"
CASES: dict[str, Case] = {
    "7 output inside a file": (2, (r"/file\b", "Not a directory"), output_in_a_file),
    "7 output where nobody may write": (2, ("/proc/run",), with_data("--out", "/proc/run")),
    "31 a pipe as data": (3, (r"/pipe\b",), pipe),
    "33 no such folder": (2, (r"/missing\b",), lambda root: (root / "missing",)),
    "34 a class without pictures": (3, (r"\btrain\b", "'green'"), empty_class),
    "35 one class": (3, ("'red'",), lambda root: (class_folders(root / "data", ("red",)),)),
    "36 val has another class": (3, (r"\bval\b", r"\btrain\b", "'c'"), splits(("a", "b"), ("b", "c"), "--strict")),
    "36 val has only others": (3, (r"\btrain\b", "'a', 'b'"), splits(("a", "b"), ("c", "d"))),
    "38 batch larger than the data": (2, (r"\b1000\b", r"\b16\b"), with_data("--batch", 1000)),
    "43 unknown network": (2, (r"\bresmlp_s12\b",), with_data("--model", "resmpl_s12")),
    "44 unknown flag": (2, ("--epocs",), with_data("--epocs", 3)),
    "44 unknown field": (2, (r"\boptim\.lrr\b", r"\boptim\.lr\b"), with_data("--set", "optim.lrr=1")),
    "44 unknown field in a file": (2, (r"\bnam\b", r"\bname\b"), recipe(b"nam: x\n")),
    "45 python tag": (2, ("python/object/apply:os.system",), recipe(ATTACK)),
    "45 half a file": (2, (r"\bYAML\b",), recipe(b"a: [1,\n b")),
    "45 empty file": (2, (r"\brecipe\b",), recipe(b"")),
    "46 shard with a path that escapes": (3, (r"\.\./escaped\.jpg",), shard_that_escapes),
    "workers below zero": (2, ("--workers", r"-1\b"), with_data("--workers", -1)),
    "worker timeout of zero": (2, ("--worker-timeout", r"\b0\b"), with_data("--worker-timeout", 0)),
    "patience of zero": (2, ("--patience", r"\b0\b", r"\b1\b"), with_data("--patience", 0)),
    "pictures every zero epochs": (2, ("--pictures", r"\b0\b", r"\b1\b"), with_data("--pictures", 0)),
    "no such device": (2, ("'gpu'",), with_data("--device", "gpu")),
    "a device that cannot train": (2, (r"\bmeta\b",), with_data("--device", "meta")),
    "a device that is not here": (2, (r"\bcuda:99\b",), with_data("--device", "cuda:99")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line(case: str, tmp_path: Path, monkeypatch, capsys) -> None:
    code, facts, arguments = CASES[case]
    monkeypatch.chdir(tmp_path)
    given = arguments(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    # What a case gives comes last, where it wins.
    done = command(("train", "--out", tmp_path / "run", *OPTIONS, *given), monkeypatch, capsys)
    assert done.code == code, done.errors
    for fact in facts:
        assert re.search(fact, done.errors)
    assert done.errors.startswith("error: ")
    assert done.errors.count("\n") == 1
    after = set(tmp_path.rglob("*")) - {tmp_path / "run", tmp_path / "run" / ".lock"}
    assert sorted(after) == before
