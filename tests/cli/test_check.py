"""`patchloom check` as a user types it: what is printed, the page, the exit code."""

import json
import os
from html.parser import HTMLParser

import pytest

from tests.cli.test_terminal import seen
from tests.data.dirty import jpeg, make_clean, make_dirty, make_shift, picture
from tests.data.layouts import camvid_segnet, coco128_semantic, grocery_store, oxford_pets, yolo_v5
from tests.reliability.commands import Done, command


@pytest.fixture
def patchloom(tmp_path, monkeypatch, capsys):
    """Runs a command in a folder of its own."""
    work = tmp_path / "work"
    work.mkdir()

    def run(*arguments: str, cwd=work) -> Done:
        monkeypatch.chdir(cwd)
        return command(arguments, monkeypatch, capsys)

    run.work = work
    return run


def test_clean(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "clean")
    done = patchloom("check", str(data))
    assert (done.code, done.errors) == (0, "")
    first, *rest = done.output.splitlines()
    assert first.startswith(f"{data}  3 classes, 12 train + 6 val   ")
    assert rest[-2:] == ["Nothing is wrong.", f"Next: patchloom train {data}"]
    assert list(patchloom.work.iterdir()) == []


@pytest.mark.parametrize(
    ("build", "options", "facts"),
    [
        (camvid_segnet, (), ("segmentation, 11 classes, 2 train + 1 val + 1 test", "'Unlabelled' (11)")),
        (oxford_pets, ("--masks", "annotations/trimaps"), ("segmentation, 6 pictures", "--masks annotations/trimaps")),
        (yolo_v5, (), ("detection, 3 classes, 2 train + 2 val", "coco128.yaml")),
        (coco128_semantic, (), ("segmentation, 2 train + 1 val", "../images")),
        (grocery_store, (), ("3 classes, 6 train + 3 val + 3 test", "3 classes (innermost")),
    ],
)
def test_public_datasets(build, options, facts, tmp_path, patchloom) -> None:
    data = build(tmp_path / "data")
    done = patchloom("check", str(data), *options)
    assert (done.code, done.errors) == (0, "")
    assert all(fact in done.output for fact in facts), done.output
    assert done.output.splitlines()[-1].startswith(f"Next: patchloom train {data}")


def test_data_that_may_be_read_in_several_ways_end_with_the_commands(tmp_path, patchloom) -> None:
    data = oxford_pets(tmp_path / "data")
    for verb in (("check",), ("train", "--dry-run")):
        done = patchloom(verb[0], str(data), *verb[1:])
        assert (done.code, done.errors.count("\n")) == (2, 1)
        ways = ("--label-pattern", "--masks annotations/trimaps", "--boxes annotations/xmls")
        assert all(f"patchloom train {data} {way}" in done.errors for way in ways)


def test_dirty_in_the_terminal_and_on_the_page(tmp_path, patchloom) -> None:
    data = make_dirty(tmp_path / "dirty")
    done = patchloom("check", str(data))
    assert (done.code, done.errors) == (3, "")
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
        assert line in done.output
    html = (patchloom.work / "runs/check-dirty/check.html").read_text()
    for fault in ("train/ant/truncated.jpg", "empty file", "EXIF rotation", "unicorn", "zebra", "val/dog/copy.jpg"):
        assert fault in html
    assert html.count("data:image/jpeg") > 20


def test_shift_as_json(tmp_path, patchloom) -> None:
    done = patchloom("check", str(make_shift(tmp_path / "shift")), "--json")
    assert done.code == 3
    found = json.loads(done.output)
    assert (found["stray_classes"], found["problems"]) == ({"bee": 1}, ["only val has 'bee'"])
    assert list(patchloom.work.iterdir()) == []


def test_strict_minds_near_copies(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "data")
    (data / "val/ant/near.jpg").write_bytes(jpeg(picture(0), quality=60))
    plain = patchloom("check", str(data))
    assert plain.code == 0
    assert "1 across train and val, 0 across labels" in plain.output
    assert patchloom("check", str(data), "--strict").code == 3


def test_sentences_in_the_terminal_and_on_the_page(tmp_path, patchloom) -> None:
    data = tmp_path / "pairs"
    data.mkdir()
    for language, lines in (("de", ["eins", "zwei", ""]), ("en", ["one", "two", "three"])):
        (data / f"train.{language}").write_text("\n".join(lines) + "\n")
        (data / f"val.{language}").write_text(lines[0] + "\n")
    done = patchloom("check", str(data))
    assert (done.code, done.errors) == (3, "")
    first, *rest = done.output.splitlines()
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
    assert patchloom("check", str(data), "--page", str(page)).code == 3
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
    done = patchloom("check", ".", cwd=data)
    assert done.code == 3
    assert "Page" not in done.output
    refused = patchloom("check", str(data), "--page", str(data / "check.html"))
    assert (refused.code, refused.output) == (2, "")
    assert refused.errors.startswith(f"error: the page {data}/check.html would lie in the data")
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
    done = patchloom("check", *arguments)
    assert (done.code, done.output) == (code, "")
    assert done.errors.startswith(message)
    assert done.errors.count("\n") == 1


def test_a_bar_is_shown_on_a_terminal(tmp_path) -> None:
    assert "18/18" in seen("check", make_clean(tmp_path / "data"))
