"""The maps that every network gives at the strides a task asks for, checked on all of them at a small size."""

import pytest
import torch

import patchloom
from patchloom.models.dense.pyramid import Level, choose_taps
from patchloom.models.network import Network
from patchloom.models.registry import family_of, list_models
from patchloom.models.timm_trunk import levels_of
from patchloom_runtime.errors import UsageError
from tests.networks import ONE_OF_EACH, assert_same, images, small

every_network = pytest.mark.parametrize("name", list_models())
every_family = pytest.mark.parametrize("name", ONE_OF_EACH.values(), ids=ONE_OF_EACH.keys())

STRIDES = {"SMLPNet": [4, 8, 16, 32], "PatchConvNet": [16] * 4, "PooledConvNet": [4, 8, 16, 32]}
# What only pooling and classifying read.
NOT_IN_MAPS = ("norm.", "classifier.", "distillation_classifier.", "class_token.", "class_blocks.", "attention_pool.")


def expected_shapes(network: Network, x: torch.Tensor, strides) -> list[tuple[int, ...]]:
    """From what the network announced."""
    sides = x.shape[2:]
    return [(len(x), c, *(-(-side // stride) for side in sides)) for stride, c in network.pyramid_levels(strides)]


@every_network
@torch.no_grad()
def test_maps_are_those_announced_and_the_last_is_what_features_are_made_of(name) -> None:
    network = small(name)
    for strides in ((4, 8, 16, 32), (16,), (8, 32)):
        x = images(network, 3)
        maps = network.pyramid(x, strides)
        assert [tuple(each.shape) for each in maps] == expected_shapes(network, x, strides)
        assert all(each.isfinite().all() for each in maps)
        if 32 in strides:
            features = network.features(x).flatten(1, -2)
            last = network.norm(maps[-1].permute(0, 2, 3, 1)).flatten(1, 2)
            assert torch.equal(last, features[:, -last.shape[1] :])
    levels = network.pyramid_levels()
    assert [level.stride for level in levels] == STRIDES.get(family_of(name).__name__, [8] * 4)
    assert levels[-1].channels == network.feature_dim


@pytest.mark.slow
@every_network
def test_published_sizes_announce_their_maps(name) -> None:
    """Without weights: depth and width are those of the papers."""
    with torch.device("meta"):
        network = patchloom.create_model(name)
        x = torch.zeros(1, 3, *network.config.image_size)
        shapes = [tuple(each.shape) for each in network.eval().pyramid(x)]
    assert shapes == expected_shapes(network, x, (4, 8, 16, 32))


@every_family
def test_gradients_reach_everything_the_maps_are_made_of(name) -> None:
    network = small(name).train()
    sum(each.square().mean() for each in network.pyramid(images(network, 5))).backward()
    silent = {key for key, p in network.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    unread = {key for key, _ in network.named_parameters() if key.startswith(NOT_IN_MAPS)}
    assert silent == unread


@every_family
def test_gradient_checkpointing_gives_the_same_maps_and_gradients(name) -> None:
    result = []
    for checkpointing in (False, True):
        network = small(name).train()
        network.gradient_checkpointing = checkpointing
        maps = network.pyramid(images(network))
        sum(each.square().mean() for each in maps).backward()
        result.append([*maps, *(p.grad for p in network.parameters() if p.grad is not None)])
    for plain, recomputed in zip(*result, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-6)


@every_family
@torch.no_grad()
def test_another_resolution_and_an_absorbed_copy_give_maps_too(name) -> None:
    network = small(name)
    height, width = network.config.image_size
    other = network.at_resolution((2 * height, width))
    x = images(other)
    assert [tuple(each.shape) for each in other.pyramid(x)] == expected_shapes(other, x, (4, 8, 16, 32))
    lean = patchloom.absorb(network)
    for actual, expected in zip(lean.pyramid(images(network)), network.pyramid(images(network)), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("name", ["patchconvnet_s60", "resnet50_attention_pool"])
@torch.no_grad()
def test_a_network_for_any_size_gives_maps_of_any_size(name) -> None:
    network = small(name)
    for size in ((96, 160), (70, 50)):
        x = torch.randn(1, 3, *size)
        maps = network.pyramid(x)
        assert [tuple(each.shape) for each in maps] == expected_shapes(network, x, (4, 8, 16, 32))


@pytest.mark.parametrize("name", ["deit_s_distilled", "resnet50_attention_pool"])  # seconds each
@torch.no_grad()
def test_a_pyramid_compiles_in_one_graph(name) -> None:
    network = small(name)
    x = images(network)
    torch._dynamo.reset()
    network.pyramid_levels()  # as whoever builds on the maps has asked
    compiled = torch.compile(network.pyramid, backend="aot_eager", fullgraph=True)(x)
    for actual, expected in zip(compiled, network.pyramid(x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [
    ("deit_s_distilled", {}),
    ("deit_ti", {"pool": "average"}),
    ("resmlp_s12", {"pool": "class_mlp"}),
    ("mixer_b16", {}),
    ("cait_xxs24", {}),
    ("cait_xxs24", {"insert_class_at": 4}),
])  # fmt: skip
@torch.no_grad()
def test_a_column_is_tapped_by_depth_at_its_patches(name, options) -> None:
    """Of 12 blocks those numbered 3, 5, 7 and 11 from 0; each map holds what the block left at each patch."""
    network = small(name, depth=12, **options)
    x, outputs = images(network), []
    hooks = [block.register_forward_hook(lambda _b, _i, out: outputs.append(out.clone())) for block in network.blocks]
    network.features(x)
    for hook in hooks:
        hook.remove()
    for actual, block in zip(network.pyramid(x), (3, 5, 7, 11), strict=True):
        tokens = outputs[block]
        first = tokens.shape[1] - 16
        for row in range(4):
            for column in range(4):
                assert torch.equal(actual[:, :, row, column], tokens[:, first + 4 * row + column])


@torch.no_grad()
def test_stages_of_a_pyramidal_network_are_its_maps() -> None:
    network = small("smlpnet_t")
    x, outputs = images(network), []
    for stage in network.stages:
        stage[-1].register_forward_hook(lambda _b, _i, out: outputs.append(out.clone()))
    for actual, expected in zip(network.pyramid(x), outputs, strict=True):
        assert torch.equal(actual, expected.permute(0, 3, 1, 2))
    assert network.pyramid_levels((2, 64)) == [Level(4, 8), Level(32, 64)]


def test_blocks_at_other_depths_and_for_other_numbers_of_maps() -> None:
    def numbers(depth: int, strides: tuple[int, ...]) -> list[int]:
        return choose_taps(dict.fromkeys(range(depth), Level(16, 1)), strides)

    assert numbers(24, (4, 8, 16, 32)) == [7, 11, 15, 23]
    assert numbers(8, (4, 8, 16, 32)) == [2, 3, 4, 7]
    assert numbers(1, (4, 8, 16, 32)) == [0, 0, 0, 0]
    assert numbers(12, (16,)) == [11]
    assert numbers(12, (8, 16)) == [7, 11]
    assert numbers(12, (2, 4, 8, 16, 32)) == [3, 3, 5, 7, 11]
    pyramid = {i: Level(stride, 1) for i, stride in enumerate((4, 8, 8, 32))}
    assert choose_taps(pyramid, (4, 8, 16, 32)) == [0, 1, 2, 3]  # 16 is as near to 8 as to 32: the finer
    assert choose_taps(pyramid, (8, 32)) == [2, 3]


@pytest.mark.parametrize("strides", [(), (8, 4), (4, 4), (0, 4), (4.0, 8), (True, 4)])
def test_strides_that_cannot_be(strides) -> None:
    with pytest.raises(UsageError) as error:
        small("resmlp_s12").pyramid_levels(strides)
    assert "strides" in str(error.value)
    assert repr(strides) in str(error.value)


def test_a_network_whose_tokens_lose_their_places_has_no_maps() -> None:
    network = small("mixer_b16", pyramid={0: 4})
    with pytest.raises(UsageError, match="mixer_b16"):
        network.pyramid(images(network))


@pytest.mark.parametrize(("backbone", "size", "levels"), [
    ("resnet18", 64, [(4, 64), (8, 128), (16, 256), (32, 512)]),
    ("convnext_atto", 64, [(4, 40), (8, 80), (16, 160), (32, 320)]),
    ("swin_tiny_patch4_window7_224", 224, [(4, 96), (8, 192), (16, 384), (32, 768)]),
    ("deit_tiny_patch16_224", 64, [(16, 192)] * 4),
])  # fmt: skip
def test_timms_networks_give_the_maps_they_announce(backbone, size, levels) -> None:
    with torch.device("meta"):
        network = patchloom.create_model(
            "resnet50_attention_pool", backbone=backbone, pool="average", image_size=size
        ).eval()
        x = torch.zeros(2, 3, size, size)
        maps = network.pyramid(x)
    assert network.pyramid_levels() == levels
    assert [tuple(each.shape) for each in maps] == expected_shapes(network, x, (4, 8, 16, 32))


def test_a_small_stem_gives_finer_maps_and_what_timm_cannot_tap_none() -> None:
    options = {"pool": "average", "image_size": 32, "num_classes": 5}
    small_stem = patchloom.create_model("resnet50_attention_pool", backbone="test_resnet", small_stem=True, **options)
    assert [level.stride for level in small_stem.pyramid_levels((1, 2, 4, 8))] == [1, 2, 4, 8]
    assert levels_of(torch.nn.Conv2d(3, 4, kernel_size=3, device="meta"), (32, 32), 3) == {}
