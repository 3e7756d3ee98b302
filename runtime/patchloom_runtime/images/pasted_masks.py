"""Masks as a detector gives them, 28×28 shares in a box, as pixels of the picture.

They are resized into their box alone, as torchvision pastes them into the whole picture: of a picture of 12 megapixels
with 100 small objects little is touched.
"""

import numpy as np

from patchloom_runtime.images.bilinear import resized_rows
from patchloom_runtime.images.object_masks import ObjectMask, Size

INSIDE = 0.5  # share from which a pixel belongs to an object


def pasted(mask: np.ndarray, box: np.ndarray, size: Size) -> ObjectMask:
    """(28, 28) float32 shares and their box → the pixels of a picture of `size` (height, width)."""
    grown = np.float32((mask.shape[-1] + 2) / mask.shape[-1])  # a border of nothing around it, as torchvision's
    centre, half = (box[2:] + box[:2]) / 2, (box[2:] - box[:2]) / 2 * grown
    left, top, right, bottom = (int(value) for value in (*(centre - half), *(centre + half)))
    width, height = max(1, right - left + 1), max(1, bottom - top + 1)
    y0, x0, y1, x1 = max(0, top), max(0, left), min(size[0], bottom + 1), min(size[1], right + 1)
    if y0 >= y1 or x0 >= x1:
        return ObjectMask(0, 0, np.zeros((0, 0), bool))
    shares = resized_rows(np.pad(mask, 1)[None], (height, width), slice(y0 - top, y1 - top))[0]
    return ObjectMask(y0, x0, shares[:, x0 - left : x1 - left] > INSIDE)
