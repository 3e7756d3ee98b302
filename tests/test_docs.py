"""The code of docs/python.md runs as it stands there."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.plugins import KINDS
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.inputs import read_image
from tests.messages import missing, refused

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    assert len(BLOCKS) == 4
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/python.md, block {number + 1}", "exec"), names)
    assert names["vector"].shape == names["vectors"][0].shape
    assert (str(names["run"].folder), names["run"].outcome.ended) == ("runs/shapes", "finished")
    assert missing(repr(names["run"]), "runs/shapes", "top1") == []
    assert missing(repr(names["classifier"]), "32×32", "cpu", 16, "triangle", "square", "pentagon") == []
    assert names["one"]._repr_html_().count("<img") == 1 + len(names["one"].maps)


def test_the_python_of_the_page_on_plugins_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("patchloom.plugins._registered", {kind: {} for kind in KINDS})
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "plugins.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/plugins.md, block {number + 1}", "exec"), names)
    assert Path("runs/own/weights.safetensors").is_file()


# What the table says of arrays, row by row, where the file's side is in tests/data/all_modes.py.
def test_what_the_table_says_of_arrays() -> None:
    grey = np.full((8, 8), 60, np.uint8)
    assert read_image(grey).getpixel((0, 0)) == (60, 60, 60)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30] + [0] * 762)
    assert read_image(palette).getpixel((0, 0)) == (10, 200, 30)
    assert read_image(np.asarray(palette)).getpixel((0, 0)) == (1, 1, 1)
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert read_image(cmyk).getpixel((0, 0)) == (255, 0, 0)
    assert read_image(np.asarray(cmyk)).getpixel((0, 0)) == (255, 255, 255)  # RGBA of alpha 0
    colors = np.full((8, 8, 3), 40_000, np.uint16)
    assert read_image(colors).getpixel((0, 0)) == (round(40_000 * 255 / 65535),) * 3
    with refused(UsageError, "int32"):
        read_image(grey.astype(np.int32))
    for bad in (np.nan, np.inf):
        with pytest.raises(DataError):
            read_image(np.full((8, 8), bad))
