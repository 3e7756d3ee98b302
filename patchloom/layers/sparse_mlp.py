"""sMLPNet's token mixing: depth-wise 3×3 convolution, then each row and each column of the map mixed by a matrix.

Maps are (B, H, W, C). A column mix multiplies (H, H) from the left of (B, H, W·C), a row mix (W, W) from the left of
(B·H, W, C): both are views. The fusing layer is applied branch by branch and summed, so nothing is concatenated.
"""

import itertools
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.convolution import Conv3x3
from patchloom.layers.kernels import usable_without_gradients
from patchloom.layers.norms import Affine, BatchNorm
from patchloom.layers.resample import Grid
from patchloom.layers.token_mixing import FEW_POSITIONS, TokenLinear, TokenMLP

Fusion = Literal["concat", "sum", "weighted"]


class SparseMLP(nn.Module):
    """Mixes rows and columns and fuses them with the identity (sMLP eq. 1), with the ablations of tables 3 and 4."""

    def __init__(
        self,
        dim: int,
        grid: Grid,
        *,
        fusion: Fusion = "concat",
        sequential: bool = False,
        identity: bool = True,
        columns_first: bool = False,
    ) -> None:
        super().__init__()
        self.sequential, self.identity, self.columns_first = sequential, identity, columns_first
        height, width = grid
        self.along_width = TokenLinear((width,))
        self.along_height = TokenLinear((height,))
        branches = (1 if sequential else 2) + identity
        # Identity, along the width, along the height: the order of the authors' weights.
        self.fuse = nn.Linear(branches * dim, dim, bias=False) if fusion == "concat" else None
        self.weights = BranchWeights(branches, dim) if fusion == "weighted" else None

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        if self.sequential:
            first, second = (self._columns, self._rows) if self.columns_first else (self._rows, self._columns)
            branches = [second(first(maps))]
        else:
            branches = [self._rows(maps), self._columns(maps)]
        return self._fuse([maps, *branches] if self.identity else branches)

    def _rows(self, maps: Tensor) -> Tensor:
        b, h, w, c = maps.shape
        return self.along_width(maps.reshape(b * h, w, c)).view(b, h, w, c)

    def _columns(self, maps: Tensor) -> Tensor:
        b, h, w, c = maps.shape
        return self.along_height(maps.reshape(b, h, w * c)).view(b, h, w, c)

    def joins(self, maps: Tensor) -> bool:
        """Return whether `added_to` has a kernel for these maps."""
        plain = self.fuse is not None and self.identity and not self.sequential
        few = max(maps.shape[1:3]) <= FEW_POSITIONS
        return plain and few and usable_without_gradients(maps, self.along_width.weight)

    def added_to(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + self(y), without gradients. Requires `joins(y)`."""
        assert self.fuse is not None
        from patchloom.layers.kernels.rows_and_columns import concat_rows_and_columns

        rows, columns = self.along_width, self.along_height
        joined = concat_rows_and_columns(y, rows.weight, rows.bias, columns.weight, columns.bias)
        return torch.addmm(x.flatten(0, -2), joined.flatten(0, -2), self.fuse.weight.T).view_as(x)

    def _fuse(self, branches: list[Tensor]) -> Tensor:
        if self.fuse is not None:
            parts = self.fuse.weight.chunk(len(branches), dim=1)
            return sum_of_linears(branches, parts)
        if self.weights is not None:
            return self.weights(branches)
        return torch.stack(branches).sum(dim=0)


class BranchWeights(nn.Module):
    """One weight per branch and channel (sMLPNet's weighted sum)."""

    decays = False

    def __init__(self, branches: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(branches, dim))

    def forward(self, branches: list[Tensor]) -> Tensor:
        """Return Σ weightᵢ · branchᵢ."""
        out = branches[0] * self.weight[0]
        for branch, weight in zip(branches[1:], self.weight[1:], strict=True):
            out = torch.addcmul(out, branch, weight)
        return out


def sum_of_linears(inputs: list[Tensor], weights: tuple[Tensor, ...]) -> Tensor:
    """Return Σ xᵢ·Wᵢᵀ: a linear layer of the concatenated inputs, without concatenating."""
    flat = [x.flatten(0, -2) for x in inputs]
    out = F.linear(flat[0], weights[0])
    for x, weight in zip(flat[1:], weights[1:], strict=True):
        out = torch.addmm(out, x, weight.T)
    return out.view(*inputs[0].shape[:-1], -1)


class MapMLP(TokenMLP):
    """A dense token MLP over all positions of a map (sMLPNet table 5)."""

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        return super().forward(maps.flatten(1, 2)).view_as(maps)


class NormActMix(nn.Module):
    """BatchNorm → GELU → mix: the unit of sMLPNet's token mixing."""

    def __init__(self, dim: int, mix: nn.Module) -> None:
        super().__init__()
        self.norm: nn.Module = BatchNorm(dim)
        self.mix = mix

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        return self.mix(self.activated(maps))

    def activated(self, maps: Tensor) -> Tensor:
        """Return the input of the mixer: GELU(norm(maps))."""
        norm = self.norm
        return norm.activated(maps) if isinstance(norm, Affine | BatchNorm) else F.gelu(norm(maps))

    def activated_after(self, mix: nn.Module, maps: Tensor) -> Tensor:
        """Return the input of the mixer if the mixer `mix` of another unit precedes this one."""
        if isinstance(mix, Conv3x3) and isinstance(self.norm, nn.Identity):
            return mix.activated(maps)
        return self.activated(mix(maps))


class NormActMixes(nn.Sequential):
    """Several `NormActMix` in sequence."""

    @property
    def units(self) -> list[NormActMix]:
        """The `NormActMix` modules, in the order they are applied."""
        return list(self)  # type: ignore[arg-type]

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H, W, C)."""
        return self.units[-1].mix(self._before_last(maps))

    def added_to(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return x + self(y) by kernels for inference, or None if they do not apply to the last mixer."""
        last = self.units[-1].mix
        if scale is not None or not isinstance(last, SparseMLP) or not last.joins(y):
            return None
        return last.added_to(x, self._before_last(y))

    def _before_last(self, maps: Tensor) -> Tensor:
        units = self.units
        maps = units[0].activated(maps)
        for unit, after in itertools.pairwise(units):
            maps = after.activated_after(unit.mix, maps)
        return maps

    @torch.no_grad()
    def absorb_(self) -> None:
        """Fold each BatchNorm into the convolution before it. The first BatchNorm becomes Affine."""
        first = self.units[0]
        if isinstance(first.norm, BatchNorm):
            first.norm = first.norm.as_affine()
        for before, after in itertools.pairwise(self.units):
            if isinstance(before.mix, Conv3x3):
                rest, weight, bias = after.norm.split()  # type: ignore[operator]
                before.mix.absorb_output_(weight, bias)
                after.norm = rest
