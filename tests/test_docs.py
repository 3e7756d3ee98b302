"""The documentation: every block of code runs or says why not, every command of a page can be parsed, the reference is
complete, and the site builds without a warning.
"""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import typer
from PIL import Image

import patchloom
from patchloom import cli
from patchloom.cli.old_spellings import modernize
from patchloom.plugins import KINDS
from patchloom.recipes.parts import GROUPS, fields_of
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.inputs import read_image
from tests.messages import missing, refused
from tests.reliability.commands import class_folders, command
from tools import notebooks, reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
# Smaller numbers for the same blocks: a test shows that they run, not what they learn.
SMALLER = (
    (r"--epochs \d+", "--epochs 1"),
    (r"count=\d+,size=\d+", "count=32,size=32"),
    (r"range\(len\(([\w.]+)\)\)", r"range(0, len(\1), 12)"),
    (r"train digits ", "train digits --set train_share=0.1 "),
    (r"--set train_share=0.1 (.*)--set train_share=0.1 ", r"--set train_share=0.1 \1"),
    (r"sweep digits .*--out", "sweep digits --grid augment.flip=0,0.5 --epochs 1 --set train_share=0.1 --out"),
    (r"--recipe translation-tiny", "--recipe translation-tiny --epochs 1"),
    (r"--linear\b", ""),
    (r"--task detect", "--task detect --size 32 --set detect.channels=16 --set detect.hidden=24"),
)


class Block(NamedTuple):
    """A block of code of a page, and the comment above it."""

    page: Path
    comment: str
    language: str
    code: str

    @property
    def runs_here(self) -> bool:
        return not self.comment.startswith(("not run: ", "run by "))


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, match["comment"] or "", match["language"], match["code"])
        for match in notebooks.BLOCK.finditer(page.read_text("utf-8"))
    ]


def lines_of(code: str) -> list[str]:
    """The commands of a block, without comments and with continued lines joined."""
    text = code.replace("\\\n", " ")
    return [line for raw in text.splitlines() if (line := re.sub(r"(^|\s)#.*$", "", raw).strip())]


RUN_HERE = [page for page in PAGES if any(block.runs_here for block in blocks(page))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with photos/ and new.jpg, in which nothing that a page registers stays."""
    class_folders(tmp_path / "photos", ("red", "blue"), pictures=10)
    Image.open(tmp_path / "photos/red/0.png").save(tmp_path / "new.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("patchloom.plugins._registered", {kind: {} for kind in KINDS})
    return tmp_path


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(
    page: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for number, (language, code) in enumerate(cells(page)):
        for pattern, smaller in SMALLER if page.parent.name == "tutorials" or page.stem != "python" else ():
            code = re.sub(pattern, smaller, code)
        if language == "python":
            exec(compile(code, f"{page.name}, block {number + 1}", "exec"), names)
        else:
            for line in lines_of(code):
                run_line(line, monkeypatch, capsys)
        ran += 1
    assert ran == sum(block.runs_here for block in blocks(page))


def cells(page: Path) -> list[tuple[str, str]]:
    """Language and code of what runs here: the blocks of a page, the cells of the notebook of a tutorial."""
    if page.parent.name != "tutorials" or page.stem == "index":
        return [(block.language, block.code) for block in blocks(page) if block.runs_here]
    book = json.loads(notebooks.notebook(page.read_text("utf-8")))
    codes = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    return [("bash" if code.startswith("%%bash\n") else "python", code.removeprefix("%%bash\n")) for code in codes]


def run_line(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line, may_fail, _ = line.partition(" || true")
    if piped := re.fullmatch(r'echo "(.*)" \| (patchloom .*)', line):
        Path("input.txt").write_text(piped[1] + "\n")
        with Path("input.txt").open() as typed, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", typed)
            run_line(piped[2], patch, capsys)
        return
    if not line.startswith("patchloom "):
        subprocess.run(line, shell=True, check=True)
        return
    done = command(tuple(shlex.split(line)[1:]), monkeypatch, capsys)
    assert not done.code or (may_fail and done.code == 3), f"{line}\n{done.output}\n{done.errors}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(blocks(page)) == len(re.findall(r"(?m)^\s*```(?:python|bash|sh|console|pycon)$", text))
    outside = re.sub(r"(?ms)^```.*?^```", "", text)
    assert (
        re.findall(r"(?m)^ {4,}(?:patchloom|python|pytest|pip|make|torchrun|import|from) .*", outside) == []
    )  # by indentation
    for block in blocks(page):
        if block.comment.startswith("run by "):
            test = ROOT / block.comment.removeprefix("run by ")
            assert page.stem in test.read_text("utf-8")
        elif not block.runs_here:
            assert len(block.comment.removeprefix("not run: ").split()) >= 2


COMMANDS = {
    shlex.join(parts): page.name
    for page in PAGES
    for block in blocks(page)
    if block.language == "bash" and not block.runs_here
    for line in lines_of(block.code)
    for part in re.split(r" && | \| ", line)
    if (parts := shlex.split(re.sub(r" [<>] \S+", "", part)))[:1] == ["patchloom"]
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_is_not_run_can_be_parsed(line: str) -> None:
    (verb, *arguments), hints = modernize(shlex.split(line)[1:])
    assert hints == []
    known: Any = typer.main.get_command(cli.make_app([verb]))
    if verb != "help" and not verb.startswith("-"):
        assert known.commands[verb].make_context(verb, arguments).params


@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_is_a_notebook(page: Path) -> None:
    book = json.loads(notebooks.notebook(page.read_text("utf-8")))
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    expected = [block for block in blocks(page) if not block.comment.startswith("not run")]
    assert [each.removeprefix("%%bash\n") for each in code] == [block.code.rstrip("\n") for block in expected]
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)


def test_the_reference_has_every_command_with_every_option() -> None:
    page = reference.commands()
    group: Any = typer.main.get_command(cli.make_app())
    for name in (name for names in cli.VERBS.values() for name in names):
        section = page.partition(f"{{#{name}}}")[2].partition("{#")[0]
        assert group.commands[name].help.splitlines()[0] in section
        options = [o for p in group.commands[name].params for o in p.opts if o.startswith("--") and p.name != "help"]
        assert [option for option in options if option not in page.partition("## Train")[0] + section] == []


def test_the_reference_has_every_public_name_field_and_error() -> None:
    page = reference.python() + reference.error_page()
    assert [
        name for name in patchloom.__all__ if f"{{#{name}}}" not in page and f"`patchloom.{name}`" not in page
    ] == []
    assert inspect.getdoc(patchloom.train).splitlines()[0] in page
    fields = reference.recipe_fields()
    keys = [f"`{group}.{name}`" for group, part in GROUPS.items() for name in fields_of(part)]
    assert [key for key in keys if key not in fields] == []
    assert missing(reference.metrics(), "`top1`", "miou", "mask_ap", "`map`", "`mae`") == []
    assert missing(reference.run_files(), "config.json", "weights.safetensors", "checksums.json") == []
    for error in ("UsageError", "DataError", "CheckpointError", "NumericalError", "ResourceError", "DeviceError"):
        row = next(line for line in reference.error_page().splitlines() if f"`patchloom.{error}`" in line)
        assert all(cell.strip() for cell in row.strip("|").split("|"))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the docs extra is not installed")
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "site/search/search_index.json").is_file()
    assert (tmp_path / "site/tutorials/search.ipynb").is_file()
    loaded = re.compile(r"""<(?:script|img|link rel="(?:stylesheet|preload|icon)")[^>]*(?:src|href)="(?:https?:)?//""")
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert [page.name for page in pages if loaded.search(page.read_text("utf-8"))] == []


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
