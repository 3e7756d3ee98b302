"""`check A --against B`: training pictures that a test set holds too are found, listed, and left out by `--exclude`."""

import json
from pathlib import Path

import pytest

from patchloom.data.checking.check import check
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source
from patchloom_runtime.errors import UsageError
from tests.data.dirty import jpeg, make_clean, make_image
from tests.data.facts import any_has, has_facts
from tests.reliability.commands import command


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A set, and another whose test holds one of its training pictures, one nearly, and one of its val."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    a = make_clean(tmp_path / "a")  # pictures 0…11 in train, 12…17 in val
    for split, images in (("train", (500, 2)), ("test", (501, 502))):
        (tmp_path / "b" / split / "x").mkdir(parents=True)
        for seed in images:
            (tmp_path / "b" / split / "x" / f"{seed}.jpg").write_bytes(jpeg(make_image(seed)))
    test = tmp_path / "b" / "test" / "x"
    (test / "same.jpg").write_bytes((a / "train/cat/1.jpg").read_bytes())
    (test / "nearly.jpg").write_bytes(jpeg(make_image(3).resize((40, 40)), quality=80))
    (test / "of_val.jpg").write_bytes((a / "val/ant/0.jpg").read_bytes())
    return a, tmp_path / "b"


def test_what_the_test_set_holds_too_is_found(both: tuple[Path, Path]) -> None:
    a, b = both
    report = check(a, against=b)
    result = {(one.key, Path(one.of.where).name, one.near) for one in report.against.overlaps}
    # Neither what train of the other set holds (picture 2), nor what val holds.
    assert result == {("train/cat/1.jpg", "same.jpg", False), ("train/ant/3.jpg", "nearly.jpg", True)}
    assert has_facts(report.against.name, "test", "b")
    assert report.against.images == 5
    (problem,) = report.problems()
    assert has_facts(problem, report.against.name)
    assert len(report.problems(strict=True)) == 2
    assert check(a).against is None


def test_a_set_without_splits_is_compared_whole(both: tuple[Path, Path]) -> None:
    a, b = both
    report = check(a, against=b / "train")
    assert [one.key for one in report.against.overlaps] == ["train/ant/2.jpg"]
    assert report.against.images == 2


def test_the_list_is_what_training_leaves_out(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = both
    done = command(("check", a, "--against", b), monkeypatch, capsys)
    written = Path("runs/check-a/in-b.tsv")
    assert done.code == 3
    lines = done.output.splitlines()
    assert any_has(lines, 5, "test", "b")
    assert any_has(lines, 1, f"train/cat/1.jpg = {b}/test/x/same.jpg")
    assert any_has(lines, 1, f"train/ant/3.jpg ≈ {b}/test/x/nearly.jpg")
    assert any_has(lines, f"patchloom train {a} --exclude {written}")
    header, *rows = [line.split("\t") for line in written.read_text().splitlines()]
    assert (len(header), [file for file, _ in rows]) == (2, ["train/ant/3.jpg", "train/cat/1.jpg"])
    for (_, reason), other in zip(rows, ("nearly.jpg", "same.jpg"), strict=True):
        assert f"{b}/test/x/{other}" in reason
    assert "nearly.jpg" in Path("runs/check-a/check.html").read_text()
    assert len(find_source(a, reading=Reading(exclude=written)).train) == 10
    clean = command(("check", a, "--against", b, "--exclude", written, "--json"), monkeypatch, capsys)
    assert clean.code == 0
    assert json.loads(clean.output)["against"]["overlaps"] == []
    more = command(
        ("check", a, "--against", b / "train", "--exclude", written, "--list", "all.tsv"), monkeypatch, capsys
    )
    assert f"patchloom train {a} --exclude all.tsv" in more.output
    assert len(find_source(a, reading=Reading(exclude="all.tsv")).train) == 9


def test_what_cannot_be_compared_is_said_first(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = both
    inside = command(("check", a, "--against", b, "--list", b / "list.tsv"), monkeypatch, capsys)
    assert inside.code == 2
    assert has_facts(inside.errors, b / "list.tsv")
    alone = command(("check", a, "--list", "list.tsv"), monkeypatch, capsys)
    assert alone.code == 2
    assert has_facts(alone.errors, "--list", "--against")
    (a.parent / "text").mkdir()
    for language in ("en", "de"):
        (a.parent / "text" / f"train.{language}").write_text("one\ntwo\n")
    with pytest.raises(UsageError, match="--against"):
        check(a.parent / "text", against=b)
