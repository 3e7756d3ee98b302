"""sMLPNet's map beside its mixed rows and its mixed columns, as the fusing layer reads them, for inference.

Letters: B images, H×W positions, C channels. A line is a row of the map, W positions of C numbers, or all columns at
once, H positions of W·C numbers. The results are written where a concatenation would put them, so fusing is one
product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from patchloom.layers.kernels import cores

NUMBERS = 128  # of each position, of one program


@triton.jit
def _mix(
    maps, weight, bias, out, lines, LENGTH, C, PART: tl.constexpr, KEPT: tl.constexpr,
    N: tl.constexpr, NB: tl.constexpr, LB: tl.constexpr,
):  # fmt: skip
    """weight · line + bias of some numbers of some lines, to the PART of three; with KEPT the line to the first too."""
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
        there = known[:, None] & (numbers[None, :] < LENGTH)
        seen = tl.load(maps + start + positions[:, None] * LENGTH + numbers[None, :], mask=there, other=0.0)
        mixed = tl.dot(matrix, seen, input_precision="ieee") + shift
        wide = numbers // C * 3 * C + numbers % C
        places = 3 * start + positions[:, None] * 3 * LENGTH + wide[None, :]
        if KEPT:
            tl.store(out + places, seen, mask=there)
        tl.store(out + places + PART * C, mixed.to(out.dtype.element_ty), mask=there)


@torch.library.custom_op("patchloom::beside_rows_and_columns", mutates_args=())
def beside_rows_and_columns(
    maps: Tensor, row_weight: Tensor, row_bias: Tensor, column_weight: Tensor, column_bias: Tensor
) -> Tensor:
    """The map, its mixed rows and its mixed columns, without gradients; (B, H, W, C), (W, W), (W), (H, H), (H) →
    (B, H, W, 3·C).
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


@beside_rows_and_columns.register_fake
def _(maps: Tensor, row_weight: Tensor, row_bias: Tensor, column_weight: Tensor, column_bias: Tensor) -> Tensor:
    del row_weight, row_bias, column_weight, column_bias
    return maps.new_empty(*maps.shape[:-1], 3 * maps.shape[-1])
