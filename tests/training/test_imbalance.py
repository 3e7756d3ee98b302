"""Uneven classes in whole runs: each remedy resumes exactly, and what is printed, selected and reported."""

import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import patchloom
from patchloom.data.labels.class_balance import class_counts, logit_adjustment
from patchloom.engine import loop
from patchloom.engine.distribution import Processes
from patchloom.engine.signals import Stopped
from patchloom.recipes import auto_recipe, get_recipe, list_recipes, override
from patchloom.recipes.methods import method_of
from patchloom.tasks.plan import TrainingSettings
from patchloom.training import assemble
from patchloom.training.run import TrainingResult, make_plan, run_training
from patchloom_runtime.errors import UsageError
from tests.forked import rank_places
from tests.golden import make
from tests.messages import missing, refused
from tests.reliability.commands import class_folders, command, forked

TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
NO_MIXING = {"augment.mixup": 0, "augment.cutmix": 0}
REMEDIES: dict[str, dict[str, Any]] = {
    "balanced": {"balance.sampling": "balanced", "augment.repeats": 2},
    "sqrt": {"balance.sampling": "sqrt", "objective.loss": "bce", "objective.smoothing": 0},
    "inverse": {"balance.class_weights": "inverse", "objective.loss": "bce", "objective.smoothing": 0},
    "effective": {"balance.class_weights": "effective", "balance.effective_beta": 0.9},
    "logits": {"balance.logit_adjustment": 1.0},
}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 60, 20 and 5 images, of which val holds out a fifth."""
    root = class_folders(tmp_path_factory.mktemp("uneven") / "data", ("rose", "tulip", "thistle"), 60)
    for name, kept in {"tulip": 20, "thistle": 5}.items():
        for number in range(kept, 60):
            (root / name / f"{number}.png").unlink()
    return root


def settings(data: Path, out: Path, **changes: Any) -> TrainingSettings:
    return TrainingSettings(
        data=str(data), out=str(out), recipe="small_images", epochs=2, batch=16, size=16, workers=0, device="cpu",
        changes=TINY | changes,
    )  # fmt: skip


def trained(given: TrainingSettings) -> tuple[TrainingResult, list[str]]:
    said: list[str] = []
    return run_training(given, say=said.append), said


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_stopped_run_resumes_to_the_same_weights(remedy, uneven, tmp_path, monkeypatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(settings(uneven, whole, **REMEDIES[remedy]))
    update = loop._Loop.update

    def interrupted(self, *arguments):
        if self.progress.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return update(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Loop, "update", interrupted)
        with pytest.raises(Stopped):
            run_training(settings(uneven, broken, **REMEDIES[remedy]), say=str)
    _, said = trained(settings(uneven, broken, **REMEDIES[remedy]))
    assert any("resuming" in line for line in said)
    assert (broken / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    plain = tmp_path / "plain"
    without = {key: value for key, value in REMEDIES[remedy].items() if not key.startswith("balance.")}
    trained(settings(uneven, plain, **without))
    assert (plain / "weights.safetensors").read_bytes() != (whole / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("remedy", ["balanced", "inverse"])
def test_two_processes_learn_what_one_learns(remedy, uneven, tmp_path) -> None:
    options = TINY | {"model.drop_path": 0} | REMEDIES[remedy]
    line = ("train", uneven, "--recipe", "small_images", "--epochs", "2", "--batch", "16", "--size", "16")
    line += ("--workers", "0", "--device", "cpu", *(f"--set={key}={value}" for key, value in options.items()))
    running = [forked(*line, "--out", tmp_path / "two", env=place) for place in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, output + errors
    for (*_, one), (*_, two) in zip(*(make.evaluations(tmp_path / name) for name in ("one", "two")), strict=True):
        assert one == pytest.approx(two, rel=1e-3)


def test_a_remedy_is_selected_by_the_mean_over_classes(uneven, tmp_path) -> None:
    result, said = trained(settings(uneven, tmp_path / "a", **REMEDIES["logits"]))
    assert result.metric == "mean_class_accuracy"
    (end,) = [line for line in said if "finished" in line]
    assert missing(end, *(f"{result.metrics[name]:.2f}" for name in ("top1", "mean_class_accuracy", "macro_f1"))) == []
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count("macro F1") == 2  # in the summary and in the table
    plain, said = trained(settings(uneven, tmp_path / "b"))
    assert plain.metric == "top1"
    assert [line for line in said if "balance.sampling=sqrt" in line]  # advice


def test_even_classes_are_selected_and_reported_by_top1(tmp_path) -> None:
    even = class_folders(tmp_path / "data", pictures=20)
    result, said = trained(settings(even, tmp_path / "run", **REMEDIES["logits"]))
    assert result.metric == "top1"
    assert "macro" not in next(line for line in said if "finished" in line)
    assert (tmp_path / "run" / "report.html").read_text().count("macro F1") == 1  # in the table


def test_auto_corrects_for_uneven_classes_unless_told_otherwise(uneven, tmp_path) -> None:
    def choice(**changes: Any) -> list[tuple[str, Any]]:
        given = replace(settings(uneven, tmp_path / "run"), recipe="auto", changes=TINY | changes)
        plan = make_plan(given, "cpu")
        assert missing(next(line for line in plan.lines() if line.startswith("data")), 4, 48) == []
        return [(each.key, each.value) for each in plan.choices if each.key.startswith("balance.")]

    assert choice() == [("balance.sampling", "sqrt")]
    assert choice(**{"balance.logit_adjustment": 1}) == [("balance.logit_adjustment", 1)]
    assert choice(**{"balance.sampling": "none"}) == [("balance.sampling", "none")]


@pytest.mark.parametrize(("ratio", "sampling"), [(1, "none"), (9.9, "none"), (10, "sqrt"), (500, "sqrt")])
def test_auto_notices_a_ratio_of_ten(ratio, sampling) -> None:
    recipe, reasons = auto_recipe(images=5_000, classes=10, image_size_median=32, imbalance=ratio)
    assert recipe.balance.sampling == sampling
    whys = [reason.why for reason in reasons if reason.field.startswith("balance.")]
    assert all(missing(why, round(ratio)) == [] for why in whys)
    assert len(whys) == (sampling != "none")
    other = {"objective.method": "multilabel"}
    _, reasons = auto_recipe(images=5_000, classes=10, image_size_median=32, imbalance=ratio, overrides=other)
    assert not [reason for reason in reasons if reason.field.startswith("balance.")]


def test_a_fitted_head_starts_adjusted(uneven, tmp_path) -> None:
    """The loss adds to its logits what the fit, which adds nothing, has learned already."""
    start = settings(uneven, tmp_path / "start")
    trained(start)

    def head(**changes: Any) -> torch.nn.Linear:
        given = replace(start, init=str(tmp_path / "start"), out=None, changes=changes | {"model.fit_head": True})
        plan = make_plan(replace(given, size=None, level=None), "cpu")
        plan = replace(plan, start=None)  # with its own classes, the classifier of the run would be kept
        return assemble.make_run(plan, Processes("fp32", device="cpu"), str, begins=True)[1].classifier

    plain, adjusted = head(), head(**REMEDIES["logits"])
    assert torch.equal(plain.weight, adjusted.weight)
    labels = make_plan(start, "cpu").splits.train.labels
    added = torch.from_numpy(logit_adjustment(class_counts(labels), 1.0, "cross_entropy")).float()
    torch.testing.assert_close(adjusted.bias + added, plain.bias)


def test_one_remedy_at_a_time() -> None:
    recipe = get_recipe("deit")
    with refused(UsageError, "balance.sampling", "balance.logit_adjustment"):
        override(recipe, {"balance.sampling": "balanced", "balance.logit_adjustment": 1})
    with refused(UsageError, "balance.effective_beta", 1):
        override(recipe, {"balance.effective_beta": 1})


@pytest.mark.parametrize("name", ["dino", "grafit", "upernet_160k", "mask_rcnn", "translation_small"])
def test_methods_without_a_classifier_of_images_refuse_remedies(name) -> None:
    assert name in list_recipes()
    assert not method_of(get_recipe(name).objective.method).reads_field("balance")
    with refused(UsageError, "balance.sampling", "sqrt"):
        override(get_recipe(name), {"balance.sampling": "sqrt"})


def test_check_and_evaluate_name_uneven_classes(uneven, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    checked = command(("check", uneven), monkeypatch, capsys)
    assert missing(checked.output, "uneven", "1 to 12", "docs/imbalance.md") == []
    trained(settings(uneven, tmp_path / "run", **NO_MIXING))
    shown = command(("evaluate", tmp_path / "run"), monkeypatch, capsys).output
    assert missing(shown, "mean_class_accuracy", "macro_f1", 12) == []
    assert re.search(r"top1.*\n.*mean_class_accuracy.*\n.*macro_f1", shown)


PAGE = (Path(__file__).parents[2] / "docs" / "imbalance.md").read_text()
SMALL = {"epochs": 1, "batch": 16, "size": 16, "workers": 0, "device": "cpu", "set": TINY}


def test_the_examples_of_the_page_run(uneven, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(uneven)
    train = patchloom.train

    def small(data: str, **options: Any) -> Any:
        return train(data, **SMALL | options | {"set": TINY | options.pop("set", {})})

    monkeypatch.setattr(patchloom, "train", small)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/imbalance.md", "exec"), {})
    lines = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    typed = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("patchloom ")]
    assert len(typed) >= 8
    sizes = ["--epochs", "1", "--batch", "16", "--size", "16", "--workers", "0", "--device", "cpu"]
    sizes += [f"--set={key}={value}" for key, value in TINY.items()]
    for words in typed:
        done = command((*words, *(sizes if words[0] == "train" else ())), monkeypatch, capsys)
        assert done.code in (0, None), f"{words}: {done.errors}"
