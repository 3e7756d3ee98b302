"""A network of patchloom under heads that answer at every place of the image: what such networks share.

The backbone is any `Network` with maps; the neck makes a pyramid of them. What of the backbone only a classifier would
read (its last norm, its pooling) stays in its weights and learns nothing. A frozen backbone keeps its statistics and
drops no branches.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from patchloom.models.dense.pyramid import STRIDES, Level
from patchloom.models.dense.pyramid_neck import PyramidNeck
from patchloom.models.network import Network, Size


class DenseNetwork(nn.Module):
    """A backbone and the neck on it; a task adds its heads and calls `maps`.

    `levels` are stride and channels of each map; without `neck` those that the backbone has.
    """

    config: Any

    def __init__(self, backbone: Network, strides: Sequence[int] = STRIDES, *, neck: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.strides = tuple(strides)
        given = backbone.pyramid_levels(strides)
        self.neck: nn.Module = PyramidNeck(given, strides) if neck else nn.Identity()
        self.levels: list[Level] = self.neck.levels if isinstance(self.neck, PyramidNeck) else given
        for name in backbone.after_blocks():
            getattr(backbone, name).requires_grad_(False)

    @property
    def frozen(self) -> bool:
        """Whether nothing of the backbone learns."""
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    def maps(self, images: Tensor) -> list[Tensor]:
        """(B, channels, H, W), normalised → one map (B, C, H/stride, W/stride) per stride."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            found = self.backbone.pyramid(images, self.strides)
        return self.neck(found)

    # What the rest of the code asks of a network ----------------------------------------------------------------

    @property
    def pixel_mean(self) -> tuple[float, ...]:
        """How images are normalised."""
        return self.backbone.pixel_mean

    @property
    def pixel_std(self) -> tuple[float, ...]:
        """How images are normalised."""
        return self.backbone.pixel_std

    @property
    def any_resolution(self) -> bool:
        """Whether images of any size are taken as they are."""
        return self.backbone.any_resolution

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that the backbone was made for."""
        return self.backbone.config.image_size

    @property
    def notes(self) -> tuple[str, ...]:
        """What was asked of the backbone and could not be had."""
        return self.backbone.notes

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether the backbone's activations are recomputed in the backward pass."""
        return self.backbone.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.backbone.gradient_checkpointing = value

    def classifiers(self) -> list[str]:
        """Attributes that learn where the backbone is frozen: everything on it."""
        return [name for name, _ in self.named_children() if name != "backbone"]

    def train(self, mode: bool = True) -> Self:
        """As torch's; a frozen backbone stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Two groups for an optimiser: no decay on norms, biases, scales, tokens and positions."""
        groups = self.backbone.parameter_groups(weight_decay)
        for name in self.classifiers():
            for parameter in getattr(self, name).parameters():
                groups[0 if parameter.ndim > 1 else 1]["params"].append(parameter)
        return groups

    def rate_scales(self, decay: float) -> dict[nn.Parameter, float]:
        """Parameter of the backbone → what its learning rate is multiplied by; those on it learn at the full rate."""
        return self.backbone.rate_scales(decay)

    def at_resolution(self, size: Size) -> Self:
        """The same network for images of another size: the backbone resampled, all else shared with this one."""
        new = copy.copy(self)
        new._modules = dict(self._modules)
        new.backbone = self.backbone.at_resolution(size)
        new.config = dataclasses.replace(self.config, image_size=new.image_size)
        return new

    def for_images_of(self, size: Size) -> Self:
        """This network where it takes images of `size` as it is, otherwise one at that resolution."""
        wanted = (size, size) if isinstance(size, int) else tuple(size)
        return self if self.any_resolution or wanted == self.image_size else self.at_resolution(size)
