"""Logits of images of any size, from the whole image or from sliding windows, in bounded memory.

Letters: B images of H×W pixels, K classes. A network gives logits at a quarter of the resolution. They are resized to
the pixels tile by tile, so that the K logits of all pixels never exist at once.

Windows are a stride apart, and the last ones are shifted back inside (the rule of mmsegmentation). Every pixel is in
one or more windows, and its logits are the mean of theirs.
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
# Elements per tile: 64 MiB. On a GPU 1 GiB, as resizing a few rows at a time is three times slower.
MOST_IN_TILE = {"cpu": 16 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class Tile:
    """Logits of some rows of each image."""

    rows: slice
    logits: Tensor  # (B, K, rows, W)


@dataclass(frozen=True)
class SlidingWindows:
    """Windows of one size over images of another; an image of that size has one window."""

    size: Size
    stride: Size
    classes: int
    at_once: int = 16  # windows per forward pass

    def logits(self, forward: Forward, images: Tensor) -> Iterator[Tile]:
        """Yield the tiles of images (B, 3, H, W), which are at least as large as a window, from top to bottom."""
        height, width = images.shape[2:]
        tops, lefts = starts(height, self.size[0], self.stride[0]), starts(width, self.size[1], self.stride[1])
        columns = torch.zeros(width, device=images.device)  # number of windows per column
        for left in lefts:
            columns[left : left + self.size[1]] += 1
        cached: dict[int, list[Tensor]] = {}  # row of windows → their logits, while tiles need them
        for rows in stretches(tops, self.size[0], self._rows_at_once(images)):
            over = [i for i, top in enumerate(tops) if top <= rows.start and rows.stop <= top + self.size[0]]
            cached = {i: cached[i] for i in over if i in cached}  # free the rows above first
            cached |= {i: self._row(forward, images, tops[i], lefts) for i in over if i not in cached}
            shape = (len(images), cached[over[0]][0].shape[1], rows.stop - rows.start, width)
            total = torch.zeros(shape, device=images.device)
            for i in over:
                inside = slice(rows.start - tops[i], rows.stop - tops[i])
                for left, logits in zip(lefts, cached[i], strict=True):
                    total[..., left : left + self.size[1]] += resized_rows(logits, self.size, inside)
            yield Tile(rows, total.div_(columns * len(over)))

    def _rows_at_once(self, images: Tensor) -> int:
        return rows_at_once(images.device, len(images) * self.classes * images.shape[3])

    def _row(self, forward: Forward, images: Tensor, top: int, lefts: list[int]) -> list[Tensor]:
        """Return the logits of one row of windows, each (B, K, h/4, w/4)."""
        height, width = self.size
        cut = torch.cat([images[:, :, top : top + height, left : left + width] for left in lefts])
        logits = [forward(some).float() for some in cut.split(self.at_once)]
        if len(images) > 1:  # without a copy for a single image, whose windows may take hundreds of MiB
            logits = [torch.cat(logits)]
        return [each for some in logits for each in some.split(len(images))]


def whole_logits(forward: Forward, images: Tensor, multiple: int = 32) -> Iterator[Tile]:
    """Yield the tiles of whole images, padded at the bottom and right to a multiple of the network's stride."""
    height, width = images.shape[2:]
    padded = padded_size((height, width), multiple)
    images = F.pad(images, (0, padded[1] - width, 0, padded[0] - height))
    logits = forward(images).float()
    yield from tiles_of(logits, padded, (height, width))


def tiles_of(logits: Tensor, size: Size, cropped: Size) -> Iterator[Tile]:
    """Yield the tiles of logits (B, K, h, w) resized to `size` and cropped at the bottom and right."""
    at_once = rows_at_once(logits.device, len(logits) * logits.shape[1] * size[1])
    for top in range(0, cropped[0], at_once):
        rows = slice(top, min(cropped[0], top + at_once))
        yield Tile(rows, resized_rows(logits, size, rows)[..., : cropped[1]])


def rows_at_once(device: torch.device, numbers_per_row: int) -> int:
    """Return the number of rows per tile."""
    return max(1, MOST_IN_TILE.get(device.type, MOST_IN_TILE["cpu"]) // numbers_per_row)


def padded_size(size: Size, multiple: int) -> Size:
    """Round both sides up to a multiple."""
    return -(-size[0] // multiple) * multiple, -(-size[1] // multiple) * multiple


def resized_rows(logits: Tensor, size: Size, rows: slice) -> Tensor:
    """Return these rows of `interpolate(logits, size, mode="bilinear")` without computing the others."""
    low, high, share = _neighbors(rows.start, rows.stop, size[0], logits.shape[2], logits.device)
    between = torch.lerp(logits.index_select(2, low), logits.index_select(2, high), share[:, None])
    return F.interpolate(between, (between.shape[2], size[1]), mode="bilinear", align_corners=False)


@lru_cache(maxsize=1024)
def _neighbors(start: int, stop: int, length: int, places: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two source positions of pixels start … stop of `length`, and the weight of the second."""
    at = ((torch.arange(start, stop, device=device) + 0.5) * (places / length) - 0.5).clamp(min=0)
    low = at.long().clamp(max=places - 1)
    return low, (low + 1).clamp(max=places - 1), at - low
