"""Sections of a report that only some tasks have, as HTML; `report.html.j2` puts them between curves and recipe."""

import math
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from patchloom.evaluation.classification import Mistake
from patchloom.report.charts import Series, bars, block_map, count_table, heat_map, line_chart
from patchloom.report.page import data_uri, render
from patchloom_runtime.calibration import Reliability

MAX_COUNTED_CLASSES = 30  # up to here, the cells of a confusion matrix have room for their counts
MAX_DRAWN_CLASSES = 250  # up to here, every pair of classes has a cell of its own
MOST_CONFUSED_CLASSES = 12  # classes of a larger matrix that are shown with counts
UNFOLDED_BARS = 20
CONFUSED_PAIRS = 20
THUMBNAIL = 112  # pixels
SMALL_PICTURE = 480  # pixels; up to here a picture shrinks to the width of a phone, a wider one scrolls


def confusion_section(counts: np.ndarray, names: Sequence[str]) -> Markup:
    """Return the confusion matrix: `counts` of images of class [row] that are predicted as class [column]."""
    return _section("confusion", confusion=_confusion(counts, names))


def class_section(per_class: Sequence[float] | np.ndarray, names: Sequence[str], counts: np.ndarray | None) -> Markup:
    """Return the accuracy per class in percent, worst first; NaN for a class without images."""
    return _section("classes", per_class=_class_bars(per_class, names, counts))


def mistake_section(mistakes: Sequence[tuple[Image.Image, Mistake, str]], names: Sequence[str]) -> Markup:
    """Return the worst mistakes: (image, mistake, path of the file) of each."""
    rows = [
        (data_uri(_thumbnail(image)), m, names[m.label], names[m.prediction], PurePath(path).name or path, path)
        for image, m, path in mistakes
    ]
    return _section("mistakes", mistakes=rows)


def picture_section(
    pictures: Sequence[tuple[str, Image.Image | Markup, str]],
    title: str = "Inside the network",
    place: str = "pictures",
) -> Markup:
    """Return pictures and charts, each (title, picture or chart, caption); `place` is the section's id in the page."""
    rows = [
        (name, p, text, 0) if isinstance(p, Markup) else (name, data_uri(p), text, p.width)
        for name, p, text in pictures
    ]
    return _section("pictures", place=place, title=title, pictures=rows, small=SMALL_PICTURE)


def reliability_section(before: Reliability, after: Reliability, notes: Sequence[str]) -> Markup:
    """Return accuracy by confidence before and after calibration, on the same images."""
    charts = []
    for number, (title, measured) in enumerate([("Before calibration", before), ("After calibration", after)]):
        points = [(100 * each.confidence, 100 * each.accuracy) for each in measured.bins if each.images]
        ideal = Series("calibrated", [(0.0, 0.0), (100.0, 100.0)], 2, 0.5)
        lines = [Series("this run", points, number), ideal]
        chart = line_chart(lines, x_label="confidence, %", y_label="accuracy, %", from_zero=True)
        caption = (
            f"Accuracy in percent of the predictions in each bin of confidence. Calibration error "
            f"{measured.calibration_error:.2f} %, loss {measured.loss:.4f}."
        )
        charts.append((title, chart, " ".join([caption, *notes]) if number else caption))
    return picture_section(charts, "Reliability of the probabilities", "reliability")


def gallery_section(
    place: str,
    title: str,
    text: str,
    pictures: Sequence[tuple[Sequence[Image.Image], str | Sequence[str]]],
    legend: Sequence[tuple[str, tuple[int, int, int]]] = (),
) -> Markup:
    """Return rows of pictures that wrap, with a caption per row or per picture; `legend` names their colors."""
    rows = [([data_uri(picture) for picture in row], caption) for row, caption in pictures]
    swatches = [(name, f"#{red:02x}{green:02x}{blue:02x}") for name, (red, green, blue) in legend]
    return _section("gallery", place=place, title=title, text=text, pictures=rows, legend=swatches)


def sample_section(samples: Sequence[tuple[str, str, str]]) -> Markup:
    """Return translations of val: (source, reference, translation) of each."""
    return _section("samples", samples=samples)


def table_section(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Markup:
    """Return a table."""
    place = re.sub(r"\W+", "-", title.lower()).strip("-")
    return _section("table", title=title, place=place, columns=columns, rows=rows)


def _section(name: str, **values: Any) -> Markup:
    return Markup(render(f"{name}_section.html.j2", **values))  # the template escapes


def _confusion(counts: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    wrong = counts - np.diag(np.diag(counts))
    images = counts.sum(axis=1)
    worst = np.argsort(-wrong, axis=None, kind="stable")[:CONFUSED_PAIRS]
    cells = [divmod(int(cell), len(names)) for cell in worst]
    pairs = [(names[i], names[j], int(wrong[i, j]), int(images[i])) for i, j in cells if wrong[i, j]]
    largest = 100 * float(np.max(wrong / np.maximum(images, 1)[:, None]))
    strengths = _strengths(counts)
    if len(names) <= MAX_COUNTED_CLASSES:
        return {"table": count_table(counts, strengths, names), "pairs": pairs[:3], "largest": largest}
    is_whole = len(names) <= MAX_DRAWN_CLASSES
    drawn = heat_map(counts, strengths, names) if is_whole else block_map(counts, names)
    block = None
    if chosen := most_confused(wrong):
        part = np.ix_(chosen, chosen)
        block = count_table(counts[part], strengths[part], [names[i] for i in chosen], images[chosen])
    whole = {"chart": drawn, "is_whole": is_whole, "block": block}
    return {"table": None, "pairs": pairs, "largest": largest, **whole}


def most_confused(wrong: np.ndarray) -> list[int]:
    """Return the classes of the most confused pairs, in either direction; the classes of a pair are neighbors."""
    both = np.triu(wrong + wrong.T)
    chosen: list[int] = []
    for place in np.argsort(-both, axis=None, kind="stable"):
        i, j = divmod(int(place), len(both))
        if not both[i, j] or len(chosen) >= MOST_CONFUSED_CLASSES:
            break
        for one, other in ((i, j), (j, i)):
            if one not in chosen and len(chosen) < MOST_CONFUSED_CLASSES:
                chosen.insert(chosen.index(other) + 1 if other in chosen else len(chosen), one)
    return chosen if len(chosen) > 1 else []


def _strengths(counts: np.ndarray) -> np.ndarray:
    """Return the color of each cell, 0…1: its share of the row, relative to the largest one off the diagonal."""
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    right = np.diag(np.diag(share))
    wrong = share - right
    return right + wrong / (wrong.max() or 1.0)


def _class_bars(
    per_class: Sequence[float] | np.ndarray, names: Sequence[str], confusion: np.ndarray | None
) -> tuple[Markup, Markup | None, int]:
    """Return bars of the worst classes, bars of the others, and the number of others."""

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
    """Enlarge a small image by a whole factor to at least `least` pixels, without interpolation."""
    factor = -(-least // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
