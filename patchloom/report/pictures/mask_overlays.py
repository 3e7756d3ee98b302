"""Masks as pictures: a colour for every class, masks in these colours, pictures under them, and each class's share."""

from functools import lru_cache

import numpy as np
from PIL import Image

OVER = 0.55  # of an overlay that is the mask's colour
NO_CLASS = (255, 255, 255)
FIRST_CLASS = (120, 144, 176)  # where VOC has black: the first class is as often the sky as the background


@lru_cache(maxsize=8)
def palette(classes: int) -> np.ndarray:
    """(classes, 3) uint8: Pascal VOC's colors, in which neighbors differ, with another for the first class."""
    numbers = np.arange(classes)
    colors = np.zeros((classes, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    colors[:1] = FIRST_CLASS
    return colors


def index_image(numbers: np.ndarray, classes: int) -> Image.Image:
    """(H, W) class numbers as a picture of these very numbers: with a palette up to 256 classes, else of 16 bits."""
    if classes > 256:
        return Image.fromarray(numbers.astype(np.uint16))
    image = Image.fromarray(numbers.astype(np.uint8), "L")
    image.putpalette(palette(256).tobytes())
    return image


def colored(numbers: np.ndarray, classes: int) -> Image.Image:
    """(H, W) class numbers in the colours of their classes; numbers outside the classes are white."""
    colors = np.vstack([palette(classes), NO_CLASS]).astype(np.uint8)
    known = (numbers >= 0) & (numbers < classes)
    return Image.fromarray(colors[np.where(known, numbers, classes)])


def overlaid(picture: Image.Image, numbers: np.ndarray, classes: int) -> Image.Image:
    """The picture under the colours of its classes."""
    return Image.blend(picture.convert("RGB"), colored(numbers, classes), OVER)


def class_shares(numbers: np.ndarray) -> list[tuple[int, float]]:
    """(H, W) class numbers → each class that is there with its share of the pixels, largest first."""
    shares = np.bincount(numbers.ravel()) / numbers.size
    return [(int(number), float(shares[number])) for number in np.argsort(-shares, kind="stable") if shares[number]]
