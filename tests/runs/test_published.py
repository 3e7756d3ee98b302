"""Published weights by name, NETWORK:TAG, in every verb; each family from its file to its outputs."""

import io
import json
import os
import pickle
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

import patchloom
from patchloom.models.pretrained import table as weights_table
from patchloom.models.pretrained.downloads import url_path
from patchloom.models.pretrained.table import Weights
from patchloom.runs import locate as named
from patchloom.runs.config import read_run_files
from patchloom.runs.folders import published_folder
from patchloom.runs.imagenet_names import imagenet_labels
from patchloom.runs.locate import find_run, run_folder
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import make_plan
from patchloom_runtime.errors import PatchloomError, UsageError
from tests.messages import missing, refused
from tests.models.test_parity import STORED, built, state_of
from tests.models.test_published import flax_names
from tests.reliability.commands import command
from tests.weights_server import SHOWN, Shelf, caches, in_hub_cache, published, served, tiny

NAME = "resmlp_s12:tiny"
TENCH, GOLDFISH = "n01440764", "n01443537"


def as_file(state) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.fixture
def online(tmp_path, monkeypatch):
    """A server that has the small network, and caches of its own."""
    caches(monkeypatch, tmp_path)
    row, network = tiny()
    features, _ = tiny("features", classes=0)
    published(monkeypatch, row, features)
    monkeypatch.chdir(tmp_path)
    files = {f"/weights.example/deit/resmlp_{tag}.pth": as_file(network.state_dict()) for tag in ("tiny", "features")}
    with served(Shelf(files)) as shelf:
        monkeypatch.setenv("PATCHLOOM_MIRROR", shelf.address)
        yield shelf


@pytest.fixture(scope="module")
def fish(tmp_path_factory) -> Path:
    """Two classes of ImageNet, named as its folders are; 6 pictures of each to train on, 2 to validate."""
    root = tmp_path_factory.mktemp("fish") / "data"
    chance = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for name, tint in ((TENCH, 60), (GOLDFISH, 180)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = (chance.integers(0, 60, (32, 32, 3)) + tint).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


# The folder ----------------------------------------------------------------------------------------------------------


def test_published_weights_become_the_folder_of_a_run(online, tmp_path) -> None:
    folder = run_folder(NAME)
    assert folder == tmp_path / "cache" / "patchloom" / "published" / NAME
    files = read_run_files(folder)
    assert (files.task, len(files.labels), len(set(files.labels))) == ("classification", 1000, 1000)
    assert files.labels[:2] == ("tench", "goldfish")
    assert (files.preprocessing.crop_ratio, files.preprocessing.image_size) == (0.9, (32, 32))
    card = (folder / "README.md").read_text()
    assert "Apache-2.0" in card
    assert "https://weights.example/deit/resmlp_tiny.pth" in card
    requests = len(online.requests)
    assert run_folder(NAME) == folder
    assert len(online.requests) == requests == 1
    classifier = patchloom.load(NAME, device="cpu")
    _, network = tiny()
    pictures = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(pictures), network(pictures), rtol=0, atol=0)


def test_a_folder_of_another_row_is_made_again(online, monkeypatch) -> None:
    folder = run_folder(NAME)
    monkeypatch.setattr(weights_table, "WEIGHTS", (replace(tiny()[0], crop_ratio=0.7),))
    assert read_run_files(run_folder(NAME)).preprocessing.crop_ratio == 0.7
    assert run_folder(NAME) == folder


def test_a_killed_maker_leaves_nothing_that_is_taken_for_whole(online) -> None:
    folder = published_folder(NAME)
    for unfinished in (folder, folder.with_name(f".{NAME}.0123456789abcdef.tmp")):
        unfinished.mkdir(parents=True)
        (unfinished / "config.json").write_text("{}")
    assert read_run_files(run_folder(NAME)).labels[0] == "tench"
    assert sorted(each.name for each in folder.parent.iterdir()) == [f".{NAME}.lock", NAME]


def test_of_two_at_once_one_makes_it(online, monkeypatch) -> None:
    makes, both_came = [], threading.Barrier(2, timeout=30)
    make = named._write_published_run
    monkeypatch.setattr(named, "_write_published_run", lambda *given: (makes.append(given), make(*given)))

    def come(_: int) -> Path:
        both_came.wait()
        return run_folder(NAME)

    with ThreadPoolExecutor(2) as pool:  # flock keeps two openings of a file apart, in one process too
        assert set(pool.map(come, range(2))) == {published_folder(NAME)}
    assert len(makes) == len(online.requests) == 1
    assert read_run_files(published_folder(NAME)).labels[0] == "tench"


class Attack:
    def __reduce__(self):
        return os.mkdir, ("escaped",)


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (lambda: pickle.dumps({"a": Attack()}), "mkdir"),
        (lambda: as_file(tiny()[1].state_dict())[:2000], "resmlp_tiny.pth"),
        (
            lambda: as_file({"cls_token": torch.zeros(1, 1, 8), "pos_embed": torch.zeros(1, 5, 8)}),
            "resmlp_s12",
        ),
        (lambda: b"<html>sign in</html>", "resmlp_tiny.pth"),
    ],
    ids=["code", "truncated", "another network", "a page"],
)
def test_a_file_that_is_not_the_network_is_one_line(online, tmp_path, monkeypatch, capsys, content, fact) -> None:
    online.files["/weights.example/deit/resmlp_tiny.pth"] = content()
    done = command(("predict", NAME, "x.png"), monkeypatch, capsys)
    assert done.code == 4
    (line,) = [line for line in done.errors.splitlines() if line.startswith("error: ")]
    assert missing(line, fact, url_path(tiny()[0].url)) == []
    assert not published_folder(NAME).exists()
    assert not (tmp_path / "escaped").exists()


def test_a_full_disk_leaves_no_folder(online, monkeypatch) -> None:
    import errno

    from patchloom.runs import folders as module
    from patchloom_runtime.errors import ResourceError

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as within:
        within.setattr(module, "save_weights", full)
        with pytest.raises(ResourceError):
            run_folder(NAME)
    assert [each.name for each in published_folder(NAME).parent.iterdir()] == [f".{NAME}.lock"]
    assert run_folder(NAME).is_dir()


# The verbs -----------------------------------------------------------------------------------------------------------


def test_predict_and_look(online, fish, tmp_path, monkeypatch, capsys) -> None:
    picture = str(next(fish.glob(f"val/{TENCH}/*.png")))
    done = command(("predict", NAME, picture, "--json", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    (found,) = json.loads(done.output)
    assert {name for name, _ in found["answers"]} <= set(imagenet_labels(1000)[0])
    assert "resmlp_s12:tiny" in done.errors
    done = command(("look", NAME, picture), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert (tmp_path / "look.html").is_file()


def test_evaluate_matches_classes_by_wordnet_id(online, fish, monkeypatch, capsys) -> None:
    done = command(("evaluate", NAME, fish, "--json", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert json.loads(done.output)["notes"]
    evaluation = patchloom.load(NAME, device="cpu").evaluate(fish)
    assert len(evaluation.report.index) == 4
    assert set(evaluation.report.labels.tolist()) == {0, 1}
    assert any(missing(note, 2, TENCH, "tench", GOLDFISH, "goldfish") == [] for note in evaluation.notes)


def test_data_of_other_classes_are_one_line(online, tmp_path, monkeypatch, capsys) -> None:
    for name in ("red", "blue"):
        (tmp_path / "colours" / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), name).save(tmp_path / "colours" / name / "0.png")
    done = command(("evaluate", NAME, "colours", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 3
    assert missing(done.errors, "blue", "red", 1) == []


def test_index_search_and_report(online, fish, tmp_path, monkeypatch, capsys) -> None:
    done = command(("index", NAME, fish / "val", "--out", "index", "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    picture = str(next(fish.glob(f"val/{TENCH}/*.png")))
    assert command(("search", "index", picture, "--device", "cpu"), monkeypatch, capsys).code == 0
    shutil.rmtree(published_folder(NAME))
    done = command(("search", "index", picture, "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 2
    assert missing(done.errors, NAME, "--model RUN") == []
    done = command(("search", "index", picture, "--model", NAME, "--device", "cpu"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    done = command(("report", NAME, "--data", fish, "--split", "val"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert (tmp_path / "report-val.html").is_file()
    assert not (published_folder(NAME) / "report-val.html").exists()


def test_features_without_a_classifier(online, fish, monkeypatch, capsys) -> None:
    name = "resmlp_s12:features"
    files = read_run_files(run_folder(name))
    assert (files.task, files.labels, files.options["num_classes"]) == ("embedding", (), 0)
    done = command(("probe", name, fish, "--knn", "1", "--device", "cpu", "--json"), monkeypatch, capsys)
    assert done.code == 0, done.errors
    done = command(("train", fish, "--teacher", name, *SHORT), monkeypatch, capsys)
    assert done.code == 2
    assert name in done.errors


SHORT = ("--device", "cpu", "--epochs", "1", "--batch", "4", "--workers", "0")


def test_training_from_them_and_with_them_as_teacher(online, fish, tmp_path, monkeypatch, capsys) -> None:
    done = command(("train", fish, "--init", NAME, "--teacher", NAME, "--out", "run", *SHORT), monkeypatch, capsys)
    assert done.code == 0, done.errors
    lines = done.output.splitlines()
    assert any(missing(line, NAME, 2, 16, 32) == [] for line in lines)
    assert any(missing(line, "model.image_size = 32", NAME) == [] for line in lines)
    record = read_run_metadata(tmp_path / "run")
    assert record is not None
    assert record.init == NAME
    assert f"--init {NAME}" in record.command(tmp_path / "run")
    assert patchloom.load("run", device="cpu").labels == (TENCH, GOLDFISH)
    assert len(online.requests) == 1
    before = (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns
    again = command(("train", fish, "--init", NAME, "--teacher", NAME, "--out", "run", *SHORT), monkeypatch, capsys)
    assert again.code == 0, again.errors
    assert (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns == before  # it had finished


def planned(data: Path, **given):
    return make_plan(TrainingSettings(data=str(data), device="cpu", workers=0, **given), "cpu")


def test_a_tag_alone_is_that_of_the_network(online, fish) -> None:
    for given in ({"model": "resmlp_s12"}, {"recipe": "resmlp"}, {}):
        plan = planned(fish, init="tiny", **given)
        assert plan.settings.init == NAME, given
        assert plan.recipe.model.name == "resmlp_s12"
        assert plan.record.init == NAME
    with refused(UsageError, "tiny", "deit_s:in1k", "deit_s:dino"):
        planned(fish, init="tiny", model="deit_s")
    with refused(UsageError, "--init tiny", "timm:resnet18"):
        planned(fish, init="tiny", model="timm:resnet18")
    with refused(UsageError, "tini", "resmlp_s12:tiny"):
        planned(fish, init="resmlp_s12:tini")


def test_the_classifier_of_imagenet_in_its_own_order_is_kept(online) -> None:
    files = read_run_files(run_folder(NAME))
    _, others = imagenet_labels(1000)
    ids = [each[0] for each in others]
    assert ids == sorted(ids)
    assert files.labels_as(ids) == tuple(ids)
    assert files.labels_as([TENCH])[:2] == (TENCH, "goldfish")
    assert files.labels_as(["Great_White_Shark", "white shark"])[2] in ("great white shark", "white shark")


@pytest.mark.parametrize("count", [1000, 21843, 11221])
def test_labels_are_names_and_distinct(count) -> None:
    labels, others = imagenet_labels(count)
    assert len(labels) == len(set(labels)) == len(others) == count
    assert all(label and label.strip() == label for label in labels)
    assert all(re.fullmatch(r"n\d{8}", each[0]) for each in others)
    if count == 1000:
        assert (labels[134], labels[517]) == ("crane bird", "crane")


def test_a_saved_copy_keeps_the_other_names(online, fish, tmp_path) -> None:
    patchloom.load(NAME, device="cpu").save_pretrained(tmp_path / "copy")
    assert len(patchloom.load(tmp_path / "copy", device="cpu").evaluate(fish).report.index) == 4


def test_a_folder_of_that_name_is_the_users(online, tmp_path) -> None:
    run_folder(NAME)
    shutil.copytree(published_folder(NAME), tmp_path / NAME)
    assert find_run(NAME) == Path(NAME)
    shutil.rmtree(tmp_path / NAME)
    (tmp_path / NAME).mkdir()
    assert find_run(NAME) is None


def test_is_here_asks_nobody(online) -> None:
    assert not named.is_downloaded(NAME)
    assert online.requests == []
    run_folder(NAME)
    assert named.is_downloaded(NAME)


# Every family, from the file to the outputs that the authors' code gave --------------------------------------------


def authors(stored: str, state: dict) -> bytes:
    """The container the authors' files have (facts of their loading code)."""
    if stored == "cait_official":
        return as_file({"model": {f"module.{key}": tensor for key, tensor in state.items()}})
    return as_file(state if stored.startswith(("resmlp", "patchconvnet")) else {"model": state})


def timms(stored: str, state: dict) -> dict | None:
    """The same under timm's names; None where timm has no such network."""
    if stored.startswith(("patchconvnet", "smlpnet")):
        return None
    if stored == "resmlp_official":
        rules = [("patch_embed.", "stem."), (".attn.", ".linear_tokens."), (".mlp.", ".mlp_channels.")]
        rules += [(".gamma_1", ".ls1"), (".gamma_2", ".ls2")]
    else:
        rules = [(".gamma_1", ".ls1.gamma"), (".gamma_2", ".ls2.gamma")] if stored == "deit3_official" else []
    out = {}
    for key, tensor in state.items():
        for old, new in rules:
            key = key.replace(old, new)
        out[key] = tensor.reshape(1, 1, -1) if key.endswith(("alpha", "beta")) else tensor
    return out


def row_of(network, **more) -> Weights:
    """A row for a network as it is."""
    config = network.config
    options = {key: value for key, value in vars(config).items() if key not in ("name", "num_classes", "image_size")}
    given = {"image_size": config.image_size[0], "classes": config.num_classes, "counted": 1, "options": options}
    return Weights(variant=config.name, tag="stored", **given, **more, **SHOWN)


@pytest.mark.parametrize("layout", ["authors", "timm"])
@pytest.mark.parametrize("stored", STORED)
def test_a_file_goes_the_whole_way_to_the_stored_outputs(stored, layout, parity, tmp_path, monkeypatch) -> None:
    tensors, config = parity(stored)
    network, state = built(stored, config["args"]), state_of(tensors)
    caches(monkeypatch, tmp_path)
    if layout == "authors":
        row = row_of(network, url="https://weights.example/deit/stored.pth")
        files = {"/weights.example/deit/stored.pth": authors(stored, state)}
    elif (theirs := timms(stored, state)) is None:
        pytest.skip("timm has no such network")
    else:
        row, files = row_of(network, hub="timm/stored"), {}
        in_hub_cache(tmp_path, "timm/stored", save({key: tensor.contiguous() for key, tensor in theirs.items()}))
    published(monkeypatch, row)
    with served(Shelf(files)) as shelf:
        monkeypatch.setenv("PATCHLOOM_MIRROR", shelf.address)
        classifier = patchloom.load(row.name, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(tensors["input"]), tensors["output"], rtol=0, atol=1e-5)


def test_googles_mixer_goes_the_whole_way(tmp_path, monkeypatch) -> None:
    from tests.networks import images, small

    network = small("mixer_b16")
    caches(monkeypatch, tmp_path)
    row = row_of(network, url="https://weights.example/imagenet1k/Mixer-B_16.npz")
    published(monkeypatch, row)
    buffer = io.BytesIO()
    np.savez(buffer, **flax_names(network))
    with served(Shelf({"/weights.example/imagenet1k/Mixer-B_16.npz": buffer.getvalue()})) as shelf:
        monkeypatch.setenv("PATCHLOOM_MIRROR", shelf.address)
        classifier = patchloom.load(row.name, device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(classifier.model(images(network)), network(images(network)), rtol=0, atol=0)


def test_weights_that_are_not_finite_are_refused(online) -> None:
    _, network = tiny()
    state = network.state_dict() | {"classifier.bias": torch.full((1000,), torch.nan)}
    online.files["/weights.example/deit/resmlp_tiny.pth"] = as_file(state)
    with refused(PatchloomError, "NaN"):
        run_folder(NAME)
    assert not published_folder(NAME).exists()
