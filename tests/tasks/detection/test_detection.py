"""Whole runs that find objects: every command, exact resume, any number of workers, one process or two."""

import csv
import json
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom import cli
from patchloom.data.sources.source import open_data
from patchloom.engine import loop
from patchloom.engine.distribution import Processes
from patchloom.engine.optimization import freeze
from patchloom.engine.signals import Stopped
from patchloom.models.cost import cost
from patchloom.runs.weights import load_network, read_weights
from patchloom.tasks.detection.run_files import VAL, load_detector, read_val
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import make_plan, run_training
from patchloom_runtime.errors import DataError, UsageError
from tests.forked import rank_places
from tests.messages import missing, refused
from tests.reliability.commands import forked

DATA = "shapes:count=16,size=32"
TINY = {
    "model.options.depth": 1,
    "model.options.dim": 24,
    "detect.channels": 16,
    "detect.hidden": 24,
    "detect.proposals": 20,
    "detect.regions": 8,
    "detect.anchor_scale": 3,
    "detect.min_score": 0.0,
    "detect.most": 5,
    "augment.scale_max": 1.2,
}


def settings(folder: Path, **given) -> TrainingSettings:
    common = {"task": "detect", "level": "coarse", "model": "patchconvnet_s20", "epochs": 2, "size": 32, "batch": 4}
    return TrainingSettings(data=DATA, out=str(folder), changes=TINY, workers=0, **common | given)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("detection") / "run"
    said: list[str] = []
    run_training(settings(folder), say=said.append)
    (folder.parent / "said.txt").write_text("\n".join(said))
    return folder


def command(*arguments: str, capsys, monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", ["patchloom", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    return out.out


def test_the_plan_says_what_is_learned(run):
    said = (run.parent / "said.txt").read_text()
    lines = said.splitlines()
    assert any("detect" in line.split(":")[0].split() for line in lines)  # the task
    assert any(missing(line, 16, 4) == [] for line in lines)  # images and classes
    assert any(missing(line, "patchconvnet_s20", 32) == [] for line in lines)
    assert missing(said, "AP50", "95 %") == []
    kept = read_val(run).report
    assert missing(said, *(f"{kept.interval(name)[1]:.1f}" for name in ("ap50", "mask_ap50"))) == []


def test_a_run_keeps_what_it_found(run):
    kept = read_val(run)
    assert kept.report.classes == ("line", "polygon", "round", "star")
    assert len(kept.names) == len(kept.sizes) == 16
    assert all(size == (32, 32) for size in kept.sizes)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    judged = [row["values"] for row in rows if row["kind"] == "evaluation"]
    assert {"ap", "ap50", "mask_ap", "mask_ap50"} <= set(judged[-1])
    best = max(judged, key=lambda values: values["ap"])
    assert dict(kept)["ap"] == pytest.approx(best["ap"], abs=1e-6)
    losses = [row["values"] for row in rows if row["kind"] == "train"][-1]
    assert {"objectness", "proposals", "classes", "boxes", "masks", "loss"} <= set(losses)


def test_evaluate_report_and_verify(run, tmp_path, capsys, monkeypatch):
    kept = dict(read_val(run))
    told = {"capsys": capsys, "monkeypatch": monkeypatch}
    without = json.loads(command("evaluate", run, "--json", **told))
    now = json.loads(command("evaluate", run, DATA, "--json", **told))
    for values in (*without.values(), *now.values()):
        assert values["mask_ap"] == pytest.approx(kept["mask_ap"], abs=1e-6)
        assert set(values["classes"]["mask"]) == {"line", "polygon", "round", "star"}
    costed = json.loads(command("evaluate", run, "--cost", "--json", **told))[run.name]
    network = load_detector(run)[0]
    assert costed["parameters"] == sum(parameter.numel() for parameter in network.parameters())
    assert costed["multiply_adds"] == cost(network.one_pass(), network.image_size).multiply_adds > 0
    shutil.copytree(run, tmp_path / "copy")
    said = command("evaluate", run, tmp_path / "copy", **told)
    assert any(missing(line, "AP50", "line", "polygon", "round", "star") == [] for line in said.splitlines())
    assert any(line.count("+0.0") == 3 for line in said.splitlines() if "mask_ap50" in line)  # with both ends
    command("report", run, **told)
    page = (run / "report.html").read_text()
    for place in ("precision", "worst", "best"):
        assert page.count(f'<section id="{place}">') == 1, place
    assert all(f"<td>{name}</td>" in page for name in ("line", "polygon", "round", "star"))
    assert '<section id="pictures">' not in page
    command("verify", run, **told)
    (run / VAL).rename(run / "hidden")
    command("report", run, **told)
    assert VAL in (run / "report.html").read_text()
    (run / "hidden").rename(run / VAL)


def test_look_shows_the_worst_of_val_and_what_is_found_in_pictures(run, tmp_path, capsys, monkeypatch):
    told = {"capsys": capsys, "monkeypatch": monkeypatch}
    worst = json.loads(command("look", run, "--page", tmp_path / "worst.html", "--json", **told))
    report = read_val(run).report
    assert len(worst["pictures"]) == 12
    page = (tmp_path / "worst.html").read_text()
    assert page.count("<figure") == 12
    assert page.count("<table") == 1  # what is taken for what
    scores = [json.loads(part) for part in re.findall(r"<figcaption>(\d+)\s?%", page)]
    assert scores[0] == 0  # the worst first
    assert scores == sorted(scores)
    val = open_data(DATA).val
    assert worst["pictures"][0]["name"] in {val.key(i) for i in range(len(val))}
    (tmp_path / "in").mkdir()
    val.read(0).save(tmp_path / "in" / "0.png")
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    said = command("look", run, tmp_path / "in", "--page", tmp_path / "one.html", **told)
    assert "note: " in said
    assert "0.png  " in said
    given = json.loads(
        command("look", run, tmp_path / "in" / "0.png", "--page", tmp_path / "one.html", "--json", **told)
    )
    assert all(set(answer) == {"name", "score", "box"} for answer in given["pictures"][0]["answers"])
    assert "0.png" in (tmp_path / "one.html").read_text()
    assert len(report.truths) == 16
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy" / VAL).unlink()
    monkeypatch.setattr(sys, "argv", ["patchloom", "look", str(tmp_path / "copy")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert missing(capsys.readouterr().err, tmp_path / "copy", VAL) == []


def test_predict_writes_annotations_and_overlays(run, tmp_path, capsys, monkeypatch):
    val = open_data(DATA).val
    (tmp_path / "in").mkdir()
    for i in range(2):
        val.read(i).resize((64, 48)).save(tmp_path / "in" / f"{i}.png")
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    model = patchloom.load(run)
    assert missing(repr(model), "ObjectDetector", "patchconvnet_s20", "32×32", 4) == []
    one = model.predict(tmp_path / "in" / "0.png", min_score=0.0)
    assert len(one) == 5
    assert one[0].mask((48, 64)).shape == (48, 64)
    assert model.predict([val.read(0), val.read(1)], min_score=1.0) == [[], []]
    with refused(UsageError, "min_score", 2):
        model.predict(val.read(0), min_score=2)
    answers = list(model.predict_files([str(tmp_path / "in")], min_score=0.0, out=tmp_path / "out"))
    assert [answer.error is None for answer in answers] == [True, True, False]
    assert [Path(answer.written[0]).is_file() for answer in answers[:2]] == [True, True]
    told = json.loads((tmp_path / "out" / "annotations.json").read_text())
    assert [image["width"] for image in told["images"]] == [64, 64]
    assert len(told["annotations"]) == 10
    assert {each["category_id"] for each in told["annotations"]} <= {1, 2, 3, 4}
    assert all({"bbox", "segmentation", "score", "area"} <= set(each) for each in told["annotations"])
    with Image.open(tmp_path / "out" / "00001-0.jpg") as overlay:
        assert overlay.size == (512, 384)
    counts = patchloom.predict(run, tmp_path / "in", threshold=0.0, csv=tmp_path / "o.csv", device="cpu")
    assert (counts.images, counts.unreadable, counts.none) == (3, 1, 0)
    header, *rows = list(csv.reader((tmp_path / "o.csv").read_text().splitlines()))
    assert header == ["path", "label", "score", "left", "top", "right", "bottom", "error"]
    boxes = [[one["name"], one["score"], *one["box"]] for answer in answers for one in answer.answers]
    assert [[row[1], *map(float, row[2:7])] for row in rows[:-1]] == boxes
    assert rows[-1][1:7] == [""] * 6
    assert rows[-1][-1]
    counts = patchloom.predict(run, tmp_path / "in" / "0.png", threshold=1.0, csv=tmp_path / "o.csv", device="cpu")
    assert list(csv.reader((tmp_path / "o.csv").read_text().splitlines()))[1][1:3] == ["none", ""]
    assert patchloom.predict(run, tmp_path / "in" / "0.png", device="cpu")[0].picture is None
    monkeypatch.setattr(
        sys, "argv", ["patchloom", "predict", str(run), str(tmp_path / "in"), "--out", str(tmp_path / "two")]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3  # one cannot be read
    assert "0.png  " in capsys.readouterr().out
    assert (tmp_path / "two" / "annotations.json").is_file()


def test_a_run_stopped_in_mid_epoch_ends_with_the_same_weights_whatever_the_workers(run, tmp_path, monkeypatch):
    update = loop._Loop.update

    def interrupted(self, *arguments):
        if self.progress.step == 5:
            signal.raise_signal(signal.SIGTERM)
        return update(self, *arguments)

    monkeypatch.setattr(loop._Loop, "update", interrupted)
    with pytest.raises(Stopped):
        run_training(settings(tmp_path / "cut"), say=str)
    monkeypatch.undo()
    said: list[str] = []
    run_training(replace(settings(tmp_path / "cut"), workers=2), say=said.append)
    assert any(missing(line, tmp_path / "cut", 6, 8) == [] for line in said)
    expected = read_weights(run / "weights.safetensors")
    found = read_weights(tmp_path / "cut" / "weights.safetensors")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


class OneOfTwo(Processes):
    """A process that is told what the other found."""

    def __init__(self, rank: int, told: list) -> None:
        super().__init__("fp32", device="cpu")
        self.rank, self.world, self._told = rank, 2, told

    def gather(self, value):
        self._told[self.rank] = value
        return [each for each in self._told if each is not None]


def test_two_processes_judge_as_one(run, tmp_path):
    plan = make_plan(settings(tmp_path / "other"), "cpu")
    task = plan.task.training
    network = plan.task.model.load_network(run)
    alone = dict(task.judge(plan, Processes("fp32", device="cpu"))(network))
    told = [None, None]
    task.judge(plan, OneOfTwo(0, told))(network)
    together = task.judge(plan, OneOfTwo(1, told))(network)
    assert all(part for part in told)
    assert not set(told[0]) & set(told[1])
    assert dict(together) == pytest.approx(alone)


def test_another_run_gives_the_backbone(run, tmp_path):
    plan = make_plan(replace(settings(tmp_path / "next"), init=str(run), model=None), "cpu")
    network = plan.task.training.network(plan)
    before = plan.task.model.load_network(run)
    for name, tensor in before.backbone.state_dict().items():
        assert torch.equal(network.backbone.state_dict()[name], tensor), name
    assert not torch.equal(network.rpn.head.cls_logits.weight, before.rpn.head.cls_logits.weight)
    assert any(str(run) in line for line in plan.lines())


def test_a_classifier_gives_the_backbone_and_it_can_be_frozen(tmp_path):
    golden = Path(__file__).parents[2] / "golden" / "classifier"
    changes = {key: value for key, value in TINY.items() if not key.startswith("model")}
    given = replace(settings(tmp_path / "boxes"), init=str(golden), model=None)
    given = replace(given, changes=changes | {"model.freeze": "backbone", "detect.masks": False})
    plan = make_plan(given, "cpu")
    network = plan.task.training.network(plan)
    trained, _ = load_network(golden)
    assert network.backbone.config.name == trained.config.name
    blocks = {name: tensor for name, tensor in trained.state_dict().items() if "blocks" in name and "channels" in name}
    assert len(blocks) > 3
    assert all(torch.equal(network.backbone.state_dict()[name], tensor) for name, tensor in blocks.items())
    freeze(network, "head")
    assert network.frozen
    assert not network.train().backbone.training
    assert all(parameter.requires_grad for parameter in network.roi_heads.parameters())
    assert not network.roi_heads.has_mask()


def test_classes_are_matched_by_name(run):
    from patchloom.tasks.detection.data import number_objects

    val = open_data(DATA).val
    told = number_objects(val, ("star-5", "circle"), None).with_parts("boxes")
    for i in range(8):
        own = [val.images.object_names[int(n)] for n in val.boxes(i)[:, 4]]
        expected = [("star-5", "circle").index(name) for name in own if name in ("star-5", "circle")]
        assert told.sample(i).boxes[:, 4].tolist() == expected
        assert told.objects(i).boxes[:, 4].tolist() == expected
        assert len(told.objects(i).masks) == len(expected)


def test_mistakes_are_said_before_any_work(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "plain" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "plain" / name / "0.png")
        Image.new("RGB", (8, 8), "red").save(tmp_path / "plain" / name / "1.png")
    with refused(DataError, "plain"):
        make_plan(replace(settings(tmp_path / "run"), data=str(tmp_path / "plain"), level=None), "cpu")
    plan = make_plan(replace(settings(tmp_path / "run"), changes=TINY | {"augment.policy": "randaugment"}), "cpu")
    with refused(UsageError, "augment.policy", "randaugment"):
        plan.task.training.loader(plan, Processes("fp32", device="cpu"), {})
    for given, facts in (
        ({"recipe": "mask_rcnn", "fit": True}, ("--fit", "mask_rcnn")),
        ({"teacher": "x"}, ("--teacher",)),
    ):
        with refused(UsageError, *facts):
            make_plan(replace(settings(tmp_path / "run"), **given), "cpu")
    with refused(UsageError, "finest"):
        make_plan(replace(settings(tmp_path / "run"), level="finest"), "cpu")


def test_networks_of_one_size_and_recipes_by_name(tmp_path):
    plan = make_plan(replace(settings(tmp_path / "run"), model="resmlp_s12"), "cpu")
    assert plan.recipe.model.image_size == 32
    network = plan.task.training.network(plan)
    loader, _ = plan.task.training.loader(plan, Processes("fp32", device="cpu"), {})
    objective = plan.task.training.objective(plan, network, loader, Processes("fp32", device="cpu"))
    assert not objective.cut
    assert np.isfinite(objective(network.train(), next(iter(loader.epoch(0))), epoch=0, step=0)["loss"].item())
    published = patchloom.get_recipe("mask_rcnn")
    assert (published.optim.lr, published.optim.weight_decay, published.schedule.step_epochs) == (1e-4, 0.05, (27, 33))
    assert published.schedule.epochs == 36


def test_small_sets_get_a_recipe_with_reasons():
    from patchloom.recipes.detection import auto_detection
    from patchloom.recipes.fit import Facts

    recipe, reasons = auto_detection(Facts(136, 191, "cuda"), None, {})
    assert (recipe.model.name, recipe.model.image_size, recipe.optim.batch_size) == ("patchconvnet_s20", 384, 16)
    assert recipe.schedule.epochs * 136 == pytest.approx(60_000, rel=0.01)
    assert recipe.optim.ema_decay
    assert all(reason.why for reason in reasons)
    small, _ = auto_detection(Facts(400, 64, "cpu"), None, {"model.image_size": 96, "schedule.epochs": "3"})
    assert (small.model.name, small.model.image_size, small.schedule.epochs) == ("smlpnet_t", 96, 3)
    assert (small.augment.scale_max, small.optim.ema_decay, small.detect.channels) == (1.25, None, 64)
    asked, _ = auto_detection(Facts(400, 300, "cuda", pretrained=True), "resmlp_s24", {})
    assert (asked.model.name, asked.optim.lr) == ("resmlp_s24", 2e-4)


# All regions count, so that none is drawn at random; plain steps, which add up as losses do.
WITHOUT_CHANCE = {"detect.regions": 512, "optim.name": "sgd", "optim.lr": 0.02, "optim.ema_decay": None}


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Losses are means over what each process sees of a batch, so they agree but for the share of each object."""
    changes = TINY | WITHOUT_CHANCE | {"model.options.patch_size": 4}
    line = ["train", DATA, "--task", "detect", "--level", "coarse", "--model", "resmlp_s12", "--epochs", "1"]
    line += ["--size", "32", "--batch", "8", "--workers", "0", "--device", "cpu"]
    line += [
        part for key, value in changes.items() for part in ("--set", f"{key}={'none' if value is None else value}")
    ]
    running = [forked(*line, "--out", tmp_path / "two", env=place) for place in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    said = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], said
    given = settings(tmp_path / "x", batch=8, epochs=1, model="resmlp_s12")
    plan = make_plan(replace(given, changes=changes), "cpu")
    torch.manual_seed(plan.recipe.seed)
    begun = dict(plan.task.training.network(plan).named_parameters())
    one, two = (read_weights(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    moved = sum(((one[name] - tensor) ** 2).sum().item() for name, tensor in begun.items())
    apart = sum(((one[name] - two[name]) ** 2).sum().item() for name in begun)
    assert moved > 1e-4
    assert apart < 0.05 * moved
    rows = [json.loads(text) for text in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    (judged,) = [row["values"] for row in rows if row["kind"] == "evaluation"]
    assert dict(read_val(tmp_path / "two"))["ap50"] == pytest.approx(judged["ap50"], abs=1e-6)
    assert len(read_val(tmp_path / "two").names) == 16


@pytest.mark.slow
def test_objects_are_found_after_two_minutes_on_a_cpu(tmp_path):
    given = TrainingSettings(data="shapes:count=300,size=64", task="detect", level="coarse", out=str(tmp_path / "run"))
    found = run_training(given, say=str).metrics
    assert found["ap50"] > 30
    assert found["mask_ap50"] > 25
