"""`--init auto`: cached weights are used, others are offered, and nothing is downloaded without a yes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save

from patchloom.models.pretrained import table
from patchloom.models.pretrained.downloads import url_path
from patchloom.runs.cached_weights import cached_weights
from patchloom.runs.locate import run_folder
from patchloom.runs.provenance import read_provenance
from patchloom.tasks.images.automatic_start import cached_starts, offered_start
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import make_plan, run_training
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import command
from tests.weights_server import Shelf, caches, in_hub_cache, served, tiny

NAME = "resmlp_s12:tiny"
CPU = {"device": "cpu", "workers": 0}


def photos(root: Path, side: int = 64) -> Path:
    chance = np.random.default_rng(0)
    for name, tint in (("one", 20), ("other", 20)):
        (root / name).mkdir(parents=True)
        for i in range(8):
            pixels = (chance.integers(0, 60, (side, side, 3)) + tint).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server with one set of published weights; the caches are empty."""
    caches(monkeypatch, tmp_path)
    row, network = tiny()
    monkeypatch.setattr(table, "WEIGHTS", (row,))
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    with served(Shelf({"/weights.example/deit/resmlp_tiny.pth": file.getvalue()})) as shelf:
        monkeypatch.setenv("PATCHLOOM_MIRROR", shelf.address)
        yield shelf


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return photos(tmp_path / "photos")


def planned(data: Path, **options: Any) -> Any:
    return make_plan(TrainingSettings(data=str(data), **CPU | options), "cpu")


def test_without_weights_in_a_cache_a_run_starts_from_random_ones(shelf: Shelf, data: Path) -> None:
    plan = planned(data)
    assert plan.settings.init is None
    assert plan.offer == NAME
    assert plan.record.init == ""
    assert any(line.startswith("init") and "--init tiny" in line for line in plan.lines())
    assert shelf.requests == []
    assert planned(data, init="none").offer == planned(data, init=None).offer == ""


def test_weights_in_a_cache_are_used_wherever_they_fit(shelf: Shelf, data: Path, tmp_path: Path) -> None:
    run_folder(NAME)
    shelf.requests.clear()
    plan = planned(data)
    assert (plan.settings.init, plan.record.init, plan.recipe.model.image_size) == (NAME, NAME, 32)
    assert plan.record.automatic_init
    assert plan.offer == ""
    assert any("--init none" in line for line in plan.lines())
    assert planned(data, model="resmlp_s12").settings.init == NAME
    assert planned(data, size=48).settings.init == NAME  # resampled
    scratch: tuple[dict[str, Any], ...] = (
        {"init": "none"},
        {"init": None},
        {"model": "deit_ti"},
        {"recipe": "resmlp"},
        {"changes": {"model.options.depth": 2}},
        {"changes": {"model.drop_path": 0.1}},
    )
    for options in scratch:
        assert planned(data, **options).settings.init is None, options
    assert planned(photos(tmp_path / "icons", 32)).settings.init is None
    assert shelf.requests == []


def test_a_damaged_or_large_network_in_a_cache_is_not_used(
    shelf: Shelf, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = url_path(tiny()[0].url)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no weights")
    assert cached_weights() == [NAME]
    assert planned(data).settings.init is None
    path.unlink()
    run_folder(NAME)
    monkeypatch.setattr("patchloom.tasks.images.plan.MOST_MULTIPLY_ADDS", {"cpu": 1e3})
    assert planned(data).settings.init is None


def test_a_run_keeps_the_start_it_began_with(shelf: Shelf, data: Path) -> None:
    short = CPU | {"epochs": 1, "batch": 8}
    scratch = run_training(TrainingSettings(data=str(data), **short), say=str)
    run_folder(NAME)
    again = planned(data, epochs=1, batch=8)
    assert (again.folder, again.settings.init) == (scratch.folder, None)
    tuned = run_training(TrainingSettings(data=str(data), out="tuned", **short), say=str)
    assert read_provenance(tuned.folder).init == NAME
    assert json.loads((tuned.folder / "run.json").read_text())["init"] == NAME
    row = tiny()[0]
    url_path(row.url).unlink()
    assert planned(data, out="tuned", epochs=1, batch=8).settings.init == NAME
    with pytest.raises(UsageError, match=NAME):
        planned(data, out="tuned", epochs=1, batch=8, init="none")
    # Weights that the user named are not taken for granted.
    run_training(TrainingSettings(data=str(data), out="named", init=NAME, **short), say=str)
    with pytest.raises(UsageError, match=NAME):
        planned(data, out="named", epochs=1, batch=8)


@pytest.mark.parametrize("accepts", [True, False])
def test_the_download_is_a_question(shelf: Shelf, data: Path, accepts: bool) -> None:
    questions: list[str] = []

    def ask(question: str) -> bool:
        questions.append(question)
        return accepts

    settings = TrainingSettings(data=str(data), epochs=1, batch=8, out="run", **CPU)
    lines: list[str] = []
    run_training(settings, say=lines.append, ask=ask)
    (question,) = questions
    assert NAME in question
    assert tiny()[0].size in question
    assert read_provenance(Path("run")).init == (NAME if accepts else "")
    assert len(shelf.requests) == accepts
    assert any(line.startswith("tip") and "--init in1k" in line for line in lines) is not accepts
    run_training(settings, say=str, ask=ask)
    assert len(questions) == 1  # the second command resumes


def test_nobody_is_asked_without_a_terminal(
    shelf: Shelf, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question without a terminal"))
    done = command(("train", data, "--epochs", 1, "--batch", 8, "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert shelf.requests == []


def test_weights_of_other_libraries_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches(monkeypatch, tmp_path)
    assert cached_weights() == []
    in_hub_cache(tmp_path, "timm/test_resnet.r160_in1k", save(timm.create_model("test_resnet").state_dict()))
    files = url_path("https://download.pytorch.org/models/mobilenet_v2-7ebf99e0.pth")
    files.parent.mkdir(parents=True)
    files.write_bytes(b"")
    names = ["timm:test_resnet.r160_in1k", "torchvision:mobilenet_v2"]
    assert cached_weights() == names
    assert list(cached_starts(None, "cpu")) == names
    assert list(cached_starts("timm:test_resnet", "cpu")) == names[:1]
    assert list(cached_starts("resmlp_s12", "cpu")) == []
    in_hub_cache(tmp_path, "timm/resmlp_12_224.fb_in1k", b"weights")
    assert next(cached_starts(None, "cpu")) == "resmlp_s12:in1k"


def test_offers_are_of_the_network_and_not_made_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    caches(monkeypatch, tmp_path)
    assert offered_start(None, "cpu") == "resmlp_s12:in1k"
    assert offered_start(None, "cuda") == "resmlp_s24:in1k"
    assert offered_start("deit_s", "cpu") == "deit_s:in1k"
    assert offered_start("smlpnet_t", "cpu") == offered_start("timm:resnet18", "cpu") == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert offered_start(None, "cpu") == ""
