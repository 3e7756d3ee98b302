"""A task is a file: one that only the tests know goes through every command, and no name of a task steers the rest."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchloom
from patchloom.recipes.methods import METHODS, method_of
from patchloom.serving.app import App
from patchloom.serving.served_model import describe, load_served, served_verbs
from patchloom.tasks.table import TASKS, task_named
from patchloom.training import run as training
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import own_sha256
from tests.forked import rank_places
from tests.golden import make
from tests.golden.make import SMALL
from tests.messages import missing, refused
from tests.reliability.commands import command, forked
from tests.serving.clients import InThisProcess, get, post
from tests.tasks import dots

ROOT = Path(__file__).parents[2] / "patchloom"
RECIPE = """
name: dots
source: these tests
objective: {method: counting}
model: {name: dot_counter, options: {hidden: 6}}
optim: {lr: 0.02, batch_size: 8}
schedule: {epochs: 6, decay: constant}
"""


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The rows of the two tables, and a recipe."""
    monkeypatch.setitem(METHODS, "counting", dots.METHOD)
    monkeypatch.setitem(TASKS, "counting", dots.TASK)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dots.yaml").write_text(RECIPE)
    return tmp_path


TRAIN = ("train", "dots:80", "--recipe", "dots.yaml", "--device", "cpu")


def newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").iterdir()) / "weights.safetensors")


def test_a_task_of_its_own_goes_through_every_command(counting: Path, monkeypatch, capsys) -> None:
    trained = command((*TRAIN, "--out", "run"), monkeypatch, capsys)
    assert trained.code == 0, trained.errors
    assert "80 pictures of dots, 64 to validate" in trained.output  # the words are those of dots.py
    off_by = float(re.findall(r"off by ([\d.]+) dots", trained.output)[-1])
    assert off_by < 1.5  # who always says 4.5 is off by 2.5
    assert "patchloom predict run IMAGE…" in trained.output
    assert json.loads((counting / "run" / "config.json").read_text())["task"] == "counting"

    evaluated = command(("evaluate", "run", "dots:10", "--json"), monkeypatch, capsys)
    assert json.loads(evaluated.output)["run"]["off_by"] == pytest.approx(off_by, abs=0.01)
    rejected = command(("probe", "run", "dots:10", "--knn", "5"), monkeypatch, capsys)
    assert rejected.code == 2
    assert "--knn" in rejected.errors

    reported = command(("report", "run", "--page", "page.html"), monkeypatch, capsys)
    assert reported.code == 0, reported.errors
    page = (counting / "page.html").read_text()
    assert all(words in page for words in ("Dots that were counted", "off by, in dots", "Off by, dots", "hidden"))

    pixels = np.zeros((16, 16), np.uint8)
    pixels[::8, ::8] = 255
    Image.fromarray(pixels).save("a.png")
    predicted = command(("predict", "run", "a.png"), monkeypatch, capsys)
    assert re.fullmatch(r"a\.png  [\d.]+ dots\n", predicted.output)
    assert command(("verify", "run"), monkeypatch, capsys).code == 0

    pytest.importorskip("onnxruntime")
    exported = command(("export", "run", "--out", "artifact"), monkeypatch, capsys)
    assert exported.code == 0, exported.errors
    assert command(("verify", "artifact"), monkeypatch, capsys).code == 0
    assert command(("predict", "artifact", "a.png"), monkeypatch, capsys).output == predicted.output
    dots_in_a = patchloom.load("artifact").predict("a.png")[0]
    assert f"{dots_in_a:.1f} dots" in predicted.output
    for source in ("run", "artifact"):
        served = load_served(source, device="cpu")
        app = App(InThisProcess(served_verbs(served), describe(served)), "dots")
        (result,) = post(app, "/count", Path("a.png").read_bytes()).json["results"]
        assert result["dots"] == pytest.approx(dots_in_a, abs=1e-3)
        assert "/count" in get(app, "/openapi.json").json["paths"]
        assert get(app, "/v2/models/dots").json["outputs"] == [{"name": "dots", "datatype": "FP32", "shape": [-1]}]


def test_an_artifact_of_a_task_is_checked_by_its_predictor(counting: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("onnxruntime")
    command((*TRAIN, "--out", "run", "--epochs", "1"), monkeypatch, capsys)
    command(("export", "run", "--out", "artifact"), monkeypatch, capsys)
    path = counting / "artifact" / "artifact.json"
    about = json.loads(path.read_text())
    del about["own_sha256"]
    for change in ({"dots": {"most": 0}}, {"dots": {}}, {"task": "guessing"}):
        changed = about | change
        path.write_text(json.dumps(changed | {"own_sha256": own_sha256(changed)}))
        with refused(CheckpointError, "artifact.json"):
            patchloom.load("artifact")


def test_a_task_of_its_own_resumes_exactly(counting: Path, monkeypatch, capsys) -> None:
    command((*TRAIN, "--out", "whole"), monkeypatch, capsys)
    command((*TRAIN, "--out", "cut", "--epochs", "2"), monkeypatch, capsys)
    resumed = command((*TRAIN, "--out", "cut"), monkeypatch, capsys)
    assert any(missing(line, "cut", 20, 60) == [] for line in resumed.output.splitlines())
    whole, cut = newest_weights(counting / "whole"), newest_weights(counting / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(tensor, cut[name]) for name, tensor in whole.items())


def test_a_run_of_an_unknown_task_is_one_line(counting: Path, monkeypatch, capsys) -> None:
    command((*TRAIN, "--out", "run", "--epochs", "1"), monkeypatch, capsys)
    monkeypatch.delitem(TASKS, "counting")
    done = command(("predict", "run", "a.png"), monkeypatch, capsys)
    assert done.code == 4
    assert missing(done.errors, "run", "counting") == []


def test_an_unknown_method_names_the_nearest() -> None:
    with refused(UsageError, "objective.method", "grafti", "grafit"):
        method_of("grafti")


def test_every_method_has_a_task_and_an_objective() -> None:
    from importlib import import_module

    for name, method in METHODS.items():
        assert task_named(method.task).name == method.task, name
        assert callable(import_module(method.objective).make_objective), name


# What may name a task or a method: the two tables, its own files, and recipes, which choose one. "segmentation" is also
# a key of files of COCO.
OWN = {
    "classification": ("objectives/classification.py",),
    "translation": ("recipes/translation.py",),
    "segmentation": (
        "recipes/segmentation.py",
        "tasks/detection/run_files.py",
        "data/annotations/coco.py",
    ),
    "dino": ("objectives/dino.py", "recipes/dino.py"),
}
TABLES = ("recipes/methods.py", "tasks/table.py")


def compared_names(path: Path) -> set[str]:
    """Strings that a file compares with something, or looks up in something."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            for part in parts:
                inner = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else [part]
                found |= {
                    each.value for each in inner if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_tests_the_name_of_a_task_or_method(path: Path) -> None:
    own = str(path.relative_to(ROOT))
    if own in TABLES:
        return
    names = {*METHODS, *TASKS} - {"counting"}
    # Groups of a recipe and labels of a method's losses are called as methods are.
    names -= {"dino", "grafit", "triplet", "instance"}
    named = {name for name in compared_names(path) & names if own not in OWN.get(name, ())}
    assert not named


def test_a_training_does_each_thing_once(tmp_path: Path, monkeypatch, capsys) -> None:
    """The data is opened, split and measured once; recipe and network are made once; val is evaluated per epoch."""
    from patchloom.tasks import task_choice
    from patchloom.tasks.images import judges, networks, resolved_recipe
    from patchloom.tasks.images import plan as image_plan
    from tests.reliability.commands import OPTIONS, class_folders

    calls: dict[str, int] = {}

    def count(module: object, name: str) -> None:
        original = getattr(module, name)

        def counted(*values: object, **options: object) -> object:
            calls[name] = calls.get(name, 0) + 1
            return original(*values, **options)

        monkeypatch.setattr(module, name, counted)

    for module in (task_choice, image_plan):
        count(module, "find_source")
    for name in ("survey", "make_splits"):
        count(image_plan, name)
    for name in ("median_side", "resolve_recipe"):
        count(resolved_recipe, name)
    count(judges, "evaluate")
    built, create = [], networks.build_model

    def build(*names: str, **options: object) -> object:
        network = create(*names, **options)
        built.append(next(network.parameters()).device.type)
        return network

    monkeypatch.setattr(networks, "build_model", build)
    monkeypatch.setattr("patchloom.runs.weights.build_model", build)
    done = command(("train", class_folders(tmp_path / "data"), "--out", "run", *OPTIONS), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert built.count("cpu") == 1
    evaluations = calls.pop("evaluate")
    assert calls == dict.fromkeys(("find_source", "survey", "make_splits", "median_side", "resolve_recipe"), 1)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert evaluations == sum(json.loads(line)["kind"] == "evaluation" for line in lines)


def test_training_knows_no_task_by_name() -> None:
    text = "".join(path.read_text() for path in (ROOT / "training").rglob("*.py"))
    for name in TASKS:
        assert f'"{name}"' not in text
    assert training.make_plan  # where the table is asked


@pytest.mark.parametrize("recipe", ["small_images", pytest.param("dino_small_images", marks=pytest.mark.slow)])
def test_processes_evaluate_a_part_each_and_agree_with_one(recipe: str, tmp_path: Path) -> None:
    few = (
        "--set",
        "dino.outputs=16",
        "--set",
        "dino.hidden=16",
        "--set",
        "dino.bottleneck=8",
        "--set",
        "views.local=0",
    )
    line = ("train", "shapes:count=60,size=32", "--recipe", recipe, "--model", "resmlp_s12", "--epochs", "1")
    line += (*SMALL, *(few if recipe.startswith("dino") else ()))
    running = [forked(*line, "--out", tmp_path / "two", env=place) for place in rank_places(2)]
    running.append(forked(*line, "--out", tmp_path / "one"))
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, output + errors
    found = [make.evaluations(tmp_path / name) for name in ("one", "two")]
    assert [row[:2] for row in found[0]] == [row[:2] for row in found[1]]
    for (*_, one), (*_, two) in zip(*found, strict=True):
        assert one == pytest.approx(two, rel=1e-3)


def test_a_process_sees_its_part_of_val(monkeypatch: pytest.MonkeyPatch) -> None:
    from patchloom.engine.distribution import Processes
    from patchloom.tasks.images.judges import ClassJudge
    from patchloom.tasks.plan import TrainingSettings

    settings = TrainingSettings(data="shapes:count=60,size=32", recipe="small_images", size=16, batch=8, device="cpu")
    judge = ClassJudge(training.make_plan(settings, "cpu"), Processes("fp32", device="cpu"))
    whole = torch.cat([batch.index for batch in judge._batches("val")]).tolist()
    parts = []
    for rank in range(2):
        monkeypatch.setattr(judge, "_processes", SimpleNamespace(rank=rank, world=2, device=torch.device("cpu")))
        monkeypatch.setattr(judge, "_together", True)
        judge._loaders.clear()
        parts.append(torch.cat([batch.index for batch in judge._batches("val")]).tolist())
    assert len(parts[0]) < len(whole)
    assert sorted({*parts[0], *parts[1]}) == whole
