"""Which blocks of a network make the maps of a pyramid: one map per stride that a task asks for.

A stride is pixels of the image per place of a map. A network says what its blocks give (`Network.taps`): every block
of a column at the stride of its patches, each stage of a pyramidal network at a stride of its own, PatchConvNet's last
block alone. Each stride asked for gets the nearest the network has; learned layers of the task's neck do the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from patchloom_runtime.errors import UsageError

STRIDES = (4, 8, 16, 32)  # what UperNet and Mask R-CNN read
# A column's maps are those after 1/3, 1/2, 2/3 and all of its blocks: 4, 6, 8 and 12 of 12 (UperNet on XCiT and BEiT).
SIXTHS_OF_DEPTH = (2, 3, 4, 6)


class Level(NamedTuple):
    """One map of a pyramid: (B, channels, H/stride, W/stride) of images of H×W pixels, rounded up."""

    stride: int
    channels: int


Taps = Mapping[Any, Level]  # block → what it gives, first to last
Kept = dict[Any, Any]  # block → what it gave; None until it has run


def chosen_taps(taps: Taps, strides: Sequence[int]) -> list[Any]:
    """The block that makes the map of each stride.

    Where several strides are nearest to the same one, the coarsest of them takes the last block there, and those before
    it blocks at 2/3, 1/2 and 1/3 of the depth there.
    """
    if (
        not strides
        or any(type(each) is not int or each < 1 for each in strides)
        or list(strides) != sorted(set(strides))
    ):
        raise UsageError(f"strides are whole numbers from 1, rising, such as {STRIDES}; given {strides!r}")
    nearest = [_nearest({level.stride for level in taps.values()}, asked) for asked in strides]
    chosen = []
    for i, stride in enumerate(nearest):
        there = [block for block, level in taps.items() if level.stride == stride]
        coarser = nearest[i + 1 :].count(stride)
        sixths = SIXTHS_OF_DEPTH[max(0, len(SIXTHS_OF_DEPTH) - 1 - coarser)]
        chosen.append(there[max(1, round(len(there) * sixths / 6)) - 1])
    return chosen


def _nearest(strides: set[int], asked: int) -> int:
    """By ratio; of two equally near the finer."""
    return min(strides, key=lambda stride: (max(stride / asked, asked / stride), stride))


def as_map(given: Tensor, stride: int, images: Tensor) -> Tensor:
    """What a block gave, (B, H', W', C) or tokens (B, T+H'·W', C) with class tokens first → (B, C, H', W'), a view."""
    if given.ndim == 3:
        grid = [-(-side // stride) for side in images.shape[2:]]
        given = given[:, -grid[0] * grid[1] :].unflatten(1, grid)
    return given.permute(0, 3, 1, 2)
