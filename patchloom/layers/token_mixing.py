"""Mixing across positions with learned matrices: ResMLP's linear layer, Mixer's token MLP.

Letters: B images, N positions in, M out, C channels. Tokens are (B, N, C): the matrix multiplies each image from the
left, so nothing is transposed or copied. (The papers write the same product as (A Xᵀ)ᵀ.)
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.kernels import aligned, usable, usable_without_gradients
from patchloom.layers.linear import as_autocast
from patchloom.layers.mlp import ActivationName, activate
from patchloom.layers.resample import Grid, Resampled, resample_columns, resample_rows
from patchloom_runtime.errors import UsageError

FEW_POSITIONS = 64  # up to here, the kernel is faster than cuBLAS
MOST_POSITIONS = 256  # limit of the kernels


def mix_tokens(weight: Tensor, tokens: Tensor, bias: Tensor) -> Tensor:
    """Return weight (M, N) · tokens (B, N, C) + bias, which is (M) or (M, C): (B, M, C)."""
    if weight.shape[1] <= FEW_POSITIONS and bias.ndim == 1 and tokens.is_cuda and usable(low := as_autocast(tokens)):
        from patchloom.layers.kernels.token_mixing import mixed

        return mixed(low, weight, bias)
    bias = bias if bias.ndim == 2 else bias.unsqueeze(-1)
    if torch.compiler.is_exporting():  # avoids an expand operator in the graph
        return torch.matmul(weight, tokens) + bias
    return torch.baddbmm(bias, weight.expand(tokens.shape[0], -1, -1), tokens)


class ScaledMix(torch.autograd.Function):
    """scale · (weight · tokens) + shift.

    Autograd would save the product to compute the gradient of the scale. It also follows from the tokens and
    weightᵀ · gradient, which the gradient of the tokens needs anyway, so the product is not saved.
    """

    @staticmethod
    def forward(tokens: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """(B, N, C), (M, N), (C), (M, C) → (B, M, C)."""
        mixed = torch.bmm(weight.expand(tokens.shape[0], -1, -1), tokens)
        return torch.addcmul(shift, mixed, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        tokens, weight, scale, _ = inputs
        ctx.save_for_backward(tokens, weight, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of tokens, weight, scale and shift."""
        tokens, weight, scale = ctx.saved_tensors
        low = grad.to(tokens.dtype)
        back = torch.bmm(weight.T.expand(tokens.shape[0], -1, -1), low)  # (B, N, C)
        of_tokens = (back * scale).to(tokens.dtype)
        of_weight = torch.bmm(low, (tokens * scale).to(tokens.dtype).transpose(1, 2)).sum(dim=0)
        of_scale = (tokens * back).sum(dim=(0, 1), dtype=scale.dtype)
        return of_tokens, of_weight, of_scale, grad.sum(dim=0).to(scale.dtype)


class AcrossPositions(nn.Module):
    """Base of layers with a `weight` and a `bias` across positions, which are initialized like linear layers."""

    weight: nn.Parameter
    bias: nn.Parameter


class TokenLinear(AcrossPositions, Resampled):
    """One matrix across the positions of a grid, shared by all channels (ResMLP's A)."""

    def __init__(self, grid: Grid, *, extra: int = 0, outputs: int | None = None) -> None:
        # `extra` tokens come before those of the grid; `outputs` rows replace one row per position.
        super().__init__()
        self.grid, self.extra = grid, extra
        inputs = extra + math.prod(grid)
        self.rows_are_positions = outputs is None
        rows = inputs if outputs is None else outputs
        self.weight = nn.Parameter(torch.empty(rows, inputs))
        self.bias = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear_(self.weight, self.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) → (B, M, C)."""
        return mix_tokens(self.weight, tokens, self.bias)

    def folded(self, tokens: Tensor, norm: tuple[Tensor, Tensor] | None, scale: Tensor) -> Tensor:
        """Return scale · self(weight · tokens + bias); `norm` is (weight, bias). Saves only `tokens` for backward."""
        shift = self.bias.unsqueeze(-1) * scale  # (M, C)
        if norm is not None:
            weight, bias = norm
            shift = torch.outer(self.weight.sum(dim=1), bias * scale) + shift
            scale = scale * weight
        tokens = as_autocast(tokens)
        weight = self.weight.to(tokens.dtype)
        if not usable(tokens):
            return ScaledMix.apply(tokens, weight, scale, shift)
        padded = ScaledMix.apply(aligned(tokens, -2), aligned(weight, -2, -1), scale, aligned(shift, -2))
        return padded[:, : len(weight)]

    def added_to(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return x + scale · self(x) in one pass if the norm is absorbed and gradients are off, otherwise None."""
        absorbed = y is x and self.bias.ndim == 2
        if (
            scale is None
            or not absorbed
            or max(self.weight.shape) > MOST_POSITIONS
            or not usable_without_gradients(x, self.weight)
        ):
            return None
        from patchloom.layers.kernels.token_mixing import mixed_and_added

        return mixed_and_added(x, self.weight, scale, self.bias)

    def absorb_input_(self, weight: Tensor, bias: Tensor) -> Tensor | None:
        """Fold a preceding weight · x + bias, except for the factor `weight`, which is returned.

        A(αx + β) + b = α(Ax + c) with c = (A1·β + b) / α. Returns None if an α is so small that c would lose precision.
        """
        if weight.abs().min() < 1e-3 * weight.abs().max():
            return None
        shift = torch.outer(self.weight.sum(dim=1), bias) + self.bias.unsqueeze(-1)  # (M, C)
        self.bias = nn.Parameter(shift / weight)
        return weight

    def add_bias_(self, bias: Tensor) -> None:
        """Add one number per channel to the output."""
        self.bias = nn.Parameter(self.bias.view(len(self.bias), -1) + bias)

    def resampled_from(self, other: "TokenLinear") -> dict[str, Tensor]:
        """Return R·A·D and R·b, or A·D and b if rows are not positions (`layers.resample`)."""
        weight: Tensor = other.weight
        bias: Tensor = other.bias
        if self.extra:
            extra = weight[:, : self.extra]
            weight = torch.cat([extra, resample_columns(weight[:, self.extra :], other.grid, self.grid)], dim=1)
        else:
            weight = resample_columns(weight, other.grid, self.grid)
        if self.rows_are_positions:
            weight = resample_rows(weight, other.grid, self.grid)
            bias = resample_rows(bias, other.grid, self.grid)
        return {"weight": weight, "bias": bias}


class TokenMLP(Resampled):
    """W2 · activation(W1 · x) across the positions of a grid (Mixer eq. 1; ResMLP's and sMLPNet's MLP ablations).

    With `groups`, G neighboring channels form one vector of G·N numbers that is mixed as a whole. With `outputs`, the
    number of tokens changes, which makes a step of a pyramid (Mixer, appendix A).
    """

    def __init__(
        self,
        grid: Grid,
        hidden: int,
        *,
        activation: ActivationName = "gelu",
        outputs: int | None = None,
        groups: int = 1,
        dropout: float = 0.0,
        copies: tuple[int, ...] = (),
    ) -> None:
        # `copies` is prepended to the shape of each weight; by default one MLP serves all channels.
        super().__init__()
        self.grid, self.activation, self.groups, self.dropout = grid, activation, groups, dropout
        self.outputs = outputs
        rows = math.prod(grid) if outputs is None else outputs
        self.weight1 = nn.Parameter(torch.empty(*copies, hidden, groups * math.prod(grid)))
        self.bias1 = nn.Parameter(torch.empty(*copies, hidden))
        self.weight2 = nn.Parameter(torch.empty(*copies, groups * rows, hidden))
        self.bias2 = nn.Parameter(torch.empty(*copies, groups * rows))
        self.reset_parameters()

    @property
    def axes(self) -> Grid:
        """Axes of the mixed vectors: the grid, preceded by the group of channels if there is one."""
        return self.grid if self.groups == 1 else (self.groups, *self.grid)

    def reset_parameters(self) -> None:
        init_linear_(self.weight1, self.bias1)
        init_linear_(self.weight2, self.bias2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C), or (B, outputs, C)."""
        if self.groups == 1:
            return self._mix(tokens)
        b, n, c = tokens.shape
        joined = tokens.view(b, n, c // self.groups, self.groups).permute(0, 3, 1, 2)
        mixed = self._mix(joined.reshape(b, self.groups * n, c // self.groups))
        return mixed.view(b, self.groups, -1, c // self.groups).permute(0, 2, 3, 1).reshape(b, -1, c)

    def added_to(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return x + self(y) in one pass, or None if there is no kernel for this MLP."""
        plain = scale is None and self.groups == 1 and self.outputs is None and self.weight1.ndim == 2
        gelu = self.activation in ("gelu", "gelu_tanh") and not (self.dropout and self.training)
        if not (plain and gelu and y.shape[1] <= MOST_POSITIONS and y.is_cuda and usable(low := as_autocast(y))):
            return None
        from patchloom.layers.kernels.token_mlp import token_mlp

        weights = (self.weight1, self.bias1, self.weight2, self.bias2)
        return token_mlp(x, low, *weights, self.activation == "gelu_tanh")

    def _mix(self, tokens: Tensor) -> Tensor:
        """(B, G·N, C/G) → (B, G·N, C/G)."""
        hidden = activate(self.activation, mix_tokens(self.weight1, tokens, self.bias1))
        return self._drop(mix_tokens(self.weight2, self._drop(hidden), self.bias2))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def resampled_from(self, other: "TokenMLP") -> dict[str, Tensor]:
        """Return the weights for another grid.

        If the hidden units grow with the grid: copies of `other`, one for each part of the larger grid (Mixer,
        supplement C). If they shrink with it: the mean of such copies. If their number stays: resampled weights.
        """
        mine, its = self.weight1.shape[-2], other.weight1.shape[-2]
        if mine == its:
            return self._resampled(other)
        new = {name: other.weight1.new_zeros(mine.shape) for name, mine in self.named_parameters()}
        parts = _parts(other, self) if mine > its else _parts(self, other)
        for positions, units in parts:
            if mine > its:
                new["weight1"][units[:, None], positions] = other.weight1
                new["weight2"][positions[:, None], units] = other.weight2
                new["bias1"][units], new["bias2"][positions] = other.bias1, other.bias2
            else:
                new["weight1"] += other.weight1[units[:, None], positions] / len(parts)
                new["weight2"] += other.weight2[positions[:, None], units] / len(parts)
                new["bias1"] += other.bias1[units] / len(parts)
                new["bias2"] += other.bias2[positions] / len(parts)
        return new

    def _resampled(self, other: "TokenMLP") -> dict[str, Tensor]:
        """Resample positions and keep the hidden units. Tokens of a pyramid have no positions and are kept."""

        def rows(weight: Tensor, axis: int) -> Tensor:
            if self.outputs is not None:
                return weight
            return resample_rows(weight.movedim(axis, 0), other.axes, self.axes).movedim(0, axis)

        return {
            "weight1": resample_columns(other.weight1, other.axes, self.axes),
            "bias1": other.bias1,
            "weight2": rows(other.weight2, -2),
            "bias2": rows(other.bias2, -1),
        }


class UntiedTokenMLP(TokenMLP):
    """A separate token MLP for each channel or group of channels: C/G times the parameters (Mixer A.1)."""

    def __init__(self, grid: Grid, hidden: int, dim: int, *, groups: int = 1, **options: Any) -> None:
        super().__init__(grid, hidden, groups=groups, copies=(dim // groups,), **options)

    def _mix(self, tokens: Tensor) -> Tensor:
        """(B, G·N, C/G) → (B, G·N, C/G)."""
        columns = tokens.permute(2, 1, 0)  # (C/G, G·N, B): one product per MLP
        hidden = activate(self.activation, torch.baddbmm(self.bias1.unsqueeze(-1), self.weight1, columns))
        mixed = torch.baddbmm(self.bias2.unsqueeze(-1), self.weight2, self._drop(hidden))
        return self._drop(mixed).permute(2, 1, 0)


def init_linear_(weight: Tensor, bias: Tensor) -> None:
    """Set weight and bias to U(±1/√inputs), as torch.nn.Linear."""
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)
    nn.init.uniform_(bias, -bound, bound)


def block_positions(small: Grid, large: Grid) -> Tensor:
    """Split grid `large` into parts of size `small` and return the positions of each: (parts, positions), row-major."""
    positions = torch.arange(math.prod(large)).view(large)
    split = [part for s, n in zip(small, large, strict=True) for part in (n // s, s)]
    axes = len(small)
    order = [*range(0, 2 * axes, 2), *range(1, 2 * axes, 2)]
    return positions.view(split).permute(order).reshape(-1, math.prod(small))


def _parts(small: TokenMLP, large: TokenMLP) -> list[tuple[Tensor, Tensor]]:
    """Return (positions, hidden units) of each copy of `small` inside `large`."""
    copies = integer_factor(small.axes, large.axes)
    if not copies or large.weight1.shape[0] != math.prod(copies) * small.weight1.shape[0]:
        raise UsageError(
            f"a token MLP of {small.weight1.shape[0]} hidden units on a grid of {small.grid} and one of "
            f"{large.weight1.shape[0]} on {large.grid} cannot be converted: use a whole multiple of the size"
        )
    positions = block_positions(small.axes, large.axes)  # (copies, positions of one)
    units = torch.arange(large.weight1.shape[0]).view(positions.shape[0], -1)
    return list(zip(positions, units, strict=True))


def integer_factor(small: Grid, large: Grid) -> tuple[int, ...] | None:
    """Return large / small along each axis, or None if that is not an integer."""
    if any(n % s for s, n in zip(small, large, strict=True)):
        return None
    return tuple(n // s for s, n in zip(small, large, strict=True))


def expansion_at(expansion: float, old: Grid, new: Grid) -> float:
    """Return the expansion on another grid. If that is not a multiple, the number of hidden units is kept."""
    return expansion if integer_factor(old, new) else expansion * math.prod(old) / math.prod(new)


class ClassMixing(TokenLinear):
    """One row of weights over class tokens and patches per class token (ResMLP's class-MLP)."""

    def forward(self, tokens: Tensor, classes: int) -> Tensor:  # type: ignore[override]
        """(B, T+N, C) → (B, T, C)."""
        del classes  # fixed by the number of rows
        return super().forward(tokens)
