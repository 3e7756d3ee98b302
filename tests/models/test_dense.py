"""What networks under heads for every place share: the neck, what learns, another size, rates by depth."""

import pytest
import torch
from torch import nn

from patchloom.engine.optimization import freeze, make_optimizer, set_rates
from patchloom.models.dense.dense_network import DenseNetwork
from patchloom.models.dense.pyramid import Level, PyramidNeck
from patchloom.models.registry import build_model
from patchloom.recipes.parts import OptimPart, SchedulePart
from patchloom_runtime.errors import UsageError
from tests.networks import ONE_OF_EACH
from tests.networks import small as network_called


@pytest.mark.parametrize(
    ("patch", "layers"),
    [
        (16, [["ConvTranspose2d", "BatchNorm2d", "GELU", "ConvTranspose2d"], ["ConvTranspose2d"], [], "MaxPool2d"]),
        (8, [["ConvTranspose2d"], [], "MaxPool2d", "MaxPool2d"]),
        (14, [["ConvTranspose2d", "BatchNorm2d", "GELU", "ConvTranspose2d"], ["ConvTranspose2d"], [], "MaxPool2d"]),
        (4, [[], "MaxPool2d", "MaxPool2d", "MaxPool2d"]),
    ],
)
def test_the_neck_makes_strides_4_8_16_and_32_of_any_patch(patch: int, layers: list) -> None:
    side = 224
    neck = PyramidNeck([Level(patch, 6)] * 4)
    made = neck([torch.randn(2, 6, side // patch, side // patch)] * 4)
    assert [tuple(each.shape) for each in made] == [(2, 6, side // s, side // s) for s in (4, 8, 16, 32)]
    result = [[type(part).__name__ for part in each] if isinstance(each, nn.Sequential) else type(each).__name__
             for each in neck.layers]  # fmt: skip
    assert result == layers


def test_maps_that_have_their_strides_pass_the_neck_as_they_are() -> None:
    maps = [torch.randn(1, c, 64 // s, 64 // s) for s, c in ((4, 3), (8, 5), (16, 7), (32, 9))]
    neck = PyramidNeck([Level(s, c) for s, c in ((4, 3), (8, 5), (16, 7), (32, 9))])
    assert all(torch.equal(a, b) for a, b in zip(maps, neck(maps), strict=True))
    assert not list(neck.parameters())


class Probe(DenseNetwork):
    def __init__(self, backbone) -> None:
        super().__init__(backbone)
        self.head = nn.ModuleList(nn.Conv2d(level.channels, 2, 1) for level in self.levels)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return sum(head(each).mean() for head, each in zip(self.head, self.maps(images), strict=True))


def small(name: str, **more: object) -> nn.Module:
    return network_called(name, num_classes=0, **more).train()


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_gradients_reach_every_parameter_that_learns(name: str) -> None:
    network = Probe(small(name))
    size = network.image_size
    network(torch.randn(2, 3, *size)).backward()
    learns = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    reached = {name for name, parameter in network.named_parameters() if parameter.grad is not None}
    assert learns == reached


def test_a_frozen_backbone_keeps_its_statistics_and_its_gradients_are_none() -> None:
    network = Probe(small("smlpnet_t", drop_path=0.5))
    freeze(network, "head")
    network.train()
    assert network.frozen
    assert not network.backbone.training
    before = {name: tensor.clone() for name, tensor in network.backbone.state_dict().items()}
    network(torch.randn(2, 3, *network.image_size)).backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.backbone.state_dict().items())
    assert all(parameter.grad is None for parameter in network.backbone.parameters())
    assert all(parameter.grad is not None for parameter in network.head.parameters())


def test_at_another_size_the_backbone_is_resampled_and_the_rest_is_shared() -> None:
    network = Probe(small("resmlp_s12")).eval()
    network.config = network.backbone.config
    height, width = network.image_size
    larger = network.at_resolution((2 * height, width))
    assert larger.image_size == (2 * height, width)
    assert larger.head is network.head
    assert network.image_size == (height, width)
    maps = larger.maps(torch.randn(1, 3, 2 * height, width))
    assert maps[0].shape[2] == 2 * maps[0].shape[3]
    assert network.for_images_of((height, width)) is network


def test_rates_fall_towards_the_image_as_in_beit() -> None:
    network = Probe(small("resmlp_s12", depth=3))
    optimizer = make_optimizer(network, OptimPart(lr=1.0, batch_size=1, weight_decay=0.1, layer_decay=0.5))
    set_rates(optimizer, 1.0)
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    decays = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    backbone = network.backbone
    assert rates[backbone.stem.weight] == 0.5**4
    for i, block in enumerate(backbone.blocks):
        assert {rates[parameter] for parameter in block.parameters()} == {0.5 ** (3 - i)}
    assert {rates[parameter] for part in (network.head, network.neck) for parameter in part.parameters()} == {1.0}
    assert {decays[p] for p in network.parameters() if p.requires_grad and p.ndim == 1} == {0.0}
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    assert len(rates) == len(learning)


@pytest.mark.parametrize(
    ("name", "first", "last", "layers"),
    [
        ("mobilenetv2_100", "conv_stem.weight", "blocks.6.0.conv_pw.weight", 7),
        ("resnet18", "conv1.weight", "layer4.1.conv2.weight", 4),
        ("vit_tiny_patch16_224", "patch_embed.proj.weight", "blocks.11.mlp.fc1.weight", 12),
        ("torchvision:resnet18", "net.conv1.weight", "net.layer4.1.conv2.weight", 5),
        ("torchvision:mobilenet_v2", "net.features.0.0.weight", "net.features.17.conv.0.0.weight", 5),
        ("torchvision:vit_b_16", "net.class_token", "net.encoder.layers.encoder_layer_11.mlp.0.weight", 13),
        ("torchvision:swin_t", "net.features.0.0.weight", "net.features.7.1.mlp.0.weight", 4),
    ],
)
def test_rates_of_other_packages_fall_by_stages_and_blocks(name: str, first: str, last: str, layers: int) -> None:
    with torch.device("meta"):
        network = build_model("resnet50_attention_pool", backbone=name, pool="average", num_classes=3)
    scales, named = network.rate_scales(0.5), dict(network.trunk.named_parameters())
    assert len(network.layers_in_order()) == layers
    assert set(scales) == set(network.parameters())
    assert scales[named[last]] == 0.5
    assert scales[named[first]] in (0.5**layers, 0.5 ** (layers + 1))
    assert scales[named[first]] == min(scales.values())
    assert scales[network.classifier.weight] == 1
    assert set(scales.values()) >= {0.5**i for i in range(layers + 1)}


def test_rates_by_depth_of_a_network_without_layers_are_refused() -> None:
    with pytest.raises(UsageError) as error:
        make_optimizer(nn.Linear(2, 2), OptimPart(lr=1.0, batch_size=1, layer_decay=0.5))
    assert "optim.layer_decay" in str(error.value)
    assert "0.5" in str(error.value)
    assert "Linear" in str(error.value)


def test_the_poly_schedule_ends_at_nothing() -> None:
    from patchloom.engine.optimization import Schedule

    part = SchedulePart(epochs=2, warmup_steps=2, decay="poly", power=0.5)
    schedule = Schedule(OptimPart(lr=1.0, batch_size=1), part, 5)
    assert [schedule.lr(step) for step in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5**0.5, 0])
