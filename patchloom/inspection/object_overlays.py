"""Objects drawn over their picture: boxes, masks, names and scores, one colour per class."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from patchloom.data.pictures.object_masks import ObjectMask
from patchloom.printable import printable

Shown = tuple[str, float | None, Sequence[float], ObjectMask | None]  # name, score, box, mask
LEAST_SIDE = 480  # of a drawing: smaller pictures are enlarged, so that names can be read
OPACITY = 0.4
GOLDEN = 0.618034  # steps around the circle of colours that never come near each other soon


def drawn_objects(picture: Image.Image, objects: Sequence[Shown], numbers: Sequence[int]) -> Image.Image:
    """The picture with its objects, of which `numbers` say the class."""
    pixels = np.asarray(picture.convert("RGB")).copy()
    for (_, _, _, mask), number in zip(objects, numbers, strict=True):
        if mask is not None and mask.bits.size:
            height, width = mask.bits.shape
            part = pixels[mask.top : mask.top + height, mask.left : mask.left + width]
            mixed = (1 - OPACITY) * part + OPACITY * np.array(class_colour(number))
            part[:] = np.where(mask.bits[..., None], mixed, part).astype(np.uint8)
    factor = max(1, -(-LEAST_SIDE // max(picture.size)))
    canvas = Image.fromarray(pixels).resize([side * factor for side in picture.size], Image.Resampling.BILINEAR)
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=max(11, max(canvas.size) // 50))
    # The surest last, so that it is on top.
    for (name, score, box, _), number in reversed(list(zip(objects, numbers, strict=True))):
        colour = class_colour(number)
        x0, y0, x1, y1 = (factor * value for value in box)
        draw.rectangle(
            (x0, y0, max(x0, x1 - 1), max(y0, y1 - 1)), outline=colour, width=max(2, max(canvas.size) // 300)
        )
        text = printable(name) + (f" {score:.0%}" if score is not None else "")
        left, top, right, bottom = draw.textbbox((x0, y0), text, font=font)
        up = bottom - y0 + 2 if y0 - (bottom - y0) - 2 >= 0 else 0
        draw.rectangle((left - 1, top - up - 1, right + 1, bottom - up + 1), fill=colour)
        draw.text((x0, y0 - up), text, fill="white", font=font)
    return canvas


def class_colour(number: int) -> tuple[int, int, int]:
    """The colour of a class, by its number."""
    red, green, blue = colorsys.hls_to_rgb((0.02 + number * GOLDEN) % 1, 0.42, 0.8)
    return round(255 * red), round(255 * green), round(255 * blue)
