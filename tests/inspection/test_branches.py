"""Norms of residual branches compared with explicit sums."""

import pytest
import torch

from patchloom.layers.residual import Residual
from patchloom.models.network import absorb
from patchloom.report.pictures.branches import BranchNorm, branch_norm_chart, branch_norms, has_branches
from patchloom_runtime.errors import UsageError
from tests.networks import images, small


def ratio(added: torch.Tensor, x: torch.Tensor) -> float:
    ratios = [(a.square().sum().sqrt() / b.square().sum().sqrt()).item() for a, b in zip(added, x, strict=True)]
    return sum(ratios) / len(ratios)


def compare(result: list[BranchNorm], expected: list[tuple[int, str, float]]) -> None:
    assert [point[:2] for point in result] == [point[:2] for point in expected]
    assert [point.ratio for point in result] == pytest.approx([value for _, _, value in expected], rel=1e-4)


@torch.no_grad()
def test_blocks_against_the_difference_of_input_and_output():
    network = small("resmlp_s12").double()
    batch = images(network).double()
    x, expected = network.stem(batch).flatten(1, 2), []
    for layer, block in enumerate(network.blocks, 1):
        for name in ("tokens", "channels"):
            after = getattr(block, name)(x.clone())
            expected.append((layer, name, ratio(after - x, x)))
            x = after
    compare(branch_norms(network, batch), expected)


@torch.no_grad()
def test_class_layers_are_measured_on_the_class_token_only():
    network = small("cait_xxs24", depth=1, class_depth=1).double()
    batch = images(network).double()
    tokens = network.position(network.stem(batch).flatten(1, 2))
    (block,), (class_block,) = network.blocks, network.class_blocks
    mixed = block.tokens(tokens.clone())
    patches = block.channels(mixed.clone())
    summary = network.class_token(2)
    read = class_block.attend(summary.clone(), patches)
    after = class_block.channels(read.clone())
    compare(
        branch_norms(network, batch),
        [
            (1, "tokens", ratio(mixed - tokens, tokens)),
            (1, "channels", ratio(patches - mixed, mixed)),
            (1, "class tokens", ratio(read - summary, summary)),
            (1, "class channels", ratio(after - read, read)),
        ],
    )


@torch.no_grad()
def test_branches_side_by_side_read_the_same_x():
    network = small("deit3_h26x2", depth=1).double()
    batch = images(network).double()
    x = network.position(network.stem(batch).flatten(1, 2))
    x = torch.cat([network.class_tokens(2), x], dim=1)
    (block,) = network.blocks
    expected = []
    for name in ("tokens", "channels"):
        part = getattr(block, name)
        expected += [(1, name, ratio(branch.mix(branch.norm(x)) * branch.scale, x)) for branch in part]
        x = part(x.clone())
    compare(branch_norms(network, batch), expected)


@pytest.mark.parametrize(
    ("name", "branches"),
    [("smlpnet_t", {"tokens", "channels"}), ("mixer_b16", {"tokens", "channels"}), ("patchconvnet_s60", {"both"})],
)
def test_families_have_one_line_per_kind_of_branch(name, branches):
    network = small(name)
    result = branch_norms(network, images(network))
    assert {point.branch for point in result if not point.branch.startswith("class")} == branches
    expected = sum(1 for module in network.modules() if isinstance(module, Residual))
    assert len([point for point in result if point.branch != "class tokens"]) == expected
    chart = branch_norm_chart(network, images(network))
    assert chart.count("<circle") == len([point for point in result if not point.branch.startswith("class")])


def test_a_tiny_scale_is_measured_to_the_digit():
    """A small branch would be lost in out − x in float32."""
    network = small("resmlp_s12", depth=1)
    batch = images(network)
    before = branch_norms(network, batch)[0].ratio
    with torch.no_grad():
        network.blocks[0].tokens.scale *= 1e-9
    assert branch_norms(network, batch)[0].ratio == pytest.approx(1e-9 * before, rel=1e-4)


def test_the_inference_copy_has_the_same_ratios():
    network = small("cait_xxs24")
    batch = images(network)
    lean = [point.ratio for point in branch_norms(absorb(network), batch)]
    assert lean == pytest.approx([point.ratio for point in branch_norms(network, batch)], rel=1e-3)


def test_a_pyramid_step_is_no_residual_and_hooks_do_not_stay():
    network = small("mixer_b16", pyramid={0: 4})
    result = branch_norms(network, images(network))
    assert [point[:2] for point in result] == [(1, "channels"), (2, "tokens"), (2, "channels")]
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in network.modules())


def test_a_convnet_without_branches_says_so():
    network = small("resnet50_attention_pool")
    assert not has_branches(network)
    with pytest.raises(UsageError, match="PooledConvNet"):
        branch_norm_chart(network, images(network))
