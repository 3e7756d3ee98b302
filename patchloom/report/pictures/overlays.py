"""Drawings over an image: attention and evidence maps, segmentation masks, and detected objects.

This module does not import torch, so that the page of a server starts fast.
"""

import colorsys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from patchloom.report.pictures.sheets import NEGATIVE, POSITIVE, displayed, heat
from patchloom_runtime.images.object_masks import ObjectMask
from patchloom_runtime.printable import printable

# Maps -----------------------------------------------------------------------------------------------------------------

SIDE = 192  # pixels of an image on a sheet
MAX_OPACITY = 0.75  # of the largest evidence


def attention_overlay(image: Image.Image, attention: np.ndarray, side: int = SIDE) -> Image.Image:
    """Blend the gray image with the map (h, w) in cividis, half and half: yellow is strongest (thesis 3.7.2.5).

    The map is interpolated to the size of the image and scaled to 0…1. The thesis multiplies image and map, which
    leaves dark objects dark however much attention they get.
    """
    gray = np.asarray(displayed(image, side).convert("L"), np.float64)
    strength = _interpolated(attention, gray.shape)
    strength = (strength - strength.min()) / ((strength.max() - strength.min()) or 1.0)
    return Image.fromarray(np.rint((gray[..., None] + heat(strength)) / 2).astype(np.uint8))


def evidence_overlay(image: Image.Image, evidence: np.ndarray, side: int = SIDE) -> Image.Image:
    """Color the pale gray image red where the map (h, w) is positive and blue where it is negative."""
    gray = np.asarray(displayed(image, side).convert("L"), np.float64)
    strength = _interpolated(evidence / (np.abs(evidence).max() or 1.0), gray.shape)[..., None]
    opacity = MAX_OPACITY * np.abs(strength)
    color = np.where(strength < 0, NEGATIVE, POSITIVE)
    pale = (128 + gray / 2)[..., None]
    return Image.fromarray(np.rint(pale * (1 - opacity) + color * opacity).astype(np.uint8))


def attention_tile(attention: np.ndarray, side: int) -> Image.Image:
    """Draw the map (h, w) alone, one square per patch, from 0 to its largest weight; negative weights count as 0."""
    shares = np.clip(attention / (attention.max() or 1.0), 0, 1)
    size = (side, max(1, round(side * attention.shape[0] / attention.shape[1])))
    return Image.fromarray(heat(shares)).resize(size, Image.Resampling.NEAREST)


def _interpolated(values: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR), np.float64)


# Masks ----------------------------------------------------------------------------------------------------------------

MASK_SHARE = 0.55  # weight of the mask's color in an overlay
NO_CLASS = (255, 255, 255)
FIRST_CLASS = (120, 144, 176)  # instead of VOC's black: the first class is as often the sky as the background


@lru_cache(maxsize=8)
def palette(classes: int) -> np.ndarray:
    """Return a color per class, (classes, 3) uint8: those of Pascal VOC, except for the first class."""
    numbers = np.arange(classes)
    colors = np.zeros((classes, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    colors[:1] = FIRST_CLASS
    return colors


def index_image(numbers: np.ndarray, classes: int) -> Image.Image:
    """Return class numbers (H, W) as an image of these numbers: with a palette up to 256 classes, else of 16 bits."""
    if classes > 256:
        return Image.fromarray(numbers.astype(np.uint16))
    image = Image.fromarray(numbers.astype(np.uint8), "L")
    image.putpalette(palette(256).tobytes())
    return image


def color_mask(numbers: np.ndarray, classes: int) -> Image.Image:
    """Draw class numbers (H, W) in the colors of their classes; numbers outside the classes are white."""
    colors = np.vstack([palette(classes), NO_CLASS]).astype(np.uint8)
    known = (numbers >= 0) & (numbers < classes)
    return Image.fromarray(colors[np.where(known, numbers, classes)])


def overlay_mask(image: Image.Image, numbers: np.ndarray, classes: int) -> Image.Image:
    """Blend an image with the colors of its class numbers (H, W)."""
    return Image.blend(image.convert("RGB"), color_mask(numbers, classes), MASK_SHARE)


def class_shares(numbers: np.ndarray) -> list[tuple[int, float]]:
    """Return each class of the class numbers (H, W) with its share of the pixels, largest first."""
    shares = np.bincount(numbers.ravel()) / numbers.size
    return [(int(number), float(shares[number])) for number in np.argsort(-shares, kind="stable") if shares[number]]


# Objects --------------------------------------------------------------------------------------------------------------

Color = tuple[int, int, int]
LEAST_SIDE = 480  # pixels of a drawing; smaller images are enlarged, so that names are legible
OBJECT_OPACITY = 0.4
GOLDEN = 0.618034  # step around the color circle that keeps consecutive hues far apart
FIRST_HUE = 0.58  # blue, far from the red of mistakes
MISTAKE = (220, 38, 38)
DASH = 4  # length of a dash and of the gap after it, in line widths


class DrawnObject(NamedTuple):
    """An object to draw."""

    text: str
    box: Sequence[float]  # x0, y0, x1, y1 in pixels of the image
    number: int  # class number, which determines the color
    mask: ObjectMask | None = None
    mistake: bool = False


def object_text(name: str, score: float | None = None) -> str:
    """Return the text for an object: its class and its score."""
    return printable(name) + (f" {score:.0%}" if score is not None else "")


def draw_objects(image: Image.Image, objects: Sequence[DrawnObject]) -> Image.Image:
    """Draw objects over an image, the first on top: boxes, masks and texts in class colors; mistakes dashed and red."""
    pixels = np.asarray(image.convert("RGB")).copy()
    for drawn in objects:
        if drawn.mask is not None and drawn.mask.bits.size:
            height, width = drawn.mask.bits.shape
            part = pixels[drawn.mask.top : drawn.mask.top + height, drawn.mask.left : drawn.mask.left + width]
            mixed = (1 - OBJECT_OPACITY) * part + OBJECT_OPACITY * np.array(class_color(drawn.number))
            part[:] = np.where(drawn.mask.bits[..., None], mixed, part).astype(np.uint8)
    factor = max(1, -(-LEAST_SIDE // max(image.size)))
    canvas = Image.fromarray(pixels).resize([side * factor for side in image.size], Image.Resampling.BILINEAR)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=max(11, max(canvas.size) // 34))
    line = max(2, max(canvas.size) // 240)
    for drawn in reversed(objects):
        color = MISTAKE if drawn.mistake else class_color(drawn.number)
        x0, y0, x1, y1 = (factor * value for value in drawn.box)
        box = x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)
        if drawn.mistake:
            _draw_dashed(draw, box, color, line)
        else:
            draw.rectangle(box, outline=color, width=line)
        _draw_text(draw, drawn.text, (x0, y0), canvas.size, color, font)
    return canvas


def _draw_text(
    draw: ImageDraw.ImageDraw, text: str, corner: tuple[float, float], size: tuple[int, int], color: Color, font: Any
) -> None:
    """Draw text above the corner of a box, or inside it, but never outside the image."""
    _, _, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = right + 4, bottom + 4
    x = max(0, min(corner[0], size[0] - width))
    y = max(0, min(corner[1] - height if corner[1] >= height else corner[1], size[1] - height))
    draw.rectangle((x, y, x + width, y + height), fill=color)
    draw.text((x + 2, y + 1), text, fill="white", font=font)


def _draw_dashed(draw: ImageDraw.ImageDraw, box: Sequence[float], color: Color, line: int) -> None:
    x0, y0, x1, y1 = box
    step = 2 * DASH * line
    for x in np.arange(x0, x1, step):
        for y in (y0, y1 - line + 1):
            draw.rectangle((x, y, min(x1, x + step / 2), y + line - 1), fill=color)
    for y in np.arange(y0, y1, step):
        for x in (x0, x1 - line + 1):
            draw.rectangle((x, y, x + line - 1, min(y1, y + step / 2)), fill=color)


def class_color(number: int) -> Color:
    """Return the color of a class."""
    red, green, blue = colorsys.hls_to_rgb((FIRST_HUE + number * GOLDEN) % 1, 0.42, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)
