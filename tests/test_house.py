"""tools/house.py finds what is planted in a made-up package, and nothing else."""

import re
from pathlib import Path

import pytest

from tools import house

FILES = {
    "patchloom/__init__.py": "def __getattr__(name):\n    import json\n",
    "patchloom/cli/train.py": (
        'def train(data):\n    import json\n\nOUT = Option(help="Folder of the run.")\n'
        'DATA = Argument("Folder of images.")\n'
    ),
    "patchloom/beside.py": "class Row:\n    pass\n",
    "runtime/patchloom_runtime/rows.py": (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import json\n"
        "class Row:\n    pass\n"
        "class FoundRun:\n    pass\n"
        "class OfPicture:\n    colour: int\n"
        "class Offer:\n    founder: int\n"
        "def task_asked(given, *, profound=lambda: 0):\n"
        '    """Return the task."""\n'
        "    if TYPE_CHECKING:\n        import os\n"
        "    else:\n        import sys\n"
        "    self._told = given.shown\n"
        "    for found in given:\n"
        '        raise ValueError(f"{found} is missing. Pass it.")\n'
        "    OPTIMISER = index_of = noise = usable_without_gradients = done_without = without_mask = 0\n" + "#\n" * 40
    ),
    "patchloom/sizes.py": (
        "def long():\n" + "    pass\n" * 60 + "def fits():\n" + "    pass\n" * 59
        + "def wide(self, a, b, c, d, e, f, g, h, i, *j, **k): pass\n"
        + "def narrow(self, a, b, c, d, e, f, g, h, i, j=lambda x: x): pass\n"
        + "@triton.jit\ndef kernel(a, b, c, d, e, f, g, h, i, j, k): pass\n"
        + "def late(): from patchloom.beside import Row\n"
    ),
    **{f"patchloom/data/part_{number}.py": "#\n" * 41 for number in range(16)},
    **{f"patchloom/layers/part_{number}.py": "#\n" * 41 for number in range(15)},
    "tests/test_rows.py": (
        'CASES = [("a", "one row is missing here")]\n'
        '@parametrize("name, message", CASES)\n'
        "def test_cases(name, message):\n    assert name == message\n"
        'def test_message():\n    with raises(ValueError, match="the file has no rows"):\n        pass\n'
        'def test_operand():\n    assert "rows were read from {path}" in out\n'
        '    assert out == ["no rows in the file"]\n'
        'def test_facts(tmp_path):\n    assert read("four words of text") == "three words only"\n'
        "def test_nothing():\n    check()\n"
        "class TestRows:\n    def test_close(self):\n        torch.testing.assert_close(a, b)\n"
    ),
    "tests/helpers.py": "def test_no_test_file():\n    pass\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def listed(root: Path, metric: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    house.main(["--root", str(root), "--list", metric])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("duplicate-classes", ["patchloom/beside.py:1 Row", "runtime/patchloom_runtime/rows.py:4 Row"]),
        (
            "british-names",
            ["runtime/patchloom_runtime/rows.py:9 colour", "runtime/patchloom_runtime/rows.py:21 OPTIMISER"],
        ),
        ("long-functions", ["patchloom/sizes.py:1 long (61 lines)"]),
        ("many-parameters", ["patchloom/sizes.py:122 wide (11 parameters)"]),
        ("crowded-folders", ["patchloom/data:1 16 files"]),
        ("small-modules", ["patchloom/beside.py:1 beside (2 lines)", "patchloom/cli/train.py:1 train (5 lines)"]),
        ("package-imports", ["runtime/patchloom_runtime/rows.py:17 import sys"]),
        ("inner-imports", ["patchloom/sizes.py:126 from patchloom.beside import Row"]),
        ("door-imports", ["patchloom/__init__.py:2 import json", "patchloom/cli/train.py:2 import json"]),
        ("short-docstrings", ["runtime/patchloom_runtime/rows.py:12 task_asked"]),
        ("unasserted-tests", ["tests/test_rows.py:13 test_nothing"]),
        (
            "sentences",
            [
                "tests/test_rows.py:1 test_cases",
                "tests/test_rows.py:6 test_message",
                "tests/test_rows.py:9 test_operand",
                "tests/test_rows.py:10 test_operand",
            ],
        ),
    ],
)
def test_each_metric_lists_what_was_planted(
    root: Path, metric: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(root, metric, capsys) == expected


def test_banned_names_are_definitions_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [line.split()[1] for line in listed(root, "banned-names", capsys)]
    assert sorted(names) == ["FoundRun", "OfPicture", "_told", "beside", "found", "given", "task_asked"]


def test_the_table_counts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    house.main(["--root", str(root)])
    table, duplicates = capsys.readouterr().out.split("\n\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    counts = {row[0]: row[1] for row in rows}
    assert counts["files"] == str(len([name for name in FILES if name.startswith(("patchloom", "runtime"))]))
    assert counts["lines"] == f"{sum(text.count(chr(10)) for name, text in FILES.items() if 'test' not in name):,}"
    assert counts["class names in more than one file"] == "1"
    assert duplicates.split()[-1] == "Row"
    assert counts["banned names, definitions"] == "7"
    assert counts["found (distinct / definitions)"] == "2 / 2"
    assert counts["of (distinct / definitions)"] == "1 / 1"
    assert counts["alike (distinct / definitions)"] == "0 / 0"
    assert counts["test functions"] == "6"
    assert counts["tests that compare a sentence"] == "3"
    assert counts["sentences that tests compare"] == "4"


def test_a_draw_depends_on_its_seed_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    house.main(["--root", str(root), "--draw", "1"])
    first = capsys.readouterr().out
    house.main(["--root", str(root), "--draw", "1"])
    assert capsys.readouterr().out == first
    assert "runtime/patchloom_runtime/rows.py:12 task_asked\n      Return the task.\n" in first
    assert "runtime/patchloom_runtime/rows.py:20 ValueError\n      {found} is missing. Pass it.\n" in first
    assert "patchloom/cli/train.py:4 help\n      Folder of the run.\n" in first
    assert "patchloom/cli/train.py:5 help\n      Folder of images.\n" in first
