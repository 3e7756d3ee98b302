"""Mixing of neighbors by 3×3 convolutions: ResMLP's and sMLPNet's local layers, PatchConvNet's trunk.

Maps are (B, H, W, C) with channels last in memory, so neither convolutions nor linear layers copy them.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.kernels import usable_uncompiled, usable_without_gradients
from patchloom.layers.linear import fold_input_, fold_output_
from patchloom.layers.mlp import activated
from patchloom.layers.resample import Grid


class Conv3x3(nn.Conv2d):
    """A 3×3 convolution of channels-last maps that keeps their size."""

    def __init__(self, dim: int, *, depthwise: bool, bias: bool = True) -> None:
        super().__init__(dim, dim, 3, padding=1, groups=dim if depthwise else 1, bias=bias)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        return super().forward(maps.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def unbiased(self, maps: Tensor) -> Tensor:
        """Return the convolution without its bias, which a GPU adds in a separate pass: the next layer can fuse it."""
        return F.conv2d(maps.permute(0, 3, 1, 2), self.weight, padding=1, groups=self.groups).permute(0, 2, 3, 1)

    def activated(self, maps: Tensor) -> Tensor:
        """Return GELU(self(maps)): (B, H, W, C) → (B, H, W, C)."""
        if self.bias is None or not usable_uncompiled(maps, self.bias):
            return F.gelu(self(maps))
        from patchloom.layers.kernels.gelu import affine_gelu

        return affine_gelu(self.unbiased(maps), None, self.bias)

    def absorb_output_(self, scale: Tensor, shift: Tensor | None = None) -> None:
        """Fold a following scale · x + shift."""
        bias = torch.zeros_like(scale) if self.bias is None else self.bias * scale
        self.weight.mul_(scale.view(-1, 1, 1, 1))
        self.bias = nn.Parameter(bias if shift is None else bias + shift)


class TokenConv(nn.Module):
    """A 3×3 convolution over the patch grid in place of ResMLP's matrix (table 3)."""

    def __init__(self, dim: int, grid: Grid, kind: Literal["conv", "depthwise", "separable"]) -> None:
        super().__init__()
        self.grid = grid
        self.spatial = Conv3x3(dim, depthwise=kind != "conv")
        self.pointwise = nn.Linear(dim, dim) if kind == "separable" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        mixed = self.spatial(tokens.unflatten(1, self.grid)).flatten(1, 2)
        return mixed if self.pointwise is None else self.pointwise(mixed)

    def absorb_output_(self, scale: Tensor) -> None:
        """Fold a following scale · x."""
        if self.pointwise is None:
            self.spatial.absorb_output_(scale)
        else:
            fold_output_(self.pointwise, scale)


class SqueezeExcite(nn.Module):
    """Squeeze-and-excite: gate channels by a small network of their means."""

    def __init__(self, dim: int, *, ratio: float = 0.25) -> None:
        super().__init__()
        hidden = round(dim * ratio)
        self.reduce = nn.Linear(dim, hidden)
        self.expand = nn.Linear(hidden, dim)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        return maps * self.gate(maps.mean(dim=(1, 2)))[:, None, None, :]

    def gate(self, means: Tensor) -> Tensor:
        """Return the gates, 0 to 1: (B, C) → (B, C)."""
        return torch.sigmoid(self.expand(F.relu(self.reduce(means))))


class PatchConv(nn.Module):
    """1×1, GELU, depthwise 3×3, GELU, squeeze-and-excite, 1×1 (PatchConvNet's block)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.spatial = Conv3x3(dim, depthwise=True)
        self.gate = SqueezeExcite(dim)
        self.last = nn.Linear(dim, dim)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        maps = self.spatial(activated("gelu", self.first, maps))
        return self.last(self.gate(F.gelu(maps)))

    def added_to(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return x + self(y) by kernels for inference, or None if they do not apply."""
        if scale is not None or self.spatial.bias is None or not usable_without_gradients(y, self.last.weight):
            return None
        from patchloom.layers.kernels.gated_linear import gated_linear
        from patchloom.layers.kernels.gelu import gelu_and_mean

        maps = self.spatial.unbiased(activated("gelu", self.first, y)).flatten(1, 2)
        maps, means = gelu_and_mean(maps, self.spatial.bias)
        last = self.last
        return gated_linear(x.flatten(1, 2), maps, self.gate.gate(means), last.weight, last.bias).view_as(x)

    def absorb_input_(self, weight: Tensor, bias: Tensor) -> Tensor | None:
        """Fold a preceding weight · x + bias. Returns the factor to apply after the layer."""
        return fold_input_(self.first, weight, bias)

    def absorb_output_(self, scale: Tensor) -> None:
        """Fold a following scale · x."""
        fold_output_(self.last, scale)
