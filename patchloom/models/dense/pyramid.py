"""Feature pyramids: the blocks whose outputs become maps, and the neck that resizes these maps.

A stride is the number of image pixels per position of a map. A network declares the outputs of its blocks
(`Network.taps`): every block of a column at its patch stride, each stage of a pyramidal network at its own stride, only
the last block of PatchConvNet. Each requested stride gets the nearest one that the network has, and the learned layers
of `PyramidNeck` resize the map.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from patchloom_runtime.errors import UsageError

STRIDES = (4, 8, 16, 32)  # inputs of UperNet and Mask R-CNN
# A column's maps come from 1/3, 1/2, 2/3 and all of its blocks: 4, 6, 8 and 12 of 12 (UperNet on XCiT and BEiT).
SIXTHS_OF_DEPTH = (2, 3, 4, 6)


class Level(NamedTuple):
    """One map of a pyramid: (B, channels, ⌈H/stride⌉, ⌈W/stride⌉) for H×W images."""

    stride: int
    channels: int


Taps = Mapping[Any, Level]  # block → its output, in order
BlockOutputs = dict[Any, Any]  # block → its output tensor; None until it has run


def choose_taps(taps: Taps, strides: Sequence[int]) -> list[Any]:
    """Return the block that makes the map of each stride.

    If several strides are nearest to the same one, the coarsest uses the last block there, and the others use blocks at
    2/3, 1/2 and 1/3 of the depth there.
    """
    if (
        not strides
        or any(type(each) is not int or each < 1 for each in strides)
        or list(strides) != sorted(set(strides))
    ):
        raise UsageError(f"strides is {strides!r}, expected rising whole numbers from 1, such as {STRIDES}")
    nearest = [_nearest({level.stride for level in taps.values()}, stride) for stride in strides]
    chosen = []
    for i, stride in enumerate(nearest):
        blocks = [block for block, level in taps.items() if level.stride == stride]
        coarser = nearest[i + 1 :].count(stride)
        sixths = SIXTHS_OF_DEPTH[max(0, len(SIXTHS_OF_DEPTH) - 1 - coarser)]
        chosen.append(blocks[max(1, round(len(blocks) * sixths / 6)) - 1])
    return chosen


def _nearest(strides: set[int], wanted: int) -> int:
    """Return the stride with the nearest ratio; of two equally near, the finer."""
    return min(strides, key=lambda stride: (max(stride / wanted, wanted / stride), stride))


def as_map(output: Tensor, stride: int, images: Tensor) -> Tensor:
    """Block output (B, H', W', C), or tokens (B, T+H'·W', C) with class tokens first → view (B, C, H', W')."""
    if output.ndim == 3:
        grid = [-(-side // stride) for side in images.shape[2:]]
        output = output[:, -grid[0] * grid[1] :].unflatten(1, grid)
    return output.permute(0, 3, 1, 2)


class PyramidNeck(nn.Module):
    """Learned layers from the maps of `Network.pyramid` to maps at the requested strides.

    Finer maps are made by transposed convolutions, each of which doubles the sides, with BatchNorm and GELU in between.
    Coarser maps are made by max-pooling. For patches of 16 pixels these are (ConvT, BatchNorm, GELU, ConvT), (ConvT),
    (), (MaxPool): the pyramid of XCiT's and BEiT's UperNet and Mask R-CNN, with the parameter counts of thesis tables
    5.3 and 6.12. Patches of 14 pixels have no such stride: their maps are made as for 16 and resized bilinearly.
    """

    def __init__(self, inputs: Sequence[Level], strides: Sequence[int] = STRIDES) -> None:
        super().__init__()
        self.levels = [Level(stride, level.channels) for stride, level in zip(strides, inputs, strict=True)]
        self._strides = [level.stride for level in inputs]
        self.layers = nn.ModuleList(
            _resizing(level.stride / stride, level.channels) for stride, level in zip(strides, inputs, strict=True)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Each (B, C, H/s, W/s) at the network's stride s → (B, C, H/t, W/t) at the requested stride t."""
        return [
            _resize_to(layer(each), each, own / level.stride)
            for layer, each, own, level in zip(self.layers, maps, self._strides, self.levels, strict=True)
        ]


def _resizing(factor: float, channels: int) -> nn.Module:
    """Return layers that scale the sides of a map by the power of two nearest to `factor`."""
    doublings = round(math.log2(factor))
    if doublings < 0:
        return nn.MaxPool2d(2**-doublings)
    layers: list[nn.Module] = []
    for _ in range(doublings):
        if layers:
            layers += [nn.BatchNorm2d(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels, 2, stride=2))
    return nn.Sequential(*layers)


def _resize_to(resized: Tensor, original: Tensor, factor: float) -> Tensor:
    """Return `resized`, resized to `factor` times the sides of `original` unless the factor is a power of two."""
    if math.log2(factor).is_integer():
        return resized
    size = [max(1, round(side * factor)) for side in original.shape[2:]]
    return F.interpolate(resized, size, mode="bilinear", align_corners=False)
