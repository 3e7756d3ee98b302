"""Mixer's token MLP with its residual sum in one pass over the tokens. The hidden layer stays in registers.

Letters: B images, N positions, C channels, D hidden units. A program holds some channels of one image, loops over the
hidden units and sums their contributions to the output. It computes the transpose, so that the hidden units of a
channel stay in the registers of the thread that computed them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from patchloom.layers.kernels import aligned, operator
from patchloom.layers.kernels.gelu import gelu, gelu_tanh

HIDDEN, CHANNELS = 64, 128  # per step, per program


@triton.jit
def _forward(
    tokens, weight1, bias1, weight2, bias2, added_to, out, C,
    N: tl.constexpr, D: tl.constexpr, TANH: tl.constexpr, NB: tl.constexpr, DB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    # A program handles CB channels of one image.
    blocks = tl.cdiv(C, CB)
    image = (tl.program_id(0) // blocks).to(tl.int64)
    channels = tl.program_id(0) % blocks * CB + tl.arange(0, CB)
    positions, units = tl.arange(0, NB), tl.arange(0, DB)
    mask = (positions[:, None] < N) & (channels[None, :] < C)
    offsets = (image * N + positions[:, None]) * C + channels[None, :]
    columns = tl.trans(tl.load(tokens + offsets, mask=mask, other=0.0))  # (CB, NB)
    total = tl.zeros((CB, NB), tl.float32)
    for first in tl.range(0, D, DB, num_stages=2):
        some = first + units
        inside = (some[:, None] < D) & (positions[None, :] < N)
        into = tl.load(weight1 + some[:, None] * N + positions[None, :], mask=inside, other=0.0)  # (DB, NB)
        shift = tl.load(bias1 + some, mask=some < D, other=0.0).to(tl.float32)
        hidden = tl.dot(columns, tl.trans(into), input_precision="ieee") + shift[None, :]
        hidden = gelu_tanh(hidden) if TANH else gelu(hidden)
        inside = (positions[:, None] < N) & (some[None, :] < D)
        back = tl.load(weight2 + positions[:, None] * D + some[None, :], mask=inside, other=0.0)  # (NB, DB)
        total = tl.dot(hidden.to(columns.dtype), tl.trans(back), total, input_precision="ieee")
    result = tl.trans(total) + tl.load(bias2 + positions, mask=positions < N, other=0.0).to(tl.float32)[:, None]
    result += tl.load(added_to + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=mask)


@operator
def token_mlp(
    added_to: Tensor, tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, tanh: bool
) -> Tensor:
    """Return added_to + weight2 · GELU(weight1 · tokens + bias1) + bias2.

    (B, N, C), (B, N, C), (D, N), (D), (N, D), (N) → (B, N, C)
    """
    added_to, tokens = added_to.contiguous(), tokens.contiguous()
    b, n, c = tokens.shape
    low = tokens.dtype
    out = torch.empty_like(added_to)
    with torch.cuda.device_of(tokens):
        _forward[(b * triton.cdiv(c, CHANNELS),)](
            tokens, weight1.to(low).contiguous(), bias1, weight2.to(low).contiguous(), bias2, added_to, out,
            c, n, weight1.shape[0], tanh, max(16, triton.next_power_of_2(n)), HIDDEN, CHANNELS, num_warps=8,
        )  # fmt: skip
    return out


@torch.library.register_fake("patchloom::token_mlp")
def _(
    added_to: Tensor, tokens: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, tanh: bool
) -> Tensor:
    del tokens, weight1, bias1, weight2, bias2, tanh
    return added_to.new_empty(added_to.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, tokens, *weights, ctx.tanh = inputs
    ctx.save_for_backward(tokens, *weights)


def _compute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # The hidden layer is recomputed: only the tokens were saved.
    tokens, weight1, bias1, weight2, bias2 = ctx.saved_tensors
    (b, n, _), low = tokens.shape, tokens.dtype
    tokens, back = aligned(tokens, -2), aligned(grad.to(low), -2)
    first, second = aligned(weight1.to(low), -1), aligned(weight2.to(low), -2)
    # baddbmm would first fill its result with the bias, in a separate pass.
    hidden = torch.bmm(first.expand(b, -1, -1), tokens) + bias1.to(low).unsqueeze(-1)  # (B, D, C)
    approximate = "tanh" if ctx.tanh else "none"
    of_weight2 = torch.bmm(back, F.gelu(hidden, approximate=approximate).transpose(1, 2)).sum(
        dim=0, dtype=torch.float32
    )
    of_hidden = torch.bmm(second.T.expand(b, -1, -1), back)
    of_hidden = torch.ops.aten.gelu_backward(of_hidden, hidden, approximate=approximate)
    of_weight1 = torch.bmm(of_hidden, tokens.transpose(1, 2)).sum(dim=0, dtype=torch.float32)
    return (
        grad,
        torch.bmm(first.T.expand(b, -1, -1), of_hidden)[:, :n],
        of_weight1[:, :n].to(weight1.dtype),
        of_hidden.sum(dim=(0, 2), dtype=torch.float32).to(bias1.dtype),
        of_weight2[:n].to(weight2.dtype),
        grad.sum(dim=(0, 2), dtype=torch.float32).to(bias2.dtype),
        None,
    )


torch.library.register_autograd("patchloom::token_mlp", _compute_gradients, setup_context=_setup_context)
