"""A residual branch: x + scale · drop_path(mix(norm(x))), the one shape every block of every family has.

`scale` is LayerScale (one weight per channel), a single learnable weight (ReZero, Fixup, T-Fixup as the thesis adapts
them in figure 3.4c), or nothing.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from patchloom.layers.norms import Affine

ResidualWeight = Literal["layerscale", "rezero", "fixup", "tfixup", "scalar", "none"]


def make_scale(kind: ResidualWeight, dim: int, init: float, *, uniform: bool = False) -> nn.Parameter | None:
    """The weight of a branch; `uniform` draws LayerScale from U[0, 2·init] (thesis 3.5.3)."""
    if kind == "none":
        return None
    if kind == "layerscale":
        return nn.Parameter(torch.rand(dim) * 2 * init if uniform else torch.full((dim,), float(init)))
    start = {"rezero": 0.0, "fixup": 1.0, "tfixup": 1.0, "scalar": float(init)}[kind]
    return nn.Parameter(torch.tensor([start]))


def drop_path(x: Tensor, probability: float) -> Tensor:
    """Stochastic depth: zero for a whole sample with `probability`, otherwise divided by the rate kept."""
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - probability)
    return x * kept.div_(1 - probability)


def drop_path_rates(rate: float, depth: int, rule: Literal["uniform", "linear"]) -> list[float]:
    """One rate a block: the same everywhere, or growing from 0 at the first block to `rate` at the last."""
    if rule == "uniform" or depth == 1:
        return [rate] * depth
    return [rate * i / (depth - 1) for i in range(depth)]


class Branch(nn.Module):
    """norm → mix → scale → drop path, without the sum."""

    def __init__(self, norm: nn.Module, mix: nn.Module, scale: nn.Parameter | None = None, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.mix = mix
        self.scale = scale
        self.drop = drop
        self.foldable, self.joins = hasattr(mix, "folded"), hasattr(mix, "added_to")
        self.weights = sum(parameter.numel() for parameter in mix.parameters())

    def add_to(self, x: Tensor, y: Tensor) -> Tensor:
        """x plus the weighted, possibly dropped, y."""
        if self.training and self.drop:
            y = drop_path(y, self.drop)
        # Without gradients the sum overwrites y, which nobody else reads: a fresh tensor costs a CPU page faults.
        out = None if torch.is_grad_enabled() or torch.compiler.is_compiling() or y.dtype != x.dtype else y
        return torch.add(x, y, out=out) if self.scale is None else torch.addcmul(x, y, self.scale, out=out)

    @torch.no_grad()
    def absorb_(self) -> None:
        """Fold the norm's weight and bias, and the scale, into the mixer where it can take them."""
        self._absorb_norm_()
        absorb_output = getattr(self.mix, "absorb_output_", None)
        if self.scale is not None and absorb_output is not None:
            absorb_output(self.scale)
            self.scale = None

    def _absorb_norm_(self) -> None:
        absorb_input = getattr(self.mix, "absorb_input_", None)
        split = getattr(self.norm, "split", None)
        if absorb_input is not None and split is not None:
            stays, weight, bias = split()
            owed = absorb_input(weight, bias)
            if owed is not None:
                self.norm = stays
                self.scale = nn.Parameter(owed if self.scale is None else self.scale * owed)


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
        """x + scale · mix(y) as one kernel, where there is one for it."""
        if not self.joins or (self.training and self.drop):
            return None
        joined: Tensor | None = self.mix.added_to(x, y, self.scale)  # type: ignore[operator]
        return joined

    def _folding_pays(self, x: Tensor) -> bool:
        """Training on more numbers than the mixer has weights: fold the scale (and Aff) into them at every step.

        It saves passes over the activations, and the backward pass keeps fewer of them.
        """
        return self.training and torch.is_grad_enabled() and self.foldable and x.numel() > self.weights


class PostNormResidual(Branch):
    """norm(x + scale · mix(x)): the norm after the sum, as in the first transformers."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, ..., C) → (B, ..., C)."""
        return self.norm(self.add_to(x, self.mix(x)))

    def _absorb_norm_(self) -> None:
        """It stays: what it gives is read by the next sum too."""


class ClassResidual(Branch):
    """The same for class tokens that read frozen patches: only the class tokens change (CaiT, PatchConvNet)."""

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """(B, T, C), (B, N, C) → (B, T, C)."""
        both = self.norm(torch.cat([tokens, patches], dim=1))
        return self.add_to(tokens, self.mix(both, tokens.shape[1]))


class Parallel(nn.ModuleList):
    """Several branches that read the same x and are summed (DeiT III, parallel ViT)."""

    def __init__(self, branches: Iterable[Branch]) -> None:
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, N, C)."""
        out = x
        for branch in self:
            out = branch.add_to(out, branch.mix(branch.norm(x)))  # type: ignore[operator]
        return out


class Block(nn.Module):
    """Residual branches one after the other: mix tokens (where the network does), then mix channels."""

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
        """Where nothing stands between the two branches, folded before, the first adds the last bias of the second.

        What is left of the second begins a product with its input, which a GPU does without a further pass.
        """
        tokens, channels = self.tokens, self.channels
        if not (isinstance(tokens, Residual) and isinstance(channels, Residual)):
            return
        bare = isinstance(channels.norm, nn.Identity) and channels.scale is None
        if (
            bare
            and tokens.scale is not None
            and hasattr(channels.mix, "owe_bias_")
            and hasattr(tokens.mix, "add_bias_")
        ):
            sizes = tokens.scale.abs()
            if sizes.min() > 1e-4 * sizes.max():
                tokens.mix.add_bias_(channels.mix.owe_bias_() / tokens.scale)  # type: ignore[operator]


class ClassBlock(nn.Module):
    """The class tokens read the patches, then a feed-forward layer of their own."""

    def __init__(self, *, attend: ClassResidual, channels: Residual) -> None:
        super().__init__()
        self.attend = attend
        self.channels = channels

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        """(B, T, C), (B, N, C) → (B, T, C)."""
        return self.channels(self.attend(tokens, patches))
