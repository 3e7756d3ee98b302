"""Attention maps point where weights were built to point; rollout and evidence against slow references."""

import numpy as np
import pytest
import torch

from patchloom.layers.attention import ClassAttention, record_attention
from patchloom.report.pictures.attention import (
    attention_rollout,
    class_attention,
    class_evidence,
    has_evidence,
    has_share,
    vector_share,
)
from patchloom_runtime.errors import UsageError
from tests.networks import assert_same, images, small

SQUARE = (slice(8, 16), slice(16, 24))  # pixels of patch (1, 2) of 8×8 patches


def pointing(name: str, **options):
    """A network of 8×8 patches whose class tokens look for bright patches: every patch's token is its brightness.

    Keys read channel 0, which the stem fills with the mean of the patch; queries are constant. Residual branches add
    nothing, so that tokens stay as the stem made them until the attention that is looked at.
    """
    network = small(name, depth=1, **options)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.stem.weight[0] = 1.0
        network.stem.weight[1] = -1.0  # so that LayerNorm does not remove the brightness
        for key, parameter in network.named_parameters():
            if "norm" in key and key.endswith("weight"):
                parameter.fill_(1.0)
        for module in network.modules():
            if isinstance(module, ClassAttention):
                for head in range(module.heads):
                    width = module.q.weight.shape[0] // module.heads
                    module.q.bias[head * width] = 20.0
                    module.k.weight[head * width, 0] = 1.0
    return network


def bright_square() -> torch.Tensor:
    picture = torch.zeros(1, 3, 32, 32)
    picture[0, :, *SQUARE] = 1.0
    return picture


@pytest.mark.parametrize(("name", "options"), [
    ("cait_xxs24", {"insert_class_at": None}),
    ("cait_xxs24", {"class_in_keys": False}),
    ("patchconvnet_s60", {"stem": "linear", "patch_size": 8, "image_size": 32}),
    ("patchconvnet_s60", {"stem": "linear", "patch_size": 8, "image_size": 32, "class_tokens": "per_class"}),
])  # fmt: skip
def test_attention_built_for_a_bright_square_points_at_it(name, options):
    network = pointing(name, **options)
    for layer in class_attention(network, bright_square()):
        assert layer.weights.shape[-2:] == (4, 4)
        for head in layer.weights[0]:
            for token in head:
                assert np.unravel_index(int(token.argmax()), (4, 4)) == (1, 2)
                assert token[1, 2] > 0.9


def test_a_vit_built_to_look_at_a_square_rolls_out_to_it():
    network = pointing("deit_s_distilled")
    with torch.no_grad():
        mix = network.blocks[0].tokens.mix
        dim, width = 16, 8
        for head in range(2):
            mix.qkv.bias[head * width] = 20.0
            mix.qkv.weight[dim + head * width, 0] = 1.0
    (layer,) = class_attention(network, bright_square())
    assert layer.layer == "layer 1"
    assert layer.weights.shape == (1, 2, 2, 4, 4)  # two heads, class and distillation token
    assert torch.all(layer.weights[..., 1, 2] > 0.9)
    rolled = attention_rollout(network, bright_square())
    # Half of a token is its residual connection, the other half goes to the square.
    assert torch.all((rolled[0, :, 1, 2] > 0.45) & (rolled[0, :, 1, 2] <= 0.5))


@pytest.mark.parametrize(("name", "tokens"), [("deit_s_distilled", 2), ("deit3_h26x2", 1), ("deit_ti", 1)])
def test_rollout_is_the_product_written_out(name, tokens):
    network = small(name, depth=3)
    batch = images(network)
    with torch.no_grad(), record_attention(network) as maps:
        network(batch)
    layers = [calls[0].double() for calls in maps.values()]
    if name == "deit3_h26x2":
        layers = [(layers[i] + layers[i + 1]) / 2 for i in range(0, len(layers), 2)]
    assert len(layers) == 3
    expected = torch.zeros(2, tokens, 16, dtype=torch.float64)
    size = tokens + 16
    for image in range(2):
        rolled = [[float(i == j) for j in range(size)] for i in range(size)]
        for layer in layers:
            mean = layer[image].mean(dim=0)
            mixed = [[0.5 * mean[i, j].item() + 0.5 * (i == j) for j in range(size)] for i in range(size)]
            rolled = [[sum(mixed[i][k] * rolled[k][j] for k in range(size)) for j in range(size)] for i in range(size)]
            assert all(abs(sum(row) - 1) < 1e-5 for row in rolled)
        expected[image] = torch.tensor(rolled)[:tokens, tokens:]
    assert_same(attention_rollout(network, batch).flatten(2).double(), expected)


def test_rollout_of_averaged_patches_is_the_mean_of_all_rows():
    network = small("deit_ti", pool="average")
    assert not network.has_class_attention
    rolled = attention_rollout(network, images(network))
    assert rolled.shape == (2, 1, 4, 4)
    assert_same(rolled.sum(dim=(1, 2, 3)), torch.ones(2))  # no class token takes a share


def test_class_layers_are_those_recorded_without_the_class_token_itself():
    network = small("cait_xxs24")
    batch = images(network)
    with torch.no_grad(), record_attention(network) as maps:
        network(batch)
    for number, layer in enumerate(class_attention(network, batch)):
        recorded = maps[f"class_blocks.{number}.attend.mix"][0]  # (B, 2, 1, 17), the class token first
        assert torch.equal(layer.weights.flatten(3), recorded[..., 1:])


def test_layers_before_the_class_token_joins_have_no_class_attention():
    network = small("cait_xxs24", depth=3, insert_class_at=1)
    names = [layer.layer for layer in class_attention(network, images(network))]
    assert names == ["layer 2", "layer 3", "class layer 1", "class layer 2"]


@pytest.mark.parametrize("classes", [2, 5])
def test_a_token_a_class_gives_each_class_its_map(classes):
    network = small("patchconvnet_s60", class_tokens="per_class", num_classes=classes)
    (layer,) = class_attention(network, images(network))
    assert layer.layer == "pooling"
    assert layer.weights.shape == (2, 1, classes, 4, 4)


def test_a_pyramid_of_any_size_finds_its_grid():
    network = small("resnet50_attention_pool")
    (layer,) = class_attention(network, torch.randn(1, 3, 64, 96))
    assert layer.weights.shape[-2:] == (2, 3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resmlp_s12", {}),
        ("mixer_b16", {}),
        ("smlpnet_t", {}),
        ("deit_ti", {"pool": "average"}),
        ("patchconvnet_s60", {"pool": "average"}),
    ],
)
def test_the_mean_of_the_evidence_is_the_logits(name, options):
    network = small(name, **options)
    batch = images(network)
    evidence = class_evidence(network, batch)
    assert evidence.ndim == 4
    with torch.no_grad():
        assert_same(evidence.mean(dim=(2, 3)), network(batch), 1e-4)


def test_evidence_of_a_patch_is_at_its_place():
    """A ResMLP without branches: only the bright patch differs, so only its logit does."""
    network = pointing("resmlp_s12")
    with torch.no_grad():
        network.classifier.weight[3, 0] = 2.0
    evidence = class_evidence(network, bright_square())[0]
    assert np.unravel_index(int(evidence[3].argmax()), (4, 4)) == (1, 2)
    assert int((evidence != 0).sum()) == 1


@pytest.mark.parametrize("name", ["resmlp_s12", "mixer_b16", "smlpnet_t", "resnet50_attention_pool"])
def test_the_shares_of_the_patches_make_the_vector(name):
    network = small(name, num_classes=0, **({"pool": "average"} if name.startswith("resnet") else {}))
    batch = images(network)
    assert has_share(network)
    shares = vector_share(network, batch)
    with torch.no_grad():
        vectors, features = network(batch), network.features(batch).reshape(2, -1, network.feature_dim)
    for share, vector, patches in zip(shares, vectors.tolist(), features.tolist(), strict=True):
        length = sum(v * v for v in vector)
        slow = [sum(p * v for p, v in zip(patch, vector, strict=True)) / length for patch in patches]
        assert_same(share.flatten(), torch.tensor(slow), 1e-4)
        assert float(share.mean()) == pytest.approx(1.0, abs=1e-4)


def test_each_family_says_which_maps_it_has():
    with pytest.raises(UsageError) as error:
        class_attention(small("resmlp_s12"), torch.zeros(1, 3, 32, 32))
    assert "ResMLP" in str(error.value)
    assert "class_evidence" in str(error.value)
    with pytest.raises(UsageError) as error:
        class_evidence(small("cait_xxs24"), torch.zeros(1, 3, 32, 32))
    assert "CaiT" in str(error.value)
    assert "class_attention" in str(error.value)
    with pytest.raises(UsageError) as error:
        attention_rollout(small("cait_xxs24"), torch.zeros(1, 3, 32, 32))
    assert "rollout" in str(error.value)
    assert "CaiT" in str(error.value)
    assert not has_evidence(small("resmlp_s12", pool="class_mlp"))
    assert not has_evidence(small("mixer_b16", pyramid={0: 4}))  # its tokens lie nowhere
    assert not has_evidence(small("mixer_b16", num_classes=0))
    assert not has_share(small("mixer_b16"))
    with pytest.raises(UsageError, match="CaiT"):
        vector_share(small("cait_xxs24", num_classes=0), torch.zeros(1, 3, 32, 32))


def test_looking_leaves_the_network_as_it_was():
    network = small("deit_s_distilled").train()
    class_attention(network, images(network))
    assert all(module.training for module in network.modules())
    assert all(getattr(module, "recorded", None) is None for module in network.modules())
