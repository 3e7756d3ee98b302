"""Grids of patches brought to another resolution, for everything that has one weight a position.

A bicubic resize (align_corners false, no antialiasing, as the authors resize position embeddings) is linear, so it is
a matrix R: new positions × old positions. Position embeddings become R·P. A matrix that mixes positions becomes
R·A·D, where D averages the new grid down to the old one: rows of D sum to 1, so a constant image gives what it gave
before, and at the same size R = D = identity.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom_runtime.errors import UsageError

Grid = tuple[int, ...]  # (height, width), or (length,) along one axis


class Resampled(nn.Module):
    """A layer with one weight a position, which can become the same layer on another grid."""

    grid: Grid

    def resampled_from(self, other: Any) -> dict[str, Tensor]:
        """Name → the weights of `other` on this layer's grid; differentiable, and of this layer reads only shapes."""
        raise UsageError(f"{type(self).__name__} does not say how {type(other).__name__} is resampled")


def _constant(function: Any) -> Any:
    """Its results are constants where it is compiled: torch.compiler.assume_constant_result, which would import the
    compiler, 1.4 s, for whoever compiles nothing."""
    function._dynamo_marked_constant = True
    return function


# Kept, because a training that shows a network small views resamples at every step. The cache is a function of its own,
# since torch.compile does not look past one.
@_constant
def upsampler(old: Grid, new: Grid, device: torch.device | None = None) -> Tensor:
    """R: (positions of `new`, positions of `old`), positions row-major; float64."""
    return _upsampler(old, new, device)


@_constant
def downsampler(old: Grid, new: Grid, device: torch.device | None = None) -> Tensor:
    """D: (positions of `old`, positions of `new`), the transpose of R with rows that sum to 1."""
    return _downsampler(old, new, device)


@lru_cache(maxsize=64)
def _upsampler(old: Grid, new: Grid, device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float64)
        for old_length, new_length in zip(old, new, strict=True):
            matrix = torch.kron(matrix, _along_one_axis(old_length, new_length))
        return matrix.to(device)


@lru_cache(maxsize=64)
def _downsampler(old: Grid, new: Grid, device: torch.device | None) -> Tensor:
    with torch.inference_mode(False):
        adjoint = _upsampler(old, new, device).T
        return adjoint / adjoint.sum(dim=1, keepdim=True)


def resample_rows(weight: Tensor, old: Grid, new: Grid) -> Tensor:
    """R·weight for a weight with one row a position: (old, ...) → (new, ...)."""
    if old == new:
        return weight.clone()
    flat = upsampler(old, new, weight.device) @ weight.double().reshape(weight.shape[0], -1)
    return flat.view(-1, *weight.shape[1:]).to(weight.dtype)


def resample_columns(weight: Tensor, old: Grid, new: Grid) -> Tensor:
    """weight·D for a weight with one column a position: (..., old) → (..., new)."""
    if old == new:
        return weight.clone()
    return (weight.double() @ downsampler(old, new, weight.device)).to(weight.dtype)


def _along_one_axis(old: int, new: int) -> Tensor:
    if old == new:
        return torch.eye(old, dtype=torch.float64)
    # Each old position as an image of its own, constant along the second axis: the resized images are R's columns.
    images = torch.eye(old, dtype=torch.float64).view(old, 1, old, 1)
    resized = F.interpolate(images, size=(new, 1), mode="bicubic", align_corners=False)
    return resized.view(old, new).T.contiguous()  # torch.kron takes no mixture of layouts
