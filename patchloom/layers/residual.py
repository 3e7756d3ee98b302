"""Residual branches: x + scale · drop_path(mix(norm(x))). Every block of every family is made of them.

`scale` is LayerScale (one weight per channel), a single learnable weight (ReZero, Fixup, T-Fixup as the thesis adapts
them in figure 3.4c), or absent.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from patchloom.layers.norms import Affine

ResidualWeight = Literal["layerscale", "rezero", "fixup", "tfixup", "scalar", "none"]


def make_scale(kind: ResidualWeight, dim: int, init: float, *, uniform: bool = False) -> nn.Parameter | None:
    """Return the learned scale of a branch. `uniform` draws LayerScale from U[0, 2·init] (thesis 3.5.3)."""
    if kind == "none":
        return None
    if kind == "layerscale":
        return nn.Parameter(torch.rand(dim) * 2 * init if uniform else torch.full((dim,), float(init)))
    start = {"rezero": 0.0, "fixup": 1.0, "tfixup": 1.0, "scalar": float(init)}[kind]
    return nn.Parameter(torch.tensor([start]))


def drop_path(x: Tensor, probability: float) -> Tensor:
    """Apply stochastic depth: zero each sample with `probability`, divide the others by 1 − probability."""
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - probability)
    return x * mask.div_(1 - probability)


def drop_path_rates(rate: float, depth: int, rule: Literal["uniform", "linear"]) -> list[float]:
    """Return one rate per block: the same for all, or growing linearly from 0 to `rate`."""
    if rule == "uniform" or depth == 1:
        return [rate] * depth
    return [rate * i / (depth - 1) for i in range(depth)]


class Branch(nn.Module):
    """norm → mix → scale → drop path. Subclasses define the sum."""

    def __init__(self, norm: nn.Module, mix: nn.Module, scale: nn.Parameter | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.mix = mix
        self.scale = scale
        self.drop = drop
        self.foldable, self.joins = hasattr(mix, "folded"), hasattr(mix, "added_to")
        self.weights = sum(parameter.numel() for parameter in mix.parameters())

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + scale · drop_path(y)."""
        if self.training and self.drop:
            y = drop_path(y, self.drop)
        # Without gradients the sum overwrites y, which nothing else reads: on a CPU a new tensor costs page faults.
        out = None if torch.is_grad_enabled() or torch.compiler.is_compiling() or y.dtype != x.dtype else y
        return torch.add(x, y, out=out) if self.scale is None else torch.addcmul(x, y, self.scale, out=out)

    @torch.no_grad()
    def absorb_(self) -> None:
        """Fold the norm's weight and bias, and the scale, into the mixer if it supports that."""
        self._absorb_norm_()
        absorb_output = getattr(self.mix, "absorb_output_", None)
        if self.scale is not None and absorb_output is not None:
            absorb_output(self.scale)
            self.scale = None

    def _absorb_norm_(self) -> None:
        absorb_input = getattr(self.mix, "absorb_input_", None)
        split = getattr(self.norm, "split", None)
        if absorb_input is not None and split is not None:
            rest, weight, bias = split()
            factor = absorb_input(weight, bias)  # to apply after the mixer
            if factor is not None:
                self.norm = rest
                self.scale = nn.Parameter(factor if self.scale is None else self.scale * factor)


class Residual(Branch):
    """x + branch(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., C) → (B, ..., C)."""
        if self.scale is not None and self._folding_pays(x):
            norm = (self.norm.weight, self.norm.bias) if isinstance(self.norm, Affine) else None
            y = self.mix.folded(x if norm else self.norm(x), norm, self.scale)  # type: ignore[operator]
            return x + (drop_path(y, self.drop) if self.drop else y)
        y = self.norm(x)
        joined = self._joined(x, y)
        return self.add_to(x, self.mix(y)) if joined is None else joined

    def _joined(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Return x + scale · mix(y) from one kernel, or None if there is no kernel for it."""
        if not self.joins or (self.training and self.drop):
            return None
        joined: Tensor | None = self.mix.added_to(x, y, self.scale)  # type: ignore[operator]
        return joined

    def _folding_pays(self, x: Tensor) -> bool:
        """Return whether to fold scale and Affine into the mixer's weights at every training step.

        That saves passes over the activations and memory for the backward pass, and pays if there are more activations
        than weights.
        """
        return self.training and torch.is_grad_enabled() and self.foldable and x.numel() > self.weights


class PostNormResidual(Branch):
    """norm(x + scale · mix(x)): the norm follows the sum, as in the original transformer."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., C) → (B, ..., C)."""
        return self.norm(self.add_to(x, self.mix(x)))

    def _absorb_norm_(self) -> None:
        """Do nothing: the next residual sum reads the normalized values too."""


class ClassResidual(Branch):
    """Residual branch in which class tokens read the patches. Only the class tokens change (CaiT, PatchConvNet)."""

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """(B, T, C), (B, N, C) → (B, T, C)."""
        both = self.norm(torch.cat([tokens, patches], dim=1))
        return self.add_to(tokens, self.mix(both, tokens.shape[1]))


class Parallel(nn.ModuleList):
    """Branches that read the same x and are summed (DeiT III, parallel ViT)."""

    def __init__(self, branches: Iterable[Branch]) -> None:
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        out = x
        for branch in self:
            out = branch.add_to(out, branch.mix(branch.norm(x)))  # type: ignore[operator]
        return out


class Block(nn.Module):
    """Two residual branches in sequence: mix tokens, then mix channels. Either may be absent."""

    def __init__(self, *, tokens: nn.Module | None, channels: nn.Module | None) -> None:
        super().__init__()
        self.tokens = tokens
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., C) → (B, ..., C)."""
        if self.tokens is not None:
            x = self.tokens(x)
        return x if self.channels is None else self.channels(x)

    @torch.no_grad()
    def absorb_(self) -> None:
        """Move the last bias of the channel branch into the token branch, if both are fully folded.

        The last product of the channel branch then starts from its input, which saves a GPU one pass.
        """
        tokens, channels = self.tokens, self.channels
        if not (isinstance(tokens, Residual) and isinstance(channels, Residual)):
            return
        is_folded = isinstance(channels.norm, nn.Identity) and channels.scale is None
        if (
            is_folded
            and tokens.scale is not None
            and hasattr(channels.mix, "owe_bias_")
            and hasattr(tokens.mix, "add_bias_")
        ):
            sizes = tokens.scale.abs()
            if sizes.min() > 1e-4 * sizes.max():
                tokens.mix.add_bias_(channels.mix.owe_bias_() / tokens.scale)  # type: ignore[operator]


class ClassBlock(nn.Module):
    """Class tokens read the patches, then pass through an MLP."""

    def __init__(self, *, attend: ClassResidual, channels: Residual) -> None:
        super().__init__()
        self.attend = attend
        self.channels = channels

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """(B, T, C), (B, N, C) → (B, T, C)."""
        return self.channels(self.attend(tokens, patches))
