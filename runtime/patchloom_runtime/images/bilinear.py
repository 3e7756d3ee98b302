"""Numbers of places resized to pixels, bilinear between the middles of places, as torch's `interpolate` does."""

import numpy as np

from patchloom_runtime.images.geometry import Size


def resized_rows(numbers: np.ndarray, size: Size, rows: slice) -> np.ndarray:
    """(K, h, w) resized to `size`, bilinear between the middles of places: these rows of it, (K, rows, W)."""
    low, high, share = _neighbours(rows.start, rows.stop, size[0], numbers.shape[1])
    between = numbers[:, low] + (numbers[:, high] - numbers[:, low]) * share[:, None]
    low, high, share = _neighbours(0, size[1], size[1], numbers.shape[2])
    return between[..., low] + (between[..., high] - between[..., low]) * share


def _neighbours(start: int, stop: int, length: int, places: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of pixels start … stop of `length`: the two of `places` they lie between, and how near to the second."""
    at = np.maximum((np.arange(start, stop) + 0.5) * (places / length) - 0.5, 0).astype(np.float32)
    low = np.minimum(at.astype(np.int64), places - 1)
    return low, np.minimum(low + 1, places - 1), at - low
