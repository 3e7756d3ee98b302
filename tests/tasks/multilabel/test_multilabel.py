"""Whole runs with several labels per image: every command, exact resume, one process or two."""

import base64
import io
import json
import os
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
from patchloom.engine import loop
from patchloom.engine.distribution import Processes
from patchloom.engine.signals import Stopped
from patchloom.evaluation.calibration import choose_temperature
from patchloom.runs.calibration import read_calibration
from patchloom.runs.weights import read_weights
from patchloom.serving.served_model import ServedModel, served_verbs
from patchloom.tasks.multilabel.evaluation import LABELS
from patchloom.tasks.multilabel.run_files import FILE, THRESHOLDS, read_thresholds, read_val_labels
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.table import TASKS, task_named
from patchloom.training.run import make_plan, run_training
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.forked import Forked, rank_places
from tests.reliability.commands import forked

COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 230), "white": (240, 240, 240)}
TINY = {"model.options.depth": 1, "model.options.dim": 24, "model.options.patch_size": 4}


def write_photos(root: Path, count: int = 40) -> Path:
    """Write images with rectangles of the colors that are their labels; white is rare."""
    rng = np.random.default_rng(0)
    root.mkdir(parents=True)
    lines = ["path,tags"]
    for i in range(count):
        image = Image.fromarray(rng.integers(0, 50, (16, 16, 3), np.uint8))
        labels = [name for name in COLORS if rng.random() < (0.08 if name == "white" else 0.5)]
        for name in labels:
            x, y = rng.integers(0, 10, 2).tolist()
            image.paste(COLORS[name], (x, y, x + 7, y + 7))
        image.save(root / f"{i:02d}.png")
        lines.append(f"{i:02d}.png,{'|'.join(labels)}")
    (root / "labels.csv").write_text("\n".join(lines))
    return root


def settings(data: Path, folder: Path, **fields) -> TrainingSettings:
    common = {"model": "resmlp_s12", "epochs": 3, "size": 16, "batch": 8, "workers": 0, "device": "cpu", "init": "none"}
    changes = TINY | fields.pop("changes", {})
    return TrainingSettings(data=str(data), out=str(folder), changes=changes, **common | fields)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("multilabel") / "photos")


@pytest.fixture(scope="module")
def run(data) -> Path:
    folder, printed = data.parent / "run", []
    run_training(settings(data, folder, changes={"augment.mixup": 0.5}), say=printed.append)
    (data.parent / "printed.txt").write_text("\n".join(printed))
    return folder


def reply_image(reply) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(reply["seen"]))).convert("RGB")


def command(*arguments, capsys, monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", ["patchloom", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr()
    assert not ended.value.code, out.err
    return out.out


def test_the_data_choose_the_task_and_the_plan_names_the_labels(run, data):
    printed = (data.parent / "printed.txt").read_text()
    assert "multilabel" in printed
    assert "4 labels" in printed
    assert "mAP" in printed
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == "multilabel"
    assert json.loads((run / "labels.json").read_text()) == ["blue", "green", "red", "white"]


def test_a_run_keeps_scores_and_thresholds(run, data):
    val = read_val_labels(run)
    values = json.loads((run / THRESHOLDS).read_text())
    assert set(values["thresholds"]) == set(COLORS)
    assert "white" not in values["own"]  # fewer than five images of val
    assert values["thresholds"]["white"] == values["shared"]
    assert val.report.thresholds.values.tolist() == [values["thresholds"][name] for name in val.report.classes]
    plan = make_plan(settings(data, data.parent / "other"), "cpu")
    assert val.report.targets[:, 0].tolist() == plan.splits.val.targets.values[:, 0].tolist()
    rows = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines() if "map" in line]
    assert dict(val.report)["map"] == pytest.approx(max(row["map"] for row in rows), abs=1e-4)
    assert dict(val.report)["macro_f1"] >= max(row["macro_f1"] for row in rows if row["map"] == rows[-1]["map"]) - 1e-6


def test_scores_are_calibrated(run, data):
    calibration, model = read_calibration(run), patchloom.load(run, device="cpu")
    assert calibration.before is not None
    assert calibration.after is not None
    assert calibration.fit is not None
    assert calibration.fit.helps == (calibration.after.loss < calibration.before.loss)
    images = LABELS.open(str(data), model.labels, split="val", folder=run)
    stored = read_val_labels(run).report
    measured = LABELS.evaluate_on(model, images)[0].report
    np.testing.assert_allclose(measured.scores, stored.scores, atol=1e-5)
    fit = choose_temperature(measured.decisions_on_labels)
    assert measured.temperature == calibration.rules.temperature == pytest.approx(fit.temperature, rel=1e-3)
    assert calibration.fit.fitted == pytest.approx(fit.fitted, rel=1e-3)


def test_damaged_thresholds_are_noticed(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / THRESHOLDS).write_text((copy / THRESHOLDS).read_text().replace("0.", "1.", 1))
    with pytest.raises(CheckpointError, match=THRESHOLDS):
        patchloom.load(copy)
    (copy / THRESHOLDS).unlink()
    assert set(patchloom.load(copy).thresholds.tolist()) == {0.5}
    for content in ('{"format": 1}', '{"format": 1, "shared": 2.0, "thresholds": {}, "own": []}', "["):
        (copy / "checksums.json").unlink(missing_ok=True)
        (copy / THRESHOLDS).write_text(content)
        with pytest.raises(CheckpointError):
            read_thresholds(copy, list(COLORS))


def test_predictions_are_all_labels_above_their_threshold(run, data, tmp_path, capsys, monkeypatch):
    model = patchloom.load(run, device="cpu")
    files = sorted(data.glob("*.png"))[:6]
    scores = model.scores([Image.open(file).convert("RGB") for file in files])
    wanted = [
        {name: float(s) for name, s, t in zip(model.labels, row, model.thresholds, strict=True) if s >= t}
        for row in scores
    ]
    predicted = model.predict(files)
    assert [dict(each) for each in predicted] == [pytest.approx(each) for each in wanted]
    assert all([s for _, s in each] == sorted((s for _, s in each), reverse=True) for each in predicted)
    assert model.predict(str(files[0]), threshold=0.0, top=2) == model.predict(str(files[0]), threshold=0.0)[:2]
    assert [each.answers for each in patchloom.predict(run, files, device="cpu")] == predicted
    printing = {"capsys": capsys, "monkeypatch": monkeypatch}
    lines = json.loads(command("predict", run, *files, "--json", "--device", "cpu", **printing))
    assert [dict(map(tuple, each["answers"])) for each in lines] == [pytest.approx(each) for each in wanted]
    patchloom.predict(run, files, csv=tmp_path / "p.csv", device="cpu")
    header, *rows = (tmp_path / "p.csv").read_text().splitlines()
    assert header.startswith("path,label,score,labels,scores")
    assert rows[0].split(",")[3] == "|".join(name for name, _ in predicted[0])


def test_evaluate_compare_report_look_and_verify(run, data, tmp_path, capsys, monkeypatch):
    printing = {"capsys": capsys, "monkeypatch": monkeypatch}
    monkeypatch.chdir(tmp_path)
    kept = dict(read_val_labels(run).report)
    stored = json.loads(command("evaluate", run, "--json", **printing))["run"]
    again = json.loads(command("evaluate", run, data, "--json", "--device", "cpu", **printing))["run"]
    for name in ("map", "macro_f1", "micro_f1", "loss"):
        assert stored[name] == pytest.approx(kept[name])
        assert again[name] == pytest.approx(kept[name], abs=1e-3)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    compared = json.loads(command("compare", run, other, "--json", **printing))["comparisons"]
    assert [(each["difference"], each["p"]) for each in compared] == [(0.0, 1.0)]
    page = command("report", other, **printing).strip()
    text = Path(page).read_text()
    assert all(name in text for name in (*COLORS, "threshold", "missing"))
    command("look", run, "--page", tmp_path / "look.html", **printing)
    assert "true: " in command("look", run, "--page", tmp_path / "look.html", **printing)
    assert (tmp_path / "look.html").is_file()
    assert "12 files" in command("verify", run, **printing)
    named = command("evaluate", run, data, "--label-column", "tags", "--json", "--device", "cpu", **printing)
    assert json.loads(named)["run"] == again
    monkeypatch.setattr(sys, "argv", ["patchloom", "evaluate", str(run), str(data), "--level", "x"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--level" in capsys.readouterr().err


def test_what_is_for_one_class_per_image_is_refused(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="multilabel"):
        patchloom.calibrate(run)
    with pytest.raises(UsageError, match="multilabel"):
        patchloom.prune(str(run), data)
    with pytest.raises(UsageError, match="multilabel"):
        patchloom.soup([run, shutil.copytree(run, tmp_path / "other")], data, out=str(tmp_path / "soup"))
    with pytest.raises(DataError, match="multilabel"):
        patchloom.audit(str(data), say=str)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_looks_name_the_true_labels_and_images_without_any(data, tmp_path):
    bare = shutil.copytree(data, tmp_path / "bare")
    rows = [line.split(",")[0] for line in (bare / "labels.csv").read_text().splitlines()[1:]]
    tags = {name: "" if place % 2 else "blue|red" for place, name in enumerate(rows)}
    (bare / "labels.csv").write_text("path,tags\n" + "\n".join(f"{name},{tags[name]}" for name in rows))
    run_training(settings(bare, tmp_path / "run", epochs=1))
    named = TASKS["multilabel"].report.look(tmp_path / "run", (), out=tmp_path / "look.html").looks
    truths = {Path(name).name: look.truth for name, _, look in named}
    assert truths == {name: "blue, red" if tags[name] else "none" for name in truths}
    assert "none" in truths.values()
    assert not any(look.right for _, _, look in named)


@pytest.mark.parametrize("to", ["onnx", "torch", "openvino"])
def test_artifacts_predict_the_same_labels(run, data, to, tmp_path):
    if to == "openvino":
        pytest.importorskip("openvino", reason="needs patchloom[openvino]")
    exported = patchloom.export(str(run), str(tmp_path / to), to=to)
    assert exported is not None
    artifact, model = load_artifact(tmp_path / to), patchloom.load(run, device="cpu")
    assert artifact.about.task == "multilabel"
    assert artifact.thresholds.tolist() == model.thresholds.tolist()
    files = sorted(data.glob("*.png"))[:8]
    for ours, theirs in zip(artifact.predict(files), model.predict(files), strict=True):
        assert dict(ours) == pytest.approx(dict(theirs), abs=1e-4)
    assert len(artifact.predict(files[0], threshold=0.0, top=3)) == 3
    opened = patchloom.load(tmp_path / to).predict(files)
    assert [dict(each) for each in opened] == [pytest.approx(dict(each)) for each in artifact.predict(files)]
    about = tmp_path / to / "artifact.json"
    values = json.loads(about.read_text())
    values["thresholds"] = [2.0] * 4
    about.write_text(json.dumps(values))
    with pytest.raises(CheckpointError):
        load_artifact(tmp_path / to)


def test_the_single_page_and_the_server_have_the_thresholds(run, data, tmp_path):
    patchloom.export(str(run), str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    model = patchloom.load(run, device="cpu")
    for values in (model.thresholds, model.neutral):
        assert json.dumps(values.tolist(), separators=(",", ":")) in text
    verbs = served_verbs(ServedModel(task_named("multilabel"), model))
    files = [Image.open(file).convert("RGB") for file in sorted(data.glob("*.png"))[:3]]
    replies = verbs["predict"].run(files, {"top": 1000})
    assert [[(one["label"], one["probability"]) for one in each["answers"]] for each in replies] == model.predict(files)
    explained = verbs["explain"].run(files, {"top": 1000, "label": None})
    for reply, one, scores in zip(explained, model.predict(files), model.scores(files), strict=True):
        assert [(each["label"], each["probability"]) for each in reply["answers"]] == [
            (name, pytest.approx(score, abs=1e-5)) for name, score in one
        ]
        assert reply["label"] == (one[0][0] if one else model.labels[scores.argmax()])
        for label, score, threshold in zip(model.labels, scores, model.thresholds, strict=True):
            (of_label,) = verbs["explain"].run([reply_image(reply)], {"top": 1, "label": label})
            if abs(score - threshold) > 0.01:
                assert (np.mean(of_label["map"]) > 0) == (score > threshold)
    maps = []
    for label in model.labels:
        (reply,) = verbs["explain"].run(files[:1], {"top": 1, "label": label})
        assert (reply["label"], len(reply["answers"]) <= 1) == (label, True)
        maps.append(np.asarray(reply["map"]))
    assert {each.shape for each in maps} == {(4, 4)}  # patches of 4 pixels
    assert max(np.ptp(each) for each in maps) > 0
    assert not all(np.array_equal(each, maps[0]) for each in maps)
    with pytest.raises(UsageError, match="gone"):
        verbs["explain"].run(files[:1], {"top": 1, "label": "gone"})


def test_a_run_stopped_in_mid_epoch_ends_with_the_same_weights(run, data, tmp_path, monkeypatch):
    update = loop._Loop.update

    def interrupted(self, *arguments):
        if self.progress.step == 5:
            signal.raise_signal(signal.SIGTERM)
        return update(self, *arguments)

    own = settings(data, tmp_path / "cut", changes={"augment.mixup": 0.5})
    monkeypatch.setattr(loop._Loop, "update", interrupted)
    with pytest.raises(Stopped):
        run_training(own, say=str)
    assert not (tmp_path / "cut" / THRESHOLDS).exists()
    monkeypatch.undo()
    run_training(replace(own, workers=2), say=str)
    expected, resumed = (read_weights(folder / "weights.safetensors") for folder in (run, tmp_path / "cut"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())
    assert (run / THRESHOLDS).read_bytes() == (tmp_path / "cut" / THRESHOLDS).read_bytes()
    assert (run / FILE).read_bytes() == (tmp_path / "cut" / FILE).read_bytes()


def test_a_killed_run_is_resumed_to_the_same_weights(run, data, tmp_path):
    own = settings(data, tmp_path / "cut", changes={"augment.mixup": 0.5})

    def killed() -> None:
        make_run = sys.modules["patchloom.training.run"].make_run
        update = loop._Loop.update

        def saving_often(*arguments, **options):
            made, *rest = make_run(*arguments, **options)
            return replace(made, save_every_s=0.0), *rest

        def interrupted(self, *arguments):
            if self.progress.step == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, *arguments)

        sys.modules["patchloom.training.run"].make_run = saving_often
        loop._Loop.update = interrupted
        run_training(own, say=str)

    process = Forked(killed)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    run_training(own, say=str)
    expected, resumed = (read_weights(folder / "weights.safetensors") for folder in (run, tmp_path / "cut"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())


def test_changed_labels_are_noticed_when_a_run_resumes(run, data, tmp_path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    own = settings(data, folder, epochs=4, changes={"augment.mixup": 0.5})
    assert not any("changed" in note for note in make_plan(own, "cpu").notes)
    text = (data / "labels.csv").read_text()
    lines = text.splitlines()
    lines[1] = "00.png," + "|".join(
        sorted({"red", "blue", "green"} ^ set(lines[1].partition(",")[2].split("|")) - {""})
    )
    (data / "labels.csv").write_text("\n".join(lines))
    notes = make_plan(own, "cpu").notes
    (data / "labels.csv").write_text(text)
    assert any("changed" in note for note in notes)


class OneOfTwo(Processes):
    """A process that gets the rows of the other."""

    def __init__(self, rank: int, rows: list) -> None:
        super().__init__("fp32", device="cpu")
        self.rank, self.world, self._rows, self._calls = rank, 2, rows, 0

    def gather(self, value):
        return [value, value]

    def gather_rows(self, rows):
        mine = self._rows[self.rank]
        mine.append(rows)
        self._calls += 1
        other = self._rows[1 - self.rank]
        return torch.cat([other[self._calls - 1], rows]) if len(other) >= self._calls else rows


def test_two_processes_judge_as_one(run, data, tmp_path):
    plan = make_plan(settings(data, tmp_path / "other"), "cpu")
    task, network = plan.task.training, plan.task.model.load_network(run)
    alone = dict(task.judge(plan, Processes("fp32", device="cpu"))(network))
    rows = [[], []]
    task.judge(plan, OneOfTwo(0, rows))(network)
    together = dict(task.judge(plan, OneOfTwo(1, rows))(network))
    assert together == pytest.approx(alone, abs=1e-4)


def test_two_processes_train_as_one(data, tmp_path):
    line = ["train", data, "--model", "resmlp_s12", "--epochs", "1", "--size", "16", "--batch", "8", "--workers", "0"]
    line += ["--device", "cpu", "--init", "none"]
    changes = TINY | {"optim.name": "sgd", "optim.lr": 0.05, "augment.mixup": 0.5}
    line += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    running = [forked(*line, "--out", tmp_path / "two", env=place) for place in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    printed = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], printed
    one, two = (read_weights(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(tensor, two[name], atol=1e-5) for name, tensor in one.items())
    first, second = (json.loads((tmp_path / name / THRESHOLDS).read_text())["thresholds"] for name in ("one", "two"))
    assert second == pytest.approx(first, abs=1e-4)


def test_a_run_is_distilled_into_another(run, data, tmp_path):
    own = settings(data, tmp_path / "student", epochs=1, teacher=str(run), changes={"objective.method": "asymmetric"})
    run_training(own, say=str)
    rows = [json.loads(line)["values"] for line in (tmp_path / "student" / "metrics.jsonl").read_text().splitlines()]
    assert any({"label_loss", "teacher_loss"} <= set(row) for row in rows)
    with pytest.raises(UsageError, match="--teacher"):
        make_plan(settings(data, tmp_path / "x", teacher="timm:resnet18"), "cpu")


def test_mistakes_are_reported_before_any_work(data, tmp_path):
    with pytest.raises(UsageError, match="--level"):
        make_plan(settings(data, tmp_path / "x", level="coarse"), "cpu")
    with pytest.raises(DataError, match="--task multilabel"):
        make_plan(settings(data, tmp_path / "x", task="classify"), "cpu")
    photos = write_photos(tmp_path / "one", 6)
    (photos / "labels.csv").write_text("\n".join(["path,tags", *(f"{i:02d}.png,red" for i in range(6))]))
    with pytest.raises(DataError, match="red"):
        make_plan(settings(photos, tmp_path / "x", task="multilabel"), "cpu")


def test_boxes_are_labels_with_the_task(tmp_path):
    plan = make_plan(settings("shapes:count=16,size=16", tmp_path / "x", task="multilabel"), "cpu")
    assert plan.splits.train.targets.values.sum(axis=1).min() >= 1
    assert len(plan.splits.classes) > 4


def test_the_python_of_the_page_runs(data, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "multilabel.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(data, tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block, "docs/multilabel.md", "exec"), names)
    assert set(names["model"].labels) == set(COLORS)
    lines = capsys.readouterr().out.splitlines()
    assert {"map", "images"} <= eval(lines[-1])[names["run"].folder.name].keys()
    first, second, _ = [line for line in lines if line.startswith("[")]
    assert len(eval(second)) <= 1
    assert {name for name, _ in eval(first)} <= set(COLORS)
