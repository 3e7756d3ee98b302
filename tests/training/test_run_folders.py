"""One folder, one run: other data, another start or fewer epochs never pass for the run that is there."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from patchloom.recipes import auto
from patchloom.runs.checksums import FILE
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import TrainingResult, make_plan, run_training
from patchloom_runtime.errors import DataError, UsageError
from tests.reliability.commands import class_folders

CHANGES = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
GIVEN: dict[str, Any] = {"recipe": "small_images", "epochs": 2, "batch": 4, "size": 16, "workers": 0, "device": "cpu"}


def settings(data: Path, **given: Any) -> TrainingSettings:
    return TrainingSettings(data=str(data), changes=CHANGES, **(GIVEN | given))


def train(data: Path, **given: Any) -> tuple[TrainingResult, list[str]]:
    said: list[str] = []
    return run_training(settings(data, **given), say=said.append), said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets in folders of one name, with other pictures, and a run on the first."""
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "x" / "images")
    class_folders(tmp_path / "y" / "images", pictures=8)
    train(Path("x/images"))
    return tmp_path


def test_other_data_of_the_same_name_get_a_folder_of_their_own(here: Path) -> None:
    before = (here / "runs" / "images" / "weights.safetensors").read_bytes()
    second, said = train(Path("y/images"))
    assert second.folder == Path("runs/images-2")
    assert second.outcome.progress.step > 0
    (line,) = [line for line in said if "runs/images-2" in line and str(here / "x/images") in line]
    assert re.search(r"runs/images\b(?!-2)", line)
    assert (here / "runs" / "images" / "weights.safetensors").read_bytes() == before
    again, said = train(Path("y/images"))
    assert again.folder == Path("runs/images-2")
    assert again.metrics == second.metrics
    assert any(all(fact in line for fact in ("2", "--epochs", "--out", "top-1")) for line in said)
    assert again.outcome.progress.step == second.outcome.progress.step


def test_the_same_names_with_other_pictures_are_other_data(here: Path) -> None:
    shutil.copytree(here / "x" / "images", here / "z" / "images")
    shutil.copy(here / "z" / "images" / "red" / "1.png", here / "z" / "images" / "red" / "0.png")
    assert make_plan(settings(Path("z/images")), "cpu").folder == Path("runs/images-2")


def test_data_that_moved_are_the_same(here: Path) -> None:
    (here / "elsewhere").mkdir()
    (here / "x" / "images").rename(here / "elsewhere" / "images")
    run, said = train(Path("elsewhere/images"), epochs=3)
    assert run.folder == Path("runs/images")
    assert run.outcome.progress.epoch == 3
    assert any(re.search(r"runs/images\b.*\b8\b.*\b12\b", line) for line in said)


def test_a_lost_file_at_the_same_place_is_a_note(here: Path) -> None:
    (here / "x" / "images" / "red" / "3.png").unlink()
    plan = make_plan(settings(Path("x/images"), epochs=3), "cpu")
    assert plan.folder == Path("runs/images")
    assert any(re.search(r"\b16\b.*\b15\b", note) for note in plan.splits.notes)


def test_a_folder_given_by_name_refuses_other_data_with_both_names(here: Path) -> None:
    with pytest.raises(DataError) as caught:
        train(Path("y/images"), out="runs/images")
    for fact in ("runs/images", str(here / "x/images"), str(here / "y/images"), "--out"):
        assert fact in str(caught.value)


def test_a_record_without_a_place_is_compared_by_its_rows(here: Path) -> None:
    file = here / "runs" / "images" / "data.json"
    old = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("place", "init")}
    file.write_text(json.dumps(old))
    (here / "runs" / "images" / FILE).unlink()  # which old versions did not write either
    assert make_plan(settings(Path("x/images")), "cpu").folder == Path("runs/images")
    assert make_plan(settings(Path("y/images")), "cpu").folder == Path("runs/images-2")
    with pytest.raises(DataError) as caught:
        make_plan(settings(Path("y/images"), out="runs/images"), "cpu")
    for fact in ("runs/images", "16", "4", "blue, red", str(here / "y/images")):
        assert fact in str(caught.value)


def test_another_start_is_refused_with_both_names(here: Path) -> None:
    data = Path("x/images")
    for seed in (1, 2):
        run_training(
            TrainingSettings(data=str(data), out=f"runs/start{seed}", changes=CHANGES | {"seed": seed}, **GIVEN),
            say=str,
        )
    train(data, out="runs/tuned", init="runs/start1")
    before = (here / "runs/tuned/run.json").read_bytes()
    with pytest.raises(UsageError) as caught:
        train(data, out="runs/tuned", init="runs/start2", epochs=3)
    for fact in ("runs/tuned", "--init runs/start1", "--init runs/start2", "--out"):
        assert fact in str(caught.value)
    with pytest.raises(UsageError) as caught:
        train(data, out="runs/tuned")
    for fact in ("runs/tuned", "--init runs/start1", "--out"):
        assert fact in str(caught.value)
    tuned, said = train(data, init="runs/start1")
    assert tuned.folder == Path("runs/images-2")
    assert any(re.search(r"runs/images\b(?!-2).*--init runs/start1", line) for line in said)
    (here / "runs/start1").rename(here / "runs/moved")
    assert train(data, out="runs/tuned", init="runs/moved", epochs=2)[0].outcome.ended == "finished"
    assert (here / "runs/tuned/run.json").read_bytes() == before
    shutil.copy("runs/start2/weights.safetensors", "runs/moved/weights.safetensors")
    with pytest.raises(UsageError) as caught:
        train(data, out="runs/tuned", init="runs/moved")
    for fact in ("runs/tuned", "--init runs/start1", "--init runs/moved"):
        assert fact in str(caught.value)


def test_fewer_epochs_are_refused_before_anything_is_written(here: Path) -> None:
    files = {path: path.read_bytes() for path in (here / "runs").rglob("*") if path.is_file()}
    with pytest.raises(UsageError) as caught:
        train(Path("x/images"), out="runs/images", epochs=1)
    for fact in ("runs/images", "--epochs 2", "--out"):
        assert fact in str(caught.value)
    assert {path: path.read_bytes() for path in (here / "runs").rglob("*") if path.is_file()} == files
    assert train(Path("x/images"), epochs=3)[0].outcome.progress.epoch == 3


def test_a_command_without_the_options_of_a_run_starts_another(here: Path) -> None:
    def plan(changes: dict[str, Any], **given: Any) -> TrainingSettings:
        own = GIVEN | {"recipe": "auto"} | given
        return TrainingSettings(data="x/images", changes=CHANGES | changes, **own)

    mixed = {"augment.mixup": 0.5}
    first = run_training(plan(mixed), say=str).folder
    assert make_plan(plan(mixed), "cpu").folder == first
    assert make_plan(plan(mixed, epochs=7), "cpu").folder == first
    assert make_plan(plan({}), "cpu").folder != first
    assert make_plan(plan(mixed, epochs=None), "cpu").folder != first
    assert make_plan(plan({}, out=str(first)), "cpu").folder == first


def test_a_val_split_too_small_to_choose_by_is_noted(here: Path) -> None:
    def noted(notes: Sequence[str]) -> list[str]:
        return [note for note in notes if re.search(r"\bval\b.*\b50\b", note)]

    (note,) = noted(make_plan(settings(Path("x/images")), "cpu").splits.notes)
    assert all(fact in note for fact in ("4", "25.0"))
    plan = make_plan(
        TrainingSettings(data="shapes:count=400,size=16", out=str(here / "new"), changes=CHANGES, **GIVEN), "cpu"
    )
    assert len(plan.splits.val) >= 50
    assert noted(plan.splits.notes) == []


def test_a_run_keeps_a_network_that_auto_would_no_longer_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of patchloom that has learned of a better one."""
    for name in ("one", "other"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (64, 64), (40 * i, 0, 0)).save(tmp_path / "data" / name / f"{i}.png")
    options = TrainingSettings(
        data=str(tmp_path / "data"), out=str(tmp_path / "run"), epochs=1, workers=0, device="cpu"
    )
    with monkeypatch.context() as before:
        network = auto._network
        before.setattr(auto, "_network", lambda *a, **k: network(*a, **k | {"has_options": True}))
        run_training(options, say=str)
    assert make_plan(replace(options, out=None), "cpu").recipe.model.name == "smlpnet_t"
    assert make_plan(options, "cpu").recipe.model.name == "resmlp_s12"
    assert run_training(replace(options, epochs=2), say=str).outcome.progress.epoch == 2
