"""Sheets of small labeled images, and the colors of numbers on them.

Weights have a sign: red is positive, blue negative, white zero. Shares, such as attention, range from dark blue to
yellow (cividis, which the thesis uses and which is readable for color-blind people).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from patchloom_runtime.errors import NumericalError

if TYPE_CHECKING:
    from torch import Tensor

NEGATIVE, POSITIVE = np.array([33, 102, 172]), np.array([178, 24, 43])
# matplotlib's cividis at 0, 1/8 … 1.
CIVIDIS = np.array(
    [
        (0, 34, 78),
        (26, 56, 111),
        (67, 78, 108),
        (97, 101, 111),
        (125, 124, 120),
        (155, 148, 118),
        (188, 174, 108),
        (222, 201, 88),
        (254, 232, 56),
    ]
)
PAPER, SEAM, INK, FADED = (245, 245, 245), (110, 110, 110), (40, 40, 40), (100, 100, 100)
TILE = 32  # pixels that small images are enlarged to, by a whole factor
GAP, MARGIN, LABEL = 2, 12, 22  # pixels between small images, around blocks, and per line of text
BLOCKS_PER_LINE = 6
PAGE = 1360  # largest width of a sheet in pixels
_MAX_LETTERS = 200  # of a title or caption; about the width of a sheet


class SheetCell(NamedTuple):
    """An image with a caption."""

    image: Image.Image
    caption: str = ""


class SheetRow(NamedTuple):
    """A row of cells under a title."""

    title: str
    cells: Sequence[SheetCell]


def sheet(rows: Sequence[SheetRow]) -> Image.Image:
    """Draw rows of images in columns; a row wider than a page wraps."""
    font = ImageFont.load_default(13)
    rows = [
        SheetRow(_shortened(row.title), [SheetCell(cell.image, _shortened(cell.caption)) for cell in row.cells])
        for row in rows
    ]
    cells = [cell for row in rows for cell in row.cells]
    column = MARGIN + int(max(max(cell.image.width, font.getlength(cell.caption)) for cell in cells))
    across = max(1, min(max(len(row.cells) for row in rows), (PAGE - MARGIN) // column))
    titles = int(max(font.getlength(row.title) for row in rows))
    lines = [(row, start) for row in rows for start in range(0, len(row.cells), across)]
    heights = [_line_height(row, start, across) for row, start in lines]
    paper = Image.new("RGB", (MARGIN + max(across * column, titles + MARGIN), MARGIN + sum(heights)), PAPER)
    draw, y = ImageDraw.Draw(paper), MARGIN
    for (row, start), height in zip(lines, heights, strict=True):
        top = y
        if start == 0 and row.title:
            draw.text((MARGIN, top), row.title, fill=INK, font=font)
            top += LABEL
        for place, cell in enumerate(row.cells[start : start + across]):
            x = MARGIN + place * column
            paper.paste(cell.image, (x, top))
            draw.text((x, top + cell.image.height + 4), cell.caption, fill=FADED, font=font)
        y += height
    return paper


def _shortened(text: str) -> str:
    """Cut a text to about the width of a page: class names may have any length."""
    return text if len(text) <= _MAX_LETTERS else f"{text[: _MAX_LETTERS - 1]}…"


def _line_height(row: SheetRow, start: int, across: int) -> int:
    cells = row.cells[start : start + across]
    title = LABEL if start == 0 and row.title else 0
    caption = LABEL if any(cell.caption for cell in cells) else 0
    return title + max(cell.image.height for cell in cells) + caption + MARGIN


def grid_sheet(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Image.Image | None]]]) -> Image.Image:
    """Draw images of one size in named rows and columns; None leaves a place empty."""
    font = ImageFont.load_default(13)
    images = [image for _, row in rows for image in row if image is not None]
    width, height = (max(getattr(image, side) for image in images) + GAP for side in ("width", "height"))
    left = MARGIN + int(max(font.getlength(name) for name, _ in rows)) + MARGIN
    paper = Image.new("RGB", (left + len(columns) * width + MARGIN, 2 * MARGIN + LABEL + len(rows) * height), PAPER)
    draw = ImageDraw.Draw(paper)
    for j, name in enumerate(columns):
        draw.text((left + (j + 0.5) * width, MARGIN), name, fill=INK, font=font, anchor="ma")
    for i, (name, row) in enumerate(rows):
        y = MARGIN + LABEL + i * height
        draw.text((left - MARGIN, y + height / 2), name, fill=INK, font=font, anchor="rm")
        for j, image in enumerate(row):
            if image is not None:
                paper.paste(image, (left + j * width, y))
    return paper


def tiled(blocks: Sequence[tuple[str, np.ndarray]], *, group: int = 1) -> Image.Image:
    """Draw labeled blocks of small images (lines, columns, h, w), six blocks per line, each on its own color scale."""
    pictures = [
        (f"{label}   ±{np.abs(tiles).max():.2g}", joined(colored(tiles), group=group)) for label, tiles in blocks
    ]
    across = min(BLOCKS_PER_LINE, len(pictures))
    width = max(picture.width for _, picture in pictures) + MARGIN
    height = max(picture.height for _, picture in pictures) + LABEL + MARGIN
    lines = -(-len(pictures) // across)
    paper = Image.new("RGB", (MARGIN + across * width, MARGIN + lines * height), PAPER)
    draw, font = ImageDraw.Draw(paper), ImageFont.load_default(13)
    for i, (label, picture) in enumerate(pictures):
        x, y = MARGIN + i % across * width, MARGIN + i // across * height
        paper.paste(picture, (x, y))
        draw.text((x + picture.width / 2, y + picture.height + 4), label, fill=INK, font=font, anchor="ma")
    return paper


def joined(
    tiles: np.ndarray, side: int = TILE, *, gap: int = GAP, seam: tuple[int, int, int] = SEAM, group: int = 1
) -> Image.Image:
    """Join small uint8 images (lines, columns, h, w, 3), enlarged by a whole factor to at most `side` pixels.

    Groups of `group` columns have a wider gap between them.
    """
    lines, columns, h, w, _ = tiles.shape
    factor = max(1, side // max(h, w))
    size = (w * factor, h * factor)
    step = (size[0] + gap, size[1] + gap)
    apart = 2 * gap if group > 1 else 0
    lefts = [j * step[0] + j // group * apart for j in range(columns)]
    block = Image.new("RGB", (lefts[-1] + size[0], lines * step[1] - gap), seam)
    for i in range(lines):
        for j in range(columns):
            small = Image.fromarray(tiles[i, j]).resize(size, Image.Resampling.NEAREST)
            block.paste(small, (lefts[j], i * step[1]))
    return block


def enlarged(pixels: np.ndarray, side: int) -> Image.Image:
    """Return uint8 pixels (h, w, 3) as an image, enlarged by a whole factor to at most `side` pixels."""
    return joined(pixels[None, None], side)


def displayed(image: Image.Image, side: int) -> Image.Image:
    """Return the image in RGB with a longer side of `side` pixels; small images are enlarged without interpolation."""
    factor = side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    way = Image.Resampling.NEAREST if factor >= 2 else Image.Resampling.LANCZOS
    return image.convert("RGB").resize(size, way)


def colored(values: np.ndarray) -> np.ndarray:
    """Return signed numbers of any shape as colors (…, 3) uint8: white at zero, full color at the largest of all."""
    strength = (values / (np.abs(values).max() or 1.0))[..., None]
    full = np.where(strength < 0, NEGATIVE, POSITIVE)
    return np.rint(255 + np.abs(strength) * (full - 255)).astype(np.uint8)


def heat(shares: np.ndarray) -> np.ndarray:
    """Return numbers 0…1 of any shape as cividis colors (…, 3) uint8."""
    places = np.linspace(0, 1, len(CIVIDIS))
    channels = [np.interp(shares, places, CIVIDIS[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=-1)).astype(np.uint8)


def numbers(tensor: "Tensor", what: str = "the weights") -> np.ndarray:
    """Return a tensor as a float64 array; raise NumericalError if some numbers are not finite."""
    values = tensor.detach().double().cpu().numpy()
    if not np.isfinite(values).all():
        raise NumericalError(f"{what} cannot be drawn: some are not finite. Use an earlier checkpoint.")
    return values
