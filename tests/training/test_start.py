"""`--init RUN`: whatever patchloom trained can be gone on from, on other data, at another size, with another recipe."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import patchloom
from patchloom.engine.distribution import Processes
from patchloom.runs.config import read_run_files
from patchloom.runs.weights import load_network
from patchloom.tasks.images.init_weights import find_init_weights
from patchloom.tasks.plan import Plan, TrainingSettings
from patchloom.training import assemble
from patchloom.training.run import make_plan, run_training
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import class_folders, command

SHAPES = "shapes:count=40,size=32"
TINY = {"model.options.depth": 2, "model.options.dim": 16, "model.options.patch_size": 8}


def trained(data: str | Path, out: Path, **given: Any) -> list[str]:
    said: list[str] = []
    values = {"epochs": 1, "batch": 8, "workers": 0, "device": "cpu", "out": str(out)} | given
    run_training(TrainingSettings(data=str(data), **values), say=said.append)
    return said


def planned(data: str | Path, init: Path, **given: Any) -> Plan:
    return make_plan(
        TrainingSettings(data=str(data), init=str(init), **({"device": "cpu", "workers": 0} | given)), "cpu"
    )


def line(plan: Plan) -> str:
    return next(line for line in plan.lines() if line.startswith("init"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `auto` makes on a CPU: half the layers, narrow, small pictures and patches."""
    folder = tmp_path_factory.mktemp("narrow") / "run"
    trained(SHAPES, folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("other") / "colours", pictures=20)


def test_a_narrow_run_is_gone_on_from_on_other_data(narrow: Path, other: Path, tmp_path: Path) -> None:
    said = trained(other, tmp_path / "run", init=str(narrow))
    (told,) = [line for line in said if line.startswith("init")]
    for fact in (str(narrow), "resmlp_s12", "6", "128", "32", "2"):
        assert re.search(rf"\b{re.escape(fact.lstrip('/'))}\b", told), fact
    for field, value in (("model.name", "resmlp_s12"), ("model.image_size", 32), ("model.options.depth", 6)):
        assert any(f"{field} = {value} " in line and str(narrow) in line for line in said)
    before, now = read_run_files(narrow), read_run_files(tmp_path / "run")
    assert {**before.options, "num_classes": 2} == now.options
    assert before.preprocessing == now.preprocessing


def test_the_weights_are_the_runs_and_a_classifier_of_the_same_classes_too(narrow: Path, other: Path) -> None:
    source = load_network(narrow)[0].state_dict()
    for data, kept in ((SHAPES, True), ("shapes:count=60,size=32", True), (other, False)):
        plan = planned(data, narrow)
        _, network, _ = assemble.make_run(plan, Processes("fp32", device="cpu"), str)
        for key, tensor in network.state_dict().items():
            assert key.startswith("classifier") or torch.equal(tensor, source[key]), key
        same = network.classifier.weight.shape == source["classifier.weight"].shape
        assert (same and torch.equal(network.classifier.weight, source["classifier.weight"])) is kept
        assert plan.start is not None
        assert plan.start.keeps(plan.record.classes) is kept
        assert re.search(rf"\b{16 if kept else 2}\b", line(plan).replace(str(narrow), ""))


def test_as_many_other_classes_get_a_fresh_classifier(narrow: Path, tmp_path: Path) -> None:
    names = tuple(f"class{i:02d}" for i in range(16))
    plan = planned(class_folders(tmp_path / "data", names, pictures=4), narrow)
    _, network, _ = assemble.make_run(plan, Processes("fp32", device="cpu"), str)
    assert not torch.equal(network.classifier.weight, load_network(narrow)[0].classifier.weight)


def test_what_the_user_gives_is_applied_on_top(narrow: Path, tmp_path: Path) -> None:
    plan = planned(SHAPES, narrow, size=48)
    for fact in (str(narrow), "resmlp_s12", "32 px", "48 px"):
        assert fact in line(plan)
    assert [c.why for c in plan.choices if c.key == "model.image_size"] == ["given"]
    trained(SHAPES, tmp_path / "large", init=str(narrow), size=48)
    assert patchloom.load(tmp_path / "large", device="cpu").model.config.image_size == (48, 48)
    assert planned(SHAPES, narrow, model="resmlp_s12").recipe.model.options["dim"] == 128


def test_another_network_is_refused_with_both_names(narrow: Path) -> None:
    for given in ({"model": "deit_ti"}, {"changes": {"model.name": "deit_ti"}}):
        with pytest.raises(UsageError) as error:
            planned(SHAPES, narrow, **given)
        for fact in (f"--init {narrow}", "resmlp_s12", "deit_ti"):
            assert fact in str(error.value)


def test_a_named_recipe_gives_all_but_the_network(narrow: Path) -> None:
    plan = planned(SHAPES, narrow, recipe="deit", batch=8, epochs=3)
    assert (plan.recipe.augment.erasing, plan.recipe.model.name) == (0.25, "resmlp_s12")
    assert (plan.recipe.model.image_size, dict(plan.recipe.model.options)["depth"]) == (32, 6)


def test_a_recipes_own_options_give_way_to_the_runs(tmp_path: Path) -> None:
    trained(SHAPES, tmp_path / "run", recipe="small_images", changes=TINY, size=32)
    plan = planned(SHAPES, tmp_path / "run", recipe="small_images", batch=8, epochs=1)
    assert dict(plan.recipe.model.options) == {"depth": 2, "dim": 16, "patch_size": 8}
    again = planned(SHAPES, tmp_path / "run", recipe=str(tmp_path / "run" / "recipe.yaml"), size=48)
    assert again.recipe.model.image_size == 48  # a recipe file says all of it, and the user on top


def test_a_crop_and_a_test_size_of_its_own_are_kept(tmp_path: Path) -> None:
    changes = TINY | {"test.crop_ratio": 0.7, "test.image_size": 48}
    trained(SHAPES, tmp_path / "run", recipe="small_images", changes=changes)
    part = planned(SHAPES, tmp_path / "run").recipe.test
    assert (part.crop_ratio, part.image_size) == (0.7, 48)


def suggested(said: list[str]) -> list[str]:
    """The last command of the line that says what to do next."""
    told = next(line for line in said if line.startswith("Next:"))
    return shlex.split(told.split("   |   ")[-1].removeprefix("patchloom "))


@pytest.mark.parametrize("recipe", ["dino", "instances"])
def test_the_command_that_a_run_without_labels_suggests_works(
    recipe: str, other: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = TINY | {"schedule.warmup_epochs": 0, "schedule.min_lr": 0.0}
    if recipe == "dino":
        changes |= {"views.local_size": 16, "dino.outputs": 64, "dino.hidden": 32, "dino.bottleneck": 16}
    said: list[str] = []
    run_training(
        TrainingSettings(
            data=str(other), recipe=recipe, model="resmlp_s12", size=32, epochs=1, batch=8, workers=0, device="cpu",
            changes=changes,
        ),
        say=said.append,
    )  # fmt: skip
    arguments = suggested(said)
    assert arguments == ["train", str(other), "--init", "runs/colours"]
    done = command((*arguments, "--device", "cpu", "--workers", "0"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert re.search(r"^init\b.*\bruns/colours\b.*\bresmlp_s12\b.*\b32 px\b", done.output, re.MULTILINE)
    assert read_run_files(Path("runs/colours-2")).options["num_classes"] == 2
    before = Path("runs/colours-2/metrics.jsonl").read_bytes()
    again = command((*arguments, "--device", "cpu", "--workers", "0"), monkeypatch, capsys)
    assert again.code == 0, again.errors
    assert Path("runs/colours-2/metrics.jsonl").read_bytes() == before
    assert not Path("runs/colours-3").exists()


def test_grafit_and_timms_networks_hand_over(other: Path, tmp_path: Path) -> None:
    short = {"schedule.warmup_epochs": 0, "schedule.min_lr": 0.0}
    trained(other, tmp_path / "grafit", recipe="grafit", model="timm:test_vit", size=32, changes=short)
    kept = load_network(tmp_path / "grafit")[0]
    assert kept.config.projector != "none"
    said = trained(other, tmp_path / "tuned", init=str(tmp_path / "grafit"))
    assert any(str(tmp_path / "grafit") in line and "timm:test_vit" in line for line in said)
    assert load_network(tmp_path / "tuned")[0].config.projector == "none"
    trained(other, tmp_path / "large", init=str(tmp_path / "tuned"), size=64)
    large = patchloom.load(tmp_path / "large", device="cpu")
    assert large.model.config.image_size == (64, 64)
    assert json.loads((tmp_path / "large" / "run.json").read_text())["init"] == str(tmp_path / "tuned")
    plan = planned(other, tmp_path / "tuned")
    assert plan.start is not None
    assert plan.start.keeps(plan.record.classes)


def test_small_views_of_a_network_of_one_size_are_resized_or_refused(other: Path, tmp_path: Path) -> None:
    changes = {"views.local_size": 16, "schedule.warmup_epochs": 0, "schedule.min_lr": 0.0, "dino.outputs": 32}
    given = {"recipe": "dino", "model": "timm:pit_ti_224", "size": 32, "epochs": 1, "batch": 8, "changes": changes}
    with pytest.raises(UsageError) as error:
        make_plan(TrainingSettings(data=str(other), device="cpu", **given), "cpu")
    for fact in ("timm:pit_ti_224", "--set dino.small_views=resize"):
        assert fact in str(error.value)
    given["changes"] = changes | {"dino.small_views": "resize"}
    assert make_plan(TrainingSettings(data=str(other), device="cpu", out=str(tmp_path), **given), "cpu").cost.parameters


def test_a_size_that_no_run_could_be_loaded_with_is_refused_before_work() -> None:
    settings = TrainingSettings(data=SHAPES, device="cpu", workers=0, changes={"test.image_size": 5000})
    with pytest.raises(UsageError, match=r"image_size.*\b5000\b"):
        make_plan(settings, "cpu")


def test_published_weights_are_offered_where_nothing_was_said() -> None:
    settings = TrainingSettings(data=SHAPES, device="cpu", workers=0)
    offered = line(make_plan(settings, "cpu"))
    for fact in ("--init in1k", "resmlp_s12", "ImageNet-1k", "61 MB", "3.01 G"):
        assert fact in offered
    for given in ({"recipe": "small_images"}, {"model": "timm:resnet18"}):
        assert not [line for line in make_plan(replace(settings, **given), "cpu").lines() if line.startswith("init")]


def test_the_head_first(narrow: Path, tmp_path: Path) -> None:
    """The new classifier tells classes apart before the first step; one that is kept is not touched."""
    for name, value in {"dark": 40, "bright": 200}.items():
        (tmp_path / name).mkdir()
        for i in range(20):
            Image.new("RGB", (16, 16), (value + i, value, value - i)).save(tmp_path / name / f"{i}.png")
    plan = planned(tmp_path, narrow, changes={"model.fit_head": True})
    said: list[str] = []
    cpu = Processes("fp32", device="cpu")
    _, network, _ = assemble.make_run(plan, cpu, said.append, begins=True)
    (told,) = [line for line in said if line.startswith("head")]
    assert re.search(r"\b32\b", told)
    found = dict(plan.task.training.judge(plan, cpu).report(network))
    assert found["top1"] == 100
    _, measured, _ = assemble.make_run(plan, cpu, said.append)  # a trial of its speed fits nothing
    assert not torch.equal(measured.classifier.weight, network.classifier.weight)
    kept = planned(SHAPES, narrow, changes={"model.fit_head": True})
    _, network, _ = assemble.make_run(kept, cpu, str, begins=True)
    assert torch.equal(network.classifier.weight, load_network(narrow)[0].classifier.weight)


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PatchConvNet with one class token, tested on whole pictures as squares."""
    folder, small = tmp_path_factory.mktemp("pooled") / "run", {"model.options.depth": 1, "model.options.dim": 16}
    square = {"test.resize": "square", "model.image_size": 32}
    trained(SHAPES, folder, model="patchconvnet_s20", recipe="patchconvnet", changes=small | square)
    return folder


def network_of(plan: Plan) -> Any:
    return assemble.make_run(plan, Processes("fp32", device="cpu"), str)[1]


def test_each_class_token_begins_as_the_one_of_a_trained_network(pooled: Path, other: Path) -> None:
    """Thesis 5.2.1: tokens per class are learned by fine-tuning."""
    source = load_network(pooled)[0].state_dict()
    for data, classes in ((SHAPES, 16), (other, 2)):
        plan = planned(data, pooled, recipe="patchconvnet_per_class", batch=8)
        assert plan.recipe.model.options["class_tokens"] == "per_class"
        assert (plan.recipe.model.options["depth"], plan.recipe.model.image_size) == (1, 32)
        state = network_of(plan).state_dict()
        tokens = source["attention_pool.token.weight"].expand(-1, classes, -1)
        assert torch.equal(state["attention_pool.token.weight"], tokens)
        assert torch.equal(state["classifier.weight"], source["classifier.weight"]) is (classes == 16)
    by_option = planned(SHAPES, pooled, changes={"model.options.class_tokens": "per_class"}, batch=8)
    assert network_of(by_option).has_token_per_class


def test_pictures_are_tested_as_squares_from_training_to_prediction(pooled: Path) -> None:
    """Mixer's resize-crop (supplement C): the whole picture, whatever its shape."""
    wide = Image.new("RGB", (200, 40))
    wide.paste((255, 255, 255), (100, 0, 200, 40))
    transform = patchloom.load(pooled, device="cpu").transform()
    seen = transform(wide)[:, :, 0]
    assert (seen[:, :15] < 10).all()
    assert (seen[:, 17:] > 245).all()
    assert planned(SHAPES, pooled, batch=8).recipe.test.resize == "square"


def test_a_recipe_of_another_size_keeps_it(narrow: Path) -> None:
    start = find_init_weights(str(narrow), None, None)
    assert start is not None
    assert start.fields("deit")["model.image_size"] == 32
    assert "model.image_size" not in start.fields("deit_finetune_384")
    assert "test.crop_ratio" not in start.fields("fixres")


def test_learned_scales_can_be_fixed_in_another_training(pooled: Path) -> None:
    """Thesis 3.5.3: is it the factors, or that they learn?"""
    settings = {"model": "patchconvnet_s20", "recipe": "patchconvnet", "batch": 8, "device": "cpu", "workers": 0}
    small = {"model.options.depth": 1, "model.options.dim": 16, "model.image_size": 32}
    fixed = TrainingSettings(data=SHAPES, **settings, changes=small | {"model.scales_from": str(pooled)})
    network, source = network_of(make_plan(fixed, "cpu")), load_network(pooled)[0].state_dict()
    scales = {name: weight for name, weight in network.named_parameters() if name.endswith(".scale")}
    assert len(scales) == 3
    assert all(torch.equal(weight, source[name]) and not weight.requires_grad for name, weight in scales.items())
    assert not torch.equal(network.blocks[0].mix.first.weight, source["blocks.0.mix.first.weight"])
    deeper = replace(fixed, changes={**fixed.changes, "model.options.depth": 2})
    with pytest.raises(UsageError, match=r"\bblocks\.1\b"):
        network_of(make_plan(deeper, "cpu"))
    with pytest.raises(UsageError, match=r"model\.scales_from.*\bnowhere\b"):
        make_plan(replace(fixed, changes={**fixed.changes, "model.scales_from": "nowhere"}), "cpu")
