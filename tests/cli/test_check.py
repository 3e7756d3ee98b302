"""`patchloom check` as a user types it: what is printed, the page, the exit code."""

import json
import os
import pty
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.data.dirty import jpeg, make_clean, make_dirty, make_shift, picture


@pytest.fixture
def patchloom(tmp_path):
    """Runs a command in a folder of its own, with a cache of its own."""
    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: str, cwd=work, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "patchloom.cli", *arguments]
        home = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=home, **options)

    def quiet(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
        return run(*arguments, stderr=subprocess.PIPE, **options)

    run.quiet, run.work = quiet, work
    return run


def test_clean(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "clean")
    done = patchloom.quiet("check", str(data))
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"{data}  3 classes, 12 train + 6 val   ")
    assert rest[-2:] == ["Nothing is wrong.", f"Next: patchloom train {data}"]
    assert list(patchloom.work.iterdir()) == []


def test_dirty_in_the_terminal_and_on_the_page(tmp_path, patchloom) -> None:
    data = make_dirty(tmp_path / "dirty")
    done = patchloom.quiet("check", str(data))
    assert (done.returncode, done.stderr) == (3, "")
    for line in (
        "train/ant/empty.jpg: empty file",
        "train/dog/0.jpg = val/dog/copy.jpg",
        "train/ant/1.jpg (ant) = train/cat/also.jpg (cat)",
        "train/dog/2.jpg ≈ train/dog/again.jpg",
        "  empty classes         1  unicorn",
        "  only in val           1  zebra (1)",
        "Problems: 4 files cannot be read; no pictures for 'unicorn'; only val has 'zebra'; the same picture",
        "Page: runs/check-dirty/check.html",
    ):
        assert line in done.stdout
    html = (patchloom.work / "runs/check-dirty/check.html").read_text()
    for fault in ("train/ant/truncated.jpg", "empty file", "EXIF rotation", "unicorn", "zebra", "val/dog/copy.jpg"):
        assert fault in html
    assert html.count("data:image/jpeg") > 20


def test_shift_as_json(tmp_path, patchloom) -> None:
    done = patchloom.quiet("check", str(make_shift(tmp_path / "shift")), "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert (found["stray_classes"], found["problems"]) == ({"bee": 1}, ["only val has 'bee'"])
    assert list(patchloom.work.iterdir()) == []


def test_strict_minds_near_copies(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "data")
    (data / "val/ant/near.jpg").write_bytes(jpeg(picture(0), quality=60))
    plain = patchloom.quiet("check", str(data))
    assert plain.returncode == 0
    assert "1 across train and val, 0 across labels" in plain.stdout
    assert patchloom.quiet("check", str(data), "--strict").returncode == 3


def test_sentences_in_the_terminal_and_on_the_page(tmp_path, patchloom) -> None:
    data = tmp_path / "pairs"
    data.mkdir()
    for language, lines in (("de", ["eins", "zwei", ""]), ("en", ["one", "two", "three"])):
        (data / f"train.{language}").write_text("\n".join(lines) + "\n")
        (data / f"val.{language}").write_text(lines[0] + "\n")
    done = patchloom.quiet("check", str(data))
    assert (done.returncode, done.stderr) == (3, "")
    first, *rest = done.stdout.splitlines()
    assert first.startswith(f"{data}  3 train + 1 val   ")
    assert rest == [
        "  duplicates            1  train.de, line 1 = val.de, line 1",
        "  in train and val      1  train.de, line 1 = val.de, line 1",
        "  empty sentence        1  train.de, line 3: beside 'three'",
        "Problems: empty sentence, 1 time; the same pair in train and val, 1 time.",
        "Page: runs/check-pairs/check.html",
    ]
    html = (patchloom.work / "runs/check-pairs/check.html").read_text()
    assert "val.de, line 1" in html
    assert "empty sentence" in html
    assert "<img" not in html


def test_names_are_escaped_on_the_page(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "data")
    evil = "<img src=x onerror=alert(1)>"
    (data / "train" / evil).mkdir()
    (data / "train" / evil / f"{evil}.jpg").write_bytes(b"")
    (data / "train" / evil / "whole.jpg").write_bytes(jpeg(picture(77)))
    (data / "train" / "ant" / os.fsdecode(b"caf\xe9.jpg")).write_bytes((data / "train/ant/0.jpg").read_bytes())
    page = tmp_path / "out" / "page.html"
    assert patchloom.quiet("check", str(data), "--page", str(page)).returncode == 3
    sources = []

    class Images(HTMLParser):
        def handle_starttag(self, tag, attributes):
            sources.extend(value for name, value in attributes if name == "src")
            assert not [name for name, _ in attributes if name.startswith("on")]

    Images().feed(page.read_text("utf-8"))
    assert sources
    assert all(source.startswith("data:image/jpeg") for source in sources)
    assert r"caf\xe9.jpg" in page.read_text("utf-8")


def test_no_page_is_written_into_the_data(tmp_path, patchloom) -> None:
    data = make_shift(tmp_path / "data")
    before = sorted(data.rglob("*"))
    done = patchloom.quiet("check", ".", cwd=data)
    assert done.returncode == 3
    assert "Page" not in done.stdout
    refused = patchloom.quiet("check", str(data), "--page", str(data / "check.html"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: the page {data}/check.html would lie in the data")
    assert sorted(data.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nowhere",), 2, "error: nowhere is neither a path nor a known data set"),
        (("digits", "--workers", "0"), 2, "error: Invalid value for '--workers'"),
        (("digits", "--stricter"), 2, "error: No such option: --stricter"),
        ((".",), 3, "error: .: no images found; expected class folders of images"),
    ],
)
def test_a_mistake_is_one_line(patchloom, arguments, code, message) -> None:
    done = patchloom.quiet("check", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_bar_is_shown_on_a_terminal(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "data")
    reader, terminal = pty.openpty()
    done = patchloom("check", str(data), stderr=terminal)
    os.close(terminal)
    with open(reader, "rb", buffering=0) as screen:
        assert b"18/18" in screen.read(1 << 16)
    assert done.returncode == 0
