"""Resample weights that belong to grid positions, for another image resolution.

A bicubic resize (align_corners false, no antialiasing, as the authors resize position embeddings) is linear, so it is
a matrix R: new positions × old positions. Position embeddings become R·P. A matrix that mixes positions becomes
R·A·D, where D averages the new grid down to the old one: rows of D sum to 1, so constant tokens are mixed into the
resized output of the old matrix, and at the same size R = D = identity.
"""

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.machine import widest_float
from patchloom_runtime.errors import UsageError

Grid = tuple[int, ...]  # (height, width), or (length,) along one axis
Interpolation = Literal["bicubic", "bilinear"]


class Resampled(nn.Module):
    """A layer with weights per position, which can be converted to another grid."""

    grid: Grid

    def resampled_from(self, other: Any) -> dict[str, Tensor]:
        """Return the weights of `other` by name, resampled to this layer's grid.

        Differentiable. Only shapes are read from this layer, which may be on the meta device.
        """
        raise UsageError(f"{type(self).__name__} does not define how {type(other).__name__} is resampled")


def _constant(function: Any) -> Any:
    """Mark a function as constant for torch.compile.

    torch.compiler.assume_constant_result does the same, but imports the compiler, which takes 1.4 s.
    """
    function._dynamo_marked_constant = True
    return function


# Cached, because training with small views resamples at every step. The cache is a separate function, since
# torch.compile does not trace through one.
@_constant
def upsampler(
    old: Grid, new: Grid, device: torch.device | None = None, interpolation: Interpolation = "bicubic"
) -> Tensor:
    """Return R: (positions of `new`, positions of `old`), row-major, float64 (MPS: float32)."""
    return _upsampler(old, new, device, interpolation)


@_constant
def downsampler(old: Grid, new: Grid, device: torch.device | None = None) -> Tensor:
    """Return D: (positions of `old`, positions of `new`), the transpose of R with rows that sum to 1."""
    return _downsampler(old, new, device)


@lru_cache(maxsize=64)
def _upsampler(old: Grid, new: Grid, device: torch.device | None, interpolation: Interpolation = "bicubic") -> Tensor:
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for old_length, new_length in zip(old, new, strict=True):
            matrix = torch.kron(matrix, _along_one_axis(old_length, new_length, interpolation))
        return matrix.to(device, widest_float(device))


@lru_cache(maxsize=64)
def _downsampler(old: Grid, new: Grid, device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):
        adjoint = _upsampler(old, new, device).T
        return adjoint / adjoint.sum(dim=1, keepdim=True)


def resample_rows(weight: Tensor, old: Grid, new: Grid, interpolation: Interpolation = "bicubic") -> Tensor:
    """Return R·weight, for a weight with one row per position: (old, ...) → (new, ...)."""
    if old == new:
        return weight.clone()
    matrix = upsampler(old, new, weight.device, interpolation)
    flat = matrix @ weight.to(matrix.dtype).reshape(weight.shape[0], -1)
    return flat.view(-1, *weight.shape[1:]).to(weight.dtype)


def resample_columns(weight: Tensor, old: Grid, new: Grid) -> Tensor:
    """Return weight·D, for a weight with one column per position: (..., old) → (..., new)."""
    if old == new:
        return weight.clone()
    matrix = downsampler(old, new, weight.device)
    return (weight.to(matrix.dtype) @ matrix).to(weight.dtype)


def _along_one_axis(old: int, new: int, interpolation: Interpolation) -> Tensor:
    if old == new:
        return torch.eye(old, dtype=torch.float64)
    # One image per old position, constant along the second axis: the resized images are the columns of R.
    images = torch.eye(old, dtype=torch.float64).view(old, 1, old, 1)
    resized = F.interpolate(images, size=(new, 1), mode=interpolation, align_corners=False)
    return resized.view(old, new).T.contiguous()  # torch.kron does not accept mixed layouts
