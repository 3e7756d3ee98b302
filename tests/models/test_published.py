"""Reading checkpoints: timm's and Flax's names, wrappers, other heads and resolutions, and what does not fit."""

import argparse

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

import patchloom
from patchloom_runtime.errors import CheckpointError, UsageError
from tests.networks import assert_same, images, small

# timm's network at our size, ours with the same options
TIMM = {
    "resmlp_12_224": ("resmlp_s12", {}, {"depth": 12, "dim": 384, "patch_size": 16}),
    "mixer_s32_224": (
        "mixer_s32",
        {},
        {"depth": 8, "dim": 512, "patch_size": 32, "token_dim": 256, "channel_dim": 2048, "gelu": "exact"},
    ),
    "deit_tiny_patch16_224": (
        "deit_ti",
        {"depth": 2},
        {"depth": 2, "dim": 192, "heads": 3, "patch_size": 16},
    ),
    "deit_tiny_distilled_patch16_224": (
        "deit_ti_distilled",
        {"depth": 2},
        {"depth": 2, "dim": 192, "heads": 3, "patch_size": 16},
    ),
    "deit3_small_patch16_224": (
        "deit3_s",
        {"depth": 2},
        {"depth": 2, "dim": 384, "heads": 6, "patch_size": 16},
    ),
    "cait_xxs24_224": ("cait_xxs24", {"depth": 2}, {"depth": 2, "dim": 192, "heads": 4, "patch_size": 16}),
}


@pytest.mark.parametrize("name", TIMM)
def test_same_outputs_as_timm(name) -> None:
    ours, theirs_options, ours_options = TIMM[name]
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=7, img_size=64, **theirs_options).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # fresh networks of timm have zero heads and tiny scales
            parameter.add_(torch.randn_like(parameter) * 0.02)
    network = small(ours, **(ours_options | {"num_classes": 7, "image_size": 64}))
    patchloom.load_published(network, theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs(x)
        assert_same(network(x), expected)
    assert expected.abs().max() > 0.1


def flax_names(network) -> dict[str, np.ndarray]:
    """A Mixer's weights under the names and axes of the authors' Flax code."""
    own = {key: tensor.numpy() for key, tensor in network.state_dict().items()}
    out = {
        "stem/kernel": own["stem.weight"].transpose(2, 3, 1, 0),
        "stem/bias": own["stem.bias"],
        "pre_head_layer_norm/scale": own["norm.weight"],
        "pre_head_layer_norm/bias": own["norm.bias"],
        "head/kernel": own["classifier.weight"].T,
        "head/bias": own["classifier.bias"],
    }
    for i in range(network.config.depth):
        block, ours = f"MixerBlock_{i}", f"blocks.{i}"
        for k, part in enumerate(("tokens", "channels")):
            out[f"{block}/LayerNorm_{k}/scale"] = own[f"{ours}.{part}.norm.weight"]
            out[f"{block}/LayerNorm_{k}/bias"] = own[f"{ours}.{part}.norm.bias"]
        for k in (1, 2):
            out[f"{block}/token_mixing/Dense_{k - 1}/kernel"] = own[f"{ours}.tokens.mix.weight{k}"].T
            out[f"{block}/token_mixing/Dense_{k - 1}/bias"] = own[f"{ours}.tokens.mix.bias{k}"]
            out[f"{block}/channel_mixing/Dense_{k - 1}/kernel"] = own[f"{ours}.channels.mix.fc{k}.weight"].T
            out[f"{block}/channel_mixing/Dense_{k - 1}/bias"] = own[f"{ours}.channels.mix.fc{k}.bias"]
    return out


def test_flax_mixer(tmp_path) -> None:
    source = small("mixer_b16")
    path = tmp_path / "mixer.npz"
    np.savez(path, **flax_names(source))
    network = patchloom.load_published(small("mixer_b16", seed=1), path)
    x = images(source)
    with torch.no_grad():
        torch.testing.assert_close(network(x), source(x), rtol=0, atol=0)


def per_class_names(network) -> dict[str, torch.Tensor]:
    """The classifier of a network with one class token a class, as the authors' list of one-output layers."""
    state = {f"head.{k}.weight": network.classifier.weight[k : k + 1] for k in range(5)}
    return state | {f"head.{k}.bias": network.classifier.bias[k : k + 1] for k in range(5)}


def test_patchconvnet_with_a_head_for_each_class() -> None:
    source = small("patchconvnet_s60", class_tokens="per_class")
    state = {k: v for k, v in source.state_dict().items() if not k.startswith("classifier")}
    network = small("patchconvnet_s60", class_tokens="per_class", seed=1)
    patchloom.load_published(network, state | per_class_names(source))
    with torch.no_grad():
        torch.testing.assert_close(network(images(source)), source(images(source)), rtol=0, atol=0)


PARALLEL = {  # ours → the authors' second branch
    "tokens.0.norm": "norm1", "tokens.1.norm": "norm11", "tokens.0.mix": "attn", "tokens.1.mix": "attn1",
    "channels.0.norm": "norm2", "channels.1.norm": "norm21", "channels.0.mix": "mlp", "channels.1.mix": "mlp1",
    "tokens.0.scale": "gamma_1", "tokens.1.scale": "gamma_1_1",
    "channels.0.scale": "gamma_2", "channels.1.scale": "gamma_2_1",
}  # fmt: skip


def test_parallel_blocks_under_the_authors_names() -> None:
    source = small("deit3_h26x2")
    state = {}
    for key, tensor in source.state_dict().items():
        for ours, theirs in PARALLEL.items():
            key = key.replace(f".{ours}", f".{theirs}") if f".{ours}" in key else key
        simple = {"stem.": "patch_embed.proj.", "classifier.": "head.", "position.weight": "pos_embed"}
        for ours, theirs in simple.items():
            key = key.replace(ours, theirs)
        state["cls_token" if key == "class_tokens.weight" else key] = tensor
    assert "blocks.0.gamma_1_1" in state
    assert "blocks.1.attn1.qkv.weight" in state
    network = patchloom.load_published(small("deit3_h26x2", seed=1), {"model": state})
    with torch.no_grad():
        torch.testing.assert_close(network(images(source)), source(images(source)), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", ["bare", "model", "module", "training", "safetensors"])
def test_containers(wrap, tmp_path) -> None:
    source = small("resmlp_s12")
    state = source.state_dict()
    path = tmp_path / ("w.safetensors" if wrap == "safetensors" else "w.pth")
    match wrap:
        case "bare":
            torch.save(state, path)
        case "model":
            torch.save({"model": state}, path)
        case "module":
            torch.save({"model": {f"module.{k}": v for k, v in state.items()}}, path)
        case "training":
            torch.save({"model": state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, path)
        case "safetensors":
            save_file(state, path)
    network = patchloom.load_published(small("resmlp_s12", seed=1), path)
    with torch.no_grad():
        torch.testing.assert_close(network(images(source)), source(images(source)), rtol=0, atol=0)


def test_another_number_of_classes_on_request() -> None:
    source, network = small("deit_s_distilled"), small("deit_s_distilled", num_classes=3, seed=1)
    with pytest.raises(CheckpointError, match="new_head=True"):
        patchloom.load_published(network, source.state_dict())
    own = network.classifier.weight.clone()
    patchloom.load_published(network, source.state_dict(), new_head=True)
    assert torch.equal(network.classifier.weight, own)
    assert torch.equal(network.blocks[0].tokens.mix.qkv.weight, source.blocks[0].tokens.mix.qkv.weight)


def test_a_checkpoint_without_a_head_on_request() -> None:
    state = {k: v for k, v in small("deit_s").state_dict().items() if not k.startswith("classifier")}
    patchloom.load_published(small("deit_s", seed=1), state, new_head=True)


@pytest.mark.parametrize("name", ["resmlp_s12", "mixer_b16", "smlpnet_t", "deit_s", "deit3_s", "cait_xxs24"])
def test_another_resolution_on_request(name) -> None:
    source = small(name)
    size = tuple(2 * side for side in source.config.image_size)
    network = small(name, seed=1, image_size=size)
    with pytest.raises(CheckpointError, match="adapt_resolution=True"):
        patchloom.load_published(network, source.state_dict())
    patchloom.load_published(network, source.state_dict(), adapt_resolution=True)
    x = images(network)
    with torch.no_grad():
        torch.testing.assert_close(network(x), source.at_resolution(size)(x), rtol=0, atol=0)


def unchanged_by(network, action) -> None:
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    action()
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())


def test_a_checkpoint_that_does_not_fit_lists_its_keys() -> None:
    network, state = small("resmlp_s12"), small("resmlp_s12", seed=1).state_dict()
    del state["norm.weight"]
    state["extra.weight"] = torch.zeros(1)

    def load() -> None:
        with pytest.raises(CheckpointError) as caught:
            patchloom.load_published(network, state)
        message = str(caught.value)
        facts = ("resmlp_s12", "norm.weight", "extra.weight")
        assert [fact for fact in facts if fact not in message] == []
        assert "\n" not in message

    unchanged_by(network, load)


def test_a_checkpoint_of_another_network_is_recognized(parity) -> None:
    tensors, _ = parity("smlpnet_official")
    state = {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}
    with pytest.raises(CheckpointError, match="sMLPNet"):
        patchloom.load_published(small("resmlp_s12"), state)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
def test_a_truncated_file_is_one_line(suffix, tmp_path) -> None:
    network = small("mixer_b16")
    path = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(network.state_dict(), path)
    elif suffix == ".pth":
        torch.save(network.state_dict(), path)
    else:
        np.savez(path, **flax_names(network))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def load() -> None:
        with pytest.raises(CheckpointError) as caught:
            patchloom.load_published(network, path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    unchanged_by(network, load)


def test_a_pickle_that_would_run_code_is_refused(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    path = tmp_path / "evil.pth"
    torch.save({"model": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        patchloom.load_published(small("resmlp_s12"), path)


def test_a_file_that_holds_something_else(tmp_path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match=r"list\.pth"):
        patchloom.load_published(small("resmlp_s12"), tmp_path / "list.pth")


def test_a_wrong_path() -> None:
    with pytest.raises(UsageError, match=r"nowhere\.pth"):
        patchloom.load_published(small("resmlp_s12"), "nowhere.pth")
