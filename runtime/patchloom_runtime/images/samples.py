"""What is read of one picture: its pixels and whatever else a task asks for.

    mask       the class of every pixel, of the picture's size
    instances  of every pixel the number of the object it belongs to, 0 for none
    boxes      (n, 6): x0, y0, x1, y1 in half-open pixels, category, and the object's number in `instances`

Mask and instances are *layers*: one whole number per pixel, of one number type for a whole set. Labels, one number per
picture, are known of a set without reading it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from patchloom_runtime.errors import DataError

UNLABELED = -1  # the label of a picture that has none
LAYERS = ("mask", "instances")
PARTS = (*LAYERS, "boxes")  # what may be asked of a set beside pictures and labels
BOX_VALUES = 6
# Where pictures of any shape share a canvas: height and width of what is seen, and of the whole picture, in pixels.
EXTENT = "extent"
# Of one picture: boxes travel by the queue between processes, which one file must not fill.
MOST_BOXES = 10_000


class LayerKind(NamedTuple):
    """What a layer of a whole set holds."""

    dtype: type[np.integer]
    outside: int  # the number where a view shows nothing of the picture


class Layer(NamedTuple):
    """One layer of one picture."""

    numbers: np.ndarray  # (H, W)
    outside: int


@dataclass(frozen=True)
class Sample:
    """One picture of a set with the parts that were asked for."""

    picture: Image.Image
    layers: dict[str, Layer] = field(default_factory=dict)
    boxes: np.ndarray | None = None  # (n, 6) float32
    whole: tuple[int, int] | None = None  # (width, height) of a picture that was decoded smaller

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the picture, in whose pixels a geometry is drawn."""
        return self.whole or self.picture.size


def checked_layer(numbers: np.ndarray, kind: LayerKind, size: tuple[int, int], where: str) -> Layer:
    """A layer of a picture of `size` (width, height); a DataError where it cannot be one."""
    height, width = numbers.shape
    if (width, height) != size:
        raise DataError(f"{where}: a mask of {width}×{height}, the picture is {size[0]}×{size[1]}")
    if not np.can_cast(numbers.dtype, kind.dtype):
        raise DataError(f"{where}: a mask of {numbers.dtype}, expected {np.dtype(kind.dtype)}")
    return Layer(numbers, kind.outside)


def checked_boxes(given: Any, names: Sequence[str], where: str) -> np.ndarray:
    """(n, 6) float32 from (n, 5) of corners and category, whose objects are numbered from 1."""
    boxes = np.asarray(given, np.float64).reshape(len(given), 5)
    if len(boxes) > MOST_BOXES:
        raise DataError(f"{where}: {len(boxes):,} boxes, more than the limit of {MOST_BOXES:,}")
    if not np.isfinite(boxes).all():
        raise DataError(f"{where}: a box has corners that are not finite numbers")
    outside = boxes[(boxes[:, 4] < 0) | (boxes[:, 4] >= len(names)), 4]
    if len(outside):
        raise DataError(f"{where}: a box of category {outside[0]:g}, expected 0…{len(names) - 1}")
    return np.column_stack([boxes, 1 + np.arange(len(boxes))]).astype(np.float32)
