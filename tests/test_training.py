"""Whole runs on small data: every recipe takes steps, a run resumes exactly, mistakes are found before any work."""

import signal

import pytest
import torch
from safetensors.torch import load_file

import patchloom
from patchloom.build import make_network, make_objective, make_teacher, median_side, resolve_recipe
from patchloom.data.device import make_loader
from patchloom.data.source import open_data
from patchloom.engine import loop
from patchloom.engine.distribution import Processes
from patchloom.engine.optimisation import Schedule, freeze, make_optimizer
from patchloom.engine.run import Run
from patchloom.engine.signals import Stopped
from patchloom.errors import DataError, UsageError
from patchloom.models.registry import family_of
from patchloom.objectives.teacher import Teacher
from patchloom.recipes import get_recipe, list_recipes, override
from patchloom.training.plan import TrainingSettings, seconds_of
from patchloom.training.run import run_training
from tests.networks import SMALL, small

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
    return override(recipe, changes)


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_takes_two_steps(name, shapes) -> None:
    recipe = shrunk(name)
    torch.manual_seed(0)
    network = make_network(recipe.model, len(shapes.classes))
    freeze(network, recipe.model.trainable)
    teacher = None
    if recipe.objective.distillation != "none":
        pupil = small("mixer_b16", num_classes=len(shapes.classes))
        teacher = Teacher(pupil, mean=pupil.pixel_mean, std=pupil.pixel_std, image_size=(32, 32), num_classes=16)
    loader, _ = make_loader(
        shapes.train, recipe.augment, recipe.model.image_size, batch_size=8, seed=recipe.seed, device="cpu"
    )
    run = Run(
        model=network,
        objective=make_objective(recipe, network, teacher),
        optimizer=make_optimizer(network, recipe.optim),
        schedule=Schedule(recipe.optim, recipe.schedule, 2),
        loader=TwoSteps(loader),
        processes=Processes("fp32", device="cpu"),
        clip_norm=recipe.optim.clip_norm,
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
    assert any("going on with" in line for line in said)
    expected = weights_of(whole)
    for key, tensor in weights_of(broken).items():
        assert torch.equal(tensor, expected[key]), key
    assert (broken / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()


def test_pictures_are_drawn_every_few_epochs_and_change_nothing(tmp_path) -> None:
    plain, drawn = tmp_path / "plain", tmp_path / "drawn"
    run_training(settings(plain, epochs=3), say=str)
    run_training(settings(drawn, epochs=3, pictures=2), say=str)
    assert not (plain / "pictures").exists()
    assert sorted(path.name for path in (drawn / "pictures").iterdir()) == ["epoch_0002.png", "epoch_0003.png"]
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
    said: list[str] = []
    run_training(settings(tmp_path / "run"), dry_run=True, say=said.append)
    assert any(line.startswith("time       about") for line in said)
    assert not (tmp_path / "run").exists()


def test_a_teacher_and_an_init_from_runs(tmp_path) -> None:
    run_training(settings(tmp_path / "teacher"), say=str)
    distilled = run_training(settings(tmp_path / "pupil", teacher=str(tmp_path / "teacher")), say=str)
    assert (tmp_path / "pupil" / "recipe.yaml").read_text().count("distillation: hard") == 1
    assert distilled.metrics["top1"] >= 0
    run_training(settings(tmp_path / "larger", init=str(tmp_path / "teacher"), size=48, epochs=1), say=str)
    assert patchloom.load(tmp_path / "larger", device="cpu").model.config.image_size == (48, 48)


def test_a_teacher_of_other_classes_is_refused(tmp_path, shapes) -> None:
    run_training(settings(tmp_path / "teacher"), say=str)
    with pytest.raises(UsageError, match="The teacher knows 16 classes"):
        make_teacher(str(tmp_path / "teacher"), open_data("digits"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": "no/such/folder"}, UsageError, "no/such/folder"),
        ({"model": "resmpl_s12"}, UsageError, "Did you mean resmlp_s12"),
        ({"recipe": "dei"}, UsageError, "deit"),
        ({"recipe": "missing.yaml"}, UsageError, "no such recipe file"),
        ({"changes": {"augment.mixpu": "0"}}, UsageError, "augment.mixup"),
        ({"changes": {"augment.mixup": "much"}}, UsageError, "augment.mixup"),
        ({"changes": {"model.options.dept": 2}}, UsageError, "Did you mean depth"),
        ({"time": "soon"}, UsageError, "--time takes hours, minutes or seconds"),
        ({"init": "nowhere"}, UsageError, "no such run or file"),
        ({"changes": TINY | {"objective.distillation": "hard"}}, UsageError, "names no teacher; give --teacher"),
        ({"level": "genus"}, (UsageError, DataError), "genus"),
        ({"batch": 1000}, UsageError, "1000"),
    ],
)
def test_mistakes_are_found_before_any_work(changes, error, message, tmp_path) -> None:
    values = {"data": "shapes:count=40,size=32", "recipe": "small_images", "out": str(tmp_path / "run"), "epochs": 1}
    values |= {"batch": 8, "device": "cpu", "changes": TINY} | changes
    with pytest.raises(error, match=message) as caught:
        run_training(TrainingSettings(**values), say=str)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_another_recipe_in_the_same_folder_is_refused(tmp_path) -> None:
    run_training(settings(tmp_path / "run", epochs=1), say=str)
    with pytest.raises(UsageError, match=r"other settings \(optim.batch_size 8 → 4\); give a new folder with --out"):
        run_training(settings(tmp_path / "run", epochs=1, batch=4), say=str)


def test_the_python_call_names_a_misspelt_option() -> None:
    with pytest.raises(UsageError, match=r"train has no option 'epoch'\. Did you mean epochs"):
        patchloom.train("digits", epoch=3)


def test_auto_says_why_and_what_was_given(shapes) -> None:
    recipe, choices = resolve_recipe(
        shapes, recipe="auto", model=None, changes={"schedule.epochs": 3}, device="cpu", pretrained=False
    )
    assert recipe.schedule.epochs == 3
    assert {choice.why for choice in choices if choice.key == "schedule.epochs"} == {"given"}
    assert all(choice.why.startswith("auto: ") for choice in choices if choice.key != "schedule.epochs")
    assert median_side(shapes.train) == 32


def test_a_recipe_file_that_is_no_text(tmp_path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"recipe\.yaml is not a recipe: it is not text"):
        run_training(settings(tmp_path / "run", recipe=str(tmp_path / "recipe.yaml")), say=str)


def test_times() -> None:
    assert [seconds_of(text) for text in ("90s", "2m", "1h30m", "0.5h", None)] == [90, 120, 5400, 1800, None]


def test_pictures_that_cannot_be_read_are_named_and_left_out(tmp_path) -> None:
    from PIL import Image

    for name, colour in (("red", "red"), ("blue", "blue")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (16, 16), colour).save(tmp_path / "data" / name / f"{i}.png")
    (tmp_path / "data" / "red" / "00-empty.png").touch()
    changes = TINY | {"model.options.patch_size": 8, "model.image_size": 16}
    base = {"data": str(tmp_path / "data"), "epochs": 1, "batch": 4, "workers": 0, "device": "cpu", "changes": changes}
    said: list[str] = []
    run_training(TrainingSettings(out=str(tmp_path / "run"), **base), say=said.append)
    assert any("left out" in line and "00-empty.png" in line and "empty file" in line for line in said)
    with pytest.raises(DataError, match=r"00-empty\.png: empty file"):
        run_training(TrainingSettings(out=str(tmp_path / "strict"), strict=True, **base), say=str)


def test_a_test_size_of_its_own(tmp_path) -> None:
    changes = TINY | {"test.image_size": 48}
    base = {"data": "shapes:count=40,size=32", "recipe": "small_images", "epochs": 1, "batch": 8, "device": "cpu"}
    run_training(TrainingSettings(out=str(tmp_path / "run"), workers=0, changes=changes, **base), say=str)
    classifier = patchloom.load(tmp_path / "run", device="cpu")
    assert classifier.model.config.image_size == (48, 48)
    assert len(classifier.predict([open_data("shapes:count=40,size=32").val.read(0)])) == 1
