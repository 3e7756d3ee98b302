"""GELU(BatchNorm(x)) in training, with the statistics of the batch: the start of every unit of sMLPNet.

Letters: M positions of all images, C channels; the kernels see rows of L columns, one or more positions each. There are
two passes forward (sums; GELU) and two backward (sums; gradients). Only x is saved for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import cores, operator
from patchloom.layers.kernels.gelu import WIDTH, affine_gelu, cumulative, folded

ROWS, PER_CORE = 32, 4  # per step; programs per multiprocessor


@triton.jit
def _slope(z):
    # The derivative of GELU.
    _, slope = cumulative(z)
    return slope


@triton.jit
def _sums(x, first, second, rows, L, C, RB: tl.constexpr, CB: tl.constexpr):
    # Sums and sums of squares of x minus its first row, which keeps precision where the mean is large.
    # A program handles CB columns of every num_programs-th block of RB rows.
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    inside = columns < L
    offset = tl.load(x + columns % C, mask=inside, other=0.0).to(tl.float32)[None, :]
    total, squares = tl.zeros((RB, CB), tl.float32), tl.zeros((RB, CB), tl.float32)
    for begin in tl.range(tl.program_id(0) * RB, rows, tl.num_programs(0) * RB, num_stages=3):
        row = (begin + tl.arange(0, RB)).to(tl.int64)[:, None]
        mask = (row < rows) & inside[None, :]
        value = tl.load(x + row * L + columns[None, :], mask=mask, other=0.0).to(tl.float32) - offset
        value = tl.where(mask, value, 0.0)
        total += value
        squares += value * value
    place = tl.program_id(0) * L + columns
    tl.store(first + place, tl.sum(total, axis=0), mask=inside)
    tl.store(second + place, tl.sum(squares, axis=0), mask=inside)


@triton.jit
def _back_sums(x, grad, scale, shift, first, second, rows, L, C, RB: tl.constexpr, CB: tl.constexpr):
    # Sums of the gradient before the GELU, and of its product with x.
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    inside = columns < L
    factor = tl.load(scale + columns % C, mask=inside, other=0.0)[None, :]
    added = tl.load(shift + columns % C, mask=inside, other=0.0)[None, :]
    offset = tl.load(x + columns % C, mask=inside, other=0.0).to(tl.float32)[None, :]
    total, products = tl.zeros((RB, CB), tl.float32), tl.zeros((RB, CB), tl.float32)
    for begin in tl.range(tl.program_id(0) * RB, rows, tl.num_programs(0) * RB, num_stages=3):
        row = (begin + tl.arange(0, RB)).to(tl.int64)[:, None]
        offsets, mask = row * L + columns[None, :], (row < rows) & inside[None, :]
        value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        back = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * _slope(value * factor + added)
        total += back
        products += back * (value - offset)
    place = tl.program_id(0) * L + columns
    tl.store(first + place, tl.sum(total, axis=0), mask=inside)
    tl.store(second + place, tl.sum(products, axis=0), mask=inside)


@triton.jit
def _back(x, grad, scale, shift, slope, constant, out, rows, L, C, RB: tl.constexpr, CB: tl.constexpr):
    # scale · gradient before the GELU + slope · x + constant.
    row = (tl.program_id(0) * RB + tl.arange(0, RB)).to(tl.int64)[:, None]
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    inside, channels = columns < L, columns % C
    factor = tl.load(scale + channels, mask=inside, other=0.0)[None, :]
    added = tl.load(shift + channels, mask=inside, other=0.0)[None, :]
    offsets, mask = row * L + columns[None, :], (row < rows) & inside[None, :]
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    back = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32) * _slope(value * factor + added)
    result = factor * back + tl.load(slope + channels, mask=inside, other=0.0)[None, :] * value
    result += tl.load(constant + channels, mask=inside, other=0.0)[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


def _column_sums(kernel: Any, x: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two sums per channel that `kernel` computes, in float32."""
    c = x.shape[-1]
    rows, length = folded(x.numel() // c, c)
    blocks = triton.cdiv(length, WIDTH)
    programs = max(1, min(triton.cdiv(rows, ROWS), PER_CORE * cores(x.device) // blocks))
    partial = x.new_empty((2, programs, length), dtype=torch.float32)
    with torch.cuda.device_of(x):
        kernel[(programs, blocks)](x, *inputs, *partial, rows, length, c, ROWS, WIDTH)
    first, second = partial.sum(dim=1).view(2, -1, c).sum(dim=1)
    return first, second


@operator
def batch_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return GELU(BatchNorm(x)) (..., C), and mean and variance of the batch, (C) each, in float32."""
    x = x.contiguous()
    c = x.shape[-1]
    m = x.numel() // c
    total, squares = _column_sums(_sums, x)
    offset = x.view(m, c)[0].float()
    mean, var = offset + total / m, (squares / m - (total / m).square()).clamp(min=0)
    return affine_gelu(x, *_affine(weight, bias, mean, var, eps)), mean, var


@torch.library.register_fake("patchloom::batch_norm_gelu")
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    del bias, eps
    mean, var = (weight.new_empty(weight.shape, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, var


def _affine(weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return scale and shift of the BatchNorm as scale · x + shift."""
    scale = weight * torch.rsqrt(var + eps)
    return scale, bias - mean * scale


@operator
def batch_norm_gelu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    x, grad = x.contiguous(), grad.contiguous()
    c = x.shape[-1]
    m = x.numel() // c
    scale, shift = _affine(weight.float(), bias.float(), mean, var, eps)
    of_bias, products = _column_sums(_back_sums, x, grad, scale, shift)
    deviation = torch.rsqrt(var + eps)
    offset = x.view(m, c)[0].float()
    of_weight = (products + (offset - mean) * of_bias) * deviation
    slope = -scale * of_weight * deviation / m
    constant = -scale * of_bias / m - slope * mean
    out = torch.empty_like(x)
    rows, length = folded(m, c)
    with torch.cuda.device_of(x):
        _back[(triton.cdiv(rows, ROWS), triton.cdiv(length, WIDTH))](
            x, grad, scale, shift, slope, constant, out, rows, length, c, ROWS, WIDTH
        )
    return out, of_weight.to(weight.dtype), of_bias.to(bias.dtype)


@torch.library.register_fake("patchloom::batch_norm_gelu_backward")
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, mean, var, eps
    return x.new_empty(x.shape), torch.empty_like(weight), torch.empty_like(bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.eps = inputs
    _, mean, var = output
    ctx.mark_non_differentiable(mean, var)
    ctx.save_for_backward(x, weight, bias, mean, var)


def _compute_gradients(ctx: Any, grad: Tensor, of_mean: Tensor, of_var: Tensor) -> tuple[Tensor | None, ...]:
    del of_mean, of_var
    x, weight, bias, mean, var = ctx.saved_tensors
    return *batch_norm_gelu_backward(grad, x, weight, bias, mean, var, ctx.eps), None


torch.library.register_autograd("patchloom::batch_norm_gelu", _compute_gradients, setup_context=_setup_context)
