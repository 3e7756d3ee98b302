"""Evaluation of one and of several runs, in Python and on the command line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.data.sources.source import open_data
from patchloom.evaluation.agreement import head_decisions
from patchloom.evaluation.knn import knn
from patchloom.evaluation.probe import few_shot_probe, linear_probe
from patchloom.evaluation.sgd_probe import RATES
from patchloom.inference import evaluations
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.models.cost import cost
from patchloom.recipes import get_recipe, override
from patchloom.runs.config import Preprocessing, write_run_files
from patchloom.runs.predictions import Predictions, save_predictions
from patchloom.runs.run_metadata import RunMetadata, write_run_metadata
from patchloom.runs.weights import save_weights
from patchloom.tasks.classification.several_runs import evaluate
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.evaluation_transform import test_transform
from tests.networks import small
from tests.reliability.commands import command

DATA = "shapes:count=240,size=32"


def make_run(folder: Path, name: str = "resmlp_s12", *, seed: int = 0, labels=None, **options) -> Path:
    """Make a run folder with an untrained network and its val predictions."""
    splits = open_data(DATA)
    names = labels or splits.classes.names
    network = small(name, seed=seed, num_classes=len(names), **options)
    recipe = override(get_recipe("small_images"), {"seed": seed})
    preprocessing = Preprocessing(network.pixel_mean, network.pixel_std, network.config.image_size, 1.0)
    write_run_files(folder, network, preprocessing, recipe, names, task="classification")
    save_weights(folder, dict(network.state_dict()), {})
    lines = [
        {"step": e, "epoch": e, "kind": "evaluation", "weights": "model", "values": {"top1": 10.0 * e + seed}}
        for e in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if labels is None:
        result = patchloom.load(folder, device="cpu").evaluate(DATA, split="val")
        save_predictions(folder, Predictions(result.report, result.fingerprint))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    result = {f"s{seed}": make_run(folder / f"s{seed}", seed=seed) for seed in range(3)}
    return result | {
        "distilled": make_run(folder / "distilled", "deit_s_distilled"),
        "others": make_run(folder / "others", labels=("dog", "cat", *open_data(DATA).classes.names[2:])),
    }


# One run ------------------------------------------------------------------------------------------------------------


def test_an_evaluation_has_an_interval(runs) -> None:
    result = patchloom.load(runs["s0"], device="cpu").evaluate(DATA, split="val")
    values = result.values()
    assert list(values)[:4] == ["top1", "top1_low", "top1_high", "top5"]
    assert (values["top1_low"], values["top1_high"]) == result.report.top_interval()
    assert values["top1_low"] <= values["top1"] <= values["top1_high"]


def test_probes_learn_from_train_and_are_judged_on_val(runs) -> None:
    classifier = patchloom.load(runs["s0"], device="cpu")
    splits = open_data(DATA)
    train, val = classifier.embed(splits.train), classifier.embed(splits.val)
    assert (len(train), len(val)) == (len(splits.train), len(splits.val))
    result = dict(classifier.probe(DATA, knn=(3, 5), linear=True, linear_sgd=1, few_shot=1))
    names = splits.classes.names
    expected = {
        **dict(knn(train, val, classes=len(names), k=(3, 5))),
        **dict(linear_probe(train, val, classes=len(names))),
        **dict(few_shot_probe(train, val, classes=names, shots=1)),
    }
    assert {name: value for name, value in result.items() if not name.startswith("linear_sgd")} == expected
    assert list(result)[:-2][-4:] == [f"linear_sgd_{name}" for name in ("top1", "top5", "held_out_top1", "rate")]
    assert result["linear_sgd_rate"] in RATES
    with pytest.raises(UsageError) as error:
        classifier.probe(DATA)
    assert "knn" in str(error.value)
    assert "linear_sgd" in str(error.value)
    assert "few_shot" in str(error.value)


@pytest.mark.parametrize("probe_options", [{"knn": (5000,)}, {"few_shot": 500}, {"linear_sgd": 0}, {}])
def test_probe_settings_are_checked_before_features_are_computed(probe_options, runs, monkeypatch) -> None:
    classifier = patchloom.load(runs["s0"], device="cpu")
    monkeypatch.setattr(evaluations, "embed_on", None)
    with pytest.raises(UsageError):
        classifier.probe(DATA, **probe_options)


def test_probes_work_on_data_of_other_classes(runs) -> None:
    result = dict(patchloom.load(runs["s0"], device="cpu").probe("digits", knn=(20,)))
    assert result["knn20_top1"] > 30  # even random patches tell digits apart; chance is 10


def test_a_sweep_is_an_evaluation_at_each_value(runs) -> None:
    classifier = patchloom.load(runs["s0"], device="cpu")
    crops = classifier.sweep(DATA, "crop", (0.5, 1.0), split="val")
    for point in crops:
        expected = classifier.evaluate(DATA, crop_ratio=point.value, split="val").report.predictions
        assert point.evaluation.report.predictions.tolist() == expected.tolist()
    assert crops[0].evaluation.report.losses.tolist() != crops[1].evaluation.report.losses.tolist()
    sizes = classifier.sweep(DATA, "size", split="val")
    assert [point.value for point in sizes] == [16, 24, 32, 40, 48, 64]
    assert sizes[2].evaluation.report.losses.tolist() == crops[1].evaluation.report.losses.tolist()
    expected = classifier.evaluate(DATA, size=48, split="val").report.losses
    assert sizes[4].evaluation.report.losses.tolist() == expected.tolist()
    with pytest.raises(UsageError, match="batch"):
        classifier.sweep(DATA, "batch")


def test_sizes_that_patches_do_not_fill_are_left_out(tmp_path) -> None:
    run = make_run(tmp_path / "run", patch_size=16)
    points = patchloom.load(run, device="cpu").sweep(DATA, "size", split="val")
    assert [point.value for point in points] == [16, 32, 48, 64]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"crop_ratio": 0.0}, ("crop_ratio", "0.0")),
        ({"crop_ratio": 1.5}, ("crop_ratio", "1.5")),
        ({"size": 0}, ("size", "0")),
        ({"batch": 0}, ("batch", "0")),
        ({"size": 30}, ("30", "8")),  # of patches of 8
    ],
)
def test_invalid_settings_are_refused(settings, facts, runs) -> None:
    with pytest.raises(UsageError) as error:
        patchloom.load(runs["s0"], device="cpu").evaluate(DATA, split="val", **settings)
    assert [fact for fact in facts if fact not in str(error.value)] == []


# Several runs -------------------------------------------------------------------------------------------------------


def test_stored_predictions_equal_those_on_the_data(runs) -> None:
    three = [str(runs[f"s{seed}"]) for seed in range(3)]
    stored, again = evaluate(three), evaluate(three, DATA, split="val", device="cpu")
    assert list(stored.evaluations) == ["s0", "s1", "s2"]
    assert stored.values() == again.values()
    assert stored.comparisons() == again.comparisons()
    assert len(stored.comparisons()) == 3


def test_spreads_of_runs(runs) -> None:
    result = evaluate([str(runs[f"s{seed}"]) for seed in range(3)])
    top1 = [of["top1"] for of in result.values().values()]
    spread = result.spreads()[0]
    assert (spread.name, spread.mean, spread.std) == (
        "top1",
        pytest.approx(np.mean(top1)),
        pytest.approx(np.std(top1, ddof=1)),
    )
    assert not {"images", "top1_low", "top1_high"} & {each.name for each in result.spreads()}
    assert {epoch: each.mean for epoch, each in result.spread_by_epoch().items()} == {1: 11, 2: 21}
    assert [(each.name, each.mean) for each in result.spreads_at_end()] == [("top1", 21)]
    assert result.not_only_seeds() == []
    elsewhere = evaluate([str(runs["s0"]), str(runs["s1"])], DATA, split="train", device="cpu")
    cloud = elsewhere.cloud()
    assert cloud.first == tuple(top1[:2])
    assert cloud.second == tuple(of["top1"] for of in elsewhere.values().values())


def test_heads_take_part_in_the_disagreement(runs) -> None:
    result = evaluate([str(runs["s0"]), str(runs["distilled"])], DATA, split="val", device="cpu", heads=True)
    table = result.disagreement()
    assert table.names == ("groundtruth", "s0", "distilled", "distilled: class", "distilled: distillation")
    classifier = patchloom.load(runs["distilled"], device="cpu")
    from patchloom.data.batches.decoded_dataset import make_evaluation_loader

    loader = make_evaluation_loader(open_data(DATA).val, 32, 1.0, batch_size=64, device=classifier.device, workers=0)
    heads = head_decisions(classifier.model, loader.epoch(0))
    expected = np.mean(heads["class"].numpy() != result.evaluations["s0"].report.predictions)
    assert table.between("distilled: class", "s0") == pytest.approx(expected)
    error = 1 - result.values()["s0"]["top1"] / 100
    assert table.between("groundtruth", "s0") == pytest.approx(error)


def test_images_are_resized_as_in_the_run(runs) -> None:
    classifier, val_images = patchloom.load(runs["s0"], device="cpu"), open_data(DATA).val
    classifier.preprocessing = replace(classifier.preprocessing, interpolation="nearest")
    pixels = (
        next(evaluations.loader_of(classifier, val_images, EvaluationSettings(size=40)).epoch(0))
        .images[0]
        .permute(1, 2, 0)
        .numpy()
    )
    assert np.array_equal(pixels, test_transform(40, 1.0, "nearest")(val_images.read(0)))
    assert not np.array_equal(pixels, test_transform(40, 1.0)(val_images.read(0)))


def test_accuracy_with_cost(runs) -> None:
    result = evaluate([str(runs["s0"]), str(runs["distilled"])])
    rows = result.tradeoffs(device="cpu", batch_sizes=(1,), seconds=0.01)
    for row in rows:
        model = patchloom.load(runs[row.name], device="cpu").model
        assert (row.parameters, row.multiply_adds) == (cost(model).parameters, cost(model).multiply_adds)
        assert row.top1 == result.values()[row.name]["top1"]
        assert row.training_multiply_adds is None  # these runs did not record it


def test_the_cost_of_the_training_is_beside_that_of_inference(runs, tmp_path) -> None:
    recorded = shutil.copytree(runs["s0"], tmp_path / "recorded")
    record = RunMetadata(data="d", data_name="d", seconds=7.0, training_multiply_adds=123, machine="1 × CPU")
    write_run_metadata(recorded, record)
    row, other = evaluate([str(recorded), str(runs["s1"])]).tradeoffs(device="cpu", batch_sizes=(1,), seconds=0.01)
    assert (row.training_multiply_adds, row.training_s, row.training_device) == (123, 7.0, "1 × CPU")
    assert other.training_multiply_adds is None


def test_runs_with_the_same_name_go_by_their_path(runs, tmp_path) -> None:
    other = make_run(tmp_path / "s0", seed=5)
    assert list(evaluate([str(runs["s0"]), str(other)]).evaluations) == [str(runs["s0"]), str(other)]


def test_runs_that_cannot_be_compared(runs, tmp_path) -> None:
    with pytest.raises(UsageError) as error:
        evaluate([str(runs["s0"]), str(runs["others"])], DATA, split="val", device="cpu")
    assert "others" in str(error.value)
    assert "s0" in str(error.value)
    assert "16" in str(error.value)
    assert "cat" in str(error.value)
    assert "dog" in str(error.value)
    with pytest.raises(UsageError, match=str(runs["s0"])):
        evaluate([str(runs["s0"])] * 2)
    with pytest.raises(UsageError) as error:
        evaluate([str(runs["s0"]), str(runs["others"])])
    assert "others" in str(error.value)
    assert "predictions.safetensors" in str(error.value)
    reordered = make_run(tmp_path / "reordered", labels=tuple(reversed(open_data(DATA).classes.names)))
    with pytest.raises(UsageError) as error:
        evaluate([str(runs["s0"]), str(reordered)], DATA, split="val", device="cpu")
    assert "reordered" in str(error.value)
    assert "s0" in str(error.value)
    result = patchloom.load(runs["s1"], device="cpu").evaluate(DATA, split="train")
    changed = make_run(tmp_path / "changed")
    save_predictions(changed, Predictions(result.report, result.fingerprint))
    with pytest.raises(UsageError) as error:
        evaluate([str(runs["s0"]), str(changed)])
    assert "changed" in str(error.value)
    assert "s0" in str(error.value)


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_says_the_same(runs, monkeypatch, capsys) -> None:
    two = (runs["s0"], runs["s1"])

    def answer(*arguments):
        done = command(arguments, monkeypatch, capsys)
        assert (done.code, done.errors) == (0, "")
        return json.loads(done.output)

    expected = evaluate([str(run) for run in two])
    result = answer("compare", *two, "--json", "--seeds", "--agreement")
    assert {name: of["top1"] for name, of in result["runs"].items()} == {
        n: v["top1"] for n, v in expected.values().items()
    }
    assert result["seeds"]["spreads"][0]["mean"] == expected.spreads()[0].mean
    assert result["seeds"]["top1_by_epoch"]["2"]["mean"] == 20.5
    assert result["disagreement"]["shares"] == expected.disagreement().shares.tolist()
    (pair,) = answer("compare", *two, "--json")["comparisons"]
    assert pair == {"first": "s0", "second": "s1", **dict(expected.comparisons()[0])}
    probes = answer("probe", *two, DATA, "--knn", "3", "--few-shot", "1", "--device", "cpu", "--json")
    classifier = patchloom.load(runs["s1"], device="cpu")
    assert {k: v for k, v in probes["s1"].items() if k != "notes"} == dict(classifier.probe(DATA, knn=(3,), few_shot=1))
    (small_crop, whole) = answer("evaluate", two[0], DATA, "--sweep", "crop=0.5,1", "--split", "val", "--json")["s0"]
    assert (small_crop["crop"], whole["top1"]) == (0.5, expected.values()["s0"]["top1"])
    assert answer("evaluate", two[0], "--json")["top1"] == expected.values()["s0"]["top1"]


@pytest.mark.parametrize(
    ("arguments", "columns"),
    [
        (("evaluate", "s0"), ["95 %", "top1"]),
        (("compare", "s0", "s1"), ["s0", "s1", "McNemar"]),
        (("compare", "s0", "s1", "--seeds"), ["top1", "loss", "epoch"]),
        (("compare", "s0", "s1", DATA, "--split", "train", "--seeds", "--device", "cpu"), ["s0", "s1", "top1"]),
        (
            ("compare", "distilled", DATA, "--split", "val", "--agreement", "--device", "cpu"),
            ["distilled: class", "0.000"],
        ),
        (("probe", "s0", DATA, "--linear", "--device", "cpu"), ["linear_top1", "linear_held_out_top1", "linear_l2"]),
        (("probe", "s0", DATA, "--linear-sgd", "1", "--device", "cpu"), ["linear_sgd_top1", "linear_sgd_rate"]),
        (("evaluate", "s0", DATA, "--sweep", "size=24,32", "--split", "val", "--device", "cpu"), ["size", "24", "32"]),
    ],
)
def test_tables(arguments, columns, runs, monkeypatch, capsys) -> None:
    done = command(tuple(runs.get(a, a) for a in arguments), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert [text for text in columns if text not in done.output] == []


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("probe", "s0", "s1", "--knn", "5"), ("--knn", "patchloom probe")),
        (("evaluate", "s0", "--size", "64"), ("--size",)),
        (("probe", "s0", "--few-shot", "0"), ("--few-shot",)),
        (("probe", "s0", DATA, "--few-shot", "0"), ("few-shot", "0")),
        (("evaluate", "s0", DATA, "--size", "0"), ("size", "0")),
        (("compare", "s0", "--seeds"), ("--seeds",)),
        (("compare", "s0"), ("two", "s0")),
        (("probe", "s0", DATA, "--knn", "5", "--sweep", "crop"), ("--sweep",)),
        (("probe", "s0", DATA, "--linear", "--agreement"), ("--agreement",)),
        (("probe", "s0", DATA, "--linear", "--split", "val"), ("--split",)),
        (("probe", "s0", DATA, "--knn", "many"), ("--knn", "many")),
        (("probe", "s0", DATA, "--knn", "10000"), ("k", "10000")),
        (("probe", "s0", DATA, "--few-shot", "1000"), ("1000",)),
        (("evaluate", "s0", DATA, "--sweep", "batch"), ("--sweep", "crop", "size")),
        (("evaluate", "s0", DATA, "--sweep", "crop=a"), ("--sweep", "crop", "size")),
        (("evaluate", "s0", DATA, "--sweep", "size=30", "--split", "val"), ("resmlp_s12", "30")),
        (("compare", "s0", "others", DATA, "--split", "val"), ("others", "16")),
        (("evaluate", "nowhere"), ("nowhere",)),
        (("compare", "nowhere", "s0"), ("nowhere",)),
    ],
)
def test_a_mistake_is_one_line(arguments, facts, runs, monkeypatch, capsys) -> None:
    done = command(tuple(runs.get(a, a) for a in arguments), monkeypatch, capsys)
    assert done.code == 2
    assert done.errors.startswith("error: ")
    assert [fact for fact in facts if fact not in done.errors] == []
    assert done.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "old", "new"),
    [
        (("evaluate", "s0", DATA, "--knn", "3", "--json", "--device", "cpu"), "evaluate --knn", "probe --knn"),
        (("evaluate", "s0", "s1", "--seeds", "--json"), "evaluate --seeds", "compare --seeds"),
        (("evaluate", "s0", "s1", "--json"), "evaluate RUN RUN", "compare RUN RUN"),
    ],
)
def test_old_spellings_of_evaluate_work_with_a_hint(arguments, old, new, runs, monkeypatch, capsys) -> None:
    done = command(tuple(runs.get(a, a) for a in arguments), monkeypatch, capsys)
    assert (done.code, done.errors.count("\n")) == (0, 1)
    assert f"patchloom {old}" in done.errors
    assert f"patchloom {new}" in done.errors
    verb = new.split()[0]
    assert command((verb, *(runs.get(a, a) for a in arguments[1:])), monkeypatch, capsys).output == done.output


def test_images_without_labels_are_reported(runs, tmp_path) -> None:
    for i in range(4):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{i}.png")
    classifier = patchloom.load(runs["s0"], device="cpu")
    for measured in (classifier.evaluate, lambda data: classifier.probe(data, linear=True)):
        with pytest.raises(DataError):
            measured(str(tmp_path))
