"""`predict` into tables and folders, from lists of paths and standard input."""

import csv
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image

import patchloom
from patchloom.tasks import prediction_files
from patchloom.tasks.predict import PredictionStream, paths_in
from patchloom_runtime.errors import UsageError
from tests.messages import missing, refused
from tests.reliability.commands import command

ODD = ["=cmd().png", "+1.png", "-x.png", "@a.png", 'quote".png', "new\nline.png", "a,b.png"]
PARAMETERS = inspect.signature(patchloom.predict).parameters.values()
DEFAULTS = {each.name: each.default for each in PARAMETERS if each.default is not each.empty} | {"device": "cpu"}


@pytest.fixture(scope="module")
def model(trained: Path) -> Path:
    return trained / "a"


@pytest.fixture
def photos(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images with odd names, two of the same name, and a file that is no image, in the current folder."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    source = trained / "data" / "red" / "0.png"
    for name in [*ODD, "0.png", "more/0.png"]:
        shutil.copyfile(source, folder / name)
    (folder / "torn.png").write_bytes(b"no picture")
    monkeypatch.chdir(folder)
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def without_times(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_csv_row_opens_its_file_and_no_cell_is_a_formula(model: Path, photos: Path, tmp_path: Path) -> None:
    names = [*ODD, "0.png", "torn.png", "gone.png"]
    expected = patchloom.predict(model, names, top=2, device="cpu")
    counts = patchloom.predict(model, names, top=2, csv=tmp_path / "a.csv", device="cpu")
    assert (counts.images, counts.unreadable, counts.none) == (10, 2, 0)
    rows = rows_of(tmp_path / "a.csv")
    assert list(rows[0]) == ["path", "label", "score", "label2", "score2", "reason", "error"]
    assert [os.path.normpath(row["path"]) for row in rows] == names
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]
    for row, prediction in zip(rows, expected, strict=True):
        labels = [name for name, _ in prediction.answers]
        assert [row["label"], row["label2"]] == (labels or ["", ""])
        assert bool(row["error"]) == (prediction.error is not None)
        if labels:
            assert float(row["score"]) == pytest.approx(prediction.answers[0][1], rel=1e-6)


def test_labels_that_look_like_formulas_get_an_apostrophe(tmp_path: Path) -> None:
    with prediction_files.open_csv(tmp_path / "a.csv", {"path": str, "label": str}) as write:
        write({"path": "/=a", "label": "=1+1"})
        write({"path": "-", "label": "-"})
        write({"path": os.fsdecode(b"\xff.png"), "label": "é"})
    assert (tmp_path / "a.csv").read_text() == "path,label\n/=a,'=1+1\n-,-\n\\udcff.png,é\n"


def test_parquet_has_the_rows_of_the_csv_in_groups(model, photos, tmp_path, monkeypatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(prediction_files, "ROWS_PER_GROUP", 4)
    patchloom.predict(model, ["."], csv=tmp_path / "a.csv", parquet=tmp_path / "a.parquet", device="cpu")
    file = parquet.ParquetFile(tmp_path / "a.parquet")
    assert file.num_row_groups == 3
    rows = rows_of(tmp_path / "a.csv")
    for row, wanted in zip(file.read().to_pylist(), rows, strict=True):
        assert row.pop("score") == (pytest.approx(float(wanted["score"]), rel=1e-6) if wanted["score"] else None)
        assert row["path"] == wanted["path"]
        assert (row["label"] or "", row["error"] or "") == (wanted["label"], wanted["error"])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_an_interrupted_table_leaves_the_old_one(model, photos, tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    target = tmp_path / "out" / f"a.{ending}"
    target.parent.mkdir()
    target.write_bytes(b"old")
    options = DEFAULTS | {ending: target, "sort_into": tmp_path / "sorted"}
    with closing(iter(PredictionStream(model, ["0.png", "more/0.png"], **options))) as stream:
        next(stream)
        assert target.read_bytes() == b"old"
    assert (list(target.parent.iterdir()), target.read_bytes()) == ([target], b"old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_paths_are_read_as_they_are_needed(model: Path, photos: Path, tmp_path: Path) -> None:
    taken = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(1)
            yield "0.png"

    with closing(iter(PredictionStream(model, endless(), **DEFAULTS | {"csv": tmp_path / "a.csv"}))) as stream:
        for _ in range(40):
            next(stream)
    assert len(taken) <= 64


def test_images_are_copied_into_folders_by_class(model: Path, photos: Path, tmp_path: Path) -> None:
    before = without_times(photos)
    counts = patchloom.predict(model, [".", "0.png"], sort_into=tmp_path / "sorted", device="cpu")
    assert (counts.images, counts.unreadable, counts.not_copied) == (11, 1, 0)
    assert without_times(photos) == before
    (folder,) = (tmp_path / "sorted").iterdir()
    assert folder.name in patchloom.load(model).labels
    assert {path.name for path in folder.iterdir()} == {*ODD, "0.png", "0-2.png", "0-3.png"}
    assert (folder / "0.png").stat().st_ino != (photos / "0.png").stat().st_ino
    assert (folder / "0-3.png").stat().st_mtime_ns == (photos / "0.png").stat().st_mtime_ns
    with refused(UsageError, tmp_path / "sorted"):
        patchloom.predict(model, ["0.png"], sort_into=tmp_path / "sorted", device="cpu")
    with refused(UsageError, "inside"):
        patchloom.predict(model, ["."], sort_into="inside", device="cpu")


def test_class_names_stay_inside_the_folder_and_apart(photos: Path, tmp_path: Path) -> None:
    labels = ["../up", "a/b", "a:b", "A_b", "", ".", "x" * 400, "none", "né\x1b[2J", "/root"]
    with prediction_files.class_folders(tmp_path / "sorted") as copy:
        assert all(copy("0.png", label) for label in labels)
        assert copy("0.png", "a/b")
        assert not copy("clip.gif#frame=3", "a/b")
    folders = sorted((tmp_path / "sorted").iterdir())
    assert len({folder.name.casefold() for folder in folders}) == len(labels)
    assert sum(len(list(folder.iterdir())) for folder in folders) == len(labels) + 1
    assert not (tmp_path / "up").exists()
    assert not [folder for folder in folders if not folder.name.isprintable()]


def test_frames_are_counted_and_not_copied(model: Path, photos: Path, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue")]
    frames[0].save("clip.gif", save_all=True, append_images=frames[1:], duration=100)
    counts = patchloom.predict(model, "clip.gif", sort_into=tmp_path / "sorted", device="cpu")
    assert (counts.images, counts.not_copied) == (2, 2)


def test_below_the_threshold_is_none(model: Path, photos: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (whole,) = patchloom.predict(model, "0.png", device="cpu")
    first = whole.answers[0][1]
    (some,) = patchloom.predict(model, "0.png", threshold=first, device="cpu")
    assert some.answers == whole.answers[:1]
    line = ("predict", model, "0.png", "--threshold", "1", "--device", "cpu")
    assert command(line, monkeypatch, capsys).output == "0.png  none\n"
    (answer,) = json.loads(command((*line, "--json"), monkeypatch, capsys).output)
    assert (answer["answers"], answer["error"]) == ([], None)
    counts = patchloom.predict(
        model, ["0.png", "torn.png"], threshold=1, csv=tmp_path / "a.csv", sort_into=tmp_path / "s", device="cpu"
    )
    assert (counts.none, counts.unreadable) == (1, 1)
    assert [row["label"] for row in rows_of(tmp_path / "a.csv")] == ["none", ""]
    assert list(without_times(tmp_path / "s")) == ["none/0.png"]
    with refused(UsageError, "threshold", 1.5):
        patchloom.predict(model, "0.png", threshold=1.5)


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\0"])
def test_standard_input_lists_paths(separator, model, photos, monkeypatch, capsys) -> None:
    names = ["0.png", "more/0.png", "torn.png"] + (["new\nline.png"] if separator == "\0" else [""])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(separator.join(names).encode())))
    done = command(("predict", model, "-", "--json", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 3
    assert [answer["path"] for answer in json.loads(done.output)] == [name for name in names if name]


def test_lists_may_arrive_in_pieces() -> None:
    class Pieces(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self._data = data

        def readable(self) -> bool:
            return True

        def read1(self, size: int) -> bytes:
            piece, self._data = self._data[:3], self._data[3:]
            return piece

    assert list(paths_in(Pieces(b"more/long name.png\nb.png\n\nc"), b"a/")) == ["a/more/long name.png", "b.png", "c"]
    assert list(paths_in(Pieces(b""), b"a.png")) == ["a.png"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WEBP"])
def test_standard_input_may_be_an_image(kind, model, photos, monkeypatch, capsys) -> None:
    encoded = io.BytesIO()
    Image.open("0.png").convert("RGB").save(encoded, kind)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(encoded.getvalue())))
    done = command(("predict", model, "-", "--json", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    (answer,) = json.loads(done.output)
    Path(f"same.{kind.lower()}").write_bytes(encoded.getvalue())
    (expected,) = patchloom.predict(model, f"same.{kind.lower()}", device="cpu")
    assert answer["path"] == "-"
    assert answer["answers"] == [list(pair) for pair in expected.answers]


@pytest.mark.parametrize(("data", "code"), [(b"", 2), (b"\x89PNG\r\n\x1a\nbroken", 3), (b"x" * 100_000, 3)])
def test_standard_input_that_is_neither(data, code, model, photos, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    done = command(("predict", model, "-", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == code
    assert "Traceback" not in done.errors + done.output
    assert "image.png" not in done.output  # the temporary file


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--csv", "a.jpg"), ("a.jpg", ".csv")),
        (("--parquet", "a.csv"), ("a.csv", ".parquet")),
        (("--csv", "folder.csv"), ("folder.csv",)),
        (("--sort-into", "more"), ("more",)),
        (("--threshold", "2"), ("--threshold",)),
    ],
)
def test_outputs_that_cannot_be_written_are_one_line(options, facts, photos, monkeypatch, capsys) -> None:
    Path("folder.csv").mkdir()
    done = command(("predict", "nowhere", "0.png", *options), monkeypatch, capsys)
    assert (done.code, done.output) == (2, "")
    assert missing(done.errors, *facts) == []


def test_the_command_prints_what_it_wrote(model, photos, tmp_path, monkeypatch, capsys) -> None:
    target = tmp_path / "a.csv"
    done = command(("predict", model, ".", "--csv", target, "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 3
    assert missing(done.output, target, 10, "torn.png", 1) == []
    done = command(("predict", model, ".", "--csv", target, "--device", "cpu", "--json"), monkeypatch, capsys)
    value = json.loads(done.output)
    assert (value["written"], value["images"], value["unreadable"]) == ([str(target)], 10, 1)


@pytest.mark.parametrize("images", [b"bytes", 3, [Image.new("RGB", (8, 8))]])
def test_images_in_memory_are_referred_to_the_model(images, model: Path) -> None:
    with refused(UsageError, "load"):
        patchloom.predict(model, images)


def test_the_commands_of_the_page_run(trained, tmp_path, monkeypatch, capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "predict.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "a", "runs/photos")
    Path("photos").mkdir()
    Image.open(trained / "data" / "red" / "0.png").convert("RGB").save("photos/new.jpg")
    lines = block.splitlines()
    assert len(lines) == 8
    for line in lines:
        before, _, after = line.rpartition("|")
        piped = subprocess.run(before, shell=True, capture_output=True, check=True).stdout if before else b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        done = command((*shlex.split(after, comments=True)[1:], "--device", "cpu"), monkeypatch, capsys)
        assert (done.code, done.errors) == (0, ""), line
    assert len(rows_of(Path("predictions.csv"))) == len(rows_of(Path("found.csv"))) == 1
    assert len(list(Path("sorted").glob("*/new.jpg"))) == 1
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.rmtree("sorted")
    names = {"patchloom": patchloom}
    exec(compile(code, "docs/predict.md", "exec"), names)
    assert names["counts"].images == 1
