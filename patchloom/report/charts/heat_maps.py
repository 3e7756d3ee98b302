"""Heat maps: confusion matrices and attention weights."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from patchloom.report.charts.svg import LETTER, shorten, svg_box, svg_text

FAINTEST, FAINTEST_SMALL = 0.08, 0.25  # least opacity of a nonempty cell, with and without a count
NAMED_CLASSES = 100  # up to here, the rows and columns of a map have room for their names
SMALL_LETTER = 4.4  # average width of a letter in pixels, in a font of 8 pixels
LONGEST_NAME = 32  # letters; the tooltip has the rest


def count_table(
    confusion: np.ndarray, strength: np.ndarray, names: Sequence[str], images: np.ndarray | None = None
) -> Markup:
    """Return a confusion matrix with counts as an HTML table: rows are true classes, columns predictions.

    `strength` is the color, 0…1. `images` is the number of images per class, for a part of a larger matrix.
    """
    images = confusion.sum(axis=1) if images is None else images
    head = Markup("").join(Markup('<th scope="col"><span>{}</span></th>').format(name) for name in names)
    rows = []
    for i, name in enumerate(names):
        cells = [
            Markup('<td class="{}" style="--s:{:.0f}%" title="{}">{}</td>').format(
                _kind(i, j, strength), 100 * max(strength[i, j], FAINTEST), _tooltip(names, i, j, count, images), count
            )
            if count
            else Markup("<td></td>")
            for j, count in enumerate(confusion[i].tolist())
        ]
        rows.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(name, Markup("").join(cells)))
    table = Markup('<table class="matrix"><tr><td><small>true ↓ predicted →</small></td>{}</tr>{}</table>')
    return table.format(head, Markup("").join(rows))


def heat_map(confusion: np.ndarray, strength: np.ndarray, names: Sequence[str]) -> Markup:
    """Return a confusion matrix of many classes as SVG: small cells whose counts are in tooltips."""
    count, images = len(names), confusion.sum(axis=1)
    cell = max(4, 900 // count)
    short = [shorten(name, LONGEST_NAME) for name in names] if count <= NAMED_CLASSES else []
    longest = SMALL_LETTER * max(map(len, short), default=0)
    left, top = longest + 26, 0.72 * longest + 30
    width, height = left + cell * count + 0.72 * longest, top + cell * count + 2
    head = Markup('<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" class="heat small" role="img">')
    parts = [
        head.format(width, height),
        svg_text(left + cell * count / 2, 12, "predicted", "middle"),
        svg_text(0, 0, "true", "middle", f"translate(12 {top + cell * count / 2:.1f}) rotate(-90)"),
        svg_box(left, top, cell * count, cell * count, "track"),
    ]
    for i, name in enumerate(short):
        tilt = f"translate({left + cell * (i + 0.5) + 3:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(svg_text(left - 6, top + cell * (i + 0.5) + 3, name, "end"))
        parts.append(svg_text(0, 0, name, "start", tilt))
    for i, j in zip(*np.nonzero(confusion), strict=True):
        tooltip = _tooltip(names, i, j, int(confusion[i, j]), images)
        parts.append(Markup('<g class="{}"><title>{}</title>').format(_kind(i, j, strength), tooltip))
        opacity = max(strength[i, j], FAINTEST_SMALL)
        parts.append(svg_box(left + cell * j, top + cell * i, cell, cell, "cell", opacity) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


def _kind(i: int, j: int, strength: np.ndarray) -> str:
    return ("right" if i == j else "wrong") + (" strong" if strength[i, j] > 0.65 else "")


def _tooltip(names: Sequence[str], i: int, j: int, count: int, images: np.ndarray) -> str:
    return f"{names[i]} → {names[j]}: {count} of {images[i]}"


def share_map(shares: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, down: str, across: str) -> Markup:
    """Return shares 0…1, (rows, columns), as SVG cells, darker for larger ones; rows and columns have names."""
    short, top_names = [shorten(name, 16) for name in rows], [shorten(name, 16) for name in columns]
    cell, longest = 18, LETTER * max(map(len, [*short, *top_names, ""]))
    left, top = longest + 26, 0.72 * longest + 34
    width, height = left + cell * len(columns) + 0.72 * longest, top + cell * len(rows) + 2
    parts = [
        Markup('<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" class="heat" role="img">').format(width, height),
        svg_text(left + cell * len(columns) / 2, 12, across, "middle"),
        svg_text(0, 0, down, "middle", f"translate(12 {top + cell * len(rows) / 2:.1f}) rotate(-90)"),
        svg_box(left, top, cell * len(columns), cell * len(rows), "track"),
    ]
    for i, name in enumerate(short):
        parts.append(svg_text(left - 6, top + cell * (i + 0.5) + 4, name, "end"))
    for j, name in enumerate(top_names):
        tilt = f"translate({left + cell * (j + 0.5) + 4:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(svg_text(0, 0, name, "start", tilt))
    for (i, j), share in np.ndenumerate(shares):
        tooltip = f"{rows[i]} attends to {columns[j]}: {share:.0%}"
        parts.append(Markup('<g class="right"><title>{}</title>').format(tooltip))
        parts.append(svg_box(left + cell * j, top + cell * i, cell, cell, "cell", float(share)) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])
