"""Tables as cells, darker for more: a confusion matrix, and shares."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from patchloom.pages.charts.svg import LETTER, shorten, svg_box, svg_text

FAINTEST = 0.08  # opacity of a cell that is not empty


def heat_map(confusion: np.ndarray, strength: np.ndarray, names: Sequence[str]) -> Markup:
    """A confusion matrix with its counts, true classes down, predictions across; `strength` is the colour, 0…1."""
    count = len(names)
    cell = max(22, min(40, 640 // count), 10 + 7 * len(str(confusion.max())))
    short = [shorten(name, 16) for name in names]
    longest = LETTER * max(map(len, short))
    tilted = longest > cell - 4
    left, top = longest + 26, (0.72 * longest if tilted else 8) + 30
    width, height = left + cell * count + (0.72 * longest if tilted else 4), top + cell * count + 2
    parts = [
        Markup('<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" class="heat" role="img">').format(width, height),
        svg_text(left + cell * count / 2, 12, "predicted", "middle"),
        svg_text(0, 0, "true", "middle", f"translate(12 {top + cell * count / 2:.1f}) rotate(-90)"),
        svg_box(left, top, cell * count, cell * count, "track"),
    ]
    for i, name in enumerate(short):
        x, middle = left + cell * (i + 0.5), top + cell * (i + 0.5)
        parts.append(svg_text(left - 6, middle + 4, name, "end"))
        turn = f"translate({x + 4:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(svg_text(0, 0, name, "start", turn) if tilted else svg_text(x, top - 6, name, "middle"))
    for i, j in zip(*np.nonzero(confusion), strict=True):
        told = f"{names[i]} → {names[j]}: {confusion[i, j]} of {confusion[i].sum()}"
        kind = ("right" if i == j else "wrong") + (" strong" if strength[i, j] > 0.65 else "")
        x, y = left + cell * j, top + cell * i
        parts.append(Markup('<g class="{}"><title>{}</title>').format(kind, told))
        parts.append(svg_box(x, y, cell, cell, "cell", max(strength[i, j], FAINTEST)))
        parts.append(svg_text(x + cell / 2, y + cell / 2 + 4, str(confusion[i, j]), "middle") + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


def share_map(shares: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, down: str, across: str) -> Markup:
    """Shares 0…1 (rows, columns) as cells, darker for more, each row and column with its name."""
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
        turn = f"translate({left + cell * (j + 0.5) + 4:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(svg_text(0, 0, name, "start", turn))
    for (i, j), share in np.ndenumerate(shares):
        told = f"{rows[i]} looks at {columns[j]}: {share:.0%}"
        parts.append(Markup('<g class="right"><title>{}</title>').format(told))
        parts.append(svg_box(left + cell * j, top + cell * i, cell, cell, "cell", float(share)) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])
