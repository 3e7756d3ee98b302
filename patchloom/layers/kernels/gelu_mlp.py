"""An MLP in training, whose GELU runs at memory speed, forward and backward.

Letters: M positions of all images, D hidden units. The GELU that torch.compile generates is limited by the arithmetic
of erf, and sums the gradient of the bias in a separate pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from patchloom.layers.kernels import cores, operator
from patchloom.layers.kernels.gelu import cumulative, cumulative_tanh, gelu, gelu_tanh

BLOCK = 2048  # numbers per program, forward
ROWS, COLUMNS, PER_CORE = 32, 128, 8  # per step, backward; programs per multiprocessor


@triton.jit
def _forward(hidden, out, count, TANH: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(hidden + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    y = gelu_tanh(x) if TANH else gelu(x)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=offsets < count)


@triton.jit
def _backward(
    grad, hidden, of_hidden, activated, sums, M, D, TANH: tl.constexpr, RB: tl.constexpr, CB: tl.constexpr
):  # fmt: skip
    # A program handles CB columns of every num_programs-th block of RB rows.
    columns = tl.program_id(1) * CB + tl.arange(0, CB)
    inside = columns < D
    total = tl.zeros((RB, CB), tl.float32)
    for begin in tl.range(tl.program_id(0) * RB, M, tl.num_programs(0) * RB, num_stages=3):
        row = (begin + tl.arange(0, RB)).to(tl.int64)[:, None]
        offsets, mask = row * D + columns[None, :], (row < M) & inside[None, :]
        x = tl.load(hidden + offsets, mask=mask, other=0.0).to(tl.float32)
        back = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
        share, slope = cumulative_tanh(x) if TANH else cumulative(x)
        back *= slope
        total += back
        tl.store(of_hidden + offsets, back.to(of_hidden.dtype.element_ty), mask=mask)
        tl.store(activated + offsets, (x * share).to(activated.dtype.element_ty), mask=mask)
    tl.store(sums + tl.program_id(0) * D + columns, tl.sum(total, axis=0), mask=inside)


@operator
def gelu_of(hidden: Tensor, tanh: bool) -> Tensor:
    """Return GELU(hidden)."""
    hidden = hidden.contiguous()
    out = torch.empty_like(hidden)
    with torch.cuda.device_of(hidden):
        _forward[(triton.cdiv(hidden.numel(), BLOCK),)](hidden, out, hidden.numel(), tanh, BLOCK)
    return out


@torch.library.register_fake("patchloom::gelu_of")
def _(hidden: Tensor, tanh: bool) -> Tensor:
    del tanh
    return hidden.new_empty(hidden.shape)


@operator
def gelu_backward(grad: Tensor, hidden: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `hidden` (M, D), GELU(hidden) (M, D), and the gradient's sum over rows (D)."""
    grad, hidden = grad.contiguous(), hidden.contiguous()
    m, d = hidden.shape
    of_hidden, activated = torch.empty_like(hidden), torch.empty_like(hidden)
    blocks = triton.cdiv(d, COLUMNS)
    programs = max(1, min(triton.cdiv(m, ROWS), PER_CORE * cores(hidden.device) // blocks))
    sums = hidden.new_empty((programs, d), dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        _backward[(programs, blocks)](grad, hidden, of_hidden, activated, sums, m, d, tanh, ROWS, COLUMNS)
    return of_hidden, activated, sums.sum(dim=0)


@torch.library.register_fake("patchloom::gelu_backward")
def _(grad: Tensor, hidden: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    del grad, tanh
    return (
        hidden.new_empty(hidden.shape),
        hidden.new_empty(hidden.shape),
        hidden.new_empty(hidden.shape[1:], dtype=torch.float32),
    )


class GeluMLP(torch.autograd.Function):
    """weight2 · GELU(weight1 · x + bias1) + bias2, which saves x and the hidden layer for the backward pass.

    Autograd would also save GELU(hidden), which the backward kernel recomputes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, tanh: bool
    ) -> Tensor:
        """(..., C), (D, C), (D), (E, D), (E) → (..., E)."""
        first, second = weight1.to(x.dtype), weight2.to(x.dtype)
        hidden = F.linear(x.reshape(-1, x.shape[-1]), first, bias1.to(x.dtype))  # (M, D)
        out = F.linear(gelu_of(hidden, tanh), second, bias2.to(x.dtype))
        ctx.save_for_backward(x, hidden, first, second)
        ctx.tanh, ctx.dtypes = tanh, (weight1.dtype, bias1.dtype, weight2.dtype, bias2.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weights and biases."""
        x, hidden, first, second = ctx.saved_tensors
        back = grad.reshape(-1, grad.shape[-1]).to(x.dtype)
        of_hidden, activated, of_bias1 = gelu_backward(back @ second, hidden, ctx.tanh)
        of_weight1 = of_hidden.T @ x.reshape(-1, x.shape[-1])
        gradients = (of_weight1, of_bias1, back.T @ activated, back.sum(dim=0, dtype=torch.float32))
        of_weights = [each.to(dtype) for each, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (of_hidden @ first).view(x.shape), *of_weights, None
