"""Objects drawn over their picture: boxes, masks, names and scores, one colour per class; mistakes dashed and red."""

import colorsys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from patchloom_runtime.images.object_masks import ObjectMask
from patchloom_runtime.printable import printable

Color = tuple[int, int, int]
LEAST_SIDE = 480  # of a drawing: smaller pictures are enlarged, so that names can be read
OPACITY = 0.4
GOLDEN = 0.618034  # steps around the circle of colours that never come near each other soon
FIRST_HUE = 0.58  # blue: far from the red of mistakes
MISTAKE = (220, 38, 38)
DASH = 4  # lengths of a dash and of the gap after it, in widths of the line


class DrawnObject(NamedTuple):
    """One object of a drawing."""

    text: str
    box: Sequence[float]  # x0, y0, x1, y1 in pixels of the picture
    number: int  # of its class, which says the colour
    mask: ObjectMask | None = None
    mistake: bool = False


def named(name: str, score: float | None = None) -> str:
    """What is written at an object: its class, and how sure that is."""
    return printable(name) + (f" {score:.0%}" if score is not None else "")


def drawn_objects(picture: Image.Image, objects: Sequence[DrawnObject]) -> Image.Image:
    """The picture with its objects, of which the first are on top."""
    pixels = np.asarray(picture.convert("RGB")).copy()
    for one in objects:
        if one.mask is not None and one.mask.bits.size:
            height, width = one.mask.bits.shape
            part = pixels[one.mask.top : one.mask.top + height, one.mask.left : one.mask.left + width]
            mixed = (1 - OPACITY) * part + OPACITY * np.array(class_color(one.number))
            part[:] = np.where(one.mask.bits[..., None], mixed, part).astype(np.uint8)
    factor = max(1, -(-LEAST_SIDE // max(picture.size)))
    canvas = Image.fromarray(pixels).resize([side * factor for side in picture.size], Image.Resampling.BILINEAR)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=max(11, max(canvas.size) // 34))
    line = max(2, max(canvas.size) // 240)
    for one in reversed(objects):
        color = MISTAKE if one.mistake else class_color(one.number)
        x0, y0, x1, y1 = (factor * value for value in one.box)
        box = x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)
        if one.mistake:
            _dashed(draw, box, color, line)
        else:
            draw.rectangle(box, outline=color, width=line)
        _labeled(draw, one.text, (x0, y0), canvas.size, color, font)
    return canvas


def _labeled(
    draw: ImageDraw.ImageDraw, text: str, corner: tuple[float, float], size: tuple[int, int], color: Color, font: Any
) -> None:
    """A name above the corner of its box, or inside it, and never outside the picture."""
    _, _, right, bottom = draw.textbbox((0, 0), text, font=font)
    width, height = right + 4, bottom + 4
    x = max(0, min(corner[0], size[0] - width))
    y = max(0, min(corner[1] - height if corner[1] >= height else corner[1], size[1] - height))
    draw.rectangle((x, y, x + width, y + height), fill=color)
    draw.text((x + 2, y + 1), text, fill="white", font=font)


def _dashed(draw: ImageDraw.ImageDraw, box: Sequence[float], color: Color, line: int) -> None:
    x0, y0, x1, y1 = box
    step = 2 * DASH * line
    for x in np.arange(x0, x1, step):
        for y in (y0, y1 - line + 1):
            draw.rectangle((x, y, min(x1, x + step / 2), y + line - 1), fill=color)
    for y in np.arange(y0, y1, step):
        for x in (x0, x1 - line + 1):
            draw.rectangle((x, y, x + line - 1, min(y1, y + step / 2)), fill=color)


def class_color(number: int) -> Color:
    """The colour of a class, by its number."""
    red, green, blue = colorsys.hls_to_rgb((FIRST_HUE + number * GOLDEN) % 1, 0.42, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)
