"""Parts of a report that only some tasks have, as HTML; `report.html.j2` puts them between curves and recipe."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.evaluation.classification import Mistake
from patchloom.pages.charts import bars, heat_map
from patchloom.pages.page import data_uri, render

LABELLED_CLASSES = 30  # up to here every cell of the confusion matrix has room for its count
UNFOLDED_BARS = 20
CONFUSED_PAIRS = 20
THUMBNAIL = 112  # pixels
RIGHT, WRONG = (37, 99, 235), (220, 38, 38)  # as in the style sheet


def confusion_section(counts: np.ndarray, names: Sequence[str]) -> Markup:
    """What is taken for what: images of class [row] put in class [column]."""
    return _section("confusion", confusion=_confusion(counts, names))


def class_section(per_class: Sequence[float] | np.ndarray, names: Sequence[str], counts: np.ndarray | None) -> Markup:
    """Accuracy by class, worst first, in percent; NaN without images."""
    return _section("classes", per_class=_class_bars(per_class, names, counts))


def mistake_section(mistakes: Sequence[tuple[Image.Image, Mistake]], names: Sequence[str]) -> Markup:
    """The worst mistakes."""
    shown = [(data_uri(_thumbnail(image)), m, names[m.label], names[m.prediction]) for image, m in mistakes]
    return _section("mistakes", mistakes=shown)


def picture_section(
    pictures: Sequence[tuple[str, Image.Image | Markup, str]],
    title: str = "Inside the network",
    place: str = "pictures",
) -> Markup:
    """(title, picture or chart, caption) of each; `place` is the section's name in the page."""
    shown = [(name, p if isinstance(p, Markup) else data_uri(p), text) for name, p, text in pictures]
    return _section("pictures", place=place, title=title, pictures=shown)


def gallery_section(
    place: str,
    title: str,
    told: str,
    pictures: Sequence[tuple[Sequence[Image.Image], str]],
    legend: Sequence[tuple[str, tuple[int, int, int]]] = (),
) -> Markup:
    """Rows of pictures, each with its caption, that break where there is no room; `legend` names their colours."""
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
    if len(names) <= LABELLED_CLASSES:
        return {
            "chart": heat_map(counts, _strengths(counts), names),
            "image": None,
            "pairs": pairs[:3],
            "largest": largest,
        }
    return {"chart": None, "image": data_uri(_compact(counts)), "pairs": pairs, "largest": largest}


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
