"""Small images on a labelled sheet, and the colours that numbers have on it.

Weights have a sign: red is positive, blue negative, white zero. Shares, such as attention, go from dark blue to yellow
(cividis, which the thesis uses and which colour-blind eyes read the same way).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from patchloom_runtime.errors import NumericalError

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
TILE = 32  # pixels a small image is brought to, by a whole factor
GAP, MARGIN, LABEL = 2, 12, 22  # pixels between small images, around blocks, and for a line of text
BLOCKS_A_LINE = 6
PAGE = 1360  # pixels a sheet may be wide
_MOST_LETTERS = 200  # of a title or caption, about the same


class SheetCell(NamedTuple):
    """An image with the text under it."""

    image: Image.Image
    caption: str = ""


class SheetRow(NamedTuple):
    """Cells side by side under a title."""

    title: str
    cells: Sequence[SheetCell]


def _start(text: str) -> str:
    """As much as a page is wide: a class may have any name."""
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def sheet(lines: Sequence[SheetRow]) -> Image.Image:
    """Lines of images; columns stand below one another, and a line wider than a page goes on in the next."""
    font = ImageFont.load_default(13)
    lines = [
        SheetRow(_start(line.title), [SheetCell(cell.image, _start(cell.caption)) for cell in line.cells])
        for line in lines
    ]
    cells = [cell for line in lines for cell in line.cells]
    column = MARGIN + int(max(max(cell.image.width, font.getlength(cell.caption)) for cell in cells))
    across = max(1, min(max(len(line.cells) for line in lines), (PAGE - MARGIN) // column))
    titles = int(max(font.getlength(line.title) for line in lines))
    rows = [(line, start) for line in lines for start in range(0, len(line.cells), across)]
    heights = [_row_height(line, start, across) for line, start in rows]
    paper = Image.new("RGB", (MARGIN + max(across * column, titles + MARGIN), MARGIN + sum(heights)), PAPER)
    draw, y = ImageDraw.Draw(paper), MARGIN
    for (line, start), height in zip(rows, heights, strict=True):
        top = y
        if start == 0 and line.title:
            draw.text((MARGIN, top), line.title, fill=INK, font=font)
            top += LABEL
        for place, cell in enumerate(line.cells[start : start + across]):
            x = MARGIN + place * column
            paper.paste(cell.image, (x, top))
            draw.text((x, top + cell.image.height + 4), cell.caption, fill=FADED, font=font)
        y += height
    return paper


def _row_height(line: SheetRow, start: int, across: int) -> int:
    cells = line.cells[start : start + across]
    title = LABEL if start == 0 and line.title else 0
    caption = LABEL if any(cell.caption for cell in cells) else 0
    return title + max(cell.image.height for cell in cells) + caption + MARGIN


def grid_sheet(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Image.Image | None]]]) -> Image.Image:
    """Images of one size in rows and columns, named at the left and at the top; None leaves a place empty."""
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
    """Labelled blocks of small images (lines, columns, h, w), six blocks a line, each coloured on its own scale."""
    pictures = [
        (f"{label}   ±{np.abs(tiles).max():.2g}", joined(colored(tiles), group=group)) for label, tiles in blocks
    ]
    across = min(BLOCKS_A_LINE, len(pictures))
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
    """Small images of bytes (lines, columns, h, w, 3) beside one another, enlarged to `side` pixels or nearly.

    Groups of more than one column stand apart.
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
    """Bytes (h, w, 3) as an image whose longer side is nearly `side`, by a whole factor, pixels kept crisp."""
    return joined(pixels[None, None], side)


def displayed(image: Image.Image, side: int) -> Image.Image:
    """In RGB, its longer side of `side` pixels; a small one enlarged with crisp pixels."""
    factor = side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    way = Image.Resampling.NEAREST if factor >= 2 else Image.Resampling.LANCZOS
    return image.convert("RGB").resize(size, way)


def colored(values: np.ndarray) -> np.ndarray:
    """Signed numbers of any shape → that shape × 3 bytes, white at zero, full colour at the largest of them all."""
    strength = (values / (np.abs(values).max() or 1.0))[..., None]
    full = np.where(strength < 0, NEGATIVE, POSITIVE)
    return np.rint(255 + np.abs(strength) * (full - 255)).astype(np.uint8)


def heat(shares: np.ndarray) -> np.ndarray:
    """Numbers 0…1 of any shape → that shape × 3 bytes of cividis."""
    places = np.linspace(0, 1, len(CIVIDIS))
    channels = [np.interp(shares, places, CIVIDIS[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=-1)).astype(np.uint8)


def numbers(tensor: Tensor, what: str = "the weights") -> np.ndarray:
    """A tensor as float64; a picture of numbers that are not finite would show nothing true."""
    values = tensor.detach().double().cpu().numpy()
    if not np.isfinite(values).all():
        raise NumericalError(f"There is no picture of {what}: some are not finite. Look at an earlier checkpoint.")
    return values
