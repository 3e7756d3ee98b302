"""Whole runs on small data: every recipe takes steps, a run resumes exactly, mistakes are found before any work."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import patchloom
from patchloom.data.batches.decoded_dataset import make_loader
from patchloom.data.batches.views import make_view_loader, views_of
from patchloom.data.checking.check import check
from patchloom.data.sources.source import open_data
from patchloom.engine import loop
from patchloom.engine.distribution import Processes
from patchloom.engine.optimization import Schedule, freeze, make_optimizer
from patchloom.engine.run import Run
from patchloom.engine.signals import Stopped
from patchloom.models import network as network_module
from patchloom.models.registry import family_of
from patchloom.objectives.feature_distillation import FeatureExtractor
from patchloom.objectives.objective import Ingredients, make_objective
from patchloom.objectives.teacher import Teacher
from patchloom.recipes import get_recipe, list_recipes, override
from patchloom.recipes.choices import resolve_recipe
from patchloom.recipes.methods import method_of
from patchloom.runs.config import read_recipe
from patchloom.runs.predictions import load_predictions
from patchloom.tasks.images.networks import make_network, make_teacher
from patchloom.tasks.images.resolved_recipe import OpenedImages, median_side
from patchloom.tasks.plan import TrainingSettings, seconds_of
from patchloom.tasks.table import task_of_method
from patchloom.training.run import _same_on_all, make_plan, run_training
from patchloom_runtime.errors import DataError, UsageError
from tests.messages import missing, refused
from tests.networks import SMALL, small
from tests.reliability.commands import class_folders

TINY = {"model.options.depth": 2, "model.options.dim": 16, "model.options.patch_size": 4}


@pytest.fixture(scope="module")
def shapes():
    return open_data("shapes:count=40,size=32")


def shrunk(name: str):
    """A recipe with its network made small and its batch and length cut; everything else as published."""
    recipe = get_recipe(name)
    if recipe.model.name.startswith("timm:"):
        changes = {"model.name": "timm:test_resnet", "model.image_size": 64}
    else:
        options = dict(SMALL[family_of(recipe.model.name)])
        changes = {"model.image_size": options.pop("image_size")}
        changes |= {f"model.options.{key}": value for key, value in options.items()}
    changes |= {"optim.batch_size": 8, "schedule.epochs": 1, "schedule.warmup_epochs": 0, "schedule.min_lr": 0.0}
    if recipe.schedule.decay == "step":
        changes |= {"schedule.step_epochs": (1,)}
    if recipe.objective.method == "dino":
        changes |= {"views.local_size": 16, "dino.outputs": 64, "dino.hidden": 32, "dino.bottleneck": 16}
    return override(recipe, changes)


@pytest.mark.parametrize(
    "name", [name for name in list_recipes() if task_of_method(get_recipe(name).objective.method).whole_images]
)
def test_every_recipe_takes_two_steps(name, shapes) -> None:
    recipe = shrunk(name)
    torch.manual_seed(0)
    network = make_network(recipe, len(shapes.classes))
    freeze(network, recipe.model.trainable)
    teacher = None
    of_features = method_of(recipe.objective.method).teacher == "features"
    if recipe.objective.distillation != "none" or of_features:
        pupil: Any = small("mixer_b16", num_classes=len(shapes.classes))
        taught = FeatureExtractor(pupil) if of_features else pupil
        teacher = Teacher(taught, mean=pupil.pixel_mean, std=pupil.pixel_std, image_size=(32, 32), num_classes=16)
    size, given = recipe.model.image_size, {"batch_size": 8, "seed": recipe.seed, "device": "cpu"}
    if method_of(recipe.objective.method).views:
        loader, _ = make_view_loader(shapes.train, views_of(recipe), **given)
    else:
        loader, _ = make_loader(shapes.train, recipe.augment, size, **given)
    processes, labels = Processes("fp32", device="cpu"), shapes.train.labels
    objective = make_objective(
        Ingredients(recipe=recipe, network=network, labels=torch.from_numpy(labels), steps_per_epoch=2, teacher=teacher)
    )
    run = Run(
        model=network,
        objective=objective,
        optimizer=make_optimizer(network, recipe.optim, *([objective] if isinstance(objective, nn.Module) else [])),
        schedule=Schedule(recipe.optim, recipe.schedule, 2),
        loader=TwoSteps(loader),
        processes=processes,
        clip_norm=recipe.optim.clip_norm,
        clip_each=recipe.optim.clip_each,
        eval_mode=recipe.model.eval_mode,
    )
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    outcome = loop.train(run)
    assert outcome.progress.step == 2
    after = network.state_dict()
    assert any(not torch.equal(tensor, before[key]) for key, tensor in after.items())
    assert all(torch.isfinite(tensor).all() for tensor in after.values() if tensor.is_floating_point())


class TwoSteps:
    """The first two batches of a loader as an epoch."""

    steps_per_epoch = 2

    def __init__(self, loader) -> None:
        self._loader = loader

    def epoch(self, epoch: int, start_step: int = 0):
        batches = self._loader.epoch(epoch, start_step)
        for _ in range(self.steps_per_epoch - start_step):
            yield next(batches)


def settings(out, **changes) -> TrainingSettings:
    values = {"recipe": "small_images", "epochs": 2, "batch": 8, "workers": 0, "device": "cpu"} | changes
    return TrainingSettings(data="shapes:count=40,size=32", out=str(out), changes=TINY, **values)


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(next(iter(sorted((folder / "checkpoints").iterdir(), reverse=True))) / "weights.safetensors")


def test_a_run_that_recomputes_activations_ends_with_the_same_weights(tmp_path, monkeypatch) -> None:
    recomputed = []
    monkeypatch.setattr(network_module, "checkpoint", lambda *a, **k: recomputed.append(1) or checkpoint(*a, **k))
    tiny = TINY | {"model.drop_path": 0.2, "model.options.norm": "batch"}
    ends = []
    for on in (False, True):
        given = replace(settings(tmp_path / str(on)), changes=tiny | {"model.gradient_checkpointing": on})
        run_training(given, say=str)
        assert bool(recomputed) is on
        rows = [json.loads(line) for line in (tmp_path / str(on) / "metrics.jsonl").read_text().splitlines()]
        ends.append((weights_of(tmp_path / str(on)), [row["values"] for row in rows]))
    (plain, numbers), (lean, same_numbers) = ends
    assert numbers == same_numbers != []
    assert all(torch.equal(lean[key], tensor) for key, tensor in plain.items())


def test_a_run_stopped_in_mid_epoch_ends_with_the_same_weights(tmp_path, monkeypatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_training(settings(whole), say=str)
    update = loop._Loop.update

    def interrupted(self, *arguments):
        if self.progress.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return update(self, *arguments)

    monkeypatch.setattr(loop._Loop, "update", interrupted)
    with pytest.raises(Stopped) as stopped:
        run_training(settings(broken), say=str)
    assert stopped.value.exit_code == 143
    monkeypatch.undo()
    said: list[str] = []
    run_training(settings(broken), say=said.append)
    assert any("resuming " in line for line in said)
    expected = weights_of(whole)
    for key, tensor in weights_of(broken).items():
        assert torch.equal(tensor, expected[key]), key
    assert (broken / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()


def losses_of(folder) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [value for line in lines for value in line["values"].values()]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_seed_twice_is_the_same_run(tmp_path, threads) -> None:
    torch.set_num_threads(threads)
    try:
        for name in "ab":
            run_training(settings(tmp_path / name), say=str)
    finally:
        torch.set_num_threads(1)
    assert (tmp_path / "a" / "weights.safetensors").read_bytes() == (
        tmp_path / "b" / "weights.safetensors"
    ).read_bytes()
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")
    run_training(replace(settings(tmp_path / "c"), changes=TINY | {"seed": 1}), say=str)
    assert losses_of(tmp_path / "a") != losses_of(tmp_path / "c")


@pytest.mark.slow
def test_another_number_of_threads_changes_only_the_last_digits(tmp_path) -> None:
    large = {"model.options.dim": 96, "model.options.depth": 4, "model.options.patch_size": 4}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            run_training(replace(settings(tmp_path / str(threads), batch=32, epochs=4), changes=large), say=str)
        finally:
            torch.set_num_threads(1)
    one, two = losses_of(tmp_path / "1"), losses_of(tmp_path / "2")
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) <= 1e-5
    weights = weights_of(tmp_path / "1")
    for key, tensor in weights_of(tmp_path / "2").items():
        assert (tensor - weights[key]).abs().max() <= 1e-5, key


def test_a_run_that_nobody_reads_goes_on(tmp_path) -> None:
    def closed(line: str) -> None:
        raise BrokenPipeError

    assert run_training(settings(tmp_path / "run", epochs=1), say=closed).metrics["top1"] >= 0


def test_pictures_are_drawn_every_few_epochs_and_change_nothing(tmp_path) -> None:
    plain, drawn = tmp_path / "plain", tmp_path / "drawn"
    run_training(settings(plain, epochs=3), say=str)
    run_training(settings(drawn, epochs=3, pictures=2), say=str)
    assert not (plain / "pictures").exists()
    names = ["branch_norms.json", "epoch_0002.png", "epoch_0003.png"]
    assert sorted(path.name for path in (drawn / "pictures").iterdir()) == names
    assert (drawn / "weights.safetensors").read_bytes() == (plain / "weights.safetensors").read_bytes()


def test_workers_change_nothing(tmp_path) -> None:
    # AutoAugment has no version for whole batches, so workers prepare the pictures.
    for workers in (0, 2):
        changes = TINY | {"augment.policy": "autoaugment", "augment.erasing": 0.25}
        run_training(
            TrainingSettings(
                data="shapes:count=40,size=32", recipe="small_images", out=str(tmp_path / str(workers)), epochs=1,
                batch=8, workers=workers, device="cpu", changes=changes,
            ),
            say=str,
        )  # fmt: skip
    one, other = weights_of(tmp_path / "0"), weights_of(tmp_path / "2")
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_the_folder_is_enough_alone(tmp_path) -> None:
    trained = run_training(settings(tmp_path / "run"), say=str)
    for name in ("weights.safetensors", "config.json", "recipe.yaml", "metrics.jsonl", "labels.json", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    classifier = patchloom.load(moved, device="cpu")
    assert classifier.labels == open_data("shapes:count=40,size=32").classes.names
    result = classifier.evaluate("shapes:count=40,size=32", split="val")
    assert result.values()["top1"] == pytest.approx(trained.metrics["top1"])
    kept = load_predictions(moved)
    assert kept.fingerprint == result.fingerprint
    assert kept.report.predictions.tolist() == result.report.predictions.tolist()
    picture = open_data("shapes:count=40,size=32").val.read(0)
    (answers,) = classifier.predict([picture], top=2)
    assert len(answers) == 2
    assert answers[0][1] >= answers[1][1]
    classifier.save_pretrained(tmp_path / "hub")
    again = patchloom.load(tmp_path / "hub", device="cpu")
    assert again.predict([picture], top=2) == [answers]
    assert patchloom.Classifier.from_pretrained(tmp_path / "hub", device="cpu").labels == classifier.labels
    assert "library_name: patchloom" in (tmp_path / "hub" / "README.md").read_text()


def test_pushing_uploads_a_folder_that_loads(tmp_path, monkeypatch) -> None:
    import shutil

    import huggingface_hub

    class Hub:
        def create_repo(self, repository, *, private, exist_ok):
            assert (repository, private, exist_ok) == ("user/shapes", True, True)

        def upload_folder(self, *, repo_id, folder_path):
            shutil.copytree(folder_path, tmp_path / "uploaded")
            return f"hub:{repo_id}"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    run_training(settings(tmp_path / "run", epochs=1), say=str)
    classifier = patchloom.load(tmp_path / "run", device="cpu")
    assert classifier.push_to_hub("user/shapes", private=True) == "hub:user/shapes"
    assert patchloom.load(tmp_path / "uploaded", device="cpu").labels == classifier.labels


def test_the_same_command_on_a_finished_run_trains_nothing(tmp_path) -> None:
    run_training(settings(tmp_path / "run"), say=str)
    before = (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns
    again = run_training(settings(tmp_path / "run"), say=str)
    assert again.outcome.ended == "finished"
    assert (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns == before


def test_a_dry_run_trains_nothing(tmp_path) -> None:
    planned = run_training(settings(tmp_path / "run"), dry_run=True, say=str)
    assert planned.summary()["seconds"] > 0
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_compiled_network_says_what_it_measured(tmp_path) -> None:
    for compiled in (True, False):
        said: list[str] = []
        run_training(settings(tmp_path / "run", compiled=compiled), dry_run=True, say=said.append)
        assert any(missing(line, "images/s", "compil") == [] for line in said) == compiled


@pytest.mark.parametrize("compiled", [True, False])
def test_what_was_compiled_is_given_back(compiled, tmp_path, monkeypatch) -> None:
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    run_training(settings(tmp_path / "run", compiled=compiled), dry_run=True, say=str)
    assert len(resets) == compiled


def test_a_teacher_and_an_init_from_runs(tmp_path) -> None:
    run_training(settings(tmp_path / "teacher"), say=str)
    distilled = run_training(settings(tmp_path / "pupil", teacher=str(tmp_path / "teacher")), say=str)
    assert (tmp_path / "pupil" / "recipe.yaml").read_text().count("distillation: hard") == 1
    assert distilled.metrics["top1"] >= 0
    runs, splits, shown = (
        [str(tmp_path / name) for name in ("teacher", "pupil")],
        open_data("shapes:count=40,size=32"),
        torch.rand(2, 3, 32, 32),
    )
    shares = [make_teacher(run, splits)(shown).softmax(dim=1) for run in runs]
    torch.testing.assert_close(make_teacher(",".join(runs), splits)(shown).exp(), (shares[0] + shares[1]) / 2)
    run_training(settings(tmp_path / "larger", init=str(tmp_path / "teacher"), size=48, epochs=1), say=str)
    assert patchloom.load(tmp_path / "larger", device="cpu").model.config.image_size == (48, 48)


def test_a_teacher_of_other_classes_is_refused(tmp_path, shapes) -> None:
    run_training(settings(tmp_path / "teacher"), say=str)
    with refused(UsageError, 16, 10):
        make_teacher(str(tmp_path / "teacher"), open_data("digits"))


@pytest.mark.parametrize(
    ("changes", "error", "facts"),
    [
        ({"data": "no/such/folder"}, UsageError, ("no/such/folder",)),
        ({"model": "resmpl_s12"}, UsageError, ("resmpl_s12", "resmlp_s12")),
        ({"recipe": "dei"}, UsageError, ("deit",)),
        ({"recipe": "missing.yaml"}, UsageError, ("missing.yaml",)),
        ({"changes": {"augment.mixpu": "0"}}, UsageError, ("augment.mixpu", "augment.mixup")),
        ({"changes": {"augment.mixup": "much"}}, UsageError, ("augment.mixup", "much")),
        ({"changes": {"model.options.dept": 2}}, UsageError, ("dept", "depth")),
        ({"time": "soon"}, UsageError, ("--time", "soon")),
        ({"init": "nowhere"}, UsageError, ("nowhere",)),
        ({"changes": TINY | {"objective.distillation": "hard"}}, UsageError, ("--teacher",)),
        ({"changes": TINY | {"objective.distillation": "labels"}}, UsageError, ("objective.distillation",)),
        ({"teacher": "no_teacher,resmlp_s12:in1k"}, UsageError, ("no_teacher",)),
        ({"level": "genus"}, (UsageError, DataError), ("genus",)),
        ({"batch": 1000}, UsageError, (1000,)),
    ],
)
def test_mistakes_are_found_before_any_work(changes, error, facts, tmp_path) -> None:
    values = {"data": "shapes:count=40,size=32", "recipe": "small_images", "out": str(tmp_path / "run"), "epochs": 1}
    values |= {"batch": 8, "device": "cpu", "changes": TINY} | changes
    with refused(error, *facts) as caught:
        run_training(TrainingSettings(**values), say=str)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_recipe_in_the_same_folder_is_refused(tmp_path) -> None:
    run_training(settings(tmp_path / "run", epochs=1), say=str)
    with refused(UsageError, "optim.batch_size", 8, 4, "--out"):
        run_training(settings(tmp_path / "run", epochs=1, batch=4), say=str)


def test_another_experiment_on_the_same_data_gets_a_folder_of_its_own(tmp_path, monkeypatch) -> None:
    """Without --out; the same command again resumes its own, and a dry run never conflicts."""
    monkeypatch.chdir(tmp_path)
    first, second, again, third = (
        run_training(replace(settings(Path("x"), epochs=1, batch=batch), out=None), say=str).folder
        for batch in (8, 4, 4, 2)
    )
    assert (first.name + "-2", first.name + "-3") == (second.name, third.name)
    assert again == second
    said: list[str] = []
    planned = run_training(replace(settings(first, epochs=1, batch=4)), dry_run=True, say=said.append)
    assert planned.outcome is None
    assert any("note:" in line and str(first) in line for line in said)


@pytest.mark.parametrize("per_class", [4, 2])
def test_fewer_than_sixteen_images_are_trained_with_a_fitting_batch(per_class, tmp_path) -> None:
    class_folders(tmp_path / "data", pictures=per_class)
    given = {"epochs": 1, "device": "cpu", "workers": 0, "size": 16}
    few = TrainingSettings(data=str(tmp_path / "data"), out=str(tmp_path / "run"), **given)
    run = run_training(few, say=str)
    assert run.outcome.ended == "finished"
    assert read_recipe(run.folder).optim.batch_size <= 2 * per_class


def test_one_image_per_class_is_refused_with_what_is_needed(tmp_path) -> None:
    class_folders(tmp_path / "data", pictures=1)
    with refused(DataError, 2, 0, "val/"):
        run_training(TrainingSettings(data=str(tmp_path / "data"), out=str(tmp_path / "run"), device="cpu"), say=str)
    (problem,) = check(str(tmp_path / "data"), cache=False).problems()
    assert "val/" in problem


def test_the_python_call_names_a_misspelt_option() -> None:
    with refused(UsageError, "epoch", "epochs"):
        patchloom.train("digits", epoch=3)


def test_auto_says_why_and_what_was_given(shapes) -> None:
    recipe, choices = resolve_recipe(
        OpenedImages(shapes, TrainingSettings(data="shapes"), "cpu").facts,
        classes=len(shapes.classes),
        recipe="auto",
        model=None,
        changes={"schedule.epochs": 3},
    )
    assert recipe.schedule.epochs == 3
    (given,) = [choice for choice in choices if choice.key == "schedule.epochs"]
    assert (given.value, given.why.startswith("auto: ")) == (3, False)
    assert all(choice.why.startswith("auto: ") for choice in choices if choice.key != "schedule.epochs")
    assert median_side(shapes.train) == 32


def test_a_recipe_file_that_is_no_text(tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with refused(UsageError, "recipe.yaml"):
        run_training(settings(tmp_path / "run", recipe=str(tmp_path / "recipe.yaml")), say=str)


def test_times() -> None:
    assert [seconds_of(text) for text in ("90s", "2m", "1h30m", "0.5h", None)] == [90, 120, 5400, 1800, None]


def on_folder(tmp_path, **changes) -> TrainingSettings:
    options = TINY | {"model.options.patch_size": 8, "model.image_size": 16}
    values = {"out": str(tmp_path / "run"), "epochs": 1, "batch": 4, "workers": 0, "device": "cpu", "changes": options}
    return TrainingSettings(data=str(tmp_path / "data"), **values | changes)


def test_pictures_that_cannot_be_read_are_named_and_left_out(tmp_path) -> None:
    data = class_folders(tmp_path / "data")
    (data / "red" / "00-empty.png").touch()
    (data / "blue" / "text.png").write_text("no picture")
    said: list[str] = []
    trained = run_training(on_folder(tmp_path), say=said.append)
    assert trained.summary()["left_out"] == 2
    left_out = tmp_path / "run" / "left_out.tsv"
    assert any(missing(line, 2, data / "blue/text.png", data / "red/00-empty.png", left_out) == [] for line in said)
    _, *rows = [line.split("\t") for line in left_out.read_text().splitlines()]
    assert [file for file, _ in rows] == [f"{data}/blue/text.png", f"{data}/red/00-empty.png"]
    assert all(reason for _, reason in rows)
    assert missing(said[0], 16, 4) == []


def test_strict_refuses_pictures_that_cannot_be_read_before_any_work(tmp_path) -> None:
    data = class_folders(tmp_path / "data")
    (data / "red" / "00-empty.png").touch()
    with refused(DataError, 1, data / "red" / "00-empty.png"):
        run_training(on_folder(tmp_path, strict=True), say=str)
    assert not (tmp_path / "run").exists()


def test_pictures_that_changed_since_a_run_began_are_said(tmp_path) -> None:
    data = class_folders(tmp_path / "data")
    (data / "red" / "00-empty.png").touch()
    run_training(on_folder(tmp_path), say=str)

    def notes() -> list[str]:
        """Those of the run that are no notes of a new run on the same data."""
        said: list[str] = []
        new: list[str] = []
        run_training(on_folder(tmp_path), say=said.append)
        run_training(on_folder(tmp_path, out=str(tmp_path / "new")), dry_run=True, say=new.append)
        known = "\n".join(new).splitlines()
        return [line for line in "\n".join(said).splitlines() if "note: " in line and line not in known]

    (data / "red" / "00-empty.png").unlink()  # it was left out, so nothing is missed
    assert notes() == []
    assert not (tmp_path / "run" / "left_out.tsv").exists()
    Image.new("RGB", (16, 16), "red").save(data / "red" / "0.png")
    assert len(notes()) == 1
    (data / "red" / "1.png").write_bytes(b"")
    (note,) = notes()
    assert missing(note, "16 → 15", "4 → 4") == []
    assert "/red/1.png\t" in (tmp_path / "run" / "left_out.tsv").read_text().splitlines()[-1]
    (data / "red").rename(data / "amber")
    with refused(DataError, tmp_path / "run", 2, "blue", "red", "amber"):
        run_training(on_folder(tmp_path), say=str)


def test_ranks_that_see_other_pictures_are_refused(tmp_path) -> None:
    class_folders(tmp_path / "data")
    plan = make_plan(on_folder(tmp_path), "cpu")

    class Two:
        def gather(self, record):
            return [record, replace(record, rows="others")]

    with refused(DataError, 1, 2, tmp_path / "data", 0):
        _same_on_all(plan, Two())


def test_a_picture_in_train_and_val_is_said(tmp_path) -> None:
    for split in ("train", "val"):
        class_folders(tmp_path / "data" / split, pictures=4 if split == "train" else 2)
    said: list[str] = []
    run_training(on_folder(tmp_path), dry_run=True, say=said.append)
    assert any(missing(line, "note: ", 4, "patchloom check") == [] for text in said for line in text.splitlines())


def test_pictures_without_classes_are_refused(tmp_path) -> None:
    (tmp_path / "data" / "annotations").mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(tmp_path / "data" / "a.png")
    content = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": [{"id": 1, "name": "x"}]}
    (tmp_path / "data" / "annotations" / "instances_train.json").write_text(json.dumps(content))
    with pytest.raises(DataError):
        run_training(on_folder(tmp_path, task="classify"), say=str)


def test_a_mistake_is_said_before_the_pictures_are_looked_at(tmp_path, monkeypatch) -> None:
    class_folders(tmp_path / "data")
    monkeypatch.setattr("patchloom.tasks.images.plan.survey", pytest.fail)
    with refused(UsageError, "nonsense"):
        run_training(on_folder(tmp_path, recipe="nonsense"), say=str)
    with pytest.raises(UsageError, match="cuda:99"):
        run_training(on_folder(tmp_path, device="cuda:99"), say=str)


def test_copies_are_held_out_together(tmp_path) -> None:
    data = class_folders(tmp_path / "data")
    for i in range(5):
        shutil.copy(data / "red" / f"{i}.png", data / "red" / f"copy{i}.png")
    run_training(on_folder(tmp_path), say=str)
    splits = open_data(data)
    held_out = {splits.val.where(i) for i in range(len(splits.val))}
    assert all(
        (str(data / f"red/{i}.png") in held_out) == (str(data / f"red/copy{i}.png") in held_out) for i in range(5)
    )
    assert json.loads((tmp_path / "run" / "data.json").read_text())["val"] == len(held_out)


def test_a_test_size_of_its_own(tmp_path) -> None:
    changes = TINY | {"test.image_size": 48}
    base = {"data": "shapes:count=40,size=32", "recipe": "small_images", "epochs": 1, "batch": 8, "device": "cpu"}
    run_training(TrainingSettings(out=str(tmp_path / "run"), workers=0, changes=changes, **base), say=str)
    classifier = patchloom.load(tmp_path / "run", device="cpu")
    assert classifier.model.config.image_size == (48, 48)
    assert len(classifier.predict([open_data("shapes:count=40,size=32").val.read(0)])) == 1
