"""Line charts, bars and heat maps as SVG text; colours and fonts come from the style sheet of the page they stand in.

Our own, since the report needs three charts and matplotlib costs 78 MB and a second to import.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 28, 36  # margins of a line chart
LETTER = 6.3  # pixels a letter takes on average in the charts' font, 11 pixels high
FAINTEST = 0.08  # opacity of a cell that is not empty
BAR = 22  # pixels from one bar to the next


class Series(NamedTuple):
    """A named line through points (x, y); it breaks where y is not finite."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0


class Axis(NamedTuple):
    """Values from `low` to `high` laid on pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` steps of 1, 2 or 5 times a power of ten, from at or below `low` to at or above `high`."""
    rough = (high - low or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def line_chart(series: Sequence[Series], *, x_label: str) -> Markup:
    """Lines over a common x axis that starts at 0; every point tells its values under the pointer."""
    points = [(x, y) for line in series for x, y in line.points if math.isfinite(y)]
    x_ticks = nice_ticks(0, max(x for x, _ in points), 6)
    y_ticks = nice_ticks(min(y for _, y in points), max(y for _, y in points))
    across = Axis(x_ticks[0], max(x for x, _ in points) or x_ticks[-1], LEFT, WIDTH - RIGHT)
    up = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [Markup('<svg viewBox="0 0 {} {}" class="lines" role="img">').format(WIDTH, HEIGHT)]
    for tick in y_ticks:
        parts.append(_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)))
        parts.append(_text(LEFT - 6, up(tick) + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        if tick <= across.high:
            parts.append(_line(across(tick), up.start, across(tick), up.start + 4))
            parts.append(_text(across(tick), up.start + 17, f"{tick:g}", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    legend_x = float(LEFT)
    for line in series:
        parts.append(Markup('<path d="{}" class="c{}"/>').format(_path(line, across, up), line.color))
        parts += [_hit(line, x, y, across, up, x_label) for x, y in line.points if math.isfinite(y)]
        parts.append(Markup('<path d="M{:.1f} 11h14" class="c{}"/>').format(legend_x, line.color))
        parts.append(_text(legend_x + 19, 15, line.name))
        legend_x += 34 + LETTER * len(line.name)
    return Markup("").join([*parts, Markup("</svg>")])


def bars(rows: Sequence[tuple[str, float, str]], *, high: float = 100.0) -> Markup:
    """A bar a row of (label, value, text after the bar); a value that is not finite has no bar."""
    left = LETTER * max(min(len(label), 22) for label, _, _ in rows) + 10
    along = Axis(0, high, left, 480 - LETTER * max(len(text) for _, _, text in rows) - 10)
    parts = [Markup('<svg viewBox="0 0 480 {}" class="bars" role="img">').format(BAR * len(rows))]
    for i, (label, value, text) in enumerate(rows):
        parts.append(Markup("<g><title>{}: {}</title>").format(label, text))
        parts.append(_text(left - 8, BAR * i + 15, shorten(label, 22), "end"))
        for kind, end in (("track", along.end), ("bar", along(value if math.isfinite(value) else 0))):
            parts.append(_rect(left, BAR * i + 4, end - left, 14, kind))
        parts.append(_text(along.end + 8, BAR * i + 15, text) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


def strengths(confusion: np.ndarray) -> np.ndarray:
    """(K, K) counts → 0…1: shares of each row; those off the diagonal, over the largest of them."""
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    right = np.diag(np.diag(share))
    wrong = share - right
    return right + wrong / (wrong.max() or 1.0)


def heat_map(confusion: np.ndarray, names: Sequence[str]) -> Markup:
    """A confusion matrix with its counts: rows are true classes, columns predictions."""
    count, strength = len(names), strengths(confusion)
    cell = max(22, min(40, 640 // count), 10 + 7 * len(str(confusion.max())))
    short = [shorten(name, 16) for name in names]
    longest = LETTER * max(map(len, short))
    tilted = longest > cell - 4
    left, top = longest + 26, (0.72 * longest if tilted else 8) + 30
    width, height = left + cell * count + (0.72 * longest if tilted else 4), top + cell * count + 2
    parts = [
        Markup('<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" class="heat" role="img">').format(width, height),
        _text(left + cell * count / 2, 12, "predicted", "middle"),
        _text(0, 0, "true", "middle", f"translate(12 {top + cell * count / 2:.1f}) rotate(-90)"),
        _rect(left, top, cell * count, cell * count, "track"),
    ]
    for i, name in enumerate(short):
        x, middle = left + cell * (i + 0.5), top + cell * (i + 0.5)
        parts.append(_text(left - 6, middle + 4, name, "end"))
        turn = f"translate({x + 4:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(_text(0, 0, name, "start", turn) if tilted else _text(x, top - 6, name, "middle"))
    for i, j in zip(*np.nonzero(confusion), strict=True):
        told = f"{names[i]} → {names[j]}: {confusion[i, j]} of {confusion[i].sum()}"
        kind = ("right" if i == j else "wrong") + (" strong" if strength[i, j] > 0.5 else "")
        x, y = left + cell * j, top + cell * i
        parts.append(Markup('<g class="{}"><title>{}</title>').format(kind, told))
        parts.append(_rect(x, y, cell, cell, "cell", max(strength[i, j], FAINTEST)))
        parts.append(_text(x + cell / 2, y + cell / 2 + 4, str(confusion[i, j]), "middle") + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


def shorten(name: str, letters: int) -> str:
    """The name, cut to so many letters."""
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _path(line: Series, across: Axis, up: Axis) -> str:
    parts, command = [], "M"
    for x, y in line.points:
        if math.isfinite(y):
            parts.append(f"{command}{across(x):.2f} {up(y):.2f}")
        command = "L" if math.isfinite(y) else "M"
    return "".join(parts)


def _hit(line: Series, x: float, y: float, across: Axis, up: Axis, x_label: str) -> Markup:
    shape = Markup('<circle cx="{:.2f}" cy="{:.2f}" r="4" class="c{}"><title>{}</title></circle>')
    return shape.format(across(x), up(y), line.color, f"{line.name} {y:.4g}, {x_label} {x:.4g}")


def _rect(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0) -> Markup:
    shape = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}" fill-opacity="{:.3f}"/>')
    return shape.format(x, y, width, height, kind, opacity)


def _line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<path d="M{:.2f} {:.2f}L{:.2f} {:.2f}" class="grid"/>').format(x1, y1, x2, y2)


def _text(x: float, y: float, text: str, anchor: str = "start", transform: str = "") -> Markup:
    turned = Markup(' transform="{}"').format(transform) if transform else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(x, y, anchor, turned, text)
