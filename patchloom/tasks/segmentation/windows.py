"""Logits of pictures of any size: whole, or from windows that slide over them; the memory they take has a bound.

Letters: B pictures of H×W pixels, K classes. A network gives logits at a quarter of the sides; what is asked of them at
the pixels is computed tile by tile, so that K numbers per pixel never exist for a whole picture at once.

Windows stand a stride apart, and the last ones are shifted back inside (mmsegmentation's rule): each has the network's
size, every pixel is in one or more, and its logits are the mean of theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom_runtime.artifacts.segmenter import starts, stretches

Size = tuple[int, int]  # height, width
Forward = Callable[[Tensor], Tensor]  # images (B, 3, h, w) → logits (B, K, h/4, w/4)
# Numbers of a tile: 64 MiB of them; a GPU resizes few rows at a time three times as slowly as 1 GiB of them.
MOST_IN_TILE = {"cpu": 16 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class Tile:
    """Logits of some rows of each picture."""

    rows: slice
    logits: Tensor  # (B, K, rows, W)


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of one size over pictures of another; of a picture of that very size there is one."""

    size: Size
    stride: Size
    classes: int
    at_once: int = 16  # windows that the network sees together

    def logits(self, forward: Forward, images: Tensor) -> Iterator[Tile]:
        """Tiles of pictures (B, 3, H, W), at least as large as a window, from top to bottom."""
        height, width = images.shape[2:]
        tops, lefts = starts(height, self.size[0], self.stride[0]), starts(width, self.size[1], self.stride[1])
        columns = torch.zeros(width, device=images.device)  # how many windows of a row each column is in
        for left in lefts:
            columns[left : left + self.size[1]] += 1
        kept: dict[int, list[Tensor]] = {}  # row of windows → the logits of each, while tiles need them
        for rows in stretches(tops, self.size[0], self._rows_at_once(images)):
            over = [i for i, top in enumerate(tops) if top <= rows.start and rows.stop <= top + self.size[0]]
            kept = {i: kept[i] for i in over if i in kept}  # what is above is let go before more is made
            kept |= {i: self._row(forward, images, tops[i], lefts) for i in over if i not in kept}
            shape = (len(images), kept[over[0]][0].shape[1], rows.stop - rows.start, width)
            total = torch.zeros(shape, device=images.device)
            for i in over:
                inside = slice(rows.start - tops[i], rows.stop - tops[i])
                for left, logits in zip(lefts, kept[i], strict=True):
                    total[..., left : left + self.size[1]] += resized_rows(logits, self.size, inside)
            yield Tile(rows, total.div_(columns * len(over)))

    def _rows_at_once(self, images: Tensor) -> int:
        return rows_at_once(images.device, len(images) * self.classes * images.shape[3])

    def _row(self, forward: Forward, images: Tensor, top: int, lefts: list[int]) -> list[Tensor]:
        """The logits of the windows of one row, each (B, K, h/4, w/4)."""
        height, width = self.size
        cut = torch.cat([images[:, :, top : top + height, left : left + width] for left in lefts])
        found = [forward(some).float() for some in cut.split(self.at_once)]
        if len(images) > 1:  # windows of one picture are not copied: those of a large one take hundreds of MiB
            found = [torch.cat(found)]
        return [each for some in found for each in some.split(len(images))]


def whole_logits(forward: Forward, images: Tensor, multiple: int = 32) -> Iterator[Tile]:
    """Tiles of pictures that the network sees whole, padded below and right to what its maps divide."""
    height, width = images.shape[2:]
    padded = padded_size((height, width), multiple)
    images = F.pad(images, (0, padded[1] - width, 0, padded[0] - height))
    logits = forward(images).float()
    yield from tiles_of(logits, padded, (height, width))


def tiles_of(logits: Tensor, size: Size, shown: Size) -> Iterator[Tile]:
    """Logits (B, K, h, w) resized to `size`, of which the first `shown` rows and columns are asked for."""
    at_once = rows_at_once(logits.device, len(logits) * logits.shape[1] * size[1])
    for top in range(0, shown[0], at_once):
        rows = slice(top, min(shown[0], top + at_once))
        yield Tile(rows, resized_rows(logits, size, rows)[..., : shown[1]])


def rows_at_once(device: torch.device, numbers_per_row: int) -> int:
    """Rows of a tile."""
    return max(1, MOST_IN_TILE.get(device.type, MOST_IN_TILE["cpu"]) // numbers_per_row)


def padded_size(size: Size, multiple: int) -> Size:
    """The least multiples that hold it."""
    return -(-size[0] // multiple) * multiple, -(-size[1] // multiple) * multiple


def resized_rows(logits: Tensor, size: Size, rows: slice) -> Tensor:
    """What `interpolate(logits, size, mode="bilinear")` gives in these rows, without the rest of it."""
    low, high, share = _neighbours(rows.start, rows.stop, size[0], logits.shape[2], logits.device)
    between = torch.lerp(logits.index_select(2, low), logits.index_select(2, high), share[:, None])
    return F.interpolate(between, (between.shape[2], size[1]), mode="bilinear", align_corners=False)


@lru_cache(maxsize=1024)
def _neighbours(start: int, stop: int, length: int, places: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of pixels start … stop of `length`: the two of `places` they lie between, and how near to the second."""
    at = ((torch.arange(start, stop, device=device) + 0.5) * (places / length) - 0.5).clamp(min=0)
    low = at.long().clamp(max=places - 1)
    return low, (low + 1).clamp(max=places - 1), at - low
