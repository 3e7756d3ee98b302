"""Normalizations over the last (channel) dimension, all with one weight and one bias per channel.

Affine (ResMLP eq. 1) computes no statistics. LayerNorm, BatchNorm and the ℓ2 norm are the papers' alternatives.
`split()` returns the part that must be computed, and the weight and bias that an adjacent linear layer can absorb.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.kernels import usable, usable_uncompiled

NormName = Literal["affine", "layer", "batch", "l2"]


class Affine(nn.Module):
    """Aff(x) = α·x + β, per channel; α is `weight`, β is `bias`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return torch.addcmul(self.bias, self.weight, x)

    def activated(self, x: Tensor) -> Tensor:
        """Return GELU(self(x)): (..., C) → (..., C)."""
        if not usable_uncompiled(x, self.weight):
            return F.gelu(self(x))
        from patchloom.layers.kernels.gelu import affine_gelu

        return affine_gelu(x, self.weight, self.bias)

    def split(self) -> tuple[nn.Module, Tensor, Tensor]:
        return nn.Identity(), self.weight, self.bias


class LayerNorm(nn.LayerNorm):
    """Zero mean and unit variance per token."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        if usable_uncompiled(x, self.weight, self.bias):
            from patchloom.layers.kernels.layer_norm import layer_norm

            return layer_norm(x, self.weight, self.bias, self.eps)
        return super().forward(x)

    def split(self) -> tuple[nn.Module, Tensor, Tensor]:
        bare = LayerNorm(self.normalized_shape, eps=self.eps, elementwise_affine=False)
        return bare, self.weight, self.bias


class BatchNorm(nn.BatchNorm1d):
    """Zero mean and unit variance per channel, over the batch and all positions. Channels are the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return super().forward(x.flatten(0, -2)).view_as(x)

    def split(self) -> tuple[nn.Module, Tensor, Tensor]:
        """In eval mode, the running statistics become part of weight and bias."""
        mean, var = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        weight = self.weight * torch.rsqrt(var + self.eps)
        return nn.Identity(), weight, self.bias - mean * weight

    def activated(self, x: Tensor) -> Tensor:
        """Return GELU(self(x)): (..., C) → (..., C)."""
        count, mean_so_far, momentum = x.numel() // x.shape[-1], self.running_mean, self.momentum
        if not self.training or mean_so_far is None or momentum is None or count == 1 or not usable(x):
            return F.gelu(self(x))
        from patchloom.layers.kernels.batch_norm_gelu import batch_norm_gelu

        out, mean, var = batch_norm_gelu(x, self.weight, self.bias, self.eps)
        with torch.no_grad():
            cast(Tensor, self.num_batches_tracked).add_(1)
            mean_so_far.lerp_(mean, momentum)
            cast(Tensor, self.running_var).lerp_(var * (count / (count - 1)), momentum)
        return out

    def as_affine(self) -> Affine:
        """Return the equivalent affine layer in eval mode."""
        _, weight, bias = self.split()
        affine = Affine(self.num_features)
        affine.weight, affine.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        return affine


class L2Norm(nn.Module):
    """Each token scaled to length √C, then Affine (ResMLP, arXiv appendix A)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.affine = Affine(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return self.affine(_to_sqrt_length(x))

    def split(self) -> tuple[nn.Module, Tensor, Tensor]:
        return Length(), self.affine.weight, self.affine.bias


class Length(nn.Module):
    """Each token scaled to length √C: the part of `L2Norm` that cannot be absorbed."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        return _to_sqrt_length(x)


def _to_sqrt_length(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5


def make_norm(name: NormName, dim: int) -> nn.Module:
    """Return a normalization by name. The `eps` of LayerNorm is that of the authors' code."""
    if name == "layer":
        return LayerNorm(dim, eps=1e-6)
    return {"affine": Affine, "batch": BatchNorm, "l2": L2Norm}[name](dim)
