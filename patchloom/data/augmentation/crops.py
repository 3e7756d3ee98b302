"""Crops and flips of a whole batch: drawn once per image, then applied to images, layers and boxes.

    b images of (h, w), which are cropped to (H, W)

Images of different sizes lie at the top left of canvases of one size. This is `geometry.py` in tensor operations,
without antialiasing and with its own random draws.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.augmentation.augment import CROP_ASPECTS, padding_of
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images.geometry import SMALLEST_BOX_SIDE, Size

BOX_TRIES = 10


class Draws:
    """Random numbers per image, consumed in order: `values` (b, n) from U(0, 1).

    `field` (2H, 2W, 3) is noise from N(0, 1), shared by all images; random erasing takes windows of it.
    """

    def __init__(self, values: Tensor, field: Tensor) -> None:
        self.values, self.field = values, field
        self._next = 0

    def one(self) -> Tensor:
        """Return the next number per image, (b,)."""
        return self.several(1)[:, 0]

    def several(self, count: int) -> Tensor:
        """Return the next numbers per image, (b, count)."""
        self._next += count
        return self.values[:, self._next - count : self._next]


@dataclass(frozen=True)
class Crops:
    """The crop of each image: `geometry.Geometry` for a batch. Edges are in pixels of the stored image."""

    kind: str  # augment.crop
    source: tuple[Tensor, Tensor]  # height and width of each stored image, (b,) float32
    size: Size
    top: Tensor  # (b,), as the following
    left: Tensor
    height: Tensor
    width: Tensor
    flipped: Tensor

    def images(self, store: Tensor, index: Tensor) -> Tensor:
        """Crop the images at `index` (b,) of (N, h, w, 3) uint8 to (b, 3, H, W) float32."""
        if self.kind == "random_resized":
            rows, columns = (
                edges / length * 2 - 1 for edges, length in zip(self._centers(), store.shape[1:], strict=False)
            )
            shape = (len(index), *self.size)
            grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], -1)
            sampled = F.grid_sample(
                store[index].permute(0, 3, 1, 2).float(),
                grid,
                mode="bicubic",
                padding_mode="border",
                align_corners=False,
            )
            return sampled.clamp(0, 255).round()
        rows, columns, inside = self._places()
        pixels = store[index[:, None, None], rows, columns]  # (b, H, W, 3)
        if self.kind == "pad":
            pixels = pixels * inside[..., None]
        return pixels.permute(0, 3, 1, 2).float()

    def layer(self, store: Tensor, index: Tensor, outside: int) -> Tensor:
        """Crop the layers at `index` of (N, h, w) to (b, H, W) by the nearest pixel; `outside` fills the padding."""
        rows, columns, inside = self._places()
        cropped = store[index[:, None, None], rows, columns]
        return cropped.where(inside, outside) if self.kind == "pad" else cropped

    def boxes(self, boxes: Tensor) -> Tensor:
        """Convert boxes (b, k, 6) to pixels of the crop and clip them to it; NaN for none and for invisible boxes."""
        height, width = (length[:, None, None] for length in self.source)
        x, y = boxes[:, :, 0:4:2].clamp(min=0).minimum(width), boxes[:, :, 1:4:2].clamp(min=0).minimum(height)
        x = (x - self.left[:, None, None]) * (self.size[1] / self.width[:, None, None])
        y = (y - self.top[:, None, None]) * (self.size[0] / self.height[:, None, None])
        x = torch.where(self.flipped[:, None, None], self.size[1] - x.flip(2), x)
        x, y = x.clamp(0, self.size[1]), y.clamp(0, self.size[0])
        moved = torch.cat([torch.stack([x, y], 3).flatten(2), boxes[:, :, 4:]], 2)
        visible = torch.minimum(x[:, :, 1] - x[:, :, 0], y[:, :, 1] - y[:, :, 0]) >= SMALLEST_BOX_SIDE
        return moved.where(visible[:, :, None], torch.nan)

    def _centers(self) -> tuple[Tensor, Tensor]:
        """Return the centers of the rows (b, H) and columns (b, W) of a resized crop, in the stored image."""
        y, x = ((torch.arange(length, device=self.top.device) + 0.5) / length for length in self.size)
        x = torch.where(self.flipped[:, None], 1 - x, x)
        return self.top[:, None] + y * self.height[:, None], self.left[:, None] + x * self.width[:, None]

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pixels of the crop as rows (b, H, 1) and columns (b, 1, W), and which are inside, (b, H, W)."""
        if self.kind == "random_resized":
            at = [centers.floor().long() for centers in self._centers()]
        else:
            y, x = (torch.arange(length, device=self.top.device).expand(len(self.top), -1) for length in self.size)
            x = torch.where(self.flipped[:, None], self.size[1] - 1 - x, x)
            at = [y + self.top[:, None], x + self.left[:, None]]
        places, inside = [], []
        for place, length in zip(at, self.source, strict=True):
            last = length.long()[:, None] - 1
            inside.append((place >= 0) & (place <= last))
            reflected = last - (last - place.abs()).abs()
            places.append(reflected if self.kind == "simple_random" else place.clamp(min=0).minimum(last))
        return places[0][:, :, None], places[1][:, None, :], inside[0][:, :, None] & inside[1][:, None, :]


def draw_crops(sizes: Tensor, augment: AugmentPart, size: Size, draws: Draws) -> Crops:
    """Draw the crops and flips of images with the heights and widths `sizes` (b, 2)."""
    source = sizes[:, 0].float(), sizes[:, 1].float()
    flipped = draws.one() < augment.flip
    if augment.crop == "random_resized":
        scales = augment.crop_min_scale, augment.crop_max_scale
        return Crops(augment.crop, source, size, *_resized_boxes(*source, scales, draws), flipped)
    padding = padding_of(augment)
    rooms = [length + (2 * padding - side + 1) for length, side in zip(source, size, strict=True)]
    top, left = ((draws.one() * room).long() - padding for room in rooms)
    if augment.crop == "centre":
        top, left = (((length - side) / 2).round().long() for length, side in zip(source, size, strict=True))
    height, width = torch.full_like(top, size[0]), torch.full_like(left, size[1])
    return Crops(augment.crop, source, size, top, left, height, width, flipped)


def _resized_boxes(
    height: Tensor, width: Tensor, scales: tuple[float, float], draws: Draws
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw Random Resized Crops of images of heights and widths (b,): top, left, height and width of each."""
    area = uniform(draws.several(BOX_TRIES), *scales) * height[:, None] * width[:, None]
    box_width, box_height, fits = first_box(area, draws, CROP_ASPECTS, width[:, None], height[:, None])
    narrow, wide = CROP_ASPECTS
    box_height = box_height.where(fits, torch.minimum(height, (width.double() / narrow).float()))
    box_width = box_width.where(fits, torch.minimum(width, (height.double() * wide).float()))
    top = (draws.one().where(fits, 0.5) * (height - box_height + 1)).floor()
    left = (draws.one().where(fits, 0.5) * (width - box_width + 1)).floor()
    return top, left, box_height, box_width


def first_box(
    area: Tensor, draws: Draws, aspects: tuple[float, float], most_tall: Tensor | int, most_wide: Tensor | int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first box with √(area·aspect) ≤ most_tall, √(area/aspect) ≤ most_wide, and whether there is one."""
    aspect = uniform(draws.several(BOX_TRIES), math.log(aspects[0]), math.log(aspects[1])).exp()
    tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()  # (b, tries)
    fits = (tall <= most_tall) & (wide <= most_wide) & (tall > 0) & (wide > 0)
    first = fits.float().argmax(1, keepdim=True)
    return tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0], fits.any(1)


def uniform(draw: Tensor, low: float, high: float) -> Tensor:
    """Map U(0, 1) to U(low, high)."""
    return low + (high - low) * draw
