"""Semantic segmentation: any network of patchloom under UperNet's head, or under one linear layer.

Letters: B images, K classes, C channels of the head, H×W pixels. Maps are (B, C, h, w), finest first.

    maps at strides 4, 8, 16, 32 ─ coarsest: pyramid pooling ─┐
                                 └ others: 1×1 ── + top-down ─┴─ 3×3 ── all at stride 4, joined ── 3×3 ── classes

(Xiao et al. 2018, in mmsegmentation's layout, which the papers used: thesis 4.3.6, 5.3.3 and 6.3.5.2. The parameters
of tables 5.3 and 6.12 are met.) Every convolution is followed by a norm and ReLU and has no bias. An auxiliary head
reads the map at stride 16 while training. The linear head is a probe: it shows what is in the features as they are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.models.dense.dense import DenseNetwork
from patchloom.models.dense.pyramid import STRIDES
from patchloom.models.registry import build_model

POOLED_SIDES = (1, 2, 3, 6)
LEARNED_FROM = 2  # the map that the auxiliary head reads: stride 16
Norm = Literal["batch", "group"]


@dataclass(frozen=True, kw_only=True)
class SegmentationConfig:
    """What a segmentation network is made from."""

    name: str  # of the backbone
    num_classes: int
    image_size: tuple[int, int]
    backbone: dict[str, Any]  # its options
    head: Literal["upernet", "linear"] = "upernet"
    channels: int = 512
    auxiliary_channels: int = 256  # 0: no auxiliary head
    norm: Norm = "batch"  # group: small batches, and any number of processes
    dropout: float = 0.1  # of whole maps, before the classes are told apart


class SegmentationNetwork(DenseNetwork):
    """Backbone, pyramid, head and, while training, the auxiliary head."""

    config: SegmentationConfig

    def __init__(self, config: SegmentationConfig) -> None:
        c = config
        backbone = build_model(c.name, **c.backbone)
        linear = c.head == "linear"
        # A network of one map would be read four times over.
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
            AuxiliaryHead(channels[LEARNED_FROM], c.auxiliary_channels, c.num_classes, c.norm, c.dropout)
            if c.auxiliary_channels and not linear
            else None
        )

    def forward(self, images: Tensor, *, auxiliary: bool = False) -> Any:
        """(B, 3, H, W), normalised → logits (B, K, H/4, W/4); with `auxiliary` also those of its head, or None."""
        maps = self.maps(images)
        logits = self.head(maps)
        if not auxiliary:
            return logits
        return logits, None if self.auxiliary is None else self.auxiliary(maps[LEARNED_FROM])


class ConvNormAct(nn.Sequential):
    """Convolution without bias, norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, size: int, norm: Norm) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False),
            nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(math.gcd(32, max(1, outputs // 8)), outputs),
            nn.ReLU(inplace=True),
        )


class UperHead(nn.Module):
    """Maps of any channels, finest first → logits at the finest."""

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
        """→ (B, K, h, w) of the first map."""
        *finer, last = maps
        seen = [lateral(each) for lateral, each in zip(self.laterals, finer, strict=True)]
        seen.append(self.bottleneck(torch.cat([last, *self._pooled(last)], dim=1)))
        for i in reversed(range(len(finer))):
            seen[i] = seen[i] + _resized(seen[i + 1], seen[i])
        seen[:-1] = [smooth(each) for smooth, each in zip(self.smoothing, seen[:-1], strict=True)]
        joined = torch.cat([seen[0], *(_resized(each, seen[0]) for each in seen[1:])], dim=1)
        return self.classifier(self.dropout(self.joining(joined)))

    def _pooled(self, last: Tensor) -> list[Tensor]:
        """What all of the coarsest map, its quarters, … show, at every place of it."""
        return [
            _resized(reduce(F.adaptive_avg_pool2d(last, side)), last)
            for side, reduce in zip(POOLED_SIDES, self.pooled, strict=True)
        ]


class AuxiliaryHead(nn.Module):
    """One map → logits at its places: it brings the loss nearer to the backbone, and is left out of answers."""

    def __init__(self, inputs: int, channels: int, classes: int, norm: Norm = "batch", dropout: float = 0.1) -> None:
        super().__init__()
        self.conv = ConvNormAct(inputs, channels, 3, norm)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = _classifier(channels, classes)

    def forward(self, features: Tensor) -> Tensor:
        """(B, C, h, w) → (B, K, h, w)."""
        return self.classifier(self.dropout(self.conv(features)))


class LinearHead(nn.Module):
    """All maps at stride 4, brought to one scale and joined, through one linear layer."""

    def __init__(self, inputs: Sequence[int], classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(sum(inputs))
        self.classifier = _classifier(sum(inputs), classes)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """→ (B, K, h, w) of the first map: between places of a map logits are blended, as features would be."""
        joined = torch.cat([maps[0], *(_resized(each, maps[0]) for each in maps[1:])], dim=1)
        return self.classifier(self.norm(joined))


def _classifier(inputs: int, classes: int) -> nn.Conv2d:
    classifier = nn.Conv2d(inputs, classes, 1)
    nn.init.normal_(classifier.weight, std=0.01)
    assert classifier.bias is not None
    nn.init.zeros_(classifier.bias)
    return classifier


def _resized(maps: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(maps, like.shape[2:], mode="bilinear", align_corners=False)
