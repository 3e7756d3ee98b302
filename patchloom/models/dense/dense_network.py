"""Base of networks with an output per position (segmentation, detection): a backbone and a neck.

The backbone is any `Network` with maps; the neck makes a pyramid of them. Parts of the backbone that only a classifier
uses (last norm, pooling) stay in its weights and are not trained. A frozen backbone keeps its running statistics and
has no stochastic depth.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from patchloom.models.dense.pyramid import STRIDES, Level, PyramidNeck
from patchloom.models.network import Network, Size


class DenseNetwork(nn.Module):
    """A backbone and a neck. A subclass adds heads, which read `maps`.

    `levels` are stride and channels of each map: the requested strides, or without `neck` those of the backbone.
    """

    config: Any

    def __init__(self, backbone: Network, strides: Sequence[int] = STRIDES, *, neck: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.strides = tuple(strides)
        levels = backbone.pyramid_levels(strides)
        self.neck: nn.Module = PyramidNeck(levels, strides) if neck else nn.Identity()
        self.levels: list[Level] = self.neck.levels if isinstance(self.neck, PyramidNeck) else levels
        for name in backbone.after_blocks():
            getattr(backbone, name).requires_grad_(False)

    @property
    def frozen(self) -> bool:
        """Whether no parameter of the backbone is trained."""
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    def maps(self, images: Tensor) -> list[Tensor]:
        """Normalized images (B, channels, H, W) → one map (B, C, H/stride, W/stride) per stride."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            maps = self.backbone.pyramid(images, self.strides)
        return self.neck(maps)

    # The part of the contract of `Network` that training and inference use ------------------------------------------

    @property
    def pixel_mean(self) -> tuple[float, ...]:
        """Mean of each channel, for normalization."""
        return self.backbone.pixel_mean

    @property
    def pixel_std(self) -> tuple[float, ...]:
        """Standard deviation of each channel, for normalization."""
        return self.backbone.pixel_std

    @property
    def any_resolution(self) -> bool:
        """Whether images of any size are accepted."""
        return self.backbone.any_resolution

    def one_pass(self) -> nn.Module:
        """Return a module of which one call costs as much as one image does, for `models.cost`."""
        return self

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images for which the backbone was made."""
        return self.backbone.config.image_size

    @property
    def notes(self) -> tuple[str, ...]:
        """Options of the backbone that have no effect."""
        return self.backbone.notes

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the backward pass recomputes the activations of the backbone."""
        return self.backbone.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.backbone.gradient_checkpointing = value

    def classifiers(self) -> list[str]:
        """Return the attributes that are trained with a frozen backbone: everything else."""
        return [name for name, _ in self.named_children() if name != "backbone"]

    def train(self, mode: bool = True) -> Self:
        """Set training mode. A frozen backbone stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return two groups for an optimizer. Norms, biases, scales, tokens and positions have no weight decay."""
        groups = self.backbone.parameter_groups(weight_decay)
        for name in self.classifiers():
            for parameter in getattr(self, name).parameters():
                groups[0 if parameter.ndim > 1 else 1]["params"].append(parameter)
        return groups

    def rate_scales(self, decay: float) -> dict[nn.Parameter, float]:
        """Return the learning-rate factors of the backbone's parameters. Others have the full rate."""
        return self.backbone.rate_scales(decay)

    def at_resolution(self, size: Size) -> Self:
        """Return a network for another image size: the backbone is a resampled copy, the rest is shared."""
        new = copy.copy(self)
        new._modules = dict(self._modules)
        new.backbone = self.backbone.at_resolution(size)
        new.config = dataclasses.replace(self.config, image_size=new.image_size)
        return new

    def for_images_of(self, size: Size) -> Self:
        """Return this network if it accepts images of `size`, otherwise one at that resolution."""
        wanted = (size, size) if isinstance(size, int) else tuple(size)
        return self if self.any_resolution or wanted == self.image_size else self.at_resolution(size)
