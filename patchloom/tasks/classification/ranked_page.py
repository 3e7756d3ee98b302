"""Ranked lists: queries of val, each with the training images most similar to it by the vectors of each run.

`patchloom look RUN --ranked` writes the page and, next to it, the same as one PNG. The color of a frame is the finest
level at which an image has the query's class (thesis figures 2.6 to 2.9): from blue at the finest over green to yellow
at the coarsest, and red for a wrong class at every level. The colors differ in lightness, for color-blind readers.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

from patchloom.data.datasets import ClassTable, ImageSet
from patchloom.disk import atomic_write
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import nearest
from patchloom.inference.classifier import load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.inference.evaluations import embed_on
from patchloom.report.charts.svg import shorten
from patchloom.report.page import data_uri, write_page
from patchloom.report.pictures.sheets import FADED, INK, LABEL, MARGIN, PAPER, displayed
from patchloom.tasks.classification.levels import BY_TRUNK, FINEST, LevelData, open_leveled
from patchloom.tasks.classification.several_runs import runs_by_name
from patchloom_runtime.errors import DataError, UsageError, at_least

QUERIES = 8
THUMBNAIL = 192  # pixels on the page
Color = tuple[int, int, int]
RIGHT = np.array([(0, 84, 180), (62, 166, 160), (250, 205, 40)])  # from the finest level to the coarsest
WRONG = (190, 30, 45)
SIDE, FRAME, GAP = 84, 6, 8  # pixels of an image on the PNG, of its frame, and between two
CAPTION_LETTERS = 13


@dataclass(frozen=True)
class RankedHit:
    """A training image that a run ranks near a query."""

    place: int  # in train
    score: float  # cosine similarity
    level: int | None  # finest level with the query's class: 0 for the classes, 1 for the level above …; None: wrong


Hits = dict[str, list[RankedHit]]  # run → hits, nearest first


@dataclass(frozen=True)
class RankedPage:
    """The paths of the page and its PNG, and the ranked lists."""

    path: Path
    png: Path
    queries: dict[int, Hits]  # place in val → hits
    notes: tuple[str, ...]


def write_ranked(
    runs: Sequence[str],
    data: str,
    *,
    out: Path,
    top: int = 10,
    queries: int = QUERIES,
    device: str = "auto",
    trunk: bool = False,
) -> RankedPage:
    """Write the `top` nearest training images of some val images from all classes, for each run.

    `trunk` drops projectors.
    """
    at_least("top", top, 1)
    if out.suffix.lower() == ".png":
        raise UsageError(f"{out} is the page; its PNG is written next to it. Pass a name that ends in .html")
    leveled, names = open_leveled(data, runs, needed=False), list(runs_by_name(runs))
    lists = _rank_all(runs, leveled, top, queries, device, trunk)
    if not lists:
        raise DataError(f"none of {queries} queries of {data} can be read")
    notes = (*leveled.notes, *([BY_TRUNK] if trunk else []))
    train, val = leveled.splits.train, leveled.splits.val
    levels = [FINEST, *leveled.classes.levels]
    frames = [*zip(levels, map(_css, frame_colors(len(levels))), strict=True), ("wrong", _css(WRONG))]
    cards = [_query_card(query, hits, train, val, levels) for query, hits in lists.items()]
    title = f"Ranked lists of {' · '.join(names)}"
    write_page(out, "ranked.html.j2", title=title, frames=frames, notes=list(notes), queries=cards)
    drawn = ranked_sheet([_ranked_list(query, hits, train, val) for query, hits in lists.items()], levels)
    file, png = io.BytesIO(), out.with_suffix(".png")
    drawn.save(file, "PNG")
    atomic_write(png, file.getvalue())
    return RankedPage(out, png, lists, notes)


def _rank_all(
    runs: Sequence[str], leveled: LevelData, top: int, queries: int, device: str, trunk: bool
) -> dict[int, Hits]:
    """Return query → hits, for the queries that every run can read."""
    folders, splits = runs_by_name(runs), leveled.splits
    chosen = spread_queries(splits.val.labels, queries)
    lists: dict[int, Hits] = {query: {} for query in chosen}
    for name, folder in folders.items():
        classifier = load(folder, device=device, trunk=trunk)
        train = embed_on(classifier, splits.train, EvaluationSettings()).labeled("train")
        val = embed_on(classifier, splits.val, EvaluationSettings())
        for query, hits in rank(train, val, chosen, leveled.classes, top).items():
            lists[query][name] = hits
    return {query: hits for query, hits in lists.items() if len(hits) == len(folders)}


def spread_queries(labels: np.ndarray, count: int) -> list[int]:
    """Choose labeled images: the first of each class, evenly over the classes; then the second of each …"""
    by_class: dict[int, list[int]] = {}
    for place in np.flatnonzero(labels >= 0).tolist():
        by_class.setdefault(int(labels[place]), []).append(place)
    if count < len(by_class):
        firsts = [by_class[label][0] for label in sorted(by_class)]
        return [firsts[round(at)] for at in np.linspace(0, len(firsts) - 1, count)]
    turns = ((turn, place) for places in by_class.values() for turn, place in enumerate(places))
    chosen = [place for _, place in sorted(turns)[:count]]
    return sorted(chosen, key=lambda place: (labels[place], place))


@torch.no_grad()
def rank(
    train: Embeddings, val: Embeddings, queries: Sequence[int], classes: ClassTable, top: int
) -> dict[int, list[RankedHit]]:
    """Return the nearest training images of each query (a place in val) that has a vector."""
    row_of = {int(index): row for row, index in enumerate(val.index.tolist())}
    embedded = [query for query in queries if query in row_of]
    if not embedded:
        return {}
    chosen = val.rows(torch.tensor([row_of[query] for query in embedded]))
    unit = (F.normalize(train.vectors), F.normalize(chosen.vectors))
    parts = list(nearest(*unit, min(top, len(train))))
    cosines, positions = (torch.cat(column) for column in zip(*parts, strict=True))
    columns = [torch.arange(len(classes)), *(torch.tensor(numbers) for _, numbers in classes.levels.values())]
    train_labels, query_labels = train.labels.cpu(), chosen.labels.cpu()
    right = torch.stack([of[train_labels][positions.cpu()] == of[query_labels][:, None] for of in columns])
    results = {}
    for i, query in enumerate(embedded):
        levels = [right[:, i, j].nonzero()[:, 0].tolist() for j in range(positions.shape[1])]
        rows = zip(train.index[positions[i]].tolist(), cosines[i].tolist(), levels, strict=True)
        results[query] = [RankedHit(place, score, at[0] if at else None) for place, score, at in rows]
    return results


# The page -------------------------------------------------------------------------------------------------------------


def _query_card(query: int, hits: Hits, train: ImageSet, val: ImageSet, levels: Sequence[str]) -> dict[str, Any]:
    """Return the variables of the template for one query."""
    label = int(val.labels[query])
    above = " · ".join(names[numbers[label]] for names, numbers in val.classes.levels.values())

    def hit_card(hit: RankedHit) -> dict[str, Any]:
        return {
            "name": train.where(hit.place),
            "label": _label(train, hit.place),
            "score": hit.score,
            "frame": len(levels) if hit.level is None else hit.level,
            "level": "wrong" if hit.level is None else levels[hit.level],
            "picture": _thumbnail(train, hit.place),
        }

    rows = [(name if len(hits) > 1 else "", [hit_card(hit) for hit in of_run]) for name, of_run in hits.items()]
    about = {"name": val.where(query), "label": _label(val, query), "above": above}
    return about | {"picture": _thumbnail(val, query), "rows": rows}


def _label(images: ImageSet, place: int) -> str:
    return images.classes.names[int(images.labels[place])]


def _read(images: ImageSet, place: int) -> Image.Image:
    """Read an image; gray if its file has disappeared since it was embedded."""
    try:
        return images.read(place)
    except DataError:
        return Image.new("RGB", (THUMBNAIL, THUMBNAIL), "gray")


def _thumbnail(images: ImageSet, place: int) -> str:
    image = _read(images, place)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    return data_uri(image, "PNG") if max(image.size) <= 64 else data_uri(image, "JPEG", quality=80)


def _css(color: Color) -> str:
    return "rgb({} {} {})".format(*color)


# The PNG --------------------------------------------------------------------------------------------------------------


class Ranked(NamedTuple):
    """An image of the collection."""

    image: Image.Image
    caption: str
    level: int | None  # as in `RankedHit`


class RankedList(NamedTuple):
    """A query and the images most similar to it by each of some networks."""

    query: Image.Image
    caption: str
    rows: Sequence[tuple[str, Sequence[Ranked]]]  # name of the network ('' for a single one), images nearest first


def _ranked_list(query: int, hits: Hits, train: ImageSet, val: ImageSet) -> RankedList:
    def ranked(hit: RankedHit) -> Ranked:
        return Ranked(_read(train, hit.place), _label(train, hit.place), hit.level)

    rows = [(name if len(hits) > 1 else "", [ranked(hit) for hit in of_run]) for name, of_run in hits.items()]
    return RankedList(_read(val, query), _label(val, query), rows)


def frame_colors(levels: int) -> list[Color]:
    """Return one color per level, the finest first."""
    places = np.linspace(0, len(RIGHT) - 1, levels) if levels > 1 else np.zeros(1)
    channels = [np.interp(places, range(len(RIGHT)), RIGHT[:, channel]) for channel in range(3)]
    return [(round(r), round(g), round(b)) for r, g, b in zip(*channels, strict=True)]


def framed(image: Image.Image, color: Color | None) -> Image.Image:
    """Draw the image in a square of `SIDE` pixels with a frame around it; None leaves the frame empty."""
    small = displayed(image, SIDE)
    paper = Image.new("RGB", (SIDE + 2 * FRAME,) * 2, color or PAPER)
    # A light line separates a dark image from a dark frame.
    paper.paste(PAPER, (FRAME - 1, FRAME - 1, FRAME + SIDE + 1, FRAME + SIDE + 1))
    paper.paste(small, ((paper.width - small.width) // 2, (paper.height - small.height) // 2))
    return paper


def ranked_sheet(lists: Sequence[RankedList], levels: Sequence[str]) -> Image.Image:
    """Draw queries at the left and one row of images per network; the legend names `levels`, the finest first."""
    font, colors = ImageFont.load_default(13), frame_colors(len(levels))
    names = [name for ranked in lists for name, _ in ranked.rows]
    left = MARGIN + max(0, *(int(font.getlength(name)) + MARGIN for name in names))
    cell, across = SIDE + 2 * FRAME + GAP, max(len(row) for ranked in lists for _, row in ranked.rows)
    line = cell + LABEL
    start = left + cell + 2 * MARGIN  # of the collection's images
    height = 2 * MARGIN + LABEL + sum(len(ranked.rows) * line + MARGIN for ranked in lists)
    legend = _legend(levels, colors, font)
    paper = Image.new("RGB", (max(start + across * cell, legend.width + MARGIN) + MARGIN, height), PAPER)
    draw, y = ImageDraw.Draw(paper), 2 * MARGIN + LABEL

    def paste(image: Image.Image, x: int, top: int, color: Color | None, caption: str, ink: Color) -> None:
        paper.paste(framed(image, color), (x, top))
        place = (x + (cell - GAP) / 2, top + cell - GAP + 3)
        draw.text(place, shorten(caption, CAPTION_LETTERS), fill=ink, font=font, anchor="ma")

    paper.paste(legend, (MARGIN, MARGIN))
    for ranked in lists:
        paste(ranked.query, left, y + (len(ranked.rows) - 1) * line // 2, None, ranked.caption, INK)
        for i, (name, row) in enumerate(ranked.rows):
            top = y + i * line
            draw.text((MARGIN, top + (cell - GAP) / 2), name, fill=INK, font=font, anchor="lm")
            for j, hit in enumerate(row):
                color = WRONG if hit.level is None else colors[hit.level]
                paste(hit.image, start + j * cell, top, color, hit.caption, FADED)
        y += len(ranked.rows) * line + MARGIN
        draw.line((MARGIN, y - MARGIN // 2, paper.width - MARGIN, y - MARGIN // 2), fill=(215, 215, 215))
    return paper


def _legend(
    levels: Sequence[str], colors: Sequence[Color], font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> Image.Image:
    """Draw 'right: fine ■ coarse ■ wrong ■' in one line."""
    entries = [*zip([f"right: {levels[0]}", *levels[1:]], colors, strict=True), ("wrong", WRONG)]
    width = sum(18 + int(font.getlength(text)) + 2 * MARGIN for text, _ in entries)
    paper = Image.new("RGB", (width, LABEL), PAPER)
    draw, x = ImageDraw.Draw(paper), 0
    for text, color in entries:
        draw.rectangle((x, 3, x + 12, 15), fill=color)
        draw.text((x + 18, 2), text, fill=INK, font=font)
        x += 18 + int(font.getlength(text)) + 2 * MARGIN
    return paper
