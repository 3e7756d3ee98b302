"""Ranked lists of runs on a page: queries of val, each beside the images of train most like it by each run's vectors.

`patchloom look RUN --ranked` writes the page and, beside it, the same as one PNG.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from patchloom.data.datasets import ClassTable, ImageSet
from patchloom.disk import atomic_write
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import nearest
from patchloom.inference.classifier import load
from patchloom.inference.evaluations import EvaluationSettings, embed_on
from patchloom.report.page import data_uri, write_page
from patchloom.report.pictures.ranked import WRONG, Ranked, RankedList, frame_colors, ranked_sheet
from patchloom.tasks.classification.levels import BY_TRUNK, FINEST, open_leveled
from patchloom.tasks.classification.several_runs import named
from patchloom_runtime.errors import DataError, UsageError, at_least

QUERIES = 8
THUMBNAIL = 192  # pixels on the page


@dataclass(frozen=True)
class RankedHit:
    """An image of train that a run puts near a query."""

    place: int  # in train
    score: float  # cosine
    level: int | None  # the finest at which it has the query's class: 0 the classes, 1 the level above …; None: none


@dataclass(frozen=True)
class RankedPage:
    """What was written, and what is on it."""

    path: Path
    png: Path
    queries: dict[int, dict[str, list[RankedHit]]]  # place in val → run → nearest first
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
    """Queries from all over the classes of val, and for each the `top` nearest of train by each run.

    `trunk` leaves projectors out.
    """
    at_least("top", top, 1)
    if out.suffix.lower() == ".png":
        raise UsageError(f"{out} is the page; its picture is written beside it. Give a name that ends in .html")
    given, folders = open_leveled(data, runs, needed=False), named(runs)
    notes = (*given.notes, *([BY_TRUNK] if trunk else []))
    train, val = given.splits.train, given.splits.val
    chosen = spread_queries(val.labels, queries)
    found: dict[int, dict[str, list[RankedHit]]] = {query: {} for query in chosen}
    for name, folder in folders.items():
        classifier = load(folder, device=device, trunk=trunk)
        collection = embed_on(classifier, train, EvaluationSettings()).labeled("train")
        asked = embed_on(classifier, val, EvaluationSettings())
        for query, hits in rank(collection, asked, chosen, given.classes, top).items():
            found[query][name] = hits
    found = {query: by_run for query, by_run in found.items() if len(by_run) == len(folders)}
    if not found:
        raise DataError(f"none of {len(chosen)} queries of {data} can be read")
    levels = [FINEST, *given.classes.levels]
    lists = [_drawn(query, by_run, train, val) for query, by_run in found.items()]
    title = f"Ranked lists of {' · '.join(folders)}"
    frames = [*zip(levels, map(_css, frame_colors(len(levels))), strict=True), ("wrong", _css(WRONG))]
    shown = [_for_page(query, by_run, train, val, levels) for query, by_run in found.items()]
    write_page(out, "ranked.html.j2", title=title, frames=frames, notes=list(notes), queries=shown)
    png = out.with_suffix(".png")
    atomic_write(png, _png(ranked_sheet(lists, levels)))
    return RankedPage(out, png, found, notes)


def spread_queries(labels: np.ndarray, count: int) -> list[int]:
    """Places of labelled images, by class: the first of each, evenly over the classes; then second ones …"""
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
    """The nearest of train for each query (a place in val) that has a vector."""
    place = {int(index): row for row, index in enumerate(val.index.tolist())}
    asked = [query for query in queries if query in place]
    if not asked:
        return {}
    some = val.rows(torch.tensor([place[query] for query in asked]))
    unit = (F.normalize(train.vectors), F.normalize(some.vectors))
    parts = list(nearest(*unit, min(top, len(train))))
    cosines, positions = (torch.cat(column) for column in zip(*parts, strict=True))
    columns = [torch.arange(len(classes)), *(torch.tensor(numbers) for _, numbers in classes.levels.values())]
    right = torch.stack([of[train.labels.cpu()][positions.cpu()] == of[some.labels.cpu()][:, None] for of in columns])
    found = {}
    for i, query in enumerate(asked):
        at = [right[:, i, j].nonzero()[:, 0].tolist() for j in range(positions.shape[1])]
        rows = zip(train.index[positions[i]].tolist(), cosines[i].tolist(), at, strict=True)
        found[query] = [RankedHit(where, score, levels[0] if levels else None) for where, score, levels in rows]
    return found


def _drawn(query: int, by_run: dict[str, list[RankedHit]], train: ImageSet, val: ImageSet) -> RankedList:
    def shown(hit: RankedHit) -> Ranked:
        return Ranked(_read(train, hit.place), _label(train, hit.place), hit.level)

    rows = [(name if len(by_run) > 1 else "", [shown(hit) for hit in hits]) for name, hits in by_run.items()]
    return RankedList(_read(val, query), _label(val, query), rows)


def _for_page(
    query: int, by_run: dict[str, list[RankedHit]], train: ImageSet, val: ImageSet, levels: Sequence[str]
) -> dict[str, Any]:
    label = int(val.labels[query])
    above = " · ".join(names[numbers[label]] for names, numbers in val.classes.levels.values())

    def shown(hit: RankedHit) -> dict[str, Any]:
        frame = len(levels) if hit.level is None else hit.level
        said = "wrong" if hit.level is None else levels[hit.level]
        about = {"name": train.where(hit.place), "label": _label(train, hit.place), "score": hit.score}
        return about | {"frame": frame, "level": said, "picture": _thumbnail(train, hit.place)}

    rows = [(name if len(by_run) > 1 else "", [shown(hit) for hit in hits]) for name, hits in by_run.items()]
    about = {"name": val.where(query), "label": _label(val, query), "above": above}
    return about | {"picture": _thumbnail(val, query), "rows": rows}


def _label(pictures: ImageSet, place: int) -> str:
    return pictures.classes.names[int(pictures.labels[place])]


def _read(pictures: ImageSet, place: int) -> Image.Image:
    """The picture; grey where its file has gone since it was embedded."""
    try:
        return pictures.read(place)
    except DataError:
        return Image.new("RGB", (THUMBNAIL, THUMBNAIL), "grey")


def _thumbnail(pictures: ImageSet, place: int) -> str:
    picture = _read(pictures, place)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    return data_uri(picture, "PNG") if max(picture.size) <= 64 else data_uri(picture, "JPEG", quality=80)


def _css(color: tuple[int, int, int]) -> str:
    return "rgb({} {} {})".format(*color)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
