import pytest
import timm
import torch

import patchloom
from patchloom_runtime.errors import UsageError


@pytest.mark.parametrize("backbone", ["resnet18", "test_resnet"])  # one convolution, and a deep stem's three
def test_a_small_stem_keeps_every_pixel(backbone) -> None:
    network = patchloom.create_model(
        "resnet50_attention_pool", backbone=backbone, pool="average", small_stem=True, image_size=32, num_classes=0
    )
    assert network.trunk(torch.randn(1, 3, 32, 32)).shape[2:] == (4, 4)
    assert network.trunk.conv1(torch.randn(1, 3, 32, 32)).shape[2:] == (32, 32)


def test_a_small_stem_costs_what_cifars_resnet_does() -> None:
    with torch.device("meta"):
        network = patchloom.create_model(
            "resnet50_attention_pool",
            backbone="resnet18",
            pool="average",
            small_stem=True,
            image_size=32,
            num_classes=10,
        )
    wide = timm.create_model("resnet18", num_classes=10)
    cost = patchloom.cost(network)
    assert cost.parameters == sum(p.numel() for p in wide.parameters()) - 64 * 3 * (49 - 9) == 11_173_962
    assert cost.multiply_adds == pytest.approx(0.5558e9, rel=0.005)  # 0.56 G, as CIFAR's ResNet-18 is known for


@pytest.mark.parametrize("backbone", ["test_convnext", "test_efficientnet"])
def test_another_networks_stem_is_left_alone(backbone) -> None:
    with pytest.raises(UsageError) as error:
        patchloom.create_model("resnet50_attention_pool", backbone=backbone, small_stem=True)
    assert "small_stem" in str(error.value)
    assert backbone in str(error.value)
