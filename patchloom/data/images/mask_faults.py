"""What is wrong with the mask of a picture: (kind, detail) of each fault, for `check`."""

from collections.abc import Iterator

import numpy as np

from patchloom.data.datasets import ImageStore
from patchloom_runtime.errors import DataError

_SHOWN = 5  # values named


def mask_faults(images: ImageStore, row: int, size: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Unreadable or of an odd mode, of another size (width, height) than the picture, values outside the names."""
    try:
        mask = images.mask(row)
    except DataError as error:
        yield "mask cannot be read", str(error)
        return
    if mask is None:
        return
    height, width = mask.classes.shape
    if (width, height) != size:
        yield "mask of another size", f"{width}×{height}, the picture is {size[0]}×{size[1]}"
    if images.mask_names:
        values, counts = np.unique(mask.classes, return_counts=True)
        outside = (values >= len(images.mask_names)) & (values != images.mask_ignore)
        if np.any(outside):
            named = ", ".join(map(str, values[outside][:_SHOWN].tolist()))
            yield "mask values unknown", f"{named} ({counts[outside].sum():,} pixels), expected {_expected(images)}"


def _expected(images: ImageStore) -> str:
    ignored = "" if images.mask_ignore is None else f" or {images.mask_ignore}"
    return f"0…{len(images.mask_names) - 1}{ignored}"
