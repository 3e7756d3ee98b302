"""From the maps a network has to the maps a task reads: at strides 4, 8, 16 and 32, by learned layers.

A column of blocks has all its maps at the stride of its patches. Finer ones are made by transposed convolutions, each
of which doubles the sides, with BatchNorm and GELU between two of them; coarser ones by the largest of their places; a
map that has its stride already passes. This is the pyramid of XCiT's and BEiT's UperNet and Mask R-CNN, for patches of
16: (ConvT, BatchNorm, GELU, ConvT), (ConvT), (), (MaxPool). The parameters of thesis tables 5.3 and 6.12 are those
of this layout. Patches of 14 have no such stride: their maps are made as for 16 and then resized, bilinearly.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.models.dense.pyramid import STRIDES, Level


class PyramidNeck(nn.Module):
    """Maps as `Network.pyramid` gives them → the same number of maps, at the strides asked for."""

    def __init__(self, given: Sequence[Level], strides: Sequence[int] = STRIDES) -> None:
        super().__init__()
        self.levels = [Level(stride, level.channels) for stride, level in zip(strides, given, strict=True)]
        self._strides = [level.stride for level in given]
        self.layers = nn.ModuleList(
            _resizing(level.stride / stride, level.channels) for stride, level in zip(strides, given, strict=True)
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Each (B, C, H/s, W/s) at the network's stride s → (B, C, H/t, W/t) at the stride t asked for."""
        return [
            _at(layer(each), each, own / level.stride)
            for layer, each, own, level in zip(self.layers, maps, self._strides, self.levels, strict=True)
        ]


def _resizing(factor: float, channels: int) -> nn.Module:
    """What makes the sides of a map about `factor` times as long: the nearest power of two."""
    doublings = round(math.log2(factor))
    if doublings < 0:
        return nn.MaxPool2d(2**-doublings)
    layers: list[nn.Module] = []
    for _ in range(doublings):
        if layers:
            layers += [nn.BatchNorm2d(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels, 2, stride=2))
    return nn.Sequential(*layers)


def _at(made: Tensor, given: Tensor, factor: float) -> Tensor:
    """The map itself where the factor is a power of two, else at `factor` times the size of the map it is made from."""
    if math.log2(factor).is_integer():
        return made
    size = [max(1, round(side * factor)) for side in given.shape[2:]]
    return F.interpolate(made, size, mode="bilinear", align_corners=False)
