"""The class of every pixel of pictures of any size, by a segmentation network: whole, by windows, at several scales.

    resize (recipe) → whole or windows → mean of the windows' logits → at the picture's own size → likeliest class

At several scales, and mirrored, probabilities are averaged instead of logits. Memory has a bound: logits of pixels
exist a tile at a time; averages over scales a block of the picture at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from patchloom.data.images.image_batch import normalize
from patchloom.models.dense.upernet import SegmentationNetwork
from patchloom.tasks.segmentation.windows import Size, SlidingWindows, Tile, padded_size, tiles_of, whole_logits
from patchloom_runtime.images.geometry import short_side_factor

if TYPE_CHECKING:
    from patchloom.recipes.schema import Recipe

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # of a test at several scales (BEiT, Swin)
MULTIPLE = 32  # of the sides of pictures seen whole: the coarsest map then has no half places
# A picture of more pixels is seen through windows of so many a side, even where it could be seen whole.
MOST_WHOLE, LARGE_WINDOW = 1 << 20, 768
# Numbers that a picture's averages over scales, or its logits at another size, may take: 512 MiB of them.
MOST_AVERAGED = 1 << 27
# Pixels that the network sees together: of a CPU one large window, which more would not make faster.
MOST_SEEN = {"cpu": 1 << 20, "cuda": 1 << 22}
SIZES_KEPT = 4  # networks resampled to sizes of pictures


@dataclass(frozen=True)
class ViewSettings:
    """How pictures are shown when a network is judged or used."""

    mode: Literal["auto", "whole", "slide"] = "auto"
    stride: float = 2 / 3  # of the side of a window
    short_side: int = 0  # to which pictures are resized; 0: they stay as they are
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False  # each scale mirrored too
    at_once: int = 16  # windows

    @classmethod
    def of(cls, recipe: "Recipe | None", *, multi_scale: bool = False) -> "ViewSettings":
        """As the recipe says; of a run without one, by default."""
        several = {"scales": SCALES, "flip": True} if multi_scale else {}
        if recipe is None:
            return cls(**several)  # type: ignore[arg-type]
        part = recipe.segment
        side = recipe.augment.short_side if part.test_short_side is None else part.test_short_side
        return cls(part.test, part.window_stride, side, **several)  # type: ignore[arg-type]


@dataclass(eq=False)
class PixelClassifier:
    """A network that tells the class of every pixel; pictures come as bytes, (B, 3, H, W)."""

    network: SegmentationNetwork
    how: ViewSettings = field(default_factory=ViewSettings)

    def __post_init__(self) -> None:
        self._sized: dict[Size, SegmentationNetwork] = {}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 → class numbers (B, H, W), int16."""
        height, width = images.shape[2:]
        found = torch.empty((len(images), height, width), dtype=torch.int16, device=images.device)
        for rows, columns, scores in self._scores(images):
            found[:, rows, columns] = scores.argmax(dim=1).to(torch.int16)
        return found

    @torch.no_grad()
    def probabilities(self, image: Tensor) -> Tensor:
        """(3, H, W) uint8 → (K, H, W): of one picture, all of it at once."""
        height, width = image.shape[1:]
        found = torch.empty((self.network.config.num_classes, height, width), device=image.device)
        averaged = self._averages_scales
        for rows, columns, scores in self._scores(image[None]):
            found[:, rows, columns] = scores[0] if averaged else scores[0].softmax(dim=0)
        return found

    def pictures_at_once(self, size: Size) -> int:
        """Pictures of (height, width) that may be given together."""
        pixels = size[0] * size[1]
        return max(1, min(self._at_once(pixels), MOST_AVERAGED // (self.network.config.num_classes * pixels)))

    def _at_once(self, pixels: int) -> int:
        """Windows, or pictures, of so many pixels that the network sees together."""
        device = next(self.network.parameters(), torch.empty(0)).device.type
        return max(1, min(self.how.at_once, MOST_SEEN.get(device, MOST_SEEN["cpu"]) // pixels))

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    @property
    def _averages_scales(self) -> bool:
        return self.how.flip or self.how.scales != (1.0,)

    def _scores(self, images: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Parts of the pictures with what is largest for the likeliest class, (B, K, rows, columns)."""
        if not self._averages_scales:
            every = slice(0, images.shape[3])
            yield from ((tile.rows, every, tile.logits) for tile in self._tiles(images, 1.0))
            return
        for rows, columns in self._blocks(images):
            around, inside = zip(
                *map(_widened, (rows, columns), images.shape[2:], (LARGE_WINDOW // 2,) * 2), strict=True
            )
            part = images[:, :, around[0], around[1]]
            total = torch.zeros((), device=images.device)
            for scale in self.how.scales:
                for mirrored in (False, True) if self.how.flip else (False,):
                    seen = self._assembled(part.flip(3) if mirrored else part, scale).softmax(dim=1)
                    total = total + (seen.flip(3) if mirrored else seen)
            count = len(self.how.scales) * (1 + self.how.flip)
            yield rows, columns, (total / count)[:, :, inside[0], inside[1]]

    def _blocks(self, images: Tensor) -> Iterator[tuple[slice, slice]]:
        """The picture as a whole, or where its averages would take too much memory in parts."""
        height, width = images.shape[2:]
        values = len(images) * self.network.config.num_classes * height * width
        side = max(height, width) if values <= MOST_AVERAGED else LARGE_WINDOW
        for top in range(0, height, side):
            for left in range(0, width, side):
                yield slice(top, min(height, top + side)), slice(left, min(width, left + side))

    def _assembled(self, images: Tensor, scale: float) -> Tensor:
        """The logits of all pixels, (B, K, H, W)."""
        height, width = images.shape[2:]
        found = torch.empty((len(images), self.network.config.num_classes, height, width), device=images.device)
        for tile in self._tiles(images, scale):
            found[:, :, tile.rows] = tile.logits
        return found

    def _tiles(self, images: Tensor, scale: float) -> Iterator[Tile]:
        """Logits at the pictures' own size, of pictures shown at `scale` times the size they are tested at."""
        own: Size = (images.shape[2], images.shape[3])
        size = self.shown_size(own, scale)
        if size == own:
            yield from self._shown(images)
            return
        shown = resize_bytes(images, size)
        logits = torch.empty((len(images), self.network.config.num_classes, *size), device=images.device)
        for tile in self._shown(shown):
            logits[:, :, tile.rows] = tile.logits
        yield from tiles_of(logits, own, own)

    def shown_size(self, own: Size, scale: float = 1.0) -> Size:
        """Height and width at which pictures are shown: no side is less than that of a window, where there are any."""
        factor = scale * short_side_factor((own[1], own[0]), self.how.short_side)
        if self._slides:
            window = self.network.image_size
            factor = max(factor, window[0] / own[0], window[1] / own[1])
        return max(1, round(own[0] * factor)), max(1, round(own[1] * factor))

    @property
    def _slides(self) -> bool:
        mode = self.how.mode
        return mode == "slide" or (mode == "auto" and not self.network.any_resolution)

    def _shown(self, images: Tensor) -> Iterator[Tile]:
        """Logits of pictures at their size, by windows or whole."""
        height, width = images.shape[2:]
        if self._slides:
            yield from self._windows(self.network.image_size).logits(self._forward(self.network), images)
        elif height * width <= MOST_WHOLE:
            yield from whole_logits(self._forward(self._at(padded_size((height, width), MULTIPLE))), images, MULTIPLE)
        else:
            # Sides that are shorter than a window are padded to it, all of them seen.
            window = padded_size((min(height, LARGE_WINDOW), min(width, LARGE_WINDOW)), MULTIPLE)
            padded = F.pad(images, (0, max(0, window[1] - width), 0, max(0, window[0] - height)))
            for tile in self._windows(window).logits(self._forward(self._at(window)), padded):
                rows = slice(tile.rows.start, min(tile.rows.stop, height))
                if rows.start < rows.stop:
                    yield Tile(rows, tile.logits[:, :, : rows.stop - rows.start, :width])

    def _windows(self, size: Size) -> SlidingWindows:
        stride = tuple(max(1, round(side * self.how.stride)) for side in size)
        at_once = self._at_once(size[0] * size[1])
        return SlidingWindows(size, (stride[0], stride[1]), self.network.config.num_classes, at_once)

    def _at(self, size: Size) -> SegmentationNetwork:
        """The network for images of a size; of those that were resampled for it the last ones are kept."""
        if self.network.any_resolution or size == self.network.image_size:
            return self.network
        if size not in self._sized:
            while len(self._sized) >= SIZES_KEPT:
                del self._sized[next(iter(self._sized))]
            self._sized[size] = self.network.at_resolution(size)
        return self._sized[size]

    def _forward(self, network: SegmentationNetwork) -> "_Forward":
        return _Forward(network)


@dataclass(frozen=True)
class _Forward:
    """Bytes in, logits out."""

    network: SegmentationNetwork

    def __call__(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(normalize(images, self.network.pixel_mean, self.network.pixel_std))
        return logits


def resize_bytes(images: Tensor, size: Size) -> Tensor:
    """(B, 3, H, W) uint8 at another size, bicubic with antialiasing."""
    resized = F.interpolate(images.float(), size, mode="bicubic", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _widened(part: slice, length: int, margin: int) -> tuple[slice, slice]:
    """A part of a side with what is around it, and where the part lies in that."""
    around = slice(max(0, part.start - margin), min(length, part.stop + margin))
    return around, slice(part.start - around.start, part.stop - around.start)
