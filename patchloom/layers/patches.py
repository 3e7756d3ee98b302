"""From pixels to tokens: patch projection, convolutional stem, learned tokens and position embeddings."""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.resample import Grid, Interpolation, Resampled, resample_rows


class PatchProjection(nn.Module):
    """One linear layer for each P×P patch. The weight has the shape of a convolution, (C, channels, P, P)."""

    def __init__(self, channels: int, dim: int, patch_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.weight = nn.Parameter(torch.empty(dim, channels, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(dim)) if bias else None
        bound = math.prod(self.weight.shape[1:]) ** -0.5  # as torch.nn.Conv2d
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, H/P, W/P, C), contiguous."""
        b, _, height, width = images.shape
        p = self.patch_size
        patches = images.reshape(b, -1, height // p, p, width // p, p).permute(0, 2, 4, 1, 3, 5)
        return F.linear(patches.flatten(3), self.weight.flatten(1), self.bias)


class PatchMerging(PatchProjection):
    """Patch projection of a channels-last map: 2×2 neighbors become one position (between sMLPNet's stages)."""

    def __init__(self, dim: int, out_dim: int) -> None:
        super().__init__(dim, out_dim, patch_size=2, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """(B, H, W, C) → (B, H/2, W/2, out)."""
        return super().forward(maps.permute(0, 3, 1, 2))


class ConvStem(nn.Module):
    """Four 3×3 convolutions of stride 2 with GELU in between, without bias (PatchConvNet, after LeViT)."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        widths = [channels, dim // 8, dim // 4, dim // 2, dim]
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False) for a, b in itertools.pairwise(widths)
        )

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, H, W) → (B, ⌈H/16⌉, ⌈W/16⌉, C)."""
        x = images.contiguous(memory_format=torch.channels_last)
        for i, conv in enumerate(self.convs):
            x = conv(F.gelu(x) if i else x)
        return x.permute(0, 2, 3, 1)


class LearnedTokens(nn.Module):
    """Learned tokens that do not depend on the image: class and distillation tokens."""

    decays = False

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, count, dim))

    def forward(self, batch: int) -> Tensor:
        """Return the tokens for a batch: (B, count, C)."""
        return self.weight.expand(batch, -1, -1)


class PositionEmbedding(Resampled):
    """One learned vector per position, added to the tokens. `extra` vectors are for tokens before those of the grid."""

    decays = False

    def __init__(self, grid: Grid, dim: int, *, extra: int = 0, interpolation: Interpolation = "bicubic") -> None:
        super().__init__()
        self.grid, self.extra, self.interpolation = grid, extra, interpolation
        self.weight = nn.Parameter(torch.zeros(1, extra + math.prod(grid), dim))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, extra+N, C) → (B, extra+N, C)."""
        return tokens + self.weight

    def resampled_from(self, other: "PositionEmbedding") -> dict[str, Tensor]:
        """Resample the grid's vectors and copy the extra ones.

        Bicubic interpolation nearly preserves the norm of the vectors, bilinear does not (thesis 3.4.5).
        """
        rows = other.weight[0]
        resized = resample_rows(rows[self.extra :], other.grid, self.grid, self.interpolation)
        return {"weight": torch.cat([rows[: self.extra], resized])[None]}
