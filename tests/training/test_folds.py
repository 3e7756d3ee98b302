"""Cross-validation: one ordinary run per fold, each image predicted by the run that did not train on it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.engine.signals import Stopped
from patchloom.evaluation.intervals import student
from patchloom.runs.config import read_recipe
from patchloom.runs.out_of_fold import FILE, load_out_of_fold, save_out_of_fold
from patchloom.runs.predictions import load_predictions
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.training.sweeps import sweep as sweep_module
from patchloom.training.sweeps.folds import FoldsResult
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.messages import refused
from tests.reliability.commands import OPTIONS, class_folders, command

CHANGES = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
GIVEN: dict[str, Any] = {"recipe": "small_images", "epochs": 1, "batch": 4, "size": 16, "workers": 0, "device": "cpu"}


def cross_validate(data: Path, out: Path | None, **given: Any) -> FoldsResult:
    result = patchloom.train(str(data), out=out and str(out), **{**GIVEN, "set": CHANGES, "folds": 3, **given})
    assert isinstance(result, FoldsResult)
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of ten images, the first of which has a copy and a nearly equal one; and three folds of them."""
    root = tmp_path_factory.mktemp("folds")
    class_folders(root / "data")
    gradient = np.linspace(0, 255, 32)[None, :, None] * np.ones((32, 1, 3))
    for name, change in (("x", 0), ("x-copy", 0), ("x-near", 2)):
        pixels = np.clip(gradient + change, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(root / "data" / "red" / f"{name}.png")
    cross_validate(root / "data", root / "folds")
    return root


def test_each_image_is_predicted_once_by_the_run_that_did_not_train_on_it(place: Path) -> None:
    predictions = load_out_of_fold(place / "folds")
    files = {path.relative_to(place / "data").as_posix() for path in (place / "data").rglob("*.png")}
    assert set(predictions.keys) == files
    assert len(predictions) == len(files) == 23
    names = [predictions.classes[label] for label in predictions.labels]
    assert names == [key.partition("/")[0] for key in predictions.keys]
    for fold in (1, 2, 3):
        own = load_predictions(place / "folds" / f"fold-{fold}").report
        rows = predictions.folds == fold
        assert sorted(own.predictions.tolist()) == sorted(predictions.predictions[rows].tolist())
        assert own.top(1) == pytest.approx(100 * np.mean((predictions.predictions == predictions.labels)[rows]))


def test_copies_stay_in_one_fold(place: Path) -> None:
    predictions = load_out_of_fold(place / "folds")
    fold = dict(zip(predictions.keys, predictions.folds.tolist(), strict=True))
    assert len({fold[f"red/{name}.png"] for name in ("x", "x-copy", "x-near")}) == 1


def test_mean_and_interval_are_of_the_folds(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("a finished fold was trained again")

    monkeypatch.setattr(sweep_module, "run_training", refuse)
    before = (place / "folds" / FILE).stat().st_mtime_ns
    result = cross_validate(place / "data", place / "folds")
    assert (place / "folds" / FILE).stat().st_mtime_ns == before
    scores = [run.metrics["top1"] for run in result.runs.values()]
    low, high = student(scores)
    assert [result.metrics[f"top1{end}"] for end in ("", "_low", "_high", "_std")] == pytest.approx(
        [np.mean(scores), low, high, np.std(scores, ddof=1)]
    )
    assert result.metrics["images"] == 23
    assert [row[0] for row in result.table()[1]] == ["1", "2", "3", "mean", "std"]
    assert result.page.is_file()
    assert len(result.summary()["folds"]) == 3
    with refused(UsageError, "fold-1"):
        _ = result.model


def test_a_fold_is_an_ordinary_run(place: Path) -> None:
    record = read_run_metadata(place / "folds" / "fold-2")
    assert record is not None
    assert record.val == "2/3"
    evaluated = patchloom.evaluate(place / "folds" / "fold-2", str(place / "data"), device="cpu")
    own = load_predictions(place / "folds" / "fold-2")
    assert next(iter(evaluated.evaluations.values())).fingerprint == own.fingerprint


def test_a_stopped_cross_validation_continues_to_the_same_predictions(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, begun = sweep_module.run_training, []

    def stop_in_the_second(settings: Any, **options: Any) -> Any:
        begun.append(settings.val)
        if len(begun) == 2:
            raise Stopped(15, 1, 3, saved=True)
        return train(settings, **options)

    monkeypatch.setattr(sweep_module, "run_training", stop_in_the_second)
    with pytest.raises(Stopped):
        cross_validate(place / "data", tmp_path / "folds")
    assert not (tmp_path / "folds" / FILE).exists()
    cross_validate(place / "data", tmp_path / "folds")
    assert begun == ["1/3", "2/3", "2/3", "3/3"]
    assert (tmp_path / "folds" / FILE).read_bytes() == (place / "folds" / FILE).read_bytes()


def test_more_epochs_continue_the_folds_and_renew_their_predictions(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "folds", tmp_path / "folds")
    before = load_out_of_fold(tmp_path / "folds")
    cross_validate(place / "data", tmp_path / "folds", epochs=2)
    after = load_out_of_fold(tmp_path / "folds")
    assert [read_recipe(tmp_path / "folds" / f"fold-{fold}").schedule.epochs for fold in (1, 2, 3)] == [2, 2, 2]
    assert before.weights != after.weights  # a fold may keep the weights of its first epoch as its best
    assert before.keys == after.keys


def test_damaged_predictions_are_noticed_and_written_again(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "folds", tmp_path / "folds")
    whole = (tmp_path / "folds" / FILE).read_bytes()
    (tmp_path / "folds" / FILE).write_bytes(whole[:-1] + b"\x00")
    with refused(CheckpointError, FILE):
        load_out_of_fold(tmp_path / "folds")
    cross_validate(place / "data", tmp_path / "folds")
    assert (tmp_path / "folds" / FILE).read_bytes() == whole


def test_names_of_any_bytes_are_kept(place: Path, tmp_path: Path) -> None:
    predictions = load_out_of_fold(place / "folds")
    odd = ("a\udcff.png", "é,\n.png", *predictions.keys[2:])
    object.__setattr__(predictions, "keys", odd)
    save_out_of_fold(tmp_path, predictions)
    assert load_out_of_fold(tmp_path).keys == odd


def test_time_is_divided_over_the_folds(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    monkeypatch.setattr(
        "patchloom.training.sweeps.folds.make_plan", lambda settings, _: times.append(settings.time) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        cross_validate(place / "data", tmp_path / "folds", time="1m", epochs=None)
    assert times == ["20s"]


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"folds": 1}, "--folds"),
        ({"folds": 101}, "101"),
        ({"val": "held-out"}, "--val"),
        ({"stop_after": "1m"}, "--stop-after"),
        ({"folds": 24}, "24"),  # images
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], fact: str, place: Path, tmp_path: Path) -> None:
    with refused(UsageError, fact):
        cross_validate(place / "data", tmp_path / "folds", **given)
    assert not (tmp_path / "folds").exists()


def test_text_has_no_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, DataError), match="--folds"):
        patchloom.train("numbers:count=50", recipe="translation-tiny", folds=2, device="cpu")


def test_other_settings_go_to_another_folder(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "folds", "runs/data-folds-3")
    planned = cross_validate(place / "data", None, dry_run=True)
    assert planned.folder == Path("runs/data-folds-3")
    other = cross_validate(place / "data", None, dry_run=True, batch=5)
    assert other.folder == Path("runs/data-folds-3-2")
    with refused(UsageError, "runs/data-folds-3", "batch_size"):
        cross_validate(place / "data", Path("runs/data-folds-3"), batch=5)


def test_the_command_prints_one_table(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("train", place / "data", *OPTIONS, "--out", place / "folds", "--folds", 3, "--epochs", 1)
    done = command(options, monkeypatch, capsys)
    assert done.code == 0, done.errors
    rows = [line.split()[0] for line in done.output.splitlines() if line.strip()]
    assert rows[-5:] == ["1", "2", "3", "mean", "std"]
    printed = command((*options, "--json"), monkeypatch, capsys).output
    assert [fold["fold"] for fold in json.loads(printed)["folds"]] == [1, 2, 3]
