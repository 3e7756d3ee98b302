"""`patchloom convert`: published files become runs, runs become published files; exact both ways."""

import json
import pickle
import shutil

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torchvision import models

import patchloom
from patchloom.models import registry
from patchloom.models.pretrained.conversion import TIMM, converted, network_of
from patchloom.models.pretrained.names import named_as, namings, renamed
from patchloom.runs.convert import file_to_run, run_to_file
from patchloom.runs.folders import write_published
from patchloom_runtime.errors import CheckpointError, UsageError
from tests.messages import refused
from tests.models.test_parity import STORED, built, state_of
from tests.networks import images, small

SMALL = ["resmlp_s12", "mixer_b16", "smlpnet_t", "deit_s", "deit_s_distilled", "deit3_s", "deit3_h26x2", "cait_xxs24",
         "patchconvnet_s60"]  # fmt: skip


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture
def tiny(monkeypatch):
    """Variants of a few thousand parameters, published as tiny as they are."""

    def make(name: str, **options):
        network = small(name, **options)
        variant = {key: value for key, value in vars(network.config).items() if key not in ("name", "num_classes")}
        monkeypatch.setitem(registry._family(name.split("_")[0])[1], name, variant)
        return network

    return make


# Names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_names_go_there_and_back_exactly(name) -> None:
    source = small(name)
    for publisher in namings(source):
        state, unknown = named_as(source, publisher)
        assert not unknown
        assert not {key for key in state if key.startswith(("classifier", "class_token", "stages"))}
        assert same(renamed(source, state), dict(source.state_dict()))


@pytest.mark.parametrize("stored", STORED)
def test_the_authors_own_tensors_come_back(stored, parity) -> None:
    tensors, config = parity(stored)
    theirs = state_of(tensors)
    network = patchloom.load_published(built(stored, config["args"]), theirs)
    state, unknown = named_as(network, "timm" if "timm" in stored else "authors")
    assert not unknown
    assert same(state, theirs)


def test_a_classifier_for_each_class_is_a_list_there() -> None:
    source = small("patchconvnet_s60", class_tokens="per_class")
    state, _ = named_as(source, "authors")
    assert state["head.4.weight"].shape == (1, 16)
    assert "head.weight" not in state
    assert same(renamed(source, state), dict(source.state_dict()))


@pytest.mark.slow
def test_timm_has_the_networks_of_the_table_under_the_same_names_and_shapes() -> None:
    for ours, theirs in TIMM.items():
        with torch.device("meta"):
            found = timm.create_model(theirs, num_classes=7)
            size = found.patch_embed.img_size if hasattr(found, "patch_embed") else found.stem.img_size
            network = patchloom.create_model(ours, num_classes=7, image_size=tuple(size))
            state, unknown = named_as(network, "timm")
        assert not unknown
        expected = {key: tensor.shape for key, tensor in found.state_dict().items()}
        assert {key: tensor.shape for key, tensor in state.items()} == expected


@pytest.mark.parametrize("name", ["deit_ti_distilled", "mixer_s32", "cait_xxs24", "resmlp_s12"])
def test_a_real_network_answers_alike_in_timm(name) -> None:
    options = _published(name) | ({"gelu": "exact"} if name.startswith("mixer") else {})
    source = small(name, num_classes=3, **(options | {"image_size": 32}))
    found = converted(source, "timm")
    theirs = eval(found.use, {"timm": timm}).eval()
    theirs.load_state_dict(found.state, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images(source)), source(images(source)), rtol=1e-4, atol=1e-4)


def _published(name: str) -> dict:
    options = registry.default_options(name)
    return {key: value for key, value in options.items() if key not in ("name", "num_classes", "image_size")}


# Files become runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
def test_a_file_becomes_a_run_and_the_run_the_file(suffix, tiny, tmp_path) -> None:
    source = tiny("mixer_b16", image_size=32)
    write_published(source, tmp_path / "run", origin="made")
    run_to_file(tmp_path / "run", "authors", tmp_path / f"flax{suffix}")
    made = file_to_run(tmp_path / f"flax{suffix}", "mixer_b16", tmp_path / "again")
    assert same(dict(made.network.state_dict()), dict(source.state_dict()))
    assert patchloom.load(tmp_path / "again", device="cpu").labels == ("0", "1", "2", "3", "4")


def test_size_and_classes_are_those_of_the_file(tiny, tmp_path) -> None:
    source = tiny("deit_s", image_size=32)
    larger = small("deit_s", image_size=64, num_classes=2)
    torch.save({"model": named_as(larger, "timm")[0]}, tmp_path / "deit.pth")
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    made = file_to_run(tmp_path / "deit.pth", "deit_s", tmp_path / "run", ["cat", "dog"])
    assert source.config.image_size == (32, 32)
    assert made.network.config.image_size == made.preprocessing.image_size == (64, 64)
    found = patchloom.load(tmp_path / "run", device="cpu")
    assert found.labels == ("cat", "dog")
    with torch.no_grad():
        torch.testing.assert_close(found.model(images(larger)), larger(images(larger)), rtol=0, atol=0)


def test_weights_without_a_classifier_become_an_embedding(tiny, tmp_path) -> None:
    source = tiny("resmlp_s12", num_classes=0)
    save_file(named_as(source, "timm")[0], tmp_path / "w.safetensors")
    file_to_run(tmp_path / "w.safetensors", "resmlp_s12", tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["task"] == "embedding"
    assert patchloom.load(tmp_path / "run", device="cpu").embed(np.zeros((32, 32, 3), np.uint8)).shape == (16,)


def test_a_token_for_each_class_is_seen_in_the_file(tiny) -> None:
    source = tiny("patchconvnet_s60", class_tokens="per_class")
    assert same(
        dict(network_of("patchconvnet_s60", named_as(source, "authors")[0]).state_dict()), dict(source.state_dict())
    )


def test_torchvisions_own_file_becomes_a_run(tmp_path) -> None:
    theirs = models.get_model("shufflenet_v2_x0_5", num_classes=3).eval()
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    made = file_to_run(tmp_path / "w.pth", "torchvision:shufflenet_v2_x0_5", tmp_path / "run", ["a", "b", "c"])
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(made.network(x), theirs(x), rtol=1e-4, atol=1e-4)
    run_to_file(tmp_path / "run", "torchvision", tmp_path / "back.safetensors")
    assert same(load_file(tmp_path / "back.safetensors"), dict(theirs.state_dict()))


# What cannot be ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_converted_is_told_and_nothing_is_written(tiny, tmp_path) -> None:
    source = tiny("resmlp_s12")
    file = tmp_path / "w.safetensors"
    save_file(named_as(source, "authors")[0], file)
    (tmp_path / "code.pth").write_bytes(pickle.dumps(shutil.rmtree))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())

    def tried(kind, facts, *args, **options) -> None:
        with refused(kind, *facts):
            file_to_run(*args, **options)

    out = tmp_path / "out"
    tried(CheckpointError, ["w.safetensors", "deit_s"], file, "deit_s", out)
    tried(CheckpointError, ["code.pth", "shutil"], tmp_path / "code.pth", "deit_s", out)
    tried(UsageError, [tmp_path / "there"], file, "resmlp_s12", tmp_path / "there")
    tried(UsageError, ["resmlp_12"], file, "resmlp_12", out)
    tried(UsageError, [5, 2], file, "resmlp_s12", out, ["a", "b"])
    tried(UsageError, ["'a'"], file, "resmlp_s12", out, ["a", "a", "b", "c", "d"])
    tried(UsageError, [file], file, "resmlp_s12", file / "under")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


POOLED = {"backbone": "test_resnet"}


@pytest.mark.parametrize(
    ("name", "options", "to", "facts"),
    [
        ("resmlp_s12", {"depth": 2}, "timm", ("timm", "resmlp_s12", "depth", 2, 12)),
        ("smlpnet_t", {}, "timm", ("timm", "smlpnet_t", "--to authors")),
        ("mixer_h14", {"depth": 1}, "timm", ("timm", "mixer_h14", "--to authors")),
        ("cait_xxs24", {"residual": "rezero"}, "authors", ("residual", "rezero", "layerscale")),
        ("deit3_h26x2", {"depth": 1}, "timm", ("timm", "deit3_h26x2", "--to authors")),
        ("resnet50_attention_pool", POOLED, "timm", ("timm", "test_resnet")),
        ("resnet50_attention_pool", POOLED, "authors", ("test_resnet", "--to timm")),
    ],
)
def test_networks_that_others_do_not_have(name, options, to, facts) -> None:
    with refused(UsageError, *facts), torch.device("meta"):
        converted(patchloom.create_model(name, **options), to)


def test_an_absorbed_network_and_a_projector_have_no_counterpart(tiny) -> None:
    with pytest.raises(UsageError):
        converted(patchloom.absorb(tiny("resmlp_s12")), "authors")
    with refused(UsageError, "projector", "mlp", "none"):
        converted(small("cait_xxs24", projector="mlp"), "authors")


def test_files_that_cannot_be_written_to(tiny, tmp_path) -> None:
    write_published(tiny("resmlp_s12"), tmp_path / "run", origin="made")
    for out, to, facts in (
        ("w.onnx", "authors", ("w.onnx", ".safetensors")),
        ("w.pth", "keras", ("--to", "timm", "authors", "torchvision", "keras")),
        ("run", "authors", ("run", ".safetensors")),
    ):
        with refused(UsageError, *facts):
            run_to_file(tmp_path / "run", to, tmp_path / out)
    (tmp_path / "w.pth").write_text("mine")
    with refused(UsageError, tmp_path / "w.pth"):
        run_to_file(tmp_path / "run", "authors", tmp_path / "w.pth")
    assert (tmp_path / "w.pth").read_text() == "mine"
