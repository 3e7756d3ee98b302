"""Explanation maps of every family."""

from typing import Any

import pytest
import torch

from patchloom.report.pictures.attention import class_attention, class_evidence, vector_share
from patchloom.report.pictures.explanations import class_map, map_kind, strengths
from patchloom_runtime.errors import UsageError
from tests.networks import images, small

CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "ResMLP": ("resmlp_s12", {}, "evidence"),
    "ResMLP, class-MLP": ("resmlp_s12", {"pool": "class_mlp"}, "contribution"),
    "Mixer": ("mixer_b16", {}, "evidence"),
    "Mixer, fewer tokens": ("mixer_b16", {"pyramid": {0: 4}}, ""),
    "sMLPNet": ("smlpnet_t", {}, "evidence"),
    "DeiT": ("deit_s", {}, "contribution"),
    "DeiT, distilled": ("deit_s_distilled", {}, "contribution"),
    "DeiT III, parallel": ("deit3_h26x2", {}, "contribution"),
    "CaiT": ("cait_xxs24", {}, "contribution"),
    "CaiT, token among patches": ("cait_xxs24", {"insert_class_at": 1, "class_depth": 0}, "contribution"),
    "PatchConvNet": ("patchconvnet_s60", {}, "contribution"),
    "PatchConvNet, a token per class": ("patchconvnet_s60", {"class_tokens": "per_class"}, "attention"),
    "ResNet": ("resnet50_attention_pool", {}, "contribution"),
    "an MLP for a head": ("deit_s", {"head": "mlp"}, "contribution"),
    "no classes, average": ("resmlp_s12", {"num_classes": 0}, "share"),
    "no classes, token": ("deit_s", {"num_classes": 0}, "attention"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_family_has_the_map_it_allows(case: str) -> None:
    name, options, kind = CASES[case]
    network = small(name, **options)
    x = images(network)
    assert map_kind(network) == kind
    if not kind:
        with pytest.raises(UsageError, match=name):
            class_map(network, x, torch.tensor([0, 0]))
        return
    first, other = (class_map(network, x, torch.tensor(numbers)) for numbers in ([0, 1], [2, 1]))
    assert first.shape == other.shape
    assert first.ndim == 3
    assert torch.equal(first[1], other[1])
    assert torch.equal(first[0], other[0]) == (not network.config.num_classes)
    scaled = strengths(other, kind, first)
    assert scaled.max() <= 1
    assert scaled.min() >= (-1 if kind in ("evidence", "contribution") else 0)
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert strengths(torch.zeros(1, 2, 2), kind).abs().max() == 0


def test_maps_are_those_that_look_draws() -> None:
    network = small("resmlp_s12")
    x, classes = images(network), torch.tensor([3, 1])
    logits = class_evidence(network, x)
    relative = logits - logits.mean(dim=1, keepdim=True)
    assert torch.equal(class_map(network, x, classes), torch.stack([relative[0, 3], relative[1, 1]]))
    network = small("patchconvnet_s60", class_tokens="per_class")
    x = images(network)
    read = class_attention(network, x)[-1].weights.mean(dim=1)
    assert torch.equal(class_map(network, x, classes), torch.stack([read[0, 3], read[1, 1]]))
    network = small("resmlp_s12", num_classes=0)
    assert torch.equal(class_map(network, images(network), classes), vector_share(network, images(network)))


@pytest.mark.parametrize("name", ["resmlp_s12", "deit_s"])
def test_outputs_that_do_not_compete_are_compared_with_what_is_neutral(name: str) -> None:
    network, only = small(name, num_classes=1), torch.tensor([0])
    x, neutral = images(network, 1), torch.tensor([0.25])
    assert class_map(network, x, only).abs().max() < 1e-6  # relative to itself, which says nothing
    found = class_map(network, x, only, neutral)
    assert found.std() > 1e-4
    if map_kind(network) == "evidence":
        torch.testing.assert_close(found.mean(), network(x)[0, 0].detach() - 0.25)


def test_a_contribution_is_the_change_of_the_logit_without_the_patch() -> None:
    """Compare with finite differences in each patch's value, to first order."""
    network: Any = small("deit_s").double()
    x = images(network, 1).double()
    layer, share = network.blocks[-1].tokens.mix.qkv, 1e-4

    def logit(without: int | None) -> float:
        def weaken(_: object, __: object, out: torch.Tensor) -> torch.Tensor:
            if without is not None:
                out[:, 1 + without, -16:] *= 1 - share
            return out

        hook = layer.register_forward_hook(weaken)
        with torch.no_grad():
            logits = network(x)[0]
        hook.remove()
        return float(logits[2] - logits.mean())

    losses = torch.tensor([(logit(None) - logit(patch)) / share for patch in range(16)])
    result = class_map(network, x, torch.tensor([2])).flatten()
    torch.testing.assert_close(result, losses, rtol=1e-2, atol=1e-4)
