"""Pixel classes of images of any size from a segmentation network: whole, by windows, at several scales.

    resize (recipe) → whole or windows → mean of the windows' logits → resize to the image's size → most likely class

At several scales, and flipped, probabilities are averaged instead of logits. Memory is bounded: logits exist one tile
at a time, averages over scales one block of the image at a time.
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

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # of multi-scale evaluation (BEiT, Swin)
MULTIPLE = 32  # of the sides of whole images, so that the coarsest feature map has no fractions
# Images of more pixels are cut into windows of this side, even if the network takes whole images.
MOST_WHOLE, LARGE_WINDOW = 1 << 20, 768
# Elements of an image's averages over scales, or of its resized logits: 512 MiB.
MOST_AVERAGED = 1 << 27
# Pixels per forward pass; on a CPU, more than one large window is not faster.
MOST_SEEN = {"cpu": 1 << 20, "cuda": 1 << 22}
SIZES_KEPT = 4  # networks that are resampled to image sizes


@dataclass(frozen=True)
class ViewSettings:
    """How images are passed to the network in evaluation and prediction."""

    mode: Literal["auto", "whole", "slide"] = "auto"
    stride: float = 2 / 3  # as a share of the window's side
    short_side: int = 0  # to which images are resized; 0 keeps their size
    scales: tuple[float, ...] = (1.0,)
    flip: bool = False  # also flip each scale
    at_once: int = 16  # windows per forward pass

    @classmethod
    def of(cls, recipe: "Recipe | None", *, multi_scale: bool = False) -> "ViewSettings":
        """Return the settings of a recipe; the defaults for a run without one."""
        several = {"scales": SCALES, "flip": True} if multi_scale else {}
        if recipe is None:
            return cls(**several)  # type: ignore[arg-type]
        part = recipe.segment
        side = recipe.augment.short_side if part.test_short_side is None else part.test_short_side
        return cls(part.test, part.window_stride, side, **several)  # type: ignore[arg-type]


@dataclass(eq=False)
class PixelClassifier:
    """A segmentation network with its view settings; images are uint8, (B, 3, H, W)."""

    network: SegmentationNetwork
    how: ViewSettings = field(default_factory=ViewSettings)
    temperature: float = 1.0  # that logits are divided by for probabilities

    def __post_init__(self) -> None:
        self._sized: dict[Size, SegmentationNetwork] = {}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Map (B, 3, H, W) uint8 to class indices (B, H, W), int16."""
        height, width = images.shape[2:]
        classes = torch.empty((len(images), height, width), dtype=torch.int16, device=images.device)
        for rows, columns, scores in self._scores(images):
            classes[:, rows, columns] = scores.argmax(dim=1).to(torch.int16)
        return classes

    @torch.no_grad()
    def probabilities(self, image: Tensor) -> Tensor:
        """Map one image (3, H, W) uint8 to probabilities (K, H, W)."""
        height, width = image.shape[1:]
        result = torch.empty((self.network.config.num_classes, height, width), device=image.device)
        averaged = self._averages_scales
        for rows, columns, scores in self._scores(image[None]):
            result[:, rows, columns] = scores[0] if averaged else (scores[0] / self.temperature).softmax(dim=0)
        return result

    @torch.no_grad()
    def logits_at(self, image: Tensor, places: Tensor) -> Tensor:
        """Return the logits (N, K) of one image (3, H, W) uint8 at N places, given as row · W + column."""
        width = image.shape[2]
        chosen = torch.empty((len(places), self.network.config.num_classes), device=image.device)
        for tile in self._tiles(image[None], 1.0):
            inside = (places // width >= tile.rows.start) & (places // width < tile.rows.stop)
            chosen[inside] = tile.logits[0].flatten(1)[:, places[inside] - tile.rows.start * width].T.float()
        return chosen

    def images_at_once(self, size: Size) -> int:
        """Return the number of images of (height, width) per call."""
        pixels = size[0] * size[1]
        return max(1, min(self._at_once(pixels), MOST_AVERAGED // (self.network.config.num_classes * pixels)))

    def _at_once(self, pixels: int) -> int:
        """Return the number of windows or images of so many pixels per forward pass."""
        device = next(self.network.parameters(), torch.empty(0)).device.type
        return max(1, min(self.how.at_once, MOST_SEEN.get(device, MOST_SEEN["cpu"]) // pixels))

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device

    @property
    def _averages_scales(self) -> bool:
        return self.how.flip or self.how.scales != (1.0,)

    def _scores(self, images: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield parts of the images with their scores (B, K, rows, columns): logits, or probabilities over scales."""
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
                for flipped in (False, True) if self.how.flip else (False,):
                    view = (self._assembled(part.flip(3) if flipped else part, scale) / self.temperature).softmax(dim=1)
                    total = total + (view.flip(3) if flipped else view)
            count = len(self.how.scales) * (1 + self.how.flip)
            yield rows, columns, (total / count)[:, :, inside[0], inside[1]]

    def _blocks(self, images: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield the image as a whole, or in blocks if its averages would take too much memory."""
        height, width = images.shape[2:]
        values = len(images) * self.network.config.num_classes * height * width
        side = max(height, width) if values <= MOST_AVERAGED else LARGE_WINDOW
        for top in range(0, height, side):
            for left in range(0, width, side):
                yield slice(top, min(height, top + side)), slice(left, min(width, left + side))

    def _assembled(self, images: Tensor, scale: float) -> Tensor:
        """Return the logits of all pixels, (B, K, H, W)."""
        height, width = images.shape[2:]
        logits = torch.empty((len(images), self.network.config.num_classes, height, width), device=images.device)
        for tile in self._tiles(images, scale):
            logits[:, :, tile.rows] = tile.logits
        return logits

    def _tiles(self, images: Tensor, scale: float) -> Iterator[Tile]:
        """Yield logits at the images' size, computed at `scale` times the size of evaluation."""
        own: Size = (images.shape[2], images.shape[3])
        size = self.view_size(own, scale)
        if size == own:
            yield from self._at_own_size(images)
            return
        resized = resize_bytes(images, size)
        logits = torch.empty((len(images), self.network.config.num_classes, *size), device=images.device)
        for tile in self._at_own_size(resized):
            logits[:, :, tile.rows] = tile.logits
        yield from tiles_of(logits, own, own)

    def view_size(self, own: Size, scale: float = 1.0) -> Size:
        """Return the height and width that images are resized to; with windows, no side is less than a window's."""
        factor = scale * short_side_factor((own[1], own[0]), self.how.short_side)
        if self._slides:
            window = self.network.image_size
            factor = max(factor, window[0] / own[0], window[1] / own[1])
        return max(1, round(own[0] * factor)), max(1, round(own[1] * factor))

    @property
    def _slides(self) -> bool:
        mode = self.how.mode
        return mode == "slide" or (mode == "auto" and not self.network.any_resolution)

    def _at_own_size(self, images: Tensor) -> Iterator[Tile]:
        """Yield logits of images without resizing them, by windows or whole."""
        height, width = images.shape[2:]
        if self._slides:
            yield from self._windows(self.network.image_size).logits(self._forward(self.network), images)
        elif height * width <= MOST_WHOLE:
            yield from whole_logits(self._forward(self._at(padded_size((height, width), MULTIPLE))), images, MULTIPLE)
        else:
            # Shorter sides are padded to the window.
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
        """Return the network for an image size; the last resampled networks are cached."""
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
    """Maps uint8 images to logits."""

    network: SegmentationNetwork

    def __call__(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(normalize(images, self.network.pixel_mean, self.network.pixel_std))
        return logits


def resize_bytes(images: Tensor, size: Size) -> Tensor:
    """Resize (B, 3, H, W) uint8, bicubic with antialiasing."""
    resized = F.interpolate(images.float(), size, mode="bicubic", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _widened(part: slice, length: int, margin: int) -> tuple[slice, slice]:
    """Return a part of a side widened by a margin, and the position of the part in it."""
    around = slice(max(0, part.start - margin), min(length, part.stop + margin))
    return around, slice(part.start - around.start, part.stop - around.start)
