"""A matrix across positions (weight · tokens) with bias, scale and residual sum in one pass over the tokens.

Letters: B images, N positions in, M out, C channels. A program holds the matrix, or some rows of it, and loops over
tiles of N positions × some channels. A tile is read once per block of rows. cuBLAS pads the 7 to 56 positions of a row
or column of a map to its smallest tile, and needs further passes for sum, scale and bias.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import cores, operator


@triton.jit
def _mix(
    tokens, weight, scale, bias, out, tiles, C,
    N: tl.constexpr, M: tl.constexpr, ADDED: tl.constexpr, NB: tl.constexpr, MB: tl.constexpr, CB: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # weight · tokens + bias, or with ADDED: tokens + scale · (weight · tokens + bias).
    rows, columns = tl.program_id(1) * MB + tl.arange(0, MB), tl.arange(0, NB)
    known = rows[:, None] < M
    matrix = tl.load(weight + rows[:, None] * N + columns[None, :], mask=known & (columns[None, :] < N), other=0.0)
    if not ADDED:
        shift = tl.load(bias + rows, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    blocks = tl.cdiv(C, CB)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        image = (tile // blocks).to(tl.int64)
        channels = tile % blocks * CB + tl.arange(0, CB)
        inside = channels[None, :] < C
        start = tokens + image * N * C
        value = tl.load(
            start + columns[:, None] * C + channels[None, :], mask=(columns[:, None] < N) & inside, other=0.0
        )
        mixed = tl.dot(matrix, value, input_precision="ieee")
        offsets, mask = rows[:, None] * C + channels[None, :], known & inside
        if ADDED:
            mixed += tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
            mixed *= tl.load(scale + channels, mask=channels < C, other=0.0).to(tl.float32)[None, :]
            mixed += tl.load(start + offsets, mask=mask, other=0.0).to(tl.float32)
        else:
            mixed += shift
        tl.store(out + image * M * C + offsets, mixed.to(out.dtype.element_ty), mask=mask)


def _launch(tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, *, added: bool) -> Tensor:
    tokens, weight, bias = tokens.contiguous(), weight.to(tokens.dtype).contiguous(), bias.contiguous()
    (b, n, c), m = tokens.shape, weight.shape[0]
    out = tokens.new_empty(b, m, c)
    nb = max(16, triton.next_power_of_2(n))
    # Block sizes tuned for 14, 28, 56 and 196 positions.
    if n <= 64:
        mb, cb, per_core, stages = max(16, triton.next_power_of_2(m)), 128, 4, 4
    else:
        mb, cb, per_core, stages = (64, 64, 1, 3) if c < 512 else (128, 32, 1, 3)
    tiles = b * triton.cdiv(c, cb)
    programs = min(tiles, cores(tokens.device) * per_core)
    with torch.cuda.device_of(tokens):
        _mix[(programs, triton.cdiv(m, mb))](
            tokens, weight, scale, bias, out, tiles, c, n, m, added, nb, mb, cb, stages, num_warps=4
        )
    return out


@operator
def mixed_and_added(tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return tokens + scale · (weight · tokens + bias), without gradients.

    (B, N, C), (N, N), (C), (N, C) → (B, N, C)
    """
    return _launch(tokens, weight, scale.contiguous(), bias, added=True)


@torch.library.register_fake("patchloom::mixed_and_added")
def _(tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    del weight, scale, bias
    return tokens.new_empty(tokens.shape)


@operator
def mixed(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return weight · tokens + bias: (B, N, C), (M, N), (M) → (B, M, C)."""
    return _launch(tokens, weight, bias, bias, added=False)


@torch.library.register_fake("patchloom::mixed")
def _(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    del bias
    return tokens.new_empty(tokens.shape[0], weight.shape[0], tokens.shape[2])


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _compute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    tokens, weight, bias = ctx.saved_tensors
    of_tokens = mixed(grad, weight.T, bias.new_zeros(weight.shape[1]))
    of_weight = torch.bmm(grad, tokens.transpose(1, 2)).sum(dim=0, dtype=torch.float32).to(weight.dtype)
    return of_tokens, of_weight, grad.sum(dim=(0, 2), dtype=torch.float32).to(bias.dtype)


torch.library.register_autograd("patchloom::mixed", _compute_gradients, setup_context=_setup_context)
