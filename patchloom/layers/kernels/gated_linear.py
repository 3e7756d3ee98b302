"""The end of PatchConvNet's block for inference: gate the maps, apply a linear layer, add the residual.

Letters: B images, P positions, C channels in, D out. Maps are gated while they are read, and the residual is added
while the result is written. PyTorch needs two further passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import operator

ROWS, OUTPUTS, CHANNELS, WARPS, STAGES = 128, 128, 64, 4, 3  # CHANNELS: per step


@triton.jit
def _forward(
    maps, gate, weight, bias, added_to, out, P, C, D,
    RB: tl.constexpr, DB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    # A program handles DB outputs of RB positions of one image.
    blocks, tiles = tl.cdiv(D, DB), tl.cdiv(P, RB)
    image = (tl.program_id(0) // (blocks * tiles)).to(tl.int64)
    rows = tl.program_id(0) // blocks % tiles * RB + tl.arange(0, RB)
    outputs = tl.program_id(0) % blocks * DB + tl.arange(0, DB)
    start = maps + image * P * C
    total = tl.zeros((RB, DB), tl.float32)
    for first in tl.range(0, C, CB):
        channels = first + tl.arange(0, CB)
        inside = channels < C
        value = tl.load(
            start + rows[:, None] * C + channels[None, :], mask=(rows[:, None] < P) & inside[None, :], other=0.0
        )
        gates = tl.load(gate + image * C + channels, mask=inside, other=0.0)
        weights = tl.load(
            weight + outputs[:, None] * C + channels[None, :],
            mask=(outputs[:, None] < D) & inside[None, :],
            other=0.0,
        )
        total = tl.dot(value * gates[None, :], tl.trans(weights), total, input_precision="ieee")
    total += tl.load(bias + outputs, mask=outputs < D, other=0.0).to(tl.float32)[None, :]
    offsets, mask = rows[:, None] * D + outputs[None, :], (rows[:, None] < P) & (outputs[None, :] < D)
    total += tl.load(added_to + image * P * D + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + image * P * D + offsets, total.to(out.dtype.element_ty), mask=mask)


@operator
def gated_linear(added_to: Tensor, maps: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return added_to + (gate · maps) · weightᵀ + bias, without gradients.

    (B, P, D), (B, P, C), (B, C), (D, C), (D) → (B, P, D)
    """
    added_to, maps, gate, weight = (each.contiguous() for each in (added_to, maps, gate, weight))
    (b, p, c), d = maps.shape, weight.shape[0]
    out = torch.empty_like(added_to)
    with torch.cuda.device_of(maps):
        _forward[(b * triton.cdiv(p, ROWS) * triton.cdiv(d, OUTPUTS),)](
            maps, gate, weight, bias, added_to, out, p, c, d,
            ROWS, OUTPUTS, CHANNELS, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


@torch.library.register_fake("patchloom::gated_linear")
def _(added_to: Tensor, maps: Tensor, gate: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    del maps, gate, weight, bias
    return added_to.new_empty(added_to.shape)
