"""Faults of the masks and boxes of one image, for `check`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from patchloom.data.images.image_store import ImageStore
from patchloom_runtime.errors import DataError

NO_OBJECTS = "no objects"  # worth reporting, but not a fault: such images are used as background
_LISTED_VALUES = 5


class AnnotationFault(NamedTuple):
    """A fault of the mask or the boxes of an image."""

    kind: str
    detail: str


def mask_faults(images: ImageStore, row: int, size: tuple[int, int]) -> Iterator[AnnotationFault]:
    """Yield faults of a mask: unreadable, of another size than the image (width, height), values without a name."""
    try:
        mask = images.mask(row)
    except DataError as error:
        yield AnnotationFault("mask cannot be read", str(error))
        return
    if mask is None:
        return
    height, width = mask.classes.shape
    if (width, height) != size:
        yield AnnotationFault("mask of another size", f"{width}×{height}, the image is {size[0]}×{size[1]}")
    if images.mask_names:
        values, counts = np.unique(mask.classes, return_counts=True)
        outside = (values >= len(images.mask_names)) & (values != images.mask_ignore)
        if np.any(outside):
            listed = ", ".join(map(str, values[outside][:_LISTED_VALUES].tolist()))
            ignored = "" if images.mask_ignore is None else f" or {images.mask_ignore}"
            expected = f"0…{len(images.mask_names) - 1}{ignored}"
            detail = f"{listed} ({counts[outside].sum():,} pixels), expected {expected}"
            yield AnnotationFault("mask values unknown", detail)


def box_faults(images: ImageStore, row: int, size: tuple[int, int]) -> Iterator[AnnotationFault]:
    """Yield faults of boxes: without area, outside the image of `size` (width, height), of an unknown class."""
    try:
        boxes = images.boxes(row)
    except (DataError, ValueError, TypeError, IndexError) as error:  # a column of foreign data may hold anything
        yield AnnotationFault("boxes cannot be read", str(error))
        return
    if boxes is not None and not len(boxes):
        yield AnnotationFault(NO_OBJECTS, "it has no boxes and is used as a background image")
    # Whole pixels: many annotations end a fraction of a pixel beyond the border, which is harmless.
    for x0, y0, x1, y1, number in [] if boxes is None else boxes.round().astype(np.int64).tolist():
        if fault := corners_fault(x0, y0, x1, y1, size):
            yield fault
        if not 0 <= number < len(images.object_names):
            yield AnnotationFault("unknown category", f"{number}, expected 0…{len(images.object_names) - 1}")


def corners_fault(x0: float, y0: float, x1: float, y1: float, size: tuple[int, int]) -> AnnotationFault | None:
    """Return the worst fault of one box, or None."""
    box = f"x {x0:g}…{x1:g}, y {y0:g}…{y1:g}"
    if not (x1 > x0 and y1 > y0):
        return AnnotationFault("box without area", box)
    if x0 < 0 or y0 < 0 or x1 > size[0] or y1 > size[1]:
        return AnnotationFault("box outside the image", f"{box}, the image is {size[0]}×{size[1]}")
    return None
