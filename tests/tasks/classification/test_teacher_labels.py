"""Distillation of images without labels: the teacher provides the classes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.runs.config import read_run_files
from patchloom.runs.predictions import load_predictions
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.assemble import silent
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.forked import rank_places
from tests.messages import refused
from tests.reliability.commands import forked

COLORS = ("blue", "green", "red")
NETWORK = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}


def write_image(path: Path, number: int) -> None:
    """Write an image of one of the three colors, with noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 90, (16, 16, 3))
    pixels[..., 2 - number % 3] += 150
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def train(data: Path, out: Path, *, recipe: str = "small_images", say=silent, **changes):
    given = {"model": "resmlp_s12", "size": 16, "epochs": 1, "batch": 8, "workers": 0, "device": "cpu", "init": "none"}
    fields = NETWORK | {key: value for key, value in changes.items() if "." in key}
    given |= {key: value for key, value in changes.items() if "." not in key}
    return run_training(TrainingSettings(data=str(data), out=str(out), recipe=recipe, changes=fields, **given), say=say)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with images in class folders, the same images without classes, and their teacher."""
    root = tmp_path_factory.mktemp("photos")
    for number in range(60):
        write_image(root / "labeled" / COLORS[number % 3] / f"{number:02}.png", number)
        write_image(root / "flat" / f"{number:02}.png", number)
    train(root / "labeled", root / "teacher", epochs=6, **{"optim.lr": 0.01, "augment.policy": "none"})
    return root


@pytest.fixture(scope="module")
def student(photos: Path) -> Path:
    return train(photos / "flat", photos / "student", teacher=str(photos / "teacher"), epochs=2).folder


def teacher_labels(run: Path) -> list[int]:
    return json.loads((run / "teacher_labels.json").read_text())


def decisions(run: Path, images: Path) -> list[int]:
    """Return the classes that a run predicts for images, in the order of their paths."""
    return [COLORS.index(scores[0][0]) for scores in patchloom.load(run).predict(sorted(images.rglob("*.png")))]


def test_images_without_labels_are_learned_from_the_teacher(photos: Path, student: Path) -> None:
    assert read_run_files(student).labels == COLORS
    decided = teacher_labels(student)
    assert sorted(decided) == sorted(decisions(photos / "teacher", photos / "flat"))
    assert len(set(decided)) == 3
    # The scores of val compare with the teacher's decisions.
    val = load_predictions(student).report
    assert val.labels.tolist() == decided[-len(val.labels) :]


def test_labels_of_val_are_kept(photos: Path, tmp_path: Path) -> None:
    wrong = {"blue": "red", "green": "blue", "red": "green"}
    for number in range(12):
        write_image(tmp_path / "data" / "train" / f"{number:02}.png", number)
        write_image(tmp_path / "data" / "val" / wrong[COLORS[number % 3]] / f"{number:02}.png", number)
    run = train(tmp_path / "data", tmp_path / "run", teacher=str(photos / "teacher")).folder
    labels = load_predictions(run).report.labels
    assert np.bincount(labels).tolist() == [4, 4, 4]
    assert labels.tolist() != decisions(photos / "teacher", tmp_path / "data" / "val")


def test_the_teacher_alone_can_be_learned_from(photos: Path, tmp_path: Path) -> None:
    """With weight 1, the labels have no part in the loss: others end with the same weights."""
    alone = {"objective.distillation": "soft", "objective.distillation_weight": 1.0, "augment.mixup": 0.0}
    options = alone | {"teacher": str(photos / "teacher"), "augment.cutmix": 0.0, "optim.ema_decay": None}
    one = train(photos / "flat", tmp_path / "one", **options).folder
    (tmp_path / "two").mkdir()
    other = [(label + 1) % 3 for label in teacher_labels(one)]
    (tmp_path / "two" / "teacher_labels.json").write_text(json.dumps(other))
    two = train(photos / "flat", tmp_path / "two", **options).folder
    assert teacher_labels(two) == other
    first, second = (load_file(run / "weights.safetensors") for run in (one, two))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_a_resumed_run_reads_its_labels(photos: Path, student: Path, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {"teacher": str(photos / "teacher"), "epochs": 3}
    shutil.copytree(student, run)
    before = teacher_labels(run)
    changed = [(label + 1) % 3 for label in before]
    (run / "teacher_labels.json").write_text(json.dumps(changed))
    train(photos / "flat", run, **options)
    assert teacher_labels(run) == changed
    for content, facts in ((json.dumps(before[:-1]), (59, 60)), ("[0, 1", ()), (json.dumps([7] * 60), (2,))):
        (run / "teacher_labels.json").write_text(content)
        with refused(CheckpointError, "teacher_labels.json", *facts):
            train(photos / "flat", run, **options | {"epochs": 4})


def test_what_a_user_can_get_wrong_is_told_before_training(photos: Path, tmp_path: Path) -> None:
    with refused(DataError, "--teacher", 60):
        train(photos / "flat", tmp_path / "run")
    backbone = train(photos / "flat", tmp_path / "dino", recipe="dino_small_images").folder
    with refused(UsageError, str(backbone)):
        train(photos / "flat", tmp_path / "run", teacher=str(backbone))
    shutil.copytree(photos / "flat", tmp_path / "some")
    write_image(tmp_path / "some" / "red" / "2.png", 2)
    with pytest.raises(DataError) as caught:  # a teacher does not fill gaps between labels
        train(tmp_path / "some", tmp_path / "run", teacher=str(photos / "teacher"))
    assert "--teacher" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_two_processes_train_as_one(photos: Path, tmp_path: Path) -> None:
    line = ["train", photos / "flat", "--teacher", photos / "teacher", "--model", "resmlp_s12", "--epochs", "1"]
    line += ["--size", "16", "--batch", "8", "--workers", "0", "--device", "cpu", "--init", "none"]
    changes = NETWORK | {"optim.name": "sgd", "optim.lr": 0.05}
    line += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    running = [forked(*line, "--out", tmp_path / "two", env=rank) for rank in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    printed = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], printed
    assert teacher_labels(tmp_path / "one") == teacher_labels(tmp_path / "two")
    one, two = (load_file(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert all(np.allclose(tensor, two[name], atol=1e-5) for name, tensor in one.items())
