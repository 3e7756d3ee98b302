"""The first hour of a new user: four public datasets exactly as they are downloaded, from `check` to an artifact.

The folders are small copies in the layouts of Grocery Store, Oxford Pets, CamVid and COCO128 (`tests/data/layouts.py`).
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.layouts import camvid_segnet, coco128_with_two_label_sets, grocery_store, oxford_pets
from tests.reliability.commands import Done, command

Typed = Callable[[str], Done]
TINY = "--device cpu --workers 0 --set model.options.depth=1 --set model.options.dim=24"
CLASSIFY = f"--model resmlp_s12 --size 16 --epochs 1 {TINY} --set model.options.patch_size=8"
SEGMENT = (
    f"--model resmlp_s12 --size 32 --epochs 1 {TINY} --set model.options.patch_size=4 --set segment.channels=8 "
    "--set segment.auxiliary_channels=8 --set segment.norm=group"
)
DETECT = (
    f"--model patchconvnet_s20 --size 32 --epochs 1 {TINY} --set detect.channels=16 --set detect.hidden=24 "
    "--set detect.proposals=20 --set detect.regions=8 --set detect.anchor_scale=3"
)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Type a command in an empty folder; it must end as expected, without a traceback."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, code: int = 0) -> Done:
        done = command(tuple(shlex.split(line)), monkeypatch, capsys)
        assert (done.code or 0) == code, f"{line}\n{done.output}\n{done.errors}"
        return done

    return run


def results(done: Done) -> dict:
    return json.loads(done.output)


def test_groceries(typed, tmp_path: Path) -> None:
    grocery_store(tmp_path)
    checked = results(typed("check dataset --json"))
    assert checked["splits"] == {"train": 6, "val": 3, "test": 3}
    assert len(checked["classes"]) == 3
    run = results(typed(f"train dataset {CLASSIFY} --json"))
    assert run["folder"] == "runs/dataset"
    tested = results(typed("evaluate runs/dataset dataset --split test --json"))
    assert tested["images"] == 3
    typed("report runs/dataset --data dataset --split test")
    typed("look runs/dataset dataset/test")
    typed("export runs/dataset --out groceries.onnx")
    (artifact,) = tmp_path.glob("groceries*")
    assert artifact.is_dir()
    again = results(typed(f"evaluate {artifact} dataset --split test --json"))
    assert again["top1"] == tested["top1"]
    image = "dataset/test/Fruit/Apple/Pink-Lady/Pink-Lady_000.jpg"
    of_run, of_artifact = (results(typed(f"predict {model} {image} --json")) for model in ("runs/dataset", artifact))
    assert of_run[0]["answers"][0][0] == of_artifact[0]["answers"][0][0]
    typed(f"look {artifact} dataset/test --out of_artifact.html")
    other = results(typed(f"train dataset {CLASSIFY} --set augment.flip=0.1 --json"))
    assert other["folder"] == "runs/dataset-2"
    assert results(typed(f"train dataset {CLASSIFY} --json"))["folder"] == "runs/dataset"
    typed(f"train dataset {CLASSIFY} --set augment.flip=0.3 --dry-run")
    typed("evaluate runs/dataset runs/dataset-2")
    for page in ("runs/dataset/report.html", "runs/dataset/report-test.html", "runs/dataset/look.html"):
        assert (tmp_path / page).stat().st_size > 10_000


def test_pets(typed, tmp_path: Path) -> None:
    data = oxford_pets(tmp_path / "pets").relative_to(tmp_path)
    question = typed(f"check {data}", 2).errors
    assert question.count("\n") == 1
    commands = [part.split(" (")[0] for part in question.split("patchloom ")[1:]]
    assert len(commands) == 3
    settings = {"--label-pattern": CLASSIFY, "--masks": SEGMENT, "--boxes": DETECT}
    for line in commands:
        (kind,) = [kind for kind in settings if kind in line]
        assert results(typed(f"{line} {settings[kind]} --out runs/{kind[2:]} --json"))["ended"] == "finished"
    assert results(typed("predict runs/label-pattern pets/images/Abyssinian_1.jpg --json"))[0]["answers"]


def test_street_scenes(typed, tmp_path: Path) -> None:
    camvid_segnet(tmp_path)
    assert results(typed("check CamVid --json"))["task"] == "segment"
    typed(f"train CamVid {SEGMENT}")
    tested = results(typed("evaluate runs/CamVid CamVid --split test --json"))
    assert tested["CamVid"]["images"] == 1
    typed("predict runs/CamVid CamVid/test/Seq05VD_f00000.png --out predicted")
    typed("look runs/CamVid CamVid/test")
    assert len(list((tmp_path / "predicted").iterdir())) >= 3


def test_boxes_with_two_sets_of_labels(typed, tmp_path: Path) -> None:
    data = coco128_with_two_label_sets(tmp_path / "coco128").relative_to(tmp_path)
    question = typed(f"train {data} --dry-run", 2).errors
    assert "--boxes labels" in question
    assert "--boxes labels_coco91" in question
    typed(f"train {data} --boxes labels {DETECT}")
    typed(f"evaluate runs/{data} {data} --boxes labels")
    typed(f"look runs/{data}")
