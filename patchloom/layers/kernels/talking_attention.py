"""Attention with talking heads in one pass over queries, keys and values, for inference. Logits stay in registers.

Letters: B images, H heads, T tokens, d channels per head, C = H·d. The mixing of heads moves into the two products,
which then run over all channels instead of those of one head:

    mixed logits (t, g)(n) = Σ_c before[g, head of c] · q[t, c] · k[n, c]
    out (t)(c)             = Σ_h after[head of c, h] · (weights[t, h] · v)[c] + bias[head of c] · Σ_n v[n, c]

That is H times the arithmetic of attention, but all of it runs on tensor cores. The bias of the first mixing adds the
same number to a whole row, which does not change the softmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import operator

ROWS, CHANNELS, WARPS, STAGES = 64, 32, 4, 3  # ROWS: queries × heads per program; CHANNELS: per step


@triton.jit
def _attend(
    qkv, before, after, bias, out, T, SCALE, C: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HB: tl.constexpr, TB: tl.constexpr, NB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    # A program handles TB queries of one image. A row is one head of one query.
    groups = tl.cdiv(T, TB)
    image, first = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups * TB
    rows, keys, some = tl.arange(0, TB * HB), tl.arange(0, NB), tl.arange(0, CB)
    query, head = first + rows // HB, rows % HB
    start = qkv + image * T * 3 * C
    logits = tl.zeros((TB * HB, NB), tl.float32)
    for begin in tl.range(0, C, CB):
        channels = begin + some
        inside = channels[None, :] < C
        q = tl.load(start + query[:, None] * 3 * C + channels[None, :], mask=(query[:, None] < T) & inside, other=0.0)
        talk = tl.load(
            before + head[:, None] * H + channels[None, :] // D, mask=(head[:, None] < H) & inside, other=0.0
        )
        k = tl.load(start + C + keys[:, None] * 3 * C + channels[None, :], mask=(keys[:, None] < T) & inside, other=0.0)
        logits = tl.dot((q * talk).to(q.dtype), tl.trans(k), logits, input_precision="ieee")
    logits = tl.where(keys[None, :] < T, logits * SCALE, -float("inf"))
    weights = tl.exp2(logits - tl.max(logits, axis=1)[:, None])
    weights = (weights / tl.sum(weights, axis=1)[:, None]).to(qkv.dtype.element_ty)
    queries = first + tl.arange(0, TB)
    for begin in tl.range(0, C, CB):
        channels = begin + some
        inside = channels[None, :] < C
        v = tl.load(
            start + 2 * C + keys[:, None] * 3 * C + channels[None, :], mask=(keys[:, None] < T) & inside, other=0.0
        )
        product = tl.dot(weights, v, input_precision="ieee")
        talk = tl.load(after + channels[None, :] // D * H + head[:, None], mask=(head[:, None] < H) & inside, other=0.0)
        product = tl.sum(tl.reshape(product * talk.to(tl.float32), (TB, HB, CB)), axis=1)
        shift = tl.load(bias + channels // D, mask=channels < C, other=0.0).to(tl.float32)
        product += (shift * tl.sum(v.to(tl.float32), axis=0))[None, :]
        offsets = (image * T + queries[:, None]) * C + channels[None, :]
        tl.store(out + offsets, product.to(out.dtype.element_ty), mask=(queries[:, None] < T) & inside)


@operator
def talking_attention(qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    """qkv (B, T, 3·C), mixing before (H, H) and after (H, H) the softmax, bias (H) → (B, T, C)."""
    qkv, before, after = qkv.contiguous(), before.contiguous(), after.contiguous()
    (b, t, c), h = qkv.shape, before.shape[0]
    c //= 3
    out = qkv.new_empty(b, t, c)
    heads = triton.next_power_of_2(h)
    queries = max(1, ROWS // heads)
    scale = (c // h) ** -0.5 * 1.4426950408889634  # log2(e), for exp2
    with torch.cuda.device_of(qkv):
        _attend[(b * triton.cdiv(t, queries),)](
            qkv, before, after, bias, out, t, scale, c,
            h, c // h, heads, queries, max(16, triton.next_power_of_2(t)), CHANNELS, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


@torch.library.register_fake("patchloom::talking_attention")
def _(qkv: Tensor, before: Tensor, after: Tensor, bias: Tensor) -> Tensor:
    del before, after, bias
    return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)
