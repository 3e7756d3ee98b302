"""Several folders, archives and patterns on the command line: what is said, and where the run goes."""

import io
import json
import zipfile

import pytest
from PIL import Image
from typer.testing import CliRunner

from patchloom.cli import make_app
from patchloom.data.sources.specs import split_specs
from patchloom.tasks.plan import folder_name
from patchloom_runtime.errors import DataError, UsageError
from tests.messages import missing, refused


def draw(root, *paths):
    for i, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (i * 9 % 256, 40 * i % 256, 3)).save(root / path)


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    draw(tmp_path, *(f"{name}/{i}.png" for name in ("cats", "dogs") for i in range(6)))


def run(*arguments):
    result = CliRunner().invoke(make_app(), list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_check_takes_several_folders():
    done = run("check", "cats", "dogs", "--json")
    report = json.loads(done.stdout)
    assert report["name"].startswith("cats, dogs")
    assert set(report["classes"]) == {"cats", "dogs"}
    printed = run("check", "cats", "dogs").stdout
    assert "patchloom train 'cats dogs'" in printed
    with refused(UsageError, "dogs/check.html"):
        run("check", "cats", "dogs", "--page", "dogs/check.html")


def test_train_takes_several_folders_and_names_the_run_by_them():
    printed = run("train", "cats", "dogs", "--dry-run", "--device", "cpu", "--size", "16", "--batch", "4").stdout
    assert "cats, dogs" in printed
    assert "runs/cats-dogs" in printed


def test_masks_and_flat_folders_are_told_before_work(tmp_path):
    with refused(DataError, 6, "--recipe dino"):
        run("train", "cats")
    draw(tmp_path / "seg", "images/0.png", "images/1.png")
    (tmp_path / "seg" / "masks").mkdir()
    for i in range(2):
        Image.new("L", (16, 16)).save(tmp_path / "seg" / "masks" / f"{i}.png")
    with refused(DataError, "--task segment"):
        run("train", "seg", "--task", "classify")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("cats dogs", "cats-dogs"),
        ("cats", "cats"),
        ("flowers.tar.gz", "flowers"),
        ("flowers.zip", "flowers"),
        ("set/train set/val", "set"),
        ("hf:user/name", "hf-user-name"),
    ],
)
def test_the_folder_of_a_run(tmp_path, data, name):
    for archive in ("flowers.tar.gz", "flowers.zip"):
        (tmp_path / archive).write_bytes(b"x")
    for split in ("train", "val"):
        (tmp_path / "set" / split).mkdir(parents=True)
    assert folder_name(split_specs(data)) == name


def test_a_zip_is_checked_in_place(tmp_path):
    with zipfile.ZipFile("pets.zip", "w") as archive:
        for path in sorted(tmp_path.glob("*s/*.png")):
            archive.write(path, str(path.relative_to(tmp_path)))
        archive.writestr("cats/broken.png", io.BytesIO(b"nothing").read())
    done = run("check", "pets.zip", "--json")
    report = json.loads(done.stdout)
    assert report["splits"] == {"train": 13}
    [bad] = report["unreadable"]
    assert missing(bad["place"]["where"], "pets.zip", "cats/broken.png") == []
