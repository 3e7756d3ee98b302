"""Corrections change labels and drop images when data are read, and never the data."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.data.checking.check import check
from patchloom.data.reading_options import Reading
from patchloom.data.sources.corrections import (
    Correction,
    corrections_digest,
    read_corrections,
    write_corrections,
)
from patchloom.data.sources.source import find_source, open_data
from patchloom.runs.provenance import read_provenance
from patchloom.runs.run_metadata import read_run_metadata
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import table_cell
from tests.messages import refused
from tests.reliability.commands import class_folders

TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    class_folders(tmp_path / "data" / "train", pictures=8)
    class_folders(tmp_path / "data" / "test", pictures=2)
    return tmp_path / "data"


def written(place: Path, text: str | bytes) -> Path:
    file = place / "corrections.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def labels(listing) -> dict[str, str]:
    pairs = zip(listing.rows.tolist(), listing.labels.tolist(), strict=True)
    return {listing.images.key(row): listing.names[label] for row, label in pairs}


def test_labels_change_and_images_are_dropped_in_every_split(data: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    file = written(
        tmp_path,
        "path,action,label\n"
        "train/red/0.png,relabel,blue\n"
        f"{data}/train/red/1.png,drop,\n"
        "\n"
        "train/blue/2.png,keep\n"
        'test/blue/1.png,relabel,"red"\n',
    )
    plain = find_source(data)
    source = find_source(data, reading=Reading(corrections=file))
    changed = labels(plain.train) | {"train/red/0.png": "blue"}
    del changed["train/red/1.png"]
    assert labels(source.train) == changed
    assert source.test is not None
    assert labels(source.test) == labels(plain.test) | {"test/blue/1.png": "red"}
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    report = check(str(data), reading=Reading(corrections=str(file)), cache=False)
    assert report.classes["blue"] == {"train": 9, "test": 1}
    assert any("2 labels changed" in note for note in report.notes)


def test_a_split_opened_by_itself_uses_the_lines_about_it(data: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "train/red/0.png,drop,\ntest/red/0.png,relabel,blue\n")
    part = find_source(data / "test", reading=Reading(corrections=file))
    assert labels(part.train)["test/red/0.png"] == "blue"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("path,action,label\ntrain/red/99.png,drop,\n", (2, "train/red/99.png", "train/blue/0.png")),
        ("train/red/0.png,relabel,bleu\n", (1, "bleu", "blue")),
        ("train/red/0.png,relabel,\n", (1, "label")),
        ("\ntrain/red/0.png,drop,blue\n", (2, "blue")),
        ("train/red/0.png,remove,\n", (1, "remove", "keep")),
        ("train/red/0.png\n", (1, "path,action,label")),
        ("train/red/0.png,drop,,,x\n", (1,)),
        ("train/red/0.png,drop,\ntrain/red/0.png,keep,\n", (2, 1)),
        ('train/red/0.png,drop,\n"train/red/1.png,drop,\n', (2,)),
        (b"\xff\xfe,drop,\n", (1,)),
        ('"a\nb",drop,\n\ntrain/red/0.png,drop,x\n', (4,)),
    ],
)
def test_wrong_lines_are_named_by_their_number(text: str | bytes, facts: tuple, data: Path, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with refused(DataError, file.name, *facts):
        find_source(data, reading=Reading(corrections=file))


def test_a_missing_file_is_a_wrong_option(data: Path) -> None:
    with refused(UsageError, "--corrections", "gone.csv"):
        find_source(data, reading=Reading(corrections="gone.csv"))


def test_names_of_any_form_come_back(tmp_path: Path) -> None:
    names = ["a,b.png", 'quoted "x".png', "=sum.png", "é\udcff.png", "line\nbreak.png"]
    (tmp_path / "data" / "-a, b").mkdir(parents=True)
    (tmp_path / "data" / "c").mkdir()
    for number, name in enumerate(names):
        pixels = np.full((8, 8, 3), number * 20, np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / "c" / name)
        Image.fromarray(pixels).save(tmp_path / "data" / "-a, b" / f"{number}.png")
    file = tmp_path / "corrections.csv"
    write_corrections(file, [Correction(f"c/{name}", "relabel", "-a, b") for name in names])
    assert list(read_corrections(file)) == [table_cell(f"c/{name}") for name in names]
    source = find_source(tmp_path / "data", reading=Reading(corrections=file))
    assert set(labels(source.train).values()) == {"-a, b"}


def test_the_digest_is_of_what_changes(tmp_path: Path) -> None:
    first = corrections_digest(written(tmp_path, "a,drop,\nb,relabel,x\nc,keep,\n"))
    assert corrections_digest(written(tmp_path, "path,action,label\nb,relabel,x\na,drop,\n")) == first
    assert corrections_digest(written(tmp_path, "a,drop,\nb,relabel,y\n")) != first
    assert corrections_digest(None) == ""


def test_a_run_records_its_corrections_and_resumes_with_no_others(data: Path, tmp_path: Path) -> None:
    options = {"recipe": "small_images", "epochs": 1, "batch": 4, "size": 16, "workers": 0, "device": "cpu"}

    def train(corrections: Path | None, **changes: object) -> None:
        out, file = str(tmp_path / "run"), corrections and str(corrections)
        patchloom.train(str(data), out=out, corrections=file, set=TINY, **{**options, **changes})  # type: ignore[arg-type]

    file = written(tmp_path, "train/red/0.png,relabel,blue\ntest/red/0.png,relabel,blue\n")
    train(file)
    run = tmp_path / "run"
    record, provenance = read_run_metadata(run), read_provenance(run)
    assert record is not None
    assert record.corrections == str(file)
    assert provenance is not None
    assert provenance.corrections == corrections_digest(file)
    # Other verbs read the data as the run did.
    evaluated = patchloom.evaluate(run, str(data), split="test", device="cpu").evaluations["run"]
    assert evaluated.report.labels.tolist().count(evaluated.report.classes.index("blue")) == 3
    written(tmp_path, "train/red/0.png,relabel,blue\ntest/red/0.png,relabel,blue\ntrain/red/1.png,keep,\n")
    train(file, epochs=2)  # `keep` changes nothing
    written(tmp_path, "train/red/0.png,drop,\n")
    for other in (file, None):
        with refused(UsageError, "--corrections", "run"):
            train(other, epochs=2)


def test_corrected_labels_are_split_like_others(data: Path, tmp_path: Path) -> None:
    file = written(tmp_path, "train/red/0.png,relabel,blue\n")
    splits = open_data(data, reading=Reading(corrections=file, val="held-out"))
    everything = [*splits.train.labels.tolist(), *splits.val.labels.tolist()]
    assert sorted(everything) == [0] * 9 + [1] * 7


def labeled_file(folder: Path, head: str, rows: list[str]) -> Path:
    folder.mkdir()
    for number, row in enumerate(rows):
        Image.new("RGB", (8, 8), (9 * number, 20, 30)).save(folder / f"{number}.png")
        rows[number] = f"{number}.png,{row}"
    (folder / "labels.csv").write_text("\n".join([f"path,{head}", *rows]))
    return folder


def test_several_labels_and_numbers_stay_with_their_images(tmp_path: Path) -> None:
    file = written(tmp_path, "1.png,drop\n2.png,relabel,sea\n")
    tags = labeled_file(tmp_path / "tags", "tags", ["sky|sea", "sky", "sky|sand", "sand|sea", "", "sea|sky"])
    train = find_source(tags, reading=Reading(corrections=file)).train
    found = {Path(train.images.key(row)).stem: set(train.labels_of(at)) for at, row in enumerate(train.rows.tolist())}
    assert found == {"0": {"sky", "sea"}, "2": {"sea"}, "3": {"sand", "sea"}, "4": set(), "5": {"sea", "sky"}}
    heights = labeled_file(tmp_path / "heights", "height", ["0.5", "1.5", "2.5", "3.5"])
    dropped = written(tmp_path, "1.png,drop\n")
    train = find_source(heights, reading=Reading(corrections=dropped)).train
    assert [train.labels_of(at) for at in range(3)] == [["height 0.5"], ["height 2.5"], ["height 3.5"]]
    with refused(DataError, "line 1", "numbers"):
        find_source(heights, reading=Reading(corrections=written(tmp_path, "1.png,relabel,2.5\n")))
