"""Talking heads between the two products of attention: mix heads, softmax, mix heads, in one pass over the logits.

Letters: B images, H heads, T queries, N keys. A program holds the H rows of one query of one image. Keys after the
first `num_keys` are padding: their weights and gradients are 0.

    weights = after · softmax(before · logits) + bias

PyTorch writes and reads (B, H, T, N) five times for that, and multiplies 8×8 by 8×T·N matrices, which fill an eighth
of a tensor core. The bias of the first mixing adds the same number to a whole row, which does not change the softmax,
so its gradient is 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import operator

ROWS = 10  # queries per program, backward


def plain(logits: Tensor, before: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    """Return the same with PyTorch operations: (B, H, T, N), (H, H), (H, H), (H) → (B, H, T, N)."""
    mixed = torch.einsum("gh,bhtn->bgtn", before.to(logits.dtype), logits)
    weights = mixed.softmax(dim=-1).to(logits.dtype)
    return torch.einsum("gh,bhtn->bgtn", after.to(logits.dtype), weights) + bias.to(logits.dtype).view(-1, 1, 1)


@triton.jit
def _mixed_softmax(logits, before, NUM_KEYS: tl.constexpr, keys):
    # Rows (H, N) → softmax of the mixed rows. Padding has weight 0.
    mixed = tl.dot(before, logits, input_precision="ieee")
    mixed = tl.where(keys < NUM_KEYS, mixed, -float("inf"))
    mixed = tl.exp(mixed - tl.max(mixed, axis=1)[:, None])
    return mixed / tl.sum(mixed, axis=1)[:, None]


@triton.jit
def _forward(
    logits, before, after, bias, out, T,
    NUM_KEYS: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    # A program handles one query of one image.
    image, query = tl.program_id(0) // T, tl.program_id(0) % T
    heads, keys = tl.arange(0, HB), tl.arange(0, NB)
    offsets = ((image * H + heads[:, None]).to(tl.int64) * T + query) * N + keys[None, :]
    mask = (heads[:, None] < H) & (keys[None, :] < N)
    square = heads[:, None] * H + tl.arange(0, HB)[None, :]
    inside = (heads[:, None] < H) & (tl.arange(0, HB)[None, :] < H)
    rows = tl.load(logits + offsets, mask=mask, other=0.0)
    first = tl.load(before + square, mask=inside, other=0.0).to(rows.dtype)
    weights = _mixed_softmax(rows, first, NUM_KEYS, keys[None, :])
    second = tl.load(after + square, mask=inside, other=0.0).to(rows.dtype)
    mixed = tl.dot(second, weights.to(rows.dtype), input_precision="ieee")
    mixed += tl.load(bias + heads, mask=heads < H, other=0.0).to(tl.float32)[:, None]
    tl.store(out + offsets, tl.where(keys[None, :] < NUM_KEYS, mixed, 0.0).to(rows.dtype), mask=mask)


@triton.jit
def _backward(
    logits, before, after, grad, of_logits, of_before, of_after, T,
    ROWS: tl.constexpr, NUM_KEYS: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    # A program handles ROWS queries of one image: the gradients of their logits, and partial sums of those of the
    # two matrices.
    groups = tl.cdiv(T, ROWS)
    image, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    heads, others, keys = tl.arange(0, HB), tl.arange(0, HB), tl.arange(0, NB)
    square = heads[:, None] * H + others[None, :]
    inside = (heads[:, None] < H) & (others[None, :] < H)
    low = logits.dtype.element_ty
    first = tl.load(before + square, mask=inside, other=0.0).to(low)
    second = tl.load(after + square, mask=inside, other=0.0).to(low)
    to_first = tl.zeros((HB, HB), tl.float32)
    to_second = tl.zeros((HB, HB), tl.float32)
    for row in range(ROWS):
        query = group * ROWS + row
        offsets = ((image * H + heads[:, None]).to(tl.int64) * T + query) * N + keys[None, :]
        mask = (heads[:, None] < H) & (keys[None, :] < N) & (query + 0 * keys[None, :] < T)
        rows = tl.load(logits + offsets, mask=mask, other=0.0)
        back = tl.load(grad + offsets, mask=mask & (keys[None, :] < NUM_KEYS), other=0.0)
        weights = _mixed_softmax(rows, first, NUM_KEYS, keys[None, :])
        to_second += tl.dot(back, tl.trans(weights.to(low)), input_precision="ieee")
        of_weights = tl.dot(tl.trans(second), back, input_precision="ieee")
        of_mixed = weights * (of_weights - tl.sum(weights * of_weights, axis=1)[:, None])
        to_first += tl.dot(of_mixed.to(low), tl.trans(rows), input_precision="ieee")
        result = tl.dot(tl.trans(first), of_mixed.to(low), input_precision="ieee")
        tl.store(of_logits + offsets, result.to(low), mask=mask)
    start = tl.program_id(0).to(tl.int64) * H * H
    tl.store(of_before + start + square, to_first, mask=inside)
    tl.store(of_after + start + square, to_second, mask=inside)


@operator
def talking_heads(logits: Tensor, before: Tensor, idle: Tensor, after: Tensor, bias: Tensor, num_keys: int) -> Tensor:
    """(B, H, T, N), (H, H), (H), (H, H), (H) → attention weights (B, H, T, N).

    `idle` is the first bias, which has no effect; it is an argument so that its gradient is 0 rather than None.
    """
    del idle
    logits, before, after = logits.contiguous(), before.contiguous(), after.contiguous()
    out = torch.empty_like(logits)
    b, h, t, n = logits.shape
    with torch.cuda.device_of(logits):
        _forward[(b * t,)](logits, before, after, bias, out, t, num_keys, n, h, *_blocks(h, n), num_warps=4)
    return out


@torch.library.register_fake("patchloom::talking_heads")
def _(logits: Tensor, before: Tensor, idle: Tensor, after: Tensor, bias: Tensor, num_keys: int) -> Tensor:
    del before, idle, after, bias, num_keys
    return logits.new_empty(logits.shape)


@operator
def talking_heads_backward(
    logits: Tensor, before: Tensor, after: Tensor, grad: Tensor, num_keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `logits`, `before` and `after`. Only the logits were saved."""
    logits, grad = logits.contiguous(), grad.contiguous()
    b, h, t, n = logits.shape
    programs = b * -(-t // ROWS)
    of_logits = torch.empty_like(logits)
    partial = logits.new_empty((2, programs, h, h), dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _backward[(programs,)](
            logits, before.contiguous(), after.contiguous(), grad, of_logits, *partial,
            t, ROWS, num_keys, n, h, *_blocks(h, n), num_warps=4,
        )  # fmt: skip
    return of_logits, partial[0].sum(dim=0).to(before.dtype), partial[1].sum(dim=0).to(after.dtype)


@torch.library.register_fake("patchloom::talking_heads_backward")
def _(logits: Tensor, before: Tensor, after: Tensor, grad: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor]:
    del grad, num_keys
    return logits.new_empty(logits.shape), torch.empty_like(before), torch.empty_like(after)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.num_keys = inputs
    ctx.save_for_backward(*tensors)


def _compute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    logits, before, idle, after, bias = ctx.saved_tensors
    of_bias = grad[..., : ctx.num_keys].sum(dim=(0, 2, 3), dtype=torch.float32).to(bias.dtype)
    of_logits, of_before, of_after = talking_heads_backward(logits, before, after, grad, ctx.num_keys)
    return of_logits, of_before, torch.zeros_like(idle), of_after, of_bias, None


torch.library.register_autograd("patchloom::talking_heads", _compute_gradients, setup_context=_setup_context)


def _blocks(heads: int, keys: int) -> tuple[int, int]:
    """Return tile sizes: powers of two, at least those of a tensor core."""
    return max(16, triton.next_power_of_2(heads)), max(16, triton.next_power_of_2(keys))
