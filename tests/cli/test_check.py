"""`patchloom check` as a user types it: what is printed, the page, the exit code."""

import json
import os
from html.parser import HTMLParser

import pytest

from tests.cli.test_terminal import terminal_output
from tests.data.dirty import jpeg, make_clean, make_dirty, make_image, make_shift
from tests.data.layouts import camvid_segnet, coco128_semantic, grocery_store, oxford_pets, yolo_v5
from tests.messages import missing
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
    assert first.startswith(f"{data} ")
    assert missing(first, 3, 12, 6) == []  # classes, images to train on and to validate
    assert f"patchloom train {data}" in rest[-1]
    assert list(patchloom.work.iterdir()) == []


PETS = ("--masks", "annotations/trimaps")


@pytest.mark.parametrize(
    ("build", "options", "task", "annotated", "splits", "facts"),
    [
        (camvid_segnet, (), "segment", 11, {"train": 2, "val": 1, "test": 1}, ("Unlabeled", 11)),
        (oxford_pets, PETS, "segment", 0, {"train": 6}, PETS),
        (yolo_v5, (), "detect", 3, {"train": 2, "val": 2}, ("coco128.yaml",)),
        (coco128_semantic, (), "segment", 0, {"train": 2, "val": 1}, ("../images",)),
        (grocery_store, (), "classify", 0, {"train": 6, "val": 3, "test": 3}, (3,)),
    ],
)
def test_public_datasets(build, options, task, annotated, splits, facts, tmp_path, patchloom) -> None:
    data = build(tmp_path / "data")
    result = json.loads(patchloom("check", str(data), *options, "--json").output)
    assert (result["task"], len(result["annotated"]), result["splits"]) == (task, annotated, splits)
    done = patchloom("check", str(data), *options)
    assert (done.code, done.errors) == (0, "")
    assert missing(done.output.splitlines()[0], *splits.values()) == []
    assert missing(done.output, *facts) == []
    assert f"patchloom train {data}" in done.output.splitlines()[-1]


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
    lines = done.output.splitlines()
    for facts in (
        ("train/ant/empty.jpg",),
        ("train/dog/0.jpg", "val/dog/copy.jpg"),
        ("train/ant/1.jpg", "(ant)", "train/cat/also.jpg", "(cat)"),
        ("train/dog/2.jpg", "train/dog/again.jpg"),
        (1, "unicorn"),
        (1, "zebra"),
        (4, "'unicorn'", "'zebra'"),  # the problems
        ("runs/check-dirty/check.html",),
    ):
        assert any(missing(line, *facts) == [] for line in lines), facts
    html = (patchloom.work / "runs/check-dirty/check.html").read_text()
    assert missing(html, "train/ant/truncated.jpg", "EXIF", "unicorn", "zebra", "val/dog/copy.jpg") == []
    assert html.count("data:image/jpeg") > 20


def test_shift_as_json(tmp_path, patchloom) -> None:
    done = patchloom("check", str(make_shift(tmp_path / "shift")), "--json")
    assert done.code == 3
    result = json.loads(done.output)
    assert result["stray_classes"] == {"bee": 1}
    (problem,) = result["problems"]
    assert missing(problem, "val", "bee") == []
    assert list(patchloom.work.iterdir()) == []


def test_strict_minds_near_copies(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "data")
    (data / "val/ant/near.jpg").write_bytes(jpeg(make_image(0), quality=60))
    plain = patchloom("check", str(data))
    assert plain.code == 0
    assert any(missing(line, 1, "train/ant/0.jpg", "val/ant/near.jpg") == [] for line in plain.output.splitlines())
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
    assert missing(first, data, 3, 1) == []
    duplicates, leaks, faults, _, page = rest
    assert missing(duplicates, 1, "train.de", "val.de") == missing(leaks, 1, "train.de", "val.de") == []
    assert missing(faults, 1, "train.de", 3, "'three'") == []
    assert "runs/check-pairs/check.html" in page
    html = (patchloom.work / "runs/check-pairs/check.html").read_text()
    assert missing(html, "train.de", "val.de", "three") == []
    assert "<img" not in html


def test_parts_in_the_terminal_and_on_the_page(tmp_path, patchloom) -> None:
    root = make_dirty(tmp_path / "data")
    whole = patchloom("check", str(root))
    for number in (1, 2):
        share = patchloom("check", str(root), "--out", "parts", "--part", f"{number}/2")
        assert (share.code, share.errors) == (0, "")
        assert missing(share.output, f"{number}/2", "--join") == []
    joined = patchloom("check", str(root), "--out", "parts", "--join")
    assert (joined.code, joined.errors) == (whole.code, "") == (3, "")
    assert joined.output.splitlines()[1:-3] == whole.output.splitlines()[1:-2]
    assert missing(joined.output, "parts/check.html", "parts/*.csv") == []
    page = (patchloom.work / "parts" / "check.html").read_text()
    assert missing(page, "unreadable.csv", "truncated.jpg", "again.jpg", "data:image/jpeg") == []
    patchloom("check", str(root), "--out", "parts", "--page", "pages of mine/a.html")
    assert 'href="../parts/odd.csv"' in (patchloom.work / "pages of mine" / "a.html").read_text()
    result = json.loads(patchloom("check", str(root), "--out", "parts", "--json").output)
    assert (result["counts"]["unreadable"], result["decoded"], result["lists"]["odd"]) == (4, 0, "odd.csv")
    assert patchloom("check", str(root), "--out", str(root / "parts")).code == 2


def test_names_are_escaped_on_the_page(tmp_path, patchloom) -> None:
    data = make_clean(tmp_path / "data")
    evil = "<img src=x onerror=alert(1)>"
    (data / "train" / evil).mkdir()
    (data / "train" / evil / f"{evil}.jpg").write_bytes(b"")
    (data / "train" / evil / "whole.jpg").write_bytes(jpeg(make_image(77)))
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
    assert "check.html" not in done.output
    refused = patchloom("check", str(data), "--page", str(data / "check.html"))
    assert (refused.code, refused.output) == (2, "")
    assert missing(refused.errors, "error: ", data / "check.html") == []
    assert sorted(data.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        (("nowhere",), 2, "nowhere"),
        (("digits", "--workers", "0"), 2, "--workers"),
        (("digits", "--stricter"), 2, "--stricter"),
        ((".",), 3, ""),
    ],
)
def test_a_mistake_is_one_line(patchloom, arguments, code, fact) -> None:
    done = patchloom("check", *arguments)
    assert (done.code, done.output) == (code, "")
    assert missing(done.errors, "error: ", fact) == []
    assert done.errors.count("\n") == 1


def test_a_bar_is_shown_on_a_terminal(tmp_path) -> None:
    assert "18/18" in terminal_output("check", make_clean(tmp_path / "data"))
