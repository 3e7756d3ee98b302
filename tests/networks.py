"""Every registered network at a size that runs in milliseconds, with weights that hide nothing."""

from typing import Any

import torch

import patchloom
from patchloom.models.cait import CaiT
from patchloom.models.mixer import Mixer
from patchloom.models.network import Network
from patchloom.models.patchconvnet import PatchConvNet
from patchloom.models.pooled_convnet import PooledConvNet
from patchloom.models.registry import family_of
from patchloom.models.resmlp import ResMLP
from patchloom.models.smlpnet import SMLPNet
from patchloom.models.vit import ViT

SMALL: dict[type[Network], dict[str, Any]] = {
    ResMLP: {"depth": 2, "dim": 16, "patch_size": 8, "image_size": 32},
    Mixer: {"depth": 2, "dim": 16, "patch_size": 8, "token_dim": 8, "channel_dim": 24, "image_size": 32},
    SMLPNet: {"depths": (1, 2, 1, 1), "dim": 8, "image_size": 64},
    ViT: {"depth": 2, "dim": 16, "heads": 2, "patch_size": 8, "image_size": 32},
    CaiT: {"depth": 2, "dim": 16, "heads": 2, "patch_size": 8, "image_size": 32},
    PatchConvNet: {"depth": 2, "dim": 16, "image_size": 64},
    PooledConvNet: {"backbone": "test_resnet", "image_size": 64},
}

ONE_OF_EACH = {
    "ResMLP": "resmlp_s12",
    "Mixer": "mixer_b16",
    "SMLPNet": "smlpnet_t",
    "ViT": "deit_s_distilled",
    "DeiT III": "deit3_h26x2",
    "CaiT": "cait_xxs24",
    "PatchConvNet": "patchconvnet_s60",
    "PooledConvNet": "resnet50_attention_pool",
}


def small(name: str, *, seed: int = 0, **options: Any) -> Network:
    """The network called `name`, small, in eval mode, with random weights, scales and statistics everywhere.

    Fresh networks start with zero heads and tiny scales, which would make most comparisons true by themselves.
    """
    torch.manual_seed(seed)
    network = patchloom.create_model(name, **({"num_classes": 5} | SMALL[family_of(name)] | options)).eval()
    with torch.no_grad():
        for key, tensor in network.state_dict().items():
            if key.endswith("running_var"):
                tensor.uniform_(0.5, 2.0)
            elif tensor.is_floating_point():
                spread = 0.3 if tensor.ndim <= 1 else 1.5 * tensor[0].numel() ** -0.5
                tensor.copy_(torch.randn_like(tensor) * spread + (1.0 if "norm" in key and "weight" in key else 0.0))
    return network


def images(network: Network, batch: int = 2, seed: int = 1) -> torch.Tensor:
    """Random pictures of the network's size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, network.config.channels, *network.config.image_size, generator=generator)


def assert_same(given: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal to `tolerance` of the largest value (at least 1): what float32 can promise of large numbers too."""
    assert given.shape == expected.shape
    scale = max(1.0, expected.abs().max().item())
    assert (given - expected).abs().max().item() <= tolerance * scale
