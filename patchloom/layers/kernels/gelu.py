"""GELU for other kernels, and fused with an affine layer before it or a mean after it, for inference.

Letters: B images, P positions, C channels. PyTorch needs a separate pass for the affine layer, which reads two bytes at
a time.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import operator

POSITIONS, CHANNELS = 32, 64  # per step
WIDTH = 128  # columns per program


@triton.jit
def cumulative(x):
    """Return Φ(x) and the derivative of x · Φ(x), with an error of at most 1e-7.

    Both take one exponential and one division (Abramowitz and Stegun, 7.1.26). With erf, arithmetic rather than memory
    would limit the speed.
    """
    near = 1 / (1 + 0.23164188 * tl.abs(x))
    bell = tl.exp2(-0.7213475204444817 * x * x)
    tail = near * (1.421413741 + near * (-1.453152027 + near * 1.061405429))
    tail = 0.5 * bell * near * (0.254829592 + near * (-0.284496736 + tail))
    share = tl.where(x < 0, tail, 1 - tail)
    return share, share + 0.3989422804014327 * x * bell


@triton.jit
def cumulative_tanh(x):
    """Return the same for the approximation Φ(x) ≈ 0.5 · (1 + tanh(…))."""
    square = x * x
    share = 1 / (1 + tl.exp2(-2.302208198 * x * (1 + 0.044715 * square)))
    return share, share + share * (1 - share) * x * (1.5957691216057308 + 0.2140644488 * square)


@triton.jit
def gelu(x):
    """Return x · Φ(x)."""
    share, _ = cumulative(x)
    return x * share


@triton.jit
def gelu_tanh(x):
    """Return x · Φ(x), with the tanh approximation of Φ."""
    share, _ = cumulative_tanh(x)
    return x * share


@triton.jit
def _affine_gelu(x, weight, bias, out, rows, L, C, WEIGHTED: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr):
    # A program handles RB rows × CB columns. Rows are L wide: one or more positions of C channels.
    row = (tl.program_id(0) * RB + tl.arange(0, RB)).to(tl.int64)
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    mask = (row[:, None] < rows) & (columns[None, :] < L)
    offsets = row[:, None] * L + columns[None, :]
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if WEIGHTED:
        value *= tl.load(weight + columns % C, mask=columns < L, other=0.0).to(tl.float32)[None, :]
    value += tl.load(bias + columns % C, mask=columns < L, other=0.0).to(tl.float32)[None, :]
    tl.store(out + offsets, gelu(value).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gelu_and_mean(x, bias, out, means, C, P: tl.constexpr, PB: tl.constexpr, CB: tl.constexpr):
    # A program handles CB channels of all positions of one image.
    image = tl.program_id(0).to(tl.int64)
    channels = tl.program_id(1) * CB + tl.arange(0, CB)
    inside = channels < C
    shift = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((PB, CB), tl.float32)
    for first in tl.range(0, P, PB, num_stages=3):
        positions = first + tl.arange(0, PB)
        mask = (positions[:, None] < P) & inside[None, :]
        offsets = (image * P + positions[:, None]) * C + channels[None, :]
        activated = gelu(tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) + shift)
        total += tl.where(mask, activated, 0.0)
        tl.store(out + offsets, activated.to(out.dtype.element_ty), mask=mask)
    mean = tl.sum(total, axis=0) / P
    tl.store(means + image * C + channels, mean.to(means.dtype.element_ty), mask=inside)


def folded(positions: int, channels: int) -> tuple[int, int]:
    """Return (rows, columns) of a view in which a row holds as many positions as fill a program's width."""
    per_row = WIDTH // math.gcd(channels, WIDTH)
    whole = positions % per_row == 0
    return (positions // per_row, channels * per_row) if whole else (positions, channels)


@operator
def affine_gelu(x: Tensor, weight: Tensor | None, bias: Tensor) -> Tensor:
    """Return GELU(weight · x + bias), without gradients: (..., C), (C), (C) → (..., C)."""
    x = x.contiguous()
    out, channels = torch.empty_like(x), x.shape[-1]
    rows, length = folded(x.numel() // channels, channels)
    with torch.cuda.device_of(x):
        _affine_gelu[(triton.cdiv(rows, POSITIONS), triton.cdiv(length, WIDTH))](
            x, bias if weight is None else weight, bias, out, rows, length, channels,
            weight is not None, POSITIONS, WIDTH,
        )  # fmt: skip
    return out


@torch.library.register_fake("patchloom::affine_gelu")
def _(x: Tensor, weight: Tensor | None, bias: Tensor) -> Tensor:
    del weight, bias
    return x.new_empty(x.shape)


@operator
def gelu_and_mean(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return GELU(x + bias) and its mean over positions, without gradients: (B, P, C), (C) → (B, P, C), (B, C)."""
    x = x.contiguous()
    b, p, c = x.shape
    out, means = torch.empty_like(x), x.new_empty(b, c)
    with torch.cuda.device_of(x):
        _gelu_and_mean[(b, triton.cdiv(c, CHANNELS))](x, bias, out, means, c, p, POSITIONS, CHANNELS)
    return out, means


@torch.library.register_fake("patchloom::gelu_and_mean")
def _(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    del bias
    return x.new_empty(x.shape), x.new_empty(x.shape[0], x.shape[2])
