"""The authors' networks, reproduced through load_published from their own key names."""

import pytest
import torch

import patchloom
from patchloom.layers.attention import record_attention

# stored file → our network with the same sizes
STORED = {
    "resmlp_official": ("resmlp_s12", {"patch_size": 8}),
    "mixer_timm": ("mixer_b16", {"patch_size": 8, "token_dim": 24, "channel_dim": None, "gelu": "exact"}),
    "vit_deit_timm": ("deit_ti", {"patch_size": 8}),
    "deit_distilled_official": ("deit_ti_distilled", {"patch_size": 8}),
    "deit3_official": ("deit3_t", {"patch_size": 8}),
    "cait_official": ("cait_xxs24", {"patch_size": 8}),
    "patchconvnet_official": ("patchconvnet_s60", {}),
    "smlpnet_official": ("smlpnet_t", {"depths": (1, 2, 2, 1), "dim": 12}),
}


def built(stored: str, arguments: dict):
    name, options = STORED[stored]
    if "embed_dim" in arguments:
        options = options | {
            "dim": arguments["embed_dim"],
            "depth": arguments.get("depth", arguments.get("num_blocks")),
        }
    size = arguments.get("img_size", arguments.get("image_size"))
    return patchloom.create_model(name, num_classes=10, image_size=size, **options).eval()


def state_of(tensors: dict) -> dict:
    return {key.removeprefix("state."): tensor for key, tensor in tensors.items() if key.startswith("state.")}


@pytest.mark.parametrize("stored", STORED)
def test_same_outputs_as_the_authors(stored, parity) -> None:
    tensors, config = parity(stored)
    network = patchloom.load_published(built(stored, config["args"]), state_of(tensors))
    with torch.no_grad():
        torch.testing.assert_close(network(tensors["input"]), tensors["output"], rtol=0, atol=1e-5)
        exact = network.double()(tensors["input"].double())
    torch.testing.assert_close(exact, tensors["output_float64"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("stored", STORED)
def test_absorbed_copy_has_the_same_outputs(stored, parity) -> None:
    tensors, config = parity(stored)
    network = patchloom.load_published(built(stored, config["args"]), state_of(tensors))
    with torch.no_grad():
        output = patchloom.absorb(network)(tensors["input"])
    torch.testing.assert_close(output, tensors["output"], rtol=0, atol=1e-5)


def test_both_heads_of_the_distilled_network(parity) -> None:
    tensors, config = parity("deit_distilled_official")
    network = patchloom.load_published(built("deit_distilled_official", config["args"]), state_of(tensors))
    with torch.no_grad():
        of_class, of_teacher = network.both_heads(network.features(tensors["input"]))
    torch.testing.assert_close(of_class, tensors["output_class"], rtol=0, atol=1e-5)
    torch.testing.assert_close(of_teacher, tensors["output_dist"], rtol=0, atol=1e-5)


def test_softmax_fusion_is_the_papers(parity) -> None:
    tensors, _ = parity("deit_distilled_official")
    network = patchloom.create_model(
        "deit_ti_distilled", num_classes=10, image_size=32, patch_size=8, dim=48, depth=3, fusion="softmax"
    ).eval()
    patchloom.load_published(network, state_of(tensors))
    with torch.no_grad():
        fused = network(tensors["input"]).softmax(dim=-1)
    expected = (tensors["output_class"].softmax(-1) + tensors["output_dist"].softmax(-1)) / 2
    torch.testing.assert_close(fused, expected, rtol=0, atol=1e-5)


def test_features_and_tokens(parity) -> None:
    tensors, config = parity("vit_deit_timm")
    network = patchloom.load_published(built("vit_deit_timm", config["args"]), state_of(tensors))
    with torch.no_grad():
        features = network.features(tensors["input"])
    torch.testing.assert_close(features, tensors["features"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stored", ["vit_deit_timm", "cait_official", "patchconvnet_official"])
def test_recording_attention_changes_nothing(stored, parity) -> None:
    tensors, config = parity(stored)
    network = patchloom.load_published(built(stored, config["args"]), state_of(tensors))
    with torch.no_grad(), record_attention(network) as maps:
        output = network(tensors["input"])
    torch.testing.assert_close(output, tensors["output"], rtol=0, atol=1e-5)
    assert maps
    for weights in maps.values():
        assert len(weights) == 1
        assert weights[0].shape[0] == 2


def test_position_embeddings_resize_as_the_authors(parity) -> None:
    from patchloom.layers.patches import PositionEmbedding

    tensors, _ = parity("pos_embed_resize")
    old = PositionEmbedding((4, 4), 8, extra=2)
    with torch.no_grad():
        old.weight.copy_(tensors["pos_embed_2extra_4x4"])
    for side in (2, 3, 6, 7):
        new = PositionEmbedding((side, side), 8, extra=2)
        resized = new.resampled_from(old)["weight"].detach()
        torch.testing.assert_close(resized, tensors[f"resized_{side}x{side}"], rtol=0, atol=1e-5)
