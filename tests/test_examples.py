"""Every example runs."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.data.test_wmt import official

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "prepare_wmt14.py"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, capsys) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_official_files_of_wmt14_are_prepared(tmp_path, capsys, monkeypatch) -> None:
    official(tmp_path / "files")
    out = tmp_path / "wmt14"
    monkeypatch.setattr(sys, "argv", ["prepare_wmt14.py", str(tmp_path / "files"), "--out", str(out)])
    runpy.run_path(str(FOLDER / "prepare_wmt14.py"), run_name="__main__")
    assert f"patchloom train {out}" in capsys.readouterr().out
    assert (out / "prepared.json").is_file()
