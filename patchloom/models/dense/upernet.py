"""Semantic segmentation: any network as backbone, with the head of UperNet or a linear head.

Letters: B images, K classes, C channels of the head, H×W pixels. Maps are (B, C, h, w), finest first.

    maps at strides 4, 8, 16, 32 ─ coarsest: pyramid pooling ─┐
                                 └ others: 1×1 ── + top-down ─┴─ 3×3 ── all at stride 4, joined ── 3×3 ── classes

(Xiao et al. 2018, in mmsegmentation's layout, which the papers used: thesis 4.3.6, 5.3.3 and 6.3.5.2. Parameter counts
equal tables 5.3 and 6.12.) Every convolution has no bias and is followed by a norm and ReLU. In training, an auxiliary
head reads the map at stride 16. The linear head is a probe of the features.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.models.dense.dense_network import DenseNetwork
from patchloom.models.dense.pyramid import STRIDES
from patchloom.models.registry import build_model

POOLED_SIDES = (1, 2, 3, 6)
AUXILIARY_MAP = 2  # the input of the auxiliary head: stride 16
Norm = Literal["batch", "group"]


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig:
    """Options of a segmentation network."""

    name: str  # of the backbone
    num_classes: int
    image_size: tuple[int, int]
    backbone: dict[str, Any]  # its options
    head: Literal["upernet", "linear"] = "upernet"
    channels: int = 512
    auxiliary_channels: int = 256  # 0: no auxiliary head
    norm: Norm = "batch"  # group: for small batches
    dropout: float = 0.1  # of whole channels, before the classifier


class SegmentationNetwork(DenseNetwork):
    """Backbone, pyramid, head and auxiliary head."""

    config: SegmentationConfig

    def __init__(self, config: SegmentationConfig) -> None:
        c = config
        backbone = build_model(c.name, **c.backbone)
        linear = c.head == "linear"
        # A network with a single map would be read four times.
        strides = STRIDES if not linear or len(backbone.taps()) > 1 else STRIDES[-2:-1]
        super().__init__(backbone, strides, neck=not linear)
        self.config = c
        channels = [level.channels for level in self.levels]
        self.head: nn.Module = (
            LinearHead(channels, c.num_classes)
            if linear
            else UperHead(channels, c.channels, c.num_classes, c.norm, c.dropout)
        )
        self.auxiliary = (
            AuxiliaryHead(channels[AUXILIARY_MAP], c.auxiliary_channels, c.num_classes, c.norm, c.dropout)
            if c.auxiliary_channels and not linear
            else None
        )

    def forward(self, images: Tensor, *, auxiliary: bool = False) -> Any:
        """Normalized images (B, 3, H, W) → logits (B, K, H/4, W/4); with `auxiliary`, also the auxiliary logits."""
        maps = self.maps(images)
        logits = self.head(maps)
        if not auxiliary:
            return logits
        return logits, None if self.auxiliary is None else self.auxiliary(maps[AUXILIARY_MAP])


class ConvNormAct(nn.Sequential):
    """Convolution without bias, norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, size: int, norm: Norm) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False),
            nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(math.gcd(32, max(1, outputs // 8)), outputs),
            nn.ReLU(inplace=True),
        )


class UperHead(nn.Module):
    """UperNet's head: maps with any channels, finest first → logits at the resolution of the first."""

    def __init__(
        self, inputs: Sequence[int], channels: int, classes: int, norm: Norm = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        c = channels
        self.pooled = nn.ModuleList(ConvNormAct(inputs[-1], c, 1, norm) for _ in POOLED_SIDES)
        self.bottleneck = ConvNormAct(inputs[-1] + len(POOLED_SIDES) * c, c, 3, norm)
        self.laterals = nn.ModuleList(ConvNormAct(each, c, 1, norm) for each in inputs[:-1])
        self.smoothing = nn.ModuleList(ConvNormAct(c, c, 3, norm) for _ in inputs[:-1])
        self.joining = ConvNormAct(len(inputs) * c, c, 3, norm)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = _classifier(c, classes)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, Cᵢ, hᵢ, wᵢ) → logits (B, K, h₁, w₁)."""
        *finer, last = maps
        levels = [lateral(each) for lateral, each in zip(self.laterals, finer, strict=True)]  # (B, C, hᵢ, wᵢ)
        levels.append(self.bottleneck(torch.cat([last, *self._pool_pyramid(last)], dim=1)))
        for i in reversed(range(len(finer))):
            levels[i] = levels[i] + _resize(levels[i + 1], levels[i])
        levels[:-1] = [smooth(each) for smooth, each in zip(self.smoothing, levels[:-1], strict=True)]
        joined = torch.cat([levels[0], *(_resize(each, levels[0]) for each in levels[1:])], dim=1)  # (B, 4C, h₁, w₁)
        return self.classifier(self.dropout(self.joining(joined)))

    def _pool_pyramid(self, last: Tensor) -> list[Tensor]:
        """Average the coarsest map over grids of 1, 2, 3 and 6 cells per side, and resize to its size."""
        return [
            _resize(reduce(F.adaptive_avg_pool2d(last, side)), last)
            for side, reduce in zip(POOLED_SIDES, self.pooled, strict=True)
        ]


class AuxiliaryHead(nn.Module):
    """A head on one map, which brings the loss nearer to the backbone. Not used for inference."""

    def __init__(self, inputs: int, channels: int, classes: int, norm: Norm = "batch", dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormAct(inputs, channels, 3, norm)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = _classifier(channels, classes)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, h, w) → (B, K, h, w)."""
        return self.classifier(self.dropout(self.conv(features)))


class LinearHead(nn.Module):
    """All maps, normalized and concatenated at stride 4, through one linear layer."""

    def __init__(self, inputs: Sequence[int], classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(sum(inputs))
        self.classifier = _classifier(sum(inputs), classes)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Maps (B, Cᵢ, hᵢ, wᵢ) → logits (B, K, h₁, w₁). Coarser maps are interpolated bilinearly."""
        joined = torch.cat([maps[0], *(_resize(each, maps[0]) for each in maps[1:])], dim=1)
        return self.classifier(self.norm(joined))


def _classifier(inputs: int, classes: int) -> nn.Conv2d:
    classifier = nn.Conv2d(inputs, classes, 1)
    nn.init.normal_(classifier.weight, std=0.01)
    assert classifier.bias is not None
    nn.init.zeros_(classifier.bias)
    return classifier


def _resize(maps: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(maps, like.shape[2:], mode="bilinear", align_corners=False)
