"""Samples: one image with the targets that a task needs.

    mask       the class of every pixel
    instances  the object number of every pixel, 0 for none
    boxes      (n, 6): x0, y0, x1, y1 in half-open pixels, category, and the object's number in `instances`

Mask and instances are *layers*: one integer per pixel, of one dtype for a whole dataset. Labels, one number per image,
are known without reading the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from patchloom_runtime.errors import DataError

UNLABELED = -1  # label of an image without one
LAYERS = ("mask", "instances")
PARTS = (*LAYERS, "boxes")  # optional parts of a sample
BOX_VALUES = 6
# Part of a sample on a canvas: height and width of the image on the canvas, then of the original, in pixels.
EXTENT = "extent"
MOST_BOXES = 10_000  # per image, so that one file cannot fill the queue between processes


class LayerKind(NamedTuple):
    """Dtype and fill value of a layer, the same for a whole dataset."""

    dtype: type[np.integer]
    outside: int  # value where a view extends beyond the image


class Layer(NamedTuple):
    """One layer of one image."""

    numbers: np.ndarray  # (H, W)
    outside: int


@dataclass(frozen=True)
class Sample:
    """One image of a dataset with the requested parts."""

    image: Image.Image
    layers: dict[str, Layer] = field(default_factory=dict)
    boxes: np.ndarray | None = None  # (n, 6) float32
    whole: tuple[int, int] | None = None  # original (width, height) of an image that was decoded smaller

    @property
    def size(self) -> tuple[int, int]:
        """Original (width, height) of the image, in whose pixels a geometry is drawn."""
        return self.whole or self.image.size


def checked_layer(numbers: np.ndarray, kind: LayerKind, size: tuple[int, int], where: str) -> Layer:
    """Return a layer for an image of `size` (width, height). Raises DataError if it does not fit."""
    height, width = numbers.shape
    if (width, height) != size:
        raise DataError(f"{where}: a mask of {width}×{height} pixels, but the image has {size[0]}×{size[1]}")
    if not np.can_cast(numbers.dtype, kind.dtype):
        raise DataError(f"{where}: a mask of {numbers.dtype}, expected {np.dtype(kind.dtype)}")
    return Layer(numbers, kind.outside)


def checked_boxes(rows: Any, names: Sequence[str], where: str) -> np.ndarray:
    """Return boxes (n, 6) float32 from (n, 5) corners and category. Objects are numbered from 1."""
    boxes = np.asarray(rows, np.float64).reshape(len(rows), 5)
    if len(boxes) > MOST_BOXES:
        raise DataError(f"{where}: {len(boxes):,} boxes, more than the limit of {MOST_BOXES:,}")
    if not np.isfinite(boxes).all():
        raise DataError(f"{where}: a box has corners that are not finite numbers")
    outside = boxes[(boxes[:, 4] < 0) | (boxes[:, 4] >= len(names)), 4]
    if len(outside):
        raise DataError(f"{where}: a box of category {outside[0]:g}, expected 0…{len(names) - 1}")
    return np.column_stack([boxes, 1 + np.arange(len(boxes))]).astype(np.float32)
