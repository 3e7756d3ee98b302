"""Networks of timm and torchvision with the contract of `Network`.

Each has its own pooling, or, for convnets, attention pooling instead (thesis 5.3.4: ResNet-50, 4.1 → 4.6 G multiply-
adds). `timm_trunk` and `torchvision_trunk` determine the output of a trunk.
"""

import copy
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from patchloom.layers.norms import make_norm
from patchloom.models.dense.pyramid import BlockOutputs, Level, Taps
from patchloom.models.network import Network
from patchloom.models.patchconvnet import AttentionPool, AttentionPoolConfig, AttentionPooled
from patchloom.models.timm_trunk import PYRAMID_SIDE, TrunkLayout, layers_of, levels_of, make_trunk, trunk_layout
from patchloom.models.torchvision_trunk import (
    PREFIX,
    TorchvisionTrunk,
    torchvision_levels_of,
    torchvision_trunk_layout,
)
from patchloom.models.vit import check_heads
from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PooledConvNetConfig(AttentionPoolConfig):
    """Options of third-party networks. `pool` "average" is the network's own pooling, whatever it is."""

    backbone: str = "resnet50"  # any network of timm with features, or torchvision:NAME
    small_stem: bool = False  # of a ResNet, for images of 32 pixels: 3×3 with stride 1, no pooling


class PooledConvNet(AttentionPooled):
    """A third-party network up to its last features, its own or attention pooling, linear classifier."""

    Config = PooledConvNetConfig
    config: PooledConvNetConfig

    def __init__(self, config: PooledConvNetConfig) -> None:
        super().__init__(config)
        layout = _trunk_layout(config)
        if config.pool == "attention" and layout.gives != "map":
            raise UsageError(
                f"attention pooling needs the last map of a convnet, which {_owner(config)} does not return; "
                "use its own pooling: --set model.options.pool=average"
            )
        self._gives, self._dim, self.any_resolution = layout.gives, layout.dim, layout.any_size
        self._levels: dict[int, Level] | None = None  # computed on first use, since it takes a while
        if config.drop_path and not layout.drops_paths:
            self.notes = (f"{_owner(config)} has no stochastic depth: drop_path {config.drop_path:g} is not used",)
        self.trunk = _make_trunk(config, layout)
        if config.pool == "attention":
            check_heads(self.feature_dim, config.pool_heads)
        self.attention_pool = AttentionPool(config, self.feature_dim) if config.pool == "attention" else None
        # With its own pooling, the network is unchanged.
        self.norm = make_norm("layer", self.feature_dim) if self.attention_pool else nn.Identity()
        self.classifier = self.make_classifier(self.feature_dim)
        self.projector = self.make_projector()

    @property
    def feature_dim(self) -> int:
        """Channels of the last map, or of the input of the network's own classifier."""
        return self._dim

    @property
    def averages_patches(self) -> bool:
        return self._gives == "map" and self.config.pool == "average"

    @property
    def resamples(self) -> bool:
        """Whether no weight belongs to a position: timm's cannot be resampled with gradients."""
        return self.any_resolution

    def taps(self) -> Taps:
        """Return timm's intermediate features of the trunk: stages of a convnet, blocks of a column."""
        if self._levels is None:
            self._levels = _levels(self.config)
        return self._levels

    def layers_in_order(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage of a convnet, or each block of a column."""
        return self.trunk.layers_in_order() if isinstance(self.trunk, TorchvisionTrunk) else layers_of(self.trunk)

    def run_blocks(self, images: Tensor, outputs: BlockOutputs | None = None) -> Any:
        """Return the trunk's features in its own layout. With `outputs`, only intermediate features are computed."""
        self.check_images(images)
        trunk: Any = self.trunk
        if outputs is None:
            return self.run(trunk if self._gives == "map" else trunk.forward_features, images)
        indices = sorted(outputs)
        between = functools.partial(trunk.forward_intermediates, indices=indices, intermediates_only=True)
        maps: Any = self.run(between, images)
        outputs.update({i: each.permute(0, 2, 3, 1) for i, each in zip(indices, maps, strict=True)})
        return maps[-1]

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) → (B, T+N, C), class tokens first, or a map (B, H, W, C) for the network's own head."""
        trunk: Any = self.trunk
        trunk_features = self.run_blocks(images)
        if self._gives == "map":
            positions = trunk_features.flatten(2).transpose(1, 2)  # (B, N, C)
            if self.attention_pool is not None:
                positions = self.attention_pool(positions)
            return self.norm(positions)
        if self._gives == "vector":
            return trunk.forward_head(trunk_features, pre_logits=True)[:, None]
        return trunk_features.permute(0, 2, 3, 1) if self._gives == "nchw" else trunk_features

    def pool(self, features: Tensor) -> Tensor:
        """Features → (B, C), by attention, mean, or the network's own head."""
        if self._gives == "map":
            return super().pool(features)
        if self._gives == "vector":
            return features[:, 0]
        trunk: Any = self.trunk
        features = features.permute(0, 3, 1, 2) if self._gives == "nchw" else features
        return trunk.forward_head(features, pre_logits=True)

    def forward_resampled(self, images: Tensor) -> Tensor:
        """Run images of another size. Raise UsageError if the trunk has a fixed size."""
        size = (images.shape[2], images.shape[3])
        if not self.any_resolution and size != self.config.image_size:
            raise UsageError(
                f"{_owner(self.config)} was made for {self.config.image_size[0]}×{self.config.image_size[1]} "
                f"images and does not accept {size[0]}×{size[1]}; resize them"
            )
        return super().forward_resampled(images)

    def _weights_for(self, new: Network) -> dict[str, Tensor]:
        """Return the weights for `new`. A trunk of a fixed size is resampled by timm if it can."""
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
        buffers = {  # tables of positions are computed for the new size
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
            f"{_owner(self.config)} cannot go from {height}×{width} to {size[0]}×{size[1]} images: {name} has one "
            "value per position, and its library cannot resample it; keep the size"
        )

    @torch.no_grad()
    def absorb_(self) -> None:
        """Fold the trunk's BatchNorms if that keeps the outputs: some networks run modules in another order."""
        weight = next(self.parameters())
        shape = (2, self.config.channels, *self.config.image_size)
        images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(weight)
        original, before = self.trunk, self.features(images)
        self.trunk = copy.deepcopy(original)
        absorb_batch_norms_(self.trunk)
        after = self.features(images)
        if not torch.allclose(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max())):
            self.trunk = original


def _owner(config: PooledConvNetConfig) -> str:
    """Return the name of the network for messages, such as "timm's resnet50"."""
    library, _, name = config.backbone.rpartition(":")
    return f"{library or 'timm'}'s {name}"


def _trunk_layout(config: PooledConvNetConfig) -> TrunkLayout:
    if config.backbone.startswith(PREFIX):
        return torchvision_trunk_layout(config.backbone.removeprefix(PREFIX), config.image_size, config.channels)
    return trunk_layout(config.backbone, config.image_size, config.channels, config.pool == "average")


def _make_trunk(config: PooledConvNetConfig, layout: TrunkLayout) -> nn.Module:
    if config.backbone.startswith(PREFIX):
        if config.small_stem:
            raise UsageError(f"small_stem is an option of timm's ResNets, not of {_owner(config)}. Remove it.")
        return TorchvisionTrunk(config.backbone.removeprefix(PREFIX), config.image_size, config.drop_path)
    trunk = make_trunk(config.backbone, layout, channels=config.channels, drop_path=config.drop_path)
    if config.small_stem:
        _shrink_stem_(trunk, config.backbone)
    return trunk


def _levels(config: PooledConvNetConfig) -> dict[int, Level]:
    layout = _trunk_layout(config)
    size = (PYRAMID_SIDE, PYRAMID_SIDE) if layout.any_size else config.image_size
    if config.backbone.startswith(PREFIX):
        return torchvision_levels_of(config.backbone.removeprefix(PREFIX), size)
    with torch.device("meta"):
        trunk = _make_trunk(config, layout).eval()
    return levels_of(trunk, size, config.channels)


def _shrink_stem_(trunk: nn.Module, name: str) -> None:
    """Replace the stem by one that keeps the image size, as SNCA and most work on CIFAR: 32 pixels would become 8."""
    stem, pool = getattr(trunk, "conv1", None), getattr(trunk, "maxpool", None)
    first = stem[0] if isinstance(stem, nn.Sequential) else stem  # the first of a deep stem
    if not (isinstance(first, nn.Conv2d) and isinstance(pool, nn.MaxPool2d)):
        raise UsageError(f"small_stem is for ResNets; timm's {name} has another stem. Remove it.")
    convolution = nn.Conv2d(first.in_channels, first.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")  # as timm's other convolutions
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


# Name → options that differ from the defaults.
VARIANTS: dict[str, dict[str, Any]] = {"resnet50_attention_pool": {"backbone": "resnet50"}}
