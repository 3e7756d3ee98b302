"""Ranked lists: queries, each beside the images of a collection most like it, framed by how right they are.

The frame is of the finest level at which an image has the query's class (thesis figures 2.6 to 2.9): blue at the
finest, over green to yellow at the coarsest, red where none is right. Colour-blind eyes tell them by their lightness.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from patchloom.report.pictures.sheets import FADED, INK, LABEL, MARGIN, PAPER, displayed

RIGHT = np.array([(0, 84, 180), (62, 166, 160), (250, 205, 40)])  # from the finest level to the coarsest
WRONG = (190, 30, 45)
SIDE, FRAME, APART = 84, 6, 8  # pixels of an image, of what surrounds it, and between two
LETTERS = 13  # of a caption, at most


class Ranked(NamedTuple):
    """An image of the collection."""

    image: Image.Image
    caption: str
    level: int | None  # the finest at which it is right: 0 the classes themselves, 1 the level above …; None: wrong


class RankedList(NamedTuple):
    """A query and what is most like it by each of some networks."""

    query: Image.Image
    caption: str
    rows: Sequence[tuple[str, Sequence[Ranked]]]  # name of the network, '' where there is one; nearest first


def frame_colors(levels: int) -> list[tuple[int, int, int]]:
    """One for each level, the finest first."""
    places = np.linspace(0, len(RIGHT) - 1, levels) if levels > 1 else np.zeros(1)
    channels = [np.interp(places, range(len(RIGHT)), RIGHT[:, channel]) for channel in range(3)]
    return [(round(r), round(g), round(b)) for r, g, b in zip(*channels, strict=True)]


def framed(image: Image.Image, color: tuple[int, int, int] | None, side: int = SIDE) -> Image.Image:
    """The image in a square of `side` pixels, and a frame around it; None leaves the frame empty."""
    small = displayed(image, side)
    paper = Image.new("RGB", (side + 2 * FRAME,) * 2, color or PAPER)
    paper.paste(PAPER, (FRAME - 1, FRAME - 1, FRAME + side + 1, FRAME + side + 1))  # a line, so that dark meets no dark
    paper.paste(small, ((paper.width - small.width) // 2, (paper.height - small.height) // 2))
    return paper


def ranked_sheet(lists: Sequence[RankedList], levels: Sequence[str]) -> Image.Image:
    """Queries at the left, a row of images for each network; the legend names `levels`, the finest first."""
    font, colors = ImageFont.load_default(13), frame_colors(len(levels))
    names = [name for one in lists for name, _ in one.rows]
    left = MARGIN + max(0, *(int(font.getlength(name)) + MARGIN for name in names))
    cell, across = SIDE + 2 * FRAME + APART, max(len(row) for one in lists for _, row in one.rows)
    line = cell + LABEL
    start = left + cell + 2 * MARGIN  # of the collection's images
    height = 2 * MARGIN + LABEL + sum(len(one.rows) * line + MARGIN for one in lists)
    legend = _legend(levels, colors, font)
    paper = Image.new("RGB", (max(start + across * cell, legend.width + MARGIN) + MARGIN, height), PAPER)
    draw, y = ImageDraw.Draw(paper), 2 * MARGIN + LABEL
    paper.paste(legend, (MARGIN, MARGIN))
    for one in lists:
        middle = y + (len(one.rows) - 1) * line // 2
        paper.paste(framed(one.query, None), (left, middle))
        draw.text(
            (left + (cell - APART) / 2, middle + cell - APART + 3),
            _short(one.caption),
            fill=INK,
            font=font,
            anchor="ma",
        )
        for i, (name, row) in enumerate(one.rows):
            top = y + i * line
            draw.text((MARGIN, top + (cell - APART) / 2), name, fill=INK, font=font, anchor="lm")
            for j, found in enumerate(row):
                color = WRONG if found.level is None else colors[found.level]
                paper.paste(framed(found.image, color), (start + j * cell, top))
                place = (start + j * cell + (cell - APART) / 2, top + cell - APART + 3)
                draw.text(place, _short(found.caption), fill=FADED, font=font, anchor="ma")
        y += len(one.rows) * line + MARGIN
        draw.line((MARGIN, y - MARGIN // 2, paper.width - MARGIN, y - MARGIN // 2), fill=(215, 215, 215))
    return paper


def _legend(
    levels: Sequence[str], colors: Sequence[tuple[int, int, int]], font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> Image.Image:
    """'query | right at fine ■ coarse ■ wrong ■' in one line."""
    entries = [*zip([f"right: {levels[0]}", *levels[1:]], colors, strict=True), ("wrong", WRONG)]
    width = sum(18 + int(font.getlength(text)) + 2 * MARGIN for text, _ in entries)
    paper = Image.new("RGB", (width, LABEL), PAPER)
    draw, x = ImageDraw.Draw(paper), 0
    for text, color in entries:
        draw.rectangle((x, 3, x + 12, 15), fill=color)
        draw.text((x + 18, 2), text, fill=INK, font=font)
        x += 18 + int(font.getlength(text)) + 2 * MARGIN
    return paper


def _short(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"
