"""LoRA: the change of low rank, its merging, and runs that train with it or freeze the network at first."""

import numpy as np
import pytest
import torch

import patchloom
from patchloom.engine.optimization import freeze
from patchloom.layers.low_rank import LowRank, add_low_rank_, merge_low_rank
from patchloom.models.registry import build_model
from patchloom.runs.checkpoints import find_checkpoint, read_checkpoint
from patchloom.runs.weights import read_weights
from patchloom_runtime.errors import UsageError

SMALL = {"patch_size": 8, "dim": 16, "depth": 2}
FAMILIES = {"resmlp_s12": SMALL, "deit_ti": {**SMALL, "heads": 2}, "cait_xxs24": {**SMALL, "heads": 2}}


@pytest.fixture(params=FAMILIES)
def network(request):
    torch.manual_seed(0)
    return build_model(request.param, num_classes=3, image_size=32, **FAMILIES[request.param]).eval()


def changed_(network) -> None:
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, LowRank):
            torch.nn.init.normal_(module.up, std=0.1, generator=generator)


def test_it_starts_as_the_same_network(network) -> None:
    images = torch.randn(2, 3, 32, 32)
    before = network(images)
    add_low_rank_(network, 4)
    assert torch.equal(network(images), before)


def test_merged_weights_are_those_of_a_plain_network_with_the_same_outputs(network) -> None:
    name = network.config.name
    plain = build_model(name, num_classes=3, image_size=32, **FAMILIES[name])
    keys = set(plain.state_dict())
    add_low_rank_(network, 4)
    changed_(network)
    merged = merge_low_rank(network.state_dict())
    assert set(merged) == keys
    plain.load_state_dict(merged)
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(plain.eval()(images), network(images), rtol=1e-5, atol=1e-5)


def test_weights_without_low_rank_are_merged_to_themselves(network) -> None:
    weights = dict(network.state_dict())
    assert merge_low_rank(weights) == weights


def test_only_the_change_and_the_head_learn(network) -> None:
    total = sum(p.numel() for p in network.parameters())
    add_low_rank_(network, 2)
    learning = freeze(network, "lora")
    assert 0 < learning < total / 2
    names = {name for name, p in network.named_parameters() if p.requires_grad}
    assert all(name.endswith((".up", ".down")) or name.startswith("classifier") for name in names)


def test_a_network_without_such_layers_is_refused() -> None:
    convnet = build_model("resnet50_attention_pool", backbone="resnet18", pool="average", num_classes=2, image_size=32)
    with pytest.raises(UsageError, match="lora"):
        add_low_rank_(convnet, 4)


def run(folder, **options):
    changes = {f"model.options.{key}": value for key, value in SMALL.items()} | options.pop("set", {})
    return patchloom.train(
        "digits", model="resmlp_s12", size=32, batch=128, out=str(folder), device="cpu", workers=0, set=changes,
        **{"epochs": 2, **options},
    )  # fmt: skip


def test_a_run_with_lora_saves_plain_weights_and_resumes_exactly(tmp_path) -> None:
    run(tmp_path / "start", epochs=1, init="none")
    lora = {"init": str(tmp_path / "start"), "set": {"model.trainable": "lora", "model.lora_rank": 2}}
    whole = run(tmp_path / "whole", **lora)
    run(tmp_path / "cut", **lora, stop_after="0.05s")
    run(tmp_path / "cut", **lora)
    first, second = (find_checkpoint(tmp_path / name, read_checkpoint).snapshot for name in ("whole", "cut"))
    assert first.step == second.step
    assert any(name.endswith(".up") for name in first.tensors["weights"])
    assert all(torch.equal(each, second.tensors["weights"][name]) for name, each in first.tensors["weights"].items())
    saved = read_weights(tmp_path / "whole" / "weights.safetensors")
    assert saved.keys() == read_weights(tmp_path / "start" / "weights.safetensors").keys()
    assert len(whole.model.predict(np.zeros((32, 32, 3), np.uint8)))


def test_the_network_is_frozen_for_the_first_epochs(tmp_path) -> None:
    start = run(tmp_path / "start", epochs=1, init="none").folder
    frozen = run(tmp_path / "frozen", init=str(start), set={"model.frozen_epochs": 2, "model.fit_head": False})
    before, after = (read_weights(folder / "weights.safetensors") for folder in (start, frozen.folder))
    below = [name for name in before if not name.startswith("classifier")]
    assert all(torch.equal(before[name], after[name]) for name in below)
    thawed = run(tmp_path / "thawed", init=str(start), set={"model.frozen_epochs": 1, "model.fit_head": False})
    last = find_checkpoint(thawed.folder, read_checkpoint).snapshot.tensors["weights"]
    assert not any(torch.equal(before[name], last[name]) for name in below)


def test_frozen_epochs_need_a_classifier(tmp_path) -> None:
    with pytest.raises(UsageError, match="frozen_epochs"):
        run(tmp_path / "a", recipe="dino_small_images", set={"model.frozen_epochs": 1})
