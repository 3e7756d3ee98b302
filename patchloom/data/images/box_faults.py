"""What is wrong with the boxes of a picture: (kind, detail) of each fault, for `check`."""

from collections.abc import Iterator

import numpy as np

from patchloom.data.datasets import ImageStore
from patchloom_runtime.errors import DataError

NO_OBJECTS = "no objects"  # no fault: such pictures teach what is none


def box_faults(images: ImageStore, row: int, size: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Boxes without area, outside the picture of `size` (width, height), of a class without a name; or none at all."""
    try:
        boxes = images.boxes(row)
    except (DataError, ValueError, TypeError, IndexError) as error:  # whatever a foreign column holds
        yield "boxes cannot be read", str(error)
        return
    if boxes is not None and not len(boxes):
        yield NO_OBJECTS, "it has no boxes and is used as a background image"
    # Whole pixels: annotations end a fraction beyond the border, and nothing is seen of a fraction of a pixel.
    for x0, y0, x1, y1, number in [] if boxes is None else boxes.round().astype(np.int64).tolist():
        if fault := corners_fault(x0, y0, x1, y1, size):
            yield fault
        if not 0 <= number < len(images.object_names):
            yield "unknown category", f"{number}, expected 0…{len(images.object_names) - 1}"


def corners_fault(x0: float, y0: float, x1: float, y1: float, size: tuple[int, int]) -> tuple[str, str] | None:
    """The fault of one box, of which the worse is told."""
    shown = f"x {x0:g}…{x1:g}, y {y0:g}…{y1:g}"
    if not (x1 > x0 and y1 > y0):
        return "box without area", shown
    if x0 < 0 or y0 < 0 or x1 > size[0] or y1 > size[1]:
        return "box outside the picture", f"{shown}, the picture is {size[0]}×{size[1]}"
    return None
