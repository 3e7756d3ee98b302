"""Regression from a labels file through every command, and runs that resume exactly."""

import csv
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import patchloom
from patchloom.engine import loop
from patchloom.report.pictures import epoch_pictures
from patchloom.report.pictures.explanations import class_map
from patchloom.report.pictures.look import network_inputs
from patchloom.runs.checkpoints import find_checkpoint, read_checkpoint
from patchloom.runs.config import read_recipe
from patchloom.runs.weights import read_weights
from patchloom.tasks.regression.model import Regressor
from patchloom.tasks.regression.run_files import read_scale, read_val_numbers
from patchloom.tasks.table import TASKS
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.forked import Forked, rank_places
from tests.reliability.commands import command, forked

NETWORK = {"model.options.dim": 16, "model.options.depth": 1, "model.options.patch_size": 4, "optim.lr": 3e-3}
IMAGES = 48


def write_images(folder: Path, header: tuple[str, ...], row) -> Path:
    """Write images of growing brightness with a labels file; `row` maps the brightness to cells."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    with open(folder / "labels.csv", "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("path", *header))
        for number in range(IMAGES):
            brightness = 20 + 4 * number
            noise = rng.integers(-10, 10, (16, 16, 3))
            Image.fromarray((brightness + noise).astype(np.uint8)).save(folder / f"{number:02}.png")
            lines.writerow((f"{number:02}.png", *row(brightness)))
    return folder / "labels.csv"


def train(data: Path | str, out: Path, **options: Any):
    given = {"model": "resmlp_s12", "size": 16, "batch": 8, "epochs": 12, "device": "cpu", "workers": 0, "init": "none"}
    changes = NETWORK | options.pop("set", {})
    return patchloom.train(str(data), out=str(out), set=changes, **given | options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("regression")
    write_images(root / "data", ("light", "dark"), lambda b: (b / 10 + 0.5, "" if b % 3 == 0 else 30 - b / 10))
    train(root / "data" / "labels.csv", root / "run", label_column="light,dark")
    return root


@pytest.fixture
def typed(monkeypatch, capsys):
    return lambda *arguments: command([str(each) for each in arguments], monkeypatch, capsys)


def test_it_learns_numbers_and_keeps_their_scale(place) -> None:
    scale = read_scale(place / "run", ("light", "dark"))
    assert scale.mean[0] == pytest.approx(11.9, abs=1)
    report = dict(read_val_numbers(place / "run").report)
    assert report["mae_light"] < scale.std[0] / 2
    assert report["r2"] > 0.5
    assert "2 numbers" in read_recipe(place / "run").source


def test_predictions_are_in_the_units_of_the_data(place, typed) -> None:
    model = patchloom.load(place / "run")
    assert isinstance(model, Regressor)
    files = [place / "data" / f"{number:02}.png" for number in (2, 40)]
    dark, bright = (dict(numbers) for numbers in model.predict([str(file) for file in files]))
    assert dark["light"] < bright["light"]
    assert dark["dark"] > bright["dark"]
    done = typed("predict", place / "run", *files, "--json")
    values = json.loads(done.output)
    assert [row["answers"][0][0] for row in values] == ["light", "light"]
    assert values[0]["answers"][0][1] == pytest.approx(dark["light"], rel=1e-4)


def test_predictions_as_a_table(place, typed, tmp_path) -> None:
    typed("predict", place / "run", place / "data" / "02.png", "--csv", tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["light", "dark"]
    assert all(np.isfinite(float(row["number"])) for row in rows)


def test_evaluation_without_and_with_the_data_agree(place, typed) -> None:
    stored = json.loads(typed("evaluate", place / "run", "--json").output)
    fresh = json.loads(typed("evaluate", place / "run", place / "data" / "labels.csv", "--json").output)
    (first,), (second,) = (
        list(each["runs"].values()) if "runs" in each else list(each.values()) for each in (stored, fresh)
    )
    assert first["scaled_mae"] == pytest.approx(second["scaled_mae"], rel=1e-4)


def test_report_and_look(place, typed, tmp_path) -> None:
    done = typed("report", place / "run", "--page", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert (done.code, done.errors) == (0, "")
    assert all(text in page for text in ("light", "dark", "Residuals", "Largest errors"))
    done = typed("look", place / "run", place / "data" / "02.png", "--page", tmp_path / "look.html")
    assert done.code == 0
    assert "light" in (tmp_path / "look.html").read_text()
    done = typed("look", place / "run", "--page", tmp_path / "worst.html")
    assert done.code == 0
    first = Path(done.output.split()[0]).name
    with open(place / "data" / "labels.csv", newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["path"] == first)
    assert f"(true: light {float(row['light']):.4g}" in done.output


def test_maps_are_relative_to_the_mean_of_training(place, tmp_path) -> None:
    data = write_images(tmp_path / "data", ("light",), lambda b: (b / 10,))
    train(data, tmp_path / "one", label_column="light", task="regress", epochs=2)
    for run in (tmp_path / "one", place / "run"):
        model = patchloom.load(run, device="cpu")
        image = Image.open(place / "data" / "07.png").convert("RGB")
        inputs = network_inputs(model.model, model.preprocessing, [image])
        for number, name in enumerate(model.labels):
            found = class_map(model.model, inputs.images, torch.tensor([number]), model.neutral)
            predicted = float(found.mean()) * model.scale.std[number] + model.scale.mean[number]
            assert predicted == pytest.approx(dict(model.predict(image))[name], rel=1e-4)
            assert found.std() > 0


def test_pictures_of_epochs_show_no_shares_of_numbers(place, tmp_path, monkeypatch) -> None:
    drawn: list[Any] = []
    pictures_of = epoch_pictures.pictures_of
    monkeypatch.setattr(
        epoch_pictures, "pictures_of", lambda *parts, **more: drawn.append(parts[1]) or pictures_of(*parts, **more)
    )
    train(place / "data" / "labels.csv", tmp_path / "run", label_column="light", epochs=1, pictures=1)
    assert drawn == [None]
    assert (tmp_path / "run" / "pictures" / "epoch_0001.png").is_file()


@pytest.mark.parametrize("option", [{"top": 1}, {"threshold": 0.5}, {"sort_into": "sorted"}])
def test_numbers_have_no_classes_to_choose(option, place) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(option)).replace('_', '-')} .*classes"):
        patchloom.predict(place / "run", [place / "data" / "02.png"], **option)


def test_the_columns_of_other_data_are_chosen(place, typed, tmp_path) -> None:
    data = write_images(tmp_path / "data", ("light", "dark", "weight"), lambda b: (b / 10, 30 - b / 10, 1.5))
    done = typed("evaluate", place / "run", data, "--label-column", "light,dark", "--json")
    assert done.code == 0, done.errors
    assert set(json.loads(done.output)["run"]["numbers"]) == {"light", "dark"}
    assert typed("evaluate", place / "run", data, "--json").code == 2


def test_runs_are_compared_on_the_same_images(place, typed, tmp_path) -> None:
    data = place / "data" / "labels.csv"
    train(data, tmp_path / "short", label_column="light,dark", epochs=1)
    done = typed("compare", place / "run", tmp_path / "short")
    assert done.code == 0
    assert "run − short" in done.output


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_an_artifact_gives_the_numbers_of_the_run(place, to, tmp_path) -> None:
    if to == "openvino":
        pytest.importorskip("openvino", reason="needs patchloom[openvino]")
    run, data = place / "run", str(place / "data" / "labels.csv")
    patchloom.export(str(run), out=str(tmp_path / "onnx"), to=to, data=data)
    file = str(place / "data" / "07.png")
    expected = dict(patchloom.load(run).predict(file))
    alone = dict(load_artifact(tmp_path / "onnx").predict(file))
    through = dict(patchloom.load(tmp_path / "onnx").predict(file))
    assert alone == pytest.approx(expected, rel=1e-3)
    assert through == pytest.approx(expected, rel=1e-3)


def test_a_page_has_the_scale(place, tmp_path) -> None:
    patchloom.export(str(place / "run"), out=str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    scale = read_scale(place / "run", ("light", "dark"))
    assert json.dumps({"mean": scale.mean.tolist(), "std": scale.std.tolist()}, separators=(",", ":")) in text


def test_the_server_answers_with_numbers(place) -> None:
    serving, model = TASKS["regression"].serving, patchloom.load(place / "run")
    assert serving is not None
    functions = serving.functions(model)
    (reply,) = functions["regress"]([Image.open(place / "data" / "02.png")], {})
    assert [each["name"] for each in reply["numbers"]] == ["light", "dark"]


def test_a_stopped_run_resumes_to_the_same_weights(place, tmp_path) -> None:
    data, options = place / "data" / "labels.csv", {"label_column": "light,dark", "epochs": 4}
    train(data, tmp_path / "whole", **options)
    train(data, tmp_path / "cut", **options, stop_after="0.05s")
    train(data, tmp_path / "cut", **options)
    first, second = (find_checkpoint(tmp_path / name, read_checkpoint).snapshot for name in ("whole", "cut"))
    assert first.step == second.step
    assert all(torch.equal(each, second.tensors["weights"][name]) for name, each in first.tensors["weights"].items())


def test_a_killed_run_resumes_to_the_same_weights(place, tmp_path) -> None:
    data, options = place / "data" / "labels.csv", {"label_column": "light,dark", "epochs": 3}
    train(data, tmp_path / "whole", **options)

    def killed() -> None:
        training = sys.modules["patchloom.training.run"]
        make_run, update = training.make_run, loop._Loop.update

        def saving_often(*arguments, **settings):
            made, *rest = make_run(*arguments, **settings)
            return replace(made, save_every_s=0.0), *rest

        def interrupted(self, *arguments):
            if self.progress.step == 7:  # in the second epoch
                os.kill(os.getpid(), signal.SIGKILL)
            return update(self, *arguments)

        training.make_run, loop._Loop.update = saving_often, interrupted
        train(data, tmp_path / "cut", **options)

    process = Forked(killed)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert find_checkpoint(tmp_path / "cut", read_checkpoint).snapshot.step > 5
    train(data, tmp_path / "cut", **options)
    whole, cut = (read_weights(tmp_path / name / "weights.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def test_two_processes_train_as_one(place, tmp_path) -> None:
    line = ["train", place / "data" / "labels.csv", "--label-column", "light,dark", "--model", "resmlp_s12"]
    line += ["--epochs", "1", "--size", "16", "--batch", "8", "--workers", "0", "--device", "cpu", "--init", "none"]
    changes = NETWORK | {"optim.name": "sgd", "optim.lr": 0.05}
    line += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    running = [forked(*line, "--out", tmp_path / "two", env=rank) for rank in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    printed = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], printed
    one, two = (read_weights(tmp_path / name / "weights.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(tensor, two[name], atol=1e-5) for name, tensor in one.items())
    first, second = (read_scale(tmp_path / name, ("light", "dark")).to_dict() for name in ("one", "two"))
    assert second == first


def test_a_resumed_run_keeps_its_scale(tmp_path) -> None:
    data = write_images(tmp_path / "data", ("light",), lambda b: (b / 10,))
    train(data, tmp_path / "run", label_column="light", epochs=1, task="regress")
    before = read_scale(tmp_path / "run", ("light",))
    data.write_text(data.read_text().replace("00.png,2.0", "00.png,9.0"))
    train(data, tmp_path / "run", label_column="light", epochs=2, task="regress")
    assert read_scale(tmp_path / "run", ("light",)).to_dict() == before.to_dict()


def test_an_ordinal_label_is_rounded_to_its_grades(tmp_path, typed) -> None:
    data = write_images(tmp_path / "data", ("stars",), lambda b: (1 + b // 50,))
    result = train(data, tmp_path / "run", label_column="stars", task="regress", epochs=8)
    assert result.metrics["exact"] > 30
    done = typed("predict", tmp_path / "run", tmp_path / "data" / "00.png")
    assert "stars 1" in done.output
    typed("predict", tmp_path / "run", tmp_path / "data" / "00.png", "--csv", tmp_path / "stars.csv")
    with open(tmp_path / "stars.csv", newline="") as file:
        assert [row["grade"] for row in csv.DictReader(file)] == ["1"]
    done = typed("predict", tmp_path / "run", tmp_path / "data" / "00.png", "--json")
    assert json.loads(done.output)[0]["grade"] == 1
    assert read_scale(tmp_path / "run", ("stars",)).grades == (1.0, 2.0, 3.0, 4.0, 5.0)


def test_images_without_numbers_are_refused(tmp_path) -> None:
    data = write_images(tmp_path / "data", ("label",), lambda b: ("bright" if b > 90 else "dark",))
    with pytest.raises((UsageError, DataError), match="number"):
        train(data, tmp_path / "run", task="regress")
    constant = write_images(tmp_path / "same", ("weight",), lambda _: (1.5,))
    with pytest.raises(DataError, match="weight"):
        train(constant, tmp_path / "run", label_column="weight", task="regress")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("method", "task"), [("asymmetric", "multilabel"), ("dino", "embedding")])
def test_a_method_of_another_task_is_refused(method: str, task: str, place, tmp_path) -> None:
    with pytest.raises(UsageError, match=rf"{method} is for {task}.*regression"):
        patchloom.train(
            str(place / "data" / "labels.csv"),
            label_column="light",
            out=str(tmp_path),
            set={"objective.method": method},
        )


def test_runs_of_two_tasks_are_not_compared(place, tmp_path, monkeypatch) -> None:
    other = shutil.copytree(place / "run", tmp_path / "labels")
    tasks = {place / "run": TASKS["regression"], other: TASKS["multilabel"]}
    monkeypatch.setattr("patchloom.tasks.evaluate.task_of_run", tasks.__getitem__)
    with pytest.raises(UsageError, match=r"regression.*multilabel"):
        patchloom.compare([place / "run", other])


def test_a_damaged_scale_is_named(place, tmp_path) -> None:
    shutil.copytree(place / "run", tmp_path / "run")
    (tmp_path / "run" / "scale.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match=r"scale\.json"):
        patchloom.load(tmp_path / "run")
