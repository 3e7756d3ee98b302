"""UperNet: the papers' parameters, transformers' head, and the light head."""

from typing import Any

import pytest
import torch

from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork, UperHead
from patchloom.models.registry import default_options
from tests.networks import ONE_OF_EACH
from tests.networks import small as network_called

ADE20K = 150


def config(name: str, classes: int = ADE20K, size: int = 512, **more: Any) -> SegmentationConfig:
    options = {"num_classes": 0, "image_size": (size, size), **more.pop("backbone", {})}
    return SegmentationConfig(name=name, num_classes=classes, image_size=(size, size), backbone=options, **more)


# Thesis tables 6.12 (positions are stored for 512 pixels) and 5.3 (the classifier and its pooling are counted).
@pytest.mark.parametrize(
    ("name", "channels", "whole", "millions"),
    [
        ("deit3_t", 192, False, 10.9),
        ("deit3_s", 384, False, 41.7),
        ("deit3_b", 512, False, 127.7),
        ("deit3_l", 512, False, 353.6),
        ("patchconvnet_s60", 512, True, 57.1),
        ("patchconvnet_b60", 512, True, 140.6),
        ("patchconvnet_b120", 512, True, 229.8),
        ("patchconvnet_l120", 512, True, 383.7),
    ],
)
def test_parameters_are_those_of_the_papers(name: str, channels: int, whole: bool, millions: float) -> None:
    with torch.device("meta"):
        network = SegmentationNetwork(config(name, channels=channels, backbone={"num_classes": 1000 if whole else 0}))
    assert round(sum(parameter.numel() for parameter in network.parameters()) / 1e6, 1) == millions


def test_the_head_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference of UperNet's head, 124 MB, is not here")
    from transformers.models.upernet.modeling_upernet import UperNetHead

    inputs = [6, 10, 14, 18]
    settings = transformers.UperNetConfig(hidden_size=12, num_labels=5, pool_scales=[1, 2, 3, 6])
    theirs, ours = UperNetHead(settings, in_channels=inputs).eval(), UperHead(inputs, 12, 5).eval()
    for parameter in [*theirs.parameters(), *(b for b in theirs.buffers() if b.is_floating_point())]:
        torch.nn.init.uniform_(parameter, 0.1, 1.0)
    copy_weights(theirs, ours)
    maps = [torch.randn(2, c, 40 // 2**i, 28 // 2**i) for i, c in enumerate(inputs)]
    assert torch.equal(theirs(maps), ours(maps))


def copy_weights(theirs: Any, ours: UperHead) -> None:
    def conv(a: Any, b: Any) -> None:
        b[0].load_state_dict(a.conv.state_dict())
        b[1].load_state_dict(a.batch_norm.state_dict())

    for a, b in zip(theirs.psp_modules.blocks, ours.pooled, strict=True):
        conv(a.layers[1], b)
    conv(theirs.bottleneck, ours.bottleneck)
    for mine, other in ((ours.laterals, theirs.lateral_convs), (ours.smoothing, theirs.fpn_convs)):
        for a, b in zip(other, mine, strict=True):
            conv(a, b)
    conv(theirs.fpn_bottleneck, ours.joining)
    ours.classifier.load_state_dict(theirs.classifier.state_dict())


def made(name: str, **more: Any) -> SegmentationNetwork:
    small = network_called(name, num_classes=0)
    options = {key: getattr(small.config, key) for key in default_options(name) if key != "name"}
    size = small.config.image_size
    torch.manual_seed(0)
    return SegmentationNetwork(
        SegmentationConfig(name=name, num_classes=3, image_size=size, backbone=options, channels=8, **more)
    )


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
@pytest.mark.parametrize("head", ["upernet", "linear"])
def test_every_network_learns_under_both_heads(name: str, head: str) -> None:
    network = made(name, head=head, auxiliary_channels=4)
    height, width = network.image_size
    logits, auxiliary = network(torch.randn(2, 3, height, width), auxiliary=True)
    assert logits.shape[:2] == (2, 3)
    if head == "upernet":
        assert tuple(logits.shape[2:]) == (height // 4, width // 4)
        assert tuple(auxiliary.shape) == (2, 3, height // 16, width // 16)
    (logits.square().mean() + (0 if auxiliary is None else auxiliary.square().mean())).backward()
    learning = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in network.named_parameters() if parameter.grad is not None} == learning


def test_answers_leave_the_auxiliary_head_out() -> None:
    network = made("resmlp_s12", auxiliary_channels=4).eval()
    images = torch.randn(1, 3, *network.image_size)
    before = network(images)
    for parameter in network.auxiliary.parameters():
        torch.nn.init.normal_(parameter)
    assert torch.equal(network(images), before)


def test_group_norm_makes_images_independent_of_their_batch() -> None:
    network = made("resmlp_s12", norm="group", auxiliary_channels=0)
    network.head.dropout.p = 0.0
    images = torch.randn(3, 3, *network.image_size)
    neck = [module for module in network.neck.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert not neck  # patches of 8: one doubling needs no norm between
    alone = torch.cat([network(image[None]) for image in images])
    assert torch.allclose(network(images), alone, atol=1e-5)
