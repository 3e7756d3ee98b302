"""timm's and torchvision's networks as networks of patchloom: each with its own pooling, or a convnet with attention
pooling in its place (thesis 5.3.4: ResNet-50, 4.1 → 4.6 G). What a trunk gives is found in `timm_trunk` and
`torchvision_trunk`."""

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from patchloom.layers.norms import make_norm
from patchloom.models.dense.pyramid import Kept, Level, Taps
from patchloom.models.network import Network
from patchloom.models.patchconvnet import AttentionPool, AttentionPoolConfig, AttentionPooled
from patchloom.models.timm_trunk import PYRAMID_SIDE, TimmTrunk, layers_of, levels_of, make_trunk, trunk_of
from patchloom.models.torchvision_trunk import (
    PREFIX,
    TorchvisionTrunk,
    torchvision_levels_of,
    torchvision_trunk_of,
)
from patchloom.models.vit import check_heads
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PooledConvNetConfig(AttentionPoolConfig):
    """Options of timm's networks; `pool` average is the network's own pooling, whatever it is."""

    backbone: str = "resnet50"  # any network of timm that gives features, or torchvision:NAME
    small_stem: bool = False  # a ResNet's for pictures of 32 pixels: 3×3 of stride 1, nothing pooled


class PooledConvNet(AttentionPooled):
    """timm's network up to its last features, its own pooling or attention pooling and LayerNorm, linear classifier."""

    Config = PooledConvNetConfig
    config: PooledConvNetConfig

    def __init__(self, config: PooledConvNetConfig) -> None:
        super().__init__(config)
        found = _found(config)
        if config.pool == "attention" and found.gives != "map":
            raise UsageError(
                f"attention pooling reads the last map of a convnet, which {_whose(config)} does not give; "
                "use its own pooling: --set model.options.pool=average"
            )
        self._gives, self._dim, self.any_resolution = found.gives, found.dim, found.any_size
        self._levels: dict[int, Level] | None = None  # found when first asked for, since it takes a while
        if config.drop_path and not found.drops_paths:
            self.notes = (f"{_whose(config)} has no stochastic depth: drop_path {config.drop_path:g} is not used",)
        self.trunk = _made(config, found)
        if config.pool == "attention":
            check_heads(self.feature_dim, config.pool_heads)
        self.attention_pool = AttentionPool(config, self.feature_dim) if config.pool == "attention" else None
        # With its own average it stays the convnet it is.
        self.norm = make_norm("layer", self.feature_dim) if self.attention_pool else nn.Identity()
        self.classifier = self.make_classifier(self.feature_dim)
        self.projector = self.make_projector()

    @property
    def feature_dim(self) -> int:
        """Channels of the last map, or of what the network's own head gives to a classifier."""
        return self._dim

    @property
    def averages_patches(self) -> bool:
        """Where timm's own head does nothing but average the last map."""
        return self._gives == "map" and self.config.pool == "average"

    @property
    def resamples(self) -> bool:
        """Only where no weight belongs to a position: timm's cannot be resampled with gradients."""
        return self.any_resolution

    def taps(self) -> Taps:
        """What timm counts as the trunk's intermediate features: stages of a convnet, blocks of a column."""
        if self._levels is None:
            self._levels = _levels(self.config)
        return self._levels

    def layers_in_order(self) -> list[list[nn.Parameter]]:
        """Stages of a convnet, blocks of a column."""
        return self.trunk.layers_in_order() if isinstance(self.trunk, TorchvisionTrunk) else layers_of(self.trunk)

    def run_blocks(self, images: Tensor, kept: Kept | None = None) -> Any:
        """What timm's network gives before its head, in timm's layout; with `kept` its intermediate features alone."""
        self.check_images(images)
        trunk: Any = self.trunk
        if kept is None:
            return self.run(trunk if self._gives == "map" else trunk.forward_features, images)
        wanted = sorted(kept)
        between = functools.partial(trunk.forward_intermediates, indices=wanted, intermediates_only=True)
        found: Any = self.run(between, images)
        kept.update({i: each.permute(0, 2, 3, 1) for i, each in zip(wanted, found, strict=True)})
        return found[-1]

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, T+N, C), class tokens first; maps with the network's own head (B, H, W, C)."""
        trunk: Any = self.trunk
        found = self.run_blocks(images)
        if self._gives == "map":
            positions = found.flatten(2).transpose(1, 2)  # (B, N, C)
            if self.attention_pool is not None:
                positions = self.attention_pool(positions)
            return self.norm(positions)
        if self._gives == "vector":
            return trunk.forward_head(found, pre_logits=True)[:, None]
        return found.permute(0, 2, 3, 1) if self._gives == "nchw" else found

    def pool(self, features: Tensor) -> Tensor:
        """What `features` gave → (B, C), by attention, an average, or timm's own head."""
        if self._gives == "map":
            return super().pool(features)
        if self._gives == "vector":
            return features[:, 0]
        trunk: Any = self.trunk
        given = features.permute(0, 3, 1, 2) if self._gives == "nchw" else features
        return trunk.forward_head(given, pre_logits=True)

    def forward_resampled(self, images: Tensor) -> Tensor:
        """As every network's, where the trunk takes any size."""
        size = (images.shape[2], images.shape[3])
        if not self.any_resolution and size != self.config.image_size:
            raise UsageError(
                f"{_whose(self.config)} was made for {self.config.image_size[0]}×{self.config.image_size[1]} "
                f"images and cannot be shown {size[0]}×{size[1]}; resize them"
            )
        return super().forward_resampled(images)

    def _weights_for(self, new: Network) -> dict[str, Tensor]:
        """As every network's; a trunk of a fixed size is resampled by timm, where timm can."""
        if self._gives == "map":
            return super()._weights_for(new)
        wanted = dict(new.named_parameters())
        source: Network = self
        if any(tensor.shape != wanted[name].shape for name, tensor in self.named_parameters()):
            source = self._resized(new.config.image_size)
        mine = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        for name, tensor in wanted.items():
            if mine[name].shape != tensor.shape:
                raise self._fixed(new.config.image_size, name)
        buffers = {  # tables of positions are computed anew
            name: mine[name] if name in mine and mine[name].shape == tensor.shape else tensor
            for name, tensor in new.named_buffers()
        }
        return {name: mine[name] for name in wanted} | buffers

    def _resized(self, size: tuple[int, int]) -> "PooledConvNet":
        copied = copy.deepcopy(self)
        resize: Any = getattr(copied.trunk, "set_input_size", None)
        if resize is None:
            raise self._fixed(size, "some weight")
        resize(img_size=size)
        return copied

    def _fixed(self, size: tuple[int, int], name: str) -> UsageError:
        height, width = self.config.image_size
        return UsageError(
            f"{_whose(self.config)} cannot go from {height}×{width} to {size[0]}×{size[1]} images: {name} has one "
            "value per position, and its library has no way to resample it; keep the size"
        )

    @torch.no_grad()
    def absorb_trunk_(self) -> None:
        """Fold the trunk's BatchNorms where it then gives the same: not every network runs them as they are listed."""
        weight = next(self.parameters())
        shape = (2, self.config.channels, *self.config.image_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight)
        whole, before = self.trunk, self.features(images)
        self.trunk = copy.deepcopy(whole)
        absorb_batch_norms_(self.trunk)
        after = self.features(images)
        if not torch.allclose(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max())):
            self.trunk = whole


def _whose(config: PooledConvNetConfig) -> str:
    """The network as messages call it."""
    library, _, name = config.backbone.rpartition(":")
    return f"{library or 'timm'}'s {name}"


def _found(config: PooledConvNetConfig) -> TimmTrunk:
    if config.backbone.startswith(PREFIX):
        return torchvision_trunk_of(config.backbone.removeprefix(PREFIX), config.image_size, config.channels)
    return trunk_of(config.backbone, config.image_size, config.channels, config.pool == "average")


def _made(config: PooledConvNetConfig, found: TimmTrunk) -> nn.Module:
    if config.backbone.startswith(PREFIX):
        if config.small_stem:
            raise UsageError(f"small_stem is an option of timm's ResNets, not of {_whose(config)}. Leave it out.")
        return TorchvisionTrunk(config.backbone.removeprefix(PREFIX), config.image_size, config.drop_path)
    trunk = make_trunk(config.backbone, found, channels=config.channels, drop_path=config.drop_path)
    if config.small_stem:
        _shrink_stem_(trunk, config.backbone)
    return trunk


def _levels(config: PooledConvNetConfig) -> dict[int, Level]:
    found = _found(config)
    size = (PYRAMID_SIDE, PYRAMID_SIDE) if found.any_size else config.image_size
    if config.backbone.startswith(PREFIX):
        return torchvision_levels_of(config.backbone.removeprefix(PREFIX), size)
    with torch.device("meta"):
        trunk = _made(config, found).eval()
    return levels_of(trunk, size, config.channels)


def _shrink_stem_(trunk: nn.Module, name: str) -> None:
    """Keep the size of the pictures, as SNCA and most work on CIFAR do: of 32 pixels the usual stem leaves 8."""
    stem, pool = getattr(trunk, "conv1", None), getattr(trunk, "maxpool", None)
    first = stem[0] if isinstance(stem, nn.Sequential) else stem  # of a deep stem's three
    if not (isinstance(first, nn.Conv2d) and isinstance(pool, nn.MaxPool2d)):
        raise UsageError(f"small_stem is a ResNet's; timm's {name} has another stem. Leave it out.")
    convolution = nn.Conv2d(first.in_channels, first.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")  # as timm's others
    trunk.set_submodule("conv1" if first is stem else "conv1.0", convolution)
    trunk.maxpool = nn.Identity()


@torch.no_grad()
def absorb_batch_norms_(trunk: nn.Module) -> None:
    """Fold each BatchNorm of a convnet into the convolution registered just before it in the same module."""
    for module in trunk.modules():
        children = list(module.named_children())
        for (conv_name, conv), (norm_name, norm) in itertools.pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None:
                setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(module, norm_name, getattr(norm, "act", nn.Identity()))


# Name → what differs from the defaults.
VARIANTS: dict[str, dict[str, Any]] = {"resnet50_attention_pool": {"backbone": "resnet50"}}
