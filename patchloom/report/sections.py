"""Parts of a report that only some tasks have, as HTML; `report.html.j2` puts them between curves and recipe."""

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.evaluation.classification import Mistake
from patchloom.report.charts import bars, count_table, heat_map
from patchloom.report.page import data_uri, render

COUNTED_CLASSES = 30  # up to here every cell of the confusion matrix has room for its count
DRAWN_CLASSES = 250  # up to here every cell of the confusion matrix is told under the pointer
ENLARGED_CLASSES = 12  # of a larger matrix, those that are confused most
UNFOLDED_BARS = 20
CONFUSED_PAIRS = 20
THUMBNAIL = 112  # pixels
SMALL_PICTURE = 480  # pixels: up to here a picture shrinks to a phone's width, a wider one is scrolled
RIGHT, WRONG = (37, 99, 235), (220, 38, 38)  # as in the style sheet


def confusion_section(counts: np.ndarray, names: Sequence[str]) -> Markup:
    """What is taken for what: images of class [row] put in class [column]."""
    return _section("confusion", confusion=_confusion(counts, names))


def class_section(per_class: Sequence[float] | np.ndarray, names: Sequence[str], counts: np.ndarray | None) -> Markup:
    """Accuracy by class, worst first, in percent; NaN without images."""
    return _section("classes", per_class=_class_bars(per_class, names, counts))


def mistake_section(mistakes: Sequence[tuple[Image.Image, Mistake, str]], names: Sequence[str]) -> Markup:
    """The worst mistakes, each with the place of its file."""
    shown = [
        (data_uri(_thumbnail(image)), m, names[m.label], names[m.prediction], PurePath(place).name or place, place)
        for image, m, place in mistakes
    ]
    return _section("mistakes", mistakes=shown)


def picture_section(
    pictures: Sequence[tuple[str, Image.Image | Markup, str]],
    title: str = "Inside the network",
    place: str = "pictures",
) -> Markup:
    """(title, picture or chart, caption) of each; `place` is the section's name in the page."""
    shown = [
        (name, p, text, 0) if isinstance(p, Markup) else (name, data_uri(p), text, p.width)
        for name, p, text in pictures
    ]
    return _section("pictures", place=place, title=title, pictures=shown, small=SMALL_PICTURE)


def gallery_section(
    place: str,
    title: str,
    told: str,
    pictures: Sequence[tuple[Sequence[Image.Image], str | Sequence[str]]],
    legend: Sequence[tuple[str, tuple[int, int, int]]] = (),
) -> Markup:
    """Rows of pictures that break where there is no room, with a caption per row or per picture.

    `legend` names their colors.
    """
    shown = [([data_uri(picture) for picture in row], caption) for row, caption in pictures]
    swatches = [(name, f"#{red:02x}{green:02x}{blue:02x}") for name, (red, green, blue) in legend]
    return _section("gallery", place=place, title=title, told=told, pictures=shown, legend=swatches)


def sample_section(samples: Sequence[tuple[str, str, str]]) -> Markup:
    """Translations of val: (source, reference, translation)."""
    return _section("samples", samples=samples)


def table_section(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """Any table."""
    return _section("table", title=title, columns=columns, rows=rows)


def _section(name: str, **values: Any) -> Markup:
    return Markup(render(f"{name}_section.html.j2", **values))  # the template escapes


def _confusion(counts: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    wrong = counts - np.diag(np.diag(counts))
    images = counts.sum(axis=1)
    worst = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSED_PAIRS]
    places = [divmod(int(place), len(names)) for place in worst]
    pairs = [(names[i], names[j], int(wrong[i, j]), int(images[i])) for i, j in places if wrong[i, j]]
    largest = 100 * float(np.max(wrong / np.maximum(images, 1)[:, None]))
    strengths = _strengths(counts)
    if len(names) <= COUNTED_CLASSES:
        return {"table": count_table(counts, strengths, names), "pairs": pairs[:3], "largest": largest}
    drawn = heat_map(counts, strengths, names) if len(names) <= DRAWN_CLASSES else None
    block = None
    if chosen := most_confused(wrong):
        part = np.ix_(chosen, chosen)
        block = count_table(counts[part], strengths[part], [names[i] for i in chosen], images[chosen])
    image = None if drawn else data_uri(_compact(counts))
    return {"table": None, "chart": drawn, "image": image, "block": block, "pairs": pairs, "largest": largest}


def most_confused(wrong: np.ndarray, count: int = ENLARGED_CLASSES) -> list[int]:
    """Classes of the pairs that are confused most, either way; those that belong together stand together."""
    both = np.triu(wrong + wrong.T)
    chosen: list[int] = []
    for place in np.argsort(-both, axis=None, kind="stable"):
        i, j = divmod(int(place), len(both))
        if not both[i, j] or len(chosen) >= count:
            break
        for one, other in ((i, j), (j, i)):
            if one not in chosen and len(chosen) < count:
                chosen.insert(chosen.index(other) + 1 if other in chosen else len(chosen), one)
    return chosen if len(chosen) > 1 else []


def _strengths(counts: np.ndarray) -> np.ndarray:
    """Colour of each cell, 0…1: its share of the row; off the diagonal, that over the largest there."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.diag(np.diag(share))
    wrong = share - right
    return right + wrong / (wrong.max() or 1.0)


def _compact(counts: np.ndarray) -> Image.Image:
    """A pixel a cell, transparent where it is empty, so that it stands on a light or a dark page."""
    alpha = np.where(counts > 0, np.maximum(np.rint(255 * _strengths(counts)), 40), 0).astype(np.uint8)
    color = np.where(np.eye(len(counts), dtype=bool)[..., None], RIGHT, WRONG).astype(np.uint8)
    return _enlarged(Image.fromarray(np.dstack([color, alpha]), "RGBA"), 500)


def _class_bars(
    per_class: Sequence[float] | np.ndarray, names: Sequence[str], confusion: np.ndarray | None
) -> tuple[Markup, Markup | None, int]:
    """The worst classes, the others, and how many others."""

    def text(i: int) -> str:
        of = "" if confusion is None else f" of {confusion[i].sum()}"
        return f"{per_class[i]:.1f} %{of}" if math.isfinite(per_class[i]) else "no images"

    order = sorted(range(len(names)), key=lambda i: per_class[i] if math.isfinite(per_class[i]) else math.inf)
    rows = [(names[i], float(per_class[i]), text(i)) for i in order]
    first, rest = rows[:UNFOLDED_BARS], rows[UNFOLDED_BARS:]
    return bars(first), bars(rest) if rest else None, len(rest)


def _thumbnail(image: Image.Image) -> Image.Image:
    small = image.convert("RGB")
    small.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    return _enlarged(small, THUMBNAIL)


def _enlarged(image: Image.Image, least: int) -> Image.Image:
    """By a whole factor, pixels kept crisp, to at least so many pixels a side where it is smaller."""
    factor = -(-least // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
