"""The concatenation of sMLPNet's map, its mixed rows and its mixed columns, for inference.

Letters: B images, H×W positions, C channels. A line is a row of the map (W positions of C numbers) or all columns at
once (H positions of W·C numbers). The results are written to their places in the concatenation, so that the fusing
layer is one product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import cores, operator

NUMBERS = 128  # per position and step


@triton.jit
def _mix(
    maps, weight, bias, out, lines, LENGTH, C, PART: tl.constexpr, COPY: tl.constexpr,
    N: tl.constexpr, NB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    # Write weight · line + bias to the PART-th third of the output; with COPY, also the line itself to the first.
    positions = tl.arange(0, NB)
    known = positions < N
    matrix = tl.load(
        weight + positions[:, None] * N + positions[None, :], mask=known[:, None] & known[None, :], other=0.0
    )
    shift = tl.load(bias + positions, mask=known, other=0.0).to(tl.float32)[:, None]
    blocks = tl.cdiv(LENGTH, LB)
    for tile in tl.range(tl.program_id(0), lines * blocks, tl.num_programs(0), num_stages=4):
        start = (tile // blocks).to(tl.int64) * N * LENGTH
        numbers = tile % blocks * LB + tl.arange(0, LB)
        mask = known[:, None] & (numbers[None, :] < LENGTH)
        value = tl.load(maps + start + positions[:, None] * LENGTH + numbers[None, :], mask=mask, other=0.0)
        mixed = tl.dot(matrix, value, input_precision="ieee") + shift
        wide = numbers // C * 3 * C + numbers % C
        offsets = 3 * start + positions[:, None] * 3 * LENGTH + wide[None, :]
        if COPY:
            tl.store(out + offsets, value, mask=mask)
        tl.store(out + offsets + PART * C, mixed.to(out.dtype.element_ty), mask=mask)


@operator
def concat_rows_and_columns(
    maps: Tensor, row_weight: Tensor, row_bias: Tensor, column_weight: Tensor, column_bias: Tensor
) -> Tensor:
    """Return the map, its mixed rows and its mixed columns, concatenated, without gradients.

    (B, H, W, C), (W, W), (W), (H, H), (H) → (B, H, W, 3·C)
    """
    maps, row_weight, column_weight = (each.contiguous() for each in (maps, row_weight, column_weight))
    b, h, w, c = maps.shape
    out = maps.new_empty(b, h, w, 3 * c)

    def launch(weight: Tensor, bias: Tensor, lines: int, length: int, part: int) -> None:
        n = len(weight)
        programs = min(lines * triton.cdiv(length, NUMBERS), 4 * cores(maps.device))
        _mix[(programs,)](
            maps, weight, bias, out, lines, length, c, part, part == 1,
            n, max(16, triton.next_power_of_2(n)), NUMBERS, num_warps=4,
        )  # fmt: skip

    with torch.cuda.device_of(maps):
        launch(row_weight, row_bias, b * h, c, 1)
        launch(column_weight, column_bias, b, w * c, 2)
    return out


@torch.library.register_fake("patchloom::concat_rows_and_columns")
def _(maps: Tensor, row_weight: Tensor, row_bias: Tensor, column_weight: Tensor, column_bias: Tensor) -> Tensor:
    del row_weight, row_bias, column_weight, column_bias
    return maps.new_empty(*maps.shape[:-1], 3 * maps.shape[-1])
