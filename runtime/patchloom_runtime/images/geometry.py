"""Where the pixels of a view come from: drawn once, then applied to a picture, to its masks and to its boxes.

    crop a box → flip → resize the box → take a window of it, which may reach over its border

A picture is resized with antialiasing, a mask by its nearest pixels, a box by its corners, so all three stay together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image

Size = tuple[int, int]  # height, width


# Of a box, after the crop: with less to see it is dropped.
SMALLEST_BOX_SIDE = 1.0
# A picture may be decoded smaller where so many times the pixels that are seen are left: the resizing then hides most
# of what the decoder did (benchmarks/LOG.md).
PIXELS_LEFT = 2
REDUCTIONS = (8, 4, 2)
LONGEST = 4  # times the short side: mmsegmentation's (2048, 512)


def resize(image: Image.Image, size: Size) -> np.ndarray:
    """Bicubic with antialiasing → (H, W, 3). torch takes a fifth of Pillow's time and stays within 1."""
    if image.size == (size[1], size[0]):
        return np.asarray(image)
    import torch  # which the light runtime has not, and does not resize by
    import torch.nn.functional as F

    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(1, image.height, image.width, 3).permute(0, 3, 1, 2)  # (1, 3, h, w), channels last
    return F.interpolate(pixels, size, mode="bicubic", antialias=True)[0].permute(1, 2, 0).numpy()


def short_side_factor(size: tuple[int, int], short_side: int) -> float:
    """By what the sides of a picture are multiplied to be of `short_side`, or less where it is long; 1 for 0."""
    return min(short_side / min(size), LONGEST * short_side / max(size)) if short_side else 1.0


def fitting_size(picture: tuple[int, int], canvas: Size, short: int | None = None, long: int | None = None) -> Size:
    """(height, width) of the shape of a picture of (width, height), within the canvas and the limits on its sides."""
    width, height = picture
    scale = min(canvas[0] / height, canvas[1] / width)
    if short is not None:
        scale = min(scale, short / min(picture))
    if long is not None:
        scale = min(scale, long / max(picture))
    return scaled_size(picture, scale, canvas)


def scaled_size(picture: tuple[int, int], scale: float, most: Size | None = None) -> Size:
    """(height, width) of a picture of (width, height) at a scale, at least one pixel each."""
    height, width = max(1, round(picture[1] * scale)), max(1, round(picture[0] * scale))
    return (height, width) if most is None else (min(height, most[0]), min(width, most[1]))


@dataclass(frozen=True)
class Geometry:
    """One view of one picture. Sizes are (height, width), corners left, top, right, bottom."""

    box: tuple[int, int, int, int]  # in pixels of the picture
    scaled: Size  # what the box is resized to
    size: Size  # of the window that is seen
    start: tuple[int, int] = (0, 0)  # top and left of the window in the resized box; may be negative
    flip: bool = False  # left to right
    reflect: bool = False  # over the border the window shows the reflection of the box; else nothing

    @property
    def reduction(self) -> int:
        """How many times smaller the picture may be decoded: 1, 2, 4 or 8."""
        left, top, right, bottom = self.box
        height, width = (PIXELS_LEFT * side for side in self.scaled)
        return next((by for by in REDUCTIONS if right - left >= by * width and bottom - top >= by * height), 1)

    def apply_picture(
        self,
        picture: Image.Image,
        resized: Callable[[Image.Image, Size], np.ndarray] = resize,
        whole: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """RGB → (H, W, 3) uint8, black where there is nothing; flipped before resizing, where it has fewer pixels.

        Of a picture that was decoded smaller `whole` is (width, height).
        """
        box = self.box if whole is None else _shrunk_box(self.box, whole, picture.size)
        if box != (0, 0, *picture.size):
            picture = picture.crop(box)
        if self.flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = resized(picture, self.scaled)
        if self.size == self.scaled and self.start == (0, 0):
            return pixels
        (top, left), (height, width) = self.start, self.size
        if 0 <= top <= self.scaled[0] - height and 0 <= left <= self.scaled[1] - width:
            return np.ascontiguousarray(pixels[top : top + height, left : left + width])
        (rows, inside_rows), (columns, inside_columns) = self._window(0), self._window(1)
        seen = pixels.take(rows, axis=0).take(columns, axis=1)
        return self._emptied(seen, inside_rows, inside_columns, 0)

    def apply_mask(self, mask: np.ndarray, outside: int) -> np.ndarray:
        """(h, w) whole numbers → (H, W), `outside` where there is nothing."""
        left, top, right, bottom = self.box
        (rows, inside_rows), (columns, inside_columns) = self._window(0), self._window(1)
        rows, columns = _nearest(rows, bottom - top, self.scaled[0]), _nearest(columns, right - left, self.scaled[1])
        columns = right - 1 - columns if self.flip else left + columns
        seen = mask.take(top + rows, axis=0).take(columns, axis=1)
        return self._emptied(seen, inside_rows, inside_columns, outside)

    def apply_boxes(self, boxes: np.ndarray) -> np.ndarray:
        """(n, 4 …) of x0, y0, x1, y1 and whatever belongs to a box → those of which something is seen, cut to that.

        Reflections have no boxes.
        """
        left, top, right, bottom = self.box
        moved = boxes.astype(np.float64)
        x, y = moved[:, [0, 2]].clip(left, right) - left, moved[:, [1, 3]].clip(top, bottom) - top
        x = (right - left - x)[:, ::-1] if self.flip else x
        x, y = x * (self.scaled[1] / (right - left)), y * (self.scaled[0] / (bottom - top))
        moved[:, [0, 2]] = (x - self.start[1]).clip(0, self.size[1])
        moved[:, [1, 3]] = (y - self.start[0]).clip(0, self.size[0])
        seen = ((moved[:, 2:4] - moved[:, :2]) >= SMALLEST_BOX_SIDE).all(1)
        return moved[seen].astype(np.float32)

    def _window(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Places in the resized box, one for each row or column that is seen, and whether they are inside."""
        length = self.scaled[axis]
        places = np.arange(self.size[axis]) + self.start[axis]
        inside = (places >= 0) & (places < length)
        if self.reflect:
            there_and_back = max(1, 2 * (length - 1))
            places = places % there_and_back
            return np.minimum(places, there_and_back - places), np.ones_like(inside)
        return places.clip(0, length - 1), inside

    @staticmethod
    def _emptied(seen: np.ndarray, rows: np.ndarray, columns: np.ndarray, value: int) -> np.ndarray:
        if not (rows.all() and columns.all()):
            seen[~rows] = value
            seen[:, ~columns] = value
        return seen


def _shrunk_box(
    box: tuple[int, int, int, int], whole: tuple[int, int], size: tuple[int, int]
) -> tuple[int, int, int, int]:
    """A box of a picture of (width, height) `whole` in the pixels of the same decoded to `size`.

    It moves by half a pixel of these at most, a quarter of one that is seen.
    """
    factor = round(max(whole) / max(size))  # sides are rounded up
    left, top, right, bottom = (round(side / factor) for side in box)
    return left, top, min(right, size[0]), min(bottom, size[1])


def _nearest(places: np.ndarray, length: int, scaled: int) -> np.ndarray:
    """The pixel of `length` whose share of `scaled` holds each place's centre."""
    return (2 * places + 1) * length // (2 * scaled)
