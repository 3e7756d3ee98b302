"""Geometry of views: drawn once, then applied to an image, its masks and its boxes.

    crop a box → flip → resize the box → take a window of it, which may extend beyond its border

An image is resized with antialiasing, a mask to its nearest pixels, a box by its corners, so all three stay aligned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

Size = tuple[int, int]  # height, width
SMALLEST_BOX_SIDE = 1.0  # pixels: boxes with less left after the crop are dropped
# An image may be decoded at reduced size if its sides stay at least this many times those of the view: resizing then
# hides most of the difference (benchmarks/LOG.md).
PIXELS_LEFT = 2
REDUCTIONS = (8, 4, 2)
LONGEST = 4  # limit of the long side as a multiple of the short one, as mmsegmentation's (2048, 512)


def resize(image: Image.Image, size: Size) -> np.ndarray:
    """Resize to (H, W, 3), bicubic with antialiasing. torch takes a fifth of Pillow's time; bytes differ by 1."""
    if image.size == (size[1], size[0]):
        return np.asarray(image)
    import torch  # only in training: artifacts resize with Pillow
    import torch.nn.functional as F

    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(1, image.height, image.width, 3).permute(0, 3, 1, 2)  # (1, 3, h, w), channels last
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


def short_side_factor(size: tuple[int, int], short_side: int) -> float:
    """Return the factor that scales an image to `short_side`, or less if its long side is too long; 1 for 0."""
    return min(short_side / min(size), LONGEST * short_side / max(size)) if short_side else 1.0


def fitting_size(image: tuple[int, int], canvas: Size, short: int | None = None, long: int | None = None) -> Size:
    """Scale an image of (width, height) to fit a canvas and limits on its sides. Returns (height, width)."""
    width, height = image
    scale = min(canvas[0] / height, canvas[1] / width)
    if short is not None:
        scale = min(scale, short / min(image))
    if long is not None:
        scale = min(scale, long / max(image))
    return scaled_size(image, scale, canvas)


def scaled_size(image: tuple[int, int], scale: float, most: Size | None = None) -> Size:
    """Return (height, width) of an image of (width, height) at a scale, at least one pixel each."""
    height, width = max(1, round(image[1] * scale)), max(1, round(image[0] * scale))
    return (height, width) if most is None else (min(height, most[0]), min(width, most[1]))


@dataclass(frozen=True)
class Geometry:
    """One view of one image. Sizes are (height, width), corners left, top, right, bottom."""

    box: tuple[int, int, int, int]  # in pixels of the image
    scaled: Size  # of the resized box
    size: Size  # of the window
    start: tuple[int, int] = (0, 0)  # top and left of the window in the resized box; may be negative
    flip: bool = False  # left to right
    reflect: bool = False  # fill the window beyond the border with reflections of the box; otherwise it is empty

    @property
    def reduction(self) -> int:
        """The factor by which the image may be decoded smaller: 1, 2, 4 or 8."""
        left, top, right, bottom = self.box
        height, width = (PIXELS_LEFT * side for side in self.scaled)
        return next((by for by in REDUCTIONS if right - left >= by * width and bottom - top >= by * height), 1)

    def apply_image(
        self,
        image: Image.Image,
        resized: Callable[[Image.Image, Size], np.ndarray] = resize,
        whole: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """Return the view of an RGB image, (H, W, 3) uint8, black where it is empty.

        `whole` is the original (width, height) of an image that was decoded smaller.
        """
        box = self.box if whole is None else _shrunk_box(self.box, whole, image.size)
        if box != (0, 0, *image.size):
            image = image.crop(box)
        if self.flip:  # before resizing, when there are fewer pixels
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = resized(image, self.scaled)
        if self.size == self.scaled and self.start == (0, 0):
            return pixels
        (top, left), (height, width) = self.start, self.size
        if 0 <= top <= self.scaled[0] - height and 0 <= left <= self.scaled[1] - width:
            return np.ascontiguousarray(pixels[top : top + height, left : left + width])
        (rows, inside_rows), (columns, inside_columns) = self._window(0), self._window(1)
        window = pixels.take(rows, axis=0).take(columns, axis=1)
        return self._emptied(window, inside_rows, inside_columns, 0)

    def apply_mask(self, mask: np.ndarray, outside: int) -> np.ndarray:
        """Return the view of a mask of integers (h, w) as (H, W), with `outside` where it is empty."""
        left, top, right, bottom = self.box
        (rows, inside_rows), (columns, inside_columns) = self._window(0), self._window(1)
        rows, columns = _nearest(rows, bottom - top, self.scaled[0]), _nearest(columns, right - left, self.scaled[1])
        columns = right - 1 - columns if self.flip else left + columns
        window = mask.take(top + rows, axis=0).take(columns, axis=1)
        return self._emptied(window, inside_rows, inside_columns, outside)

    def apply_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """Return the visible boxes, clipped to the view. Rows are x0, y0, x1, y1 and any further values of a box.

        Reflections have no boxes.
        """
        left, top, right, bottom = self.box
        moved = boxes.astype(np.float64)
        x, y = moved[:, [0, 2]].clip(left, right) - left, moved[:, [1, 3]].clip(top, bottom) - top
        x = (right - left - x)[:, ::-1] if self.flip else x
        x, y = x * (self.scaled[1] / (right - left)), y * (self.scaled[0] / (bottom - top))
        moved[:, [0, 2]] = (x - self.start[1]).clip(0, self.size[1])
        moved[:, [1, 3]] = (y - self.start[0]).clip(0, self.size[0])
        visible = ((moved[:, 2:4] - moved[:, :2]) >= SMALLEST_BOX_SIDE).all(1)
        return moved[visible].astype(np.float32)

    def _window(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the position in the resized box of each row or column of the window, and whether it is inside."""
        length = self.scaled[axis]
        positions = np.arange(self.size[axis]) + self.start[axis]
        inside = (positions >= 0) & (positions < length)
        if self.reflect:
            period = max(1, 2 * (length - 1))
            positions = positions % period
            return np.minimum(positions, period - positions), np.ones_like(inside)
        return positions.clip(0, length - 1), inside

    @staticmethod
    def _emptied(window: np.ndarray, rows: np.ndarray, columns: np.ndarray, value: int) -> np.ndarray:
        if not (rows.all() and columns.all()):
            window[~rows] = value
            window[:, ~columns] = value
        return window


def _shrunk_box(
    box: tuple[int, int, int, int], whole: tuple[int, int], size: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Convert a box from an image of `whole` (width, height) to the same image decoded at `size`.

    Corners move by at most half a decoded pixel, which is a quarter of a pixel of the view.
    """
    factor = round(max(whole) / max(size))  # sides are rounded up
    left, top, right, bottom = (round(side / factor) for side in box)
    return left, top, min(right, size[0]), min(bottom, size[1])


def _nearest(positions: np.ndarray, length: int, scaled: int) -> np.ndarray:
    """Return the nearest of `length` pixels for each position on a side resized to `scaled`."""
    return (2 * positions + 1) * length // (2 * scaled)


def resized_rows(maps: np.ndarray, size: Size, rows: slice) -> np.ndarray:
    """Resize maps (K, h, w) to `size` and return some rows, (K, rows, W). Bilinear, as torch's `interpolate`."""
    low, high, share = _neighbors(rows.start, rows.stop, size[0], maps.shape[1])
    between = maps[:, low] + (maps[:, high] - maps[:, low]) * share[:, None]
    low, high, share = _neighbors(0, size[1], size[1], maps.shape[2])
    return between[..., low] + (between[..., high] - between[..., low]) * share


def _neighbors(start: int, stop: int, length: int, cells: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two cells around each pixel from start to stop of `length`, and the weight of the second."""
    at = np.maximum((np.arange(start, stop) + 0.5) * (cells / length) - 0.5, 0).astype(np.float32)
    low = np.minimum(at.astype(np.int64), cells - 1)
    return low, np.minimum(low + 1, cells - 1), at - low
