"""Heat maps: confusion matrices and attention weights."""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from patchloom.report.charts.svg import LETTER, shorten, svg_box, svg_start, svg_text

FAINTEST, FAINTEST_SMALL = 0.08, 0.25  # least opacity of a nonempty cell, with and without a count
# From this strength on, white text is easier to read on a cell than black (WCAG's contrast on a light page).
WHITE_FROM = {"right": 0.8, "wrong": 0.77}
SIDE = 900  # pixels of a whole matrix
NAME_HEIGHT = 10  # pixels of a name beside a row; thinner rows are named at intervals
BLOCKS = 50  # rows of a matrix whose classes are added up
SMALL_LETTER = 4.9  # average width of a letter in pixels, in a font of 9 pixels
LONGEST_NAME = 32  # letters; the tooltip has the rest


def count_table(
    confusion: np.ndarray, strength: np.ndarray, names: Sequence[str], images: np.ndarray | None = None
) -> Markup:
    """Return a confusion matrix with counts as an HTML table: rows are true classes, columns predictions.

    `strength` is the color, 0…1. `images` is the number of images per class, for a part of a larger matrix.
    """
    images = confusion.sum(axis=1) if images is None else images
    short = [shorten(name, LONGEST_NAME) for name in names]
    head = Markup("").join(
        Markup('<th scope="col" title="{}"><span>{}</span></th>').format(name, text)
        for name, text in zip(names, short, strict=True)
    )
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
        row = Markup('<tr><th scope="row" title="{}">{}</th>{}</tr>')
        rows.append(row.format(name, short[i], Markup("").join(cells)))
    label = "confusion matrix: rows are true classes, columns predictions"
    table = Markup('<table class="matrix" aria-label="{}"><tr><td>true ↓<br>predicted →</td>{}</tr>{}</table>')
    return table.format(label, head, Markup("").join(rows))


def heat_map(confusion: np.ndarray, strength: np.ndarray, names: Sequence[str]) -> Markup:
    """Return a confusion matrix of many classes as SVG: small cells whose counts are in tooltips."""
    count, images = len(names), confusion.sum(axis=1)
    cell = max(4, SIDE // count)
    parts, left, top = _frame(names, cell, f"confusion matrix of {count} classes")
    for i, j in zip(*np.nonzero(confusion), strict=True):
        tooltip = _tooltip(names, i, j, int(confusion[i, j]), images)
        parts.append(Markup('<g class="{}"><title>{}</title>').format(_kind(i, j, strength), tooltip))
        opacity = max(strength[i, j], FAINTEST_SMALL)
        parts.append(svg_box(left + cell * j, top + cell * i, cell, cell, "cell", opacity) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


def block_map(confusion: np.ndarray, names: Sequence[str]) -> Markup:
    """Return a confusion matrix of very many classes as SVG: neighboring classes are added up to at most `BLOCKS` rows.

    A cell of the diagonal has the share that is predicted correctly and, in its corner, the mistakes within the block.
    """
    size = -(-len(names) // BLOCKS)
    starts = np.arange(0, len(names), size)
    correct = np.add.reduceat(np.diag(confusion), starts)
    wrong = np.add.reduceat(np.add.reduceat(confusion, starts, axis=0), starts, axis=1) - np.diag(correct)
    images = correct + wrong.sum(axis=1)
    share = wrong / np.maximum(images, 1)[:, None]
    titles = [f"{names[start]} … {names[min(start + size, len(names)) - 1]}" for start in starts.tolist()]
    cell = SIDE // len(starts)
    name = f"confusion matrix of {len(names)} classes, {size} in a row"
    parts, left, top = _frame([names[start] for start in starts.tolist()], cell, name)
    box = Markup('<g class="{}"><title>{}</title>{}</g>')
    for i, right in enumerate(correct.tolist()):
        text = f"{titles[i]}: {right} of {images[i]} correct, {wrong[i, i]} taken for another class of the same block"
        full = svg_box(left + cell * i, top + cell * i, cell, cell, "cell", right / max(images[i], 1))
        parts.append(box.format("right", text, full))
    for i, j in zip(*np.nonzero(wrong), strict=True):
        inset = cell / 2 if i == j else 0
        text = f"{titles[i]} → {titles[j]}: {wrong[i, j]} of {images[i]}"
        place = left + cell * j + inset, top + cell * i + inset, cell - inset, cell - inset
        opacity = max(share[i, j] / share.max(), FAINTEST_SMALL)
        parts.append(box.format("wrong", text, svg_box(*place, "cell", opacity)))
    return Markup("").join([*parts, Markup("</svg>")])


def _frame(names: Sequence[str], cell: int, title: str) -> tuple[list[Markup], float, float]:
    """Return the empty map of square cells with names beside its rows and columns, and its left and top."""
    count, step = len(names), -(-NAME_HEIGHT // cell)
    short = {i: shorten(names[i], LONGEST_NAME) for i in range(0, count, step)}
    longest = SMALL_LETTER * max(map(len, short.values()))
    left, top = longest + 26, 0.72 * longest + 30
    width, height = left + cell * count + 0.72 * longest, top + cell * count + 2
    parts = [
        svg_start(width, height, "heat small", title, "Rows are true classes, columns predictions.", fixed=True),
        svg_text(left + cell * count / 2, 12, "predicted", "middle"),
        svg_text(0, 0, "true", "middle", f"translate(12 {top + cell * count / 2:.1f}) rotate(-90)"),
        svg_box(left, top, cell * count, cell * count, "track"),
    ]
    for i, name in short.items():
        tilt = f"translate({left + cell * (i + 0.5) + 3:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(svg_text(left - 6, top + cell * (i + 0.5) + 3, name, "end"))
        parts.append(svg_text(0, 0, name, "start", tilt))
    return parts, left, top


def _kind(i: int, j: int, strength: np.ndarray) -> str:
    kind = "right" if i == j else "wrong"
    return kind + (" strong" if strength[i, j] >= WHITE_FROM[kind] else "")


def _tooltip(names: Sequence[str], i: int, j: int, count: int, images: np.ndarray) -> str:
    return f"{names[i]} → {names[j]}: {count} of {images[i]}"


def share_map(shares: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, down: str, across: str) -> Markup:
    """Return shares 0…1, (rows, columns), as SVG cells, darker for larger ones; rows and columns have names."""
    short, top_names = [shorten(name, 16) for name in rows], [shorten(name, 16) for name in columns]
    cell, widest = 18, LETTER * max(map(len, [*short, ""]))
    tilted = 0.72 * LETTER * max(map(len, [*top_names, ""]))  # height and width of the longest name at 45 degrees
    left, top = widest + 26, tilted + 34
    width, height = left + cell * len(columns) + tilted, top + cell * len(rows) + 2
    parts = [
        svg_start(width, height, "heat", f"{down} by {across}: shares of attention", fixed=True),
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
