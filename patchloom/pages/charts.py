"""Line charts, scatters, bars and heat maps as SVG text; `svg_file` makes a file of one.

Colours and fonts come from the style sheet of the page they stand in; only the many colours of a scatter are its own.
Our own, since few kinds are needed and matplotlib costs 78 MB and a second to import.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 28, 36  # margins of a line chart
LETTER = 6.3  # pixels a letter takes on average in the charts' font, 11 pixels high
FAINTEST = 0.08  # opacity of a cell that is not empty
FEW = 12  # points that are drawn as dots too
BAR, BARS_WIDTH = 22, 400  # from one bar to the next, and across
SCATTER, LEGEND_LINE = 460, 16  # side of a scatter's field, and from one line of its legend to the next
GROUPS_TOLD = 24  # in a legend
# Twelve that are told apart on light and dark pages; more groups than that take shades of them.
PALETTE = (
    "#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2",
    "#db2777", "#65a30d", "#92400e", "#64748b", "#c026d3", "#0d9488",
)  # fmt: skip
LINE_COLORS = 8  # classes c0 … c7 of a page's style
STYLE = (
    "svg{background:#fff} text{fill:#1a2230;font:11px sans-serif} path{fill:none;stroke-width:1.8} "
    "path.grid{stroke:#e2e6ec;stroke-width:1} circle{fill:transparent} circle.seen{r:2.5px} .track{fill:#eef1f5} "
    ".bar,.right rect{fill:#2563eb} .wrong rect{fill:#dc2626} .strong text{fill:#fff} "
    + " ".join(
        f"path.c{i}{{stroke:{color}}} .c{i}.seen{{fill:{color}}}" for i, color in enumerate(PALETTE[:LINE_COLORS])
    )
)


class Series(NamedTuple):
    """A named line through points (x, y); it breaks where y is not finite."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    strength: float = 1.0  # opacity: fainter ones lie behind
    listed: bool = True  # in the legend


class Point(NamedTuple):
    """A point of a scatter; points of one group have one colour."""

    x: float
    y: float
    name: str = ""  # told under the pointer, or written beside it
    group: str = ""


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
    apart = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0  # rounding apart
    rough = (apart or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


class LogAxis(Axis):
    """The same with equal steps for equal factors; values are above 0."""

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return Axis(math.log(self.low), math.log(self.high), self.start, self.end)(math.log(value))


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    from_zero: bool = False,
    log: bool = False,
    x_names: Sequence[str] = (),
) -> Markup:
    """Lines over a common x axis that starts at 0, as y does on demand; a point tells its values under the pointer.

    With `log` the x axis goes from the least to the most x, which are above 0, by factors, and names the values shown.
    With `x_names` the places 0, 1 … along x have these names instead of numbers.
    """
    lines = [line._replace(points=[p for p in line.points if math.isfinite(p[1])]) for line in series]
    if not any(line.points for line in lines):
        return Markup('<p class="muted">no finite values</p>')
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    y_ticks = nice_ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    listed = [line for line in lines if line.listed]
    places = _legend([shorten(line.name, 40) for line in listed]) if len(listed) > 1 else []
    lower = places[-1][1] if places else 0  # further lines of the legend push the chart down
    across = Axis(0, max(xs) or 1, LEFT, WIDTH - RIGHT)
    x_ticks = nice_ticks(0, across.high, 6)
    if log and min(xs) < max(xs):
        across = LogAxis(min(xs), max(xs), LEFT + 10, WIDTH - RIGHT - 10)
        x_ticks = _apart(sorted(set(xs)), across)
    if x_names:
        across = Axis(-0.4, len(x_names) - 0.6, LEFT, WIDTH - RIGHT)
    up = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM + lower, TOP + lower)
    marks, height = _x_marks(across, up.start, x_label, x_ticks, x_names)
    parts = [Markup('<svg viewBox="0 0 {} {:.0f}" class="lines" role="img">').format(WIDTH, height)]
    for tick in y_ticks:
        parts.append(svg_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)))
        parts.append(svg_text(LEFT - 6, up(tick) + 4, f"{tick:g}", "end"))
    parts += marks
    for whole, line in zip(series, lines, strict=True):
        shade = Markup(' opacity="{:.2f}"').format(line.strength) if line.strength < 1 else ""
        parts.append(Markup('<path d="{}" class="c{}"{}/>').format(_path(whole, across, up), line.color, shade))
        seen = " seen" if len(line.points) <= FEW and line.strength == 1 else ""
        for x, y in line.points:
            told = f"{line.name} {y:.4g}, {x_label} {x_names[round(x)] if x_names else f'{x:.4g}'}"
            dot = Markup('<circle cx="{:.2f}" cy="{:.2f}" r="4" class="c{}{}"><title>{}</title></circle>')
            parts.append(dot.format(across(x), up(y), line.color, seen, told))
    for (x, y), line in zip(places, listed, strict=False):
        shade = Markup(' opacity="{:.2f}"').format(line.strength) if line.strength < 1 else ""
        parts.append(Markup('<path d="M{:.1f} {}h12" class="c{}"{}/>').format(x, y + 11, line.color, shade))
        parts.append(svg_text(x + 16, y + 15, shorten(line.name, 40)))
    return Markup("").join([*parts, Markup("</svg>")])


def _apart(values: Sequence[float], across: Axis) -> list[float]:
    """Of rising values those whose names have room beside one another."""
    chosen: list[float] = []
    for value in values:
        if not chosen or across(value) - across(chosen[-1]) > LETTER * max(len(f"{value:g}"), len(f"{chosen[-1]:g}")):
            chosen.append(value)
    return chosen


def _x_marks(
    across: Axis, bottom: float, label: str, ticks: Sequence[float], names: Sequence[str]
) -> tuple[list[Markup], float]:
    """Ticks below `bottom` with numbers, or with names, tilted where they are wide; and where the chart ends."""
    parts, deep = [], 17.0
    if names:
        short = [shorten(name, 16) for name in names]
        widest = LETTER * max(map(len, short))
        tilted = widest > across(1) - across(0) - 4
        deep = 12 + 0.57 * widest if tilted else deep
        for place, name in enumerate(short):
            turn = f"translate({across(place) + 4:.1f} {bottom + 14:.1f}) rotate(-35)"
            parts.append(svg_line(across(place), bottom, across(place), bottom + 4))
            parts.append(
                svg_text(0, 0, name, "end", turn) if tilted else svg_text(across(place), bottom + 17, name, "middle")
            )
    else:
        for tick in ticks:
            if tick <= across.high:
                parts.append(svg_line(across(tick), bottom, across(tick), bottom + 4))
                parts.append(svg_text(across(tick), bottom + 17, f"{tick:g}", "middle"))
    end = bottom + deep + BOTTOM - 17
    return [*parts, svg_text((across.start + across.end) / 2, end - 4, label, "middle")], end


def _legend(names: Sequence[str]) -> list[tuple[float, int]]:
    """Where each name of a legend begins: side by side, and on a further line where the chart ends."""
    places: list[tuple[float, int]] = []
    x, y = float(LEFT), 0
    for name in names:
        wide = 28 + LETTER * len(name)
        if x > LEFT and x + wide > WIDTH:
            x, y = float(LEFT), y + LEGEND_LINE
        places.append((x, y))
        x += wide
    return places


def scatter_chart(
    points: Sequence[Point],
    *,
    x_label: str = "",
    y_label: str = "",
    named: bool = False,
    groups: Sequence[str] = (),
    line: tuple[float, float] | None = None,
    side: int = SCATTER,
) -> Markup:
    """Points coloured by group, with a legend; axes without labels have no numbers, as those of a t-SNE mean nothing.

    `named` writes each point's name beside it; `groups` gives the order of the legend, otherwise that of the points.
    `line` is a straight one through them: its slope and its height at x = 0. `side` is that of the field, in pixels.
    """
    names = list(dict.fromkeys([*groups, *(point.group for point in points)]))
    told = [name for name in names if name][:GROUPS_TOLD]
    left, below = (LEFT + 12, BOTTOM + 4) if x_label else (8, 8)
    legend = 30 + LETTER * max(len(shorten(name, 24)) for name in told) if told else RIGHT if x_label else 8
    width, height = left + side + legend, max(side + 10 + below, LEGEND_LINE * (len(told) + 2))
    across, up = _scatter_axes(points, left, side, ticked=bool(x_label))
    parts = [
        Markup('<svg viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" class="scatter" role="img">').format(width, height),
        *_frame(across, up, x_label, y_label),
        *([_straight(*line, across, up)] if line else []),
    ]
    dot = Markup('<circle cx="{:.2f}" cy="{:.2f}" r="{}" style="fill:{};fill-opacity:.8"><title>{}</title></circle>')
    for point in points:
        values = f" ({point.x:.4g}, {point.y:.4g})" if x_label else ""
        text = " · ".join(filter(None, [point.name, point.group])) + values
        color = _group_color(names.index(point.group))
        parts.append(dot.format(across(point.x), up(point.y), 4 if named else 3, color, text))
    if named:
        parts += _beside(points, across, up)
    for i, name in enumerate(told):
        y = 10 + LEGEND_LINE * (i + 0.5)
        parts.append(dot.format(left + side + 14, y, 4, _group_color(names.index(name)), name))
        parts.append(svg_text(left + side + 24, y + 4, shorten(name, 24)))
    if (more := len([name for name in names if name]) - len(told)) > 0:
        parts.append(svg_text(left + side + 24, 14 + LEGEND_LINE * (len(told) + 0.5), f"{more} more"))
    return Markup("").join([*parts, Markup("</svg>")])


def bars(rows: Sequence[tuple[str, float, str]], *, high: float = 100.0, width: int = BARS_WIDTH) -> Markup:
    """A bar a row of (label, value, text after the bar); a value that is not finite has no bar."""
    left = LETTER * max(min(len(label), 22) for label, _, _ in rows) + 10
    along = Axis(0, high, left, width - LETTER * max(len(text) for _, _, text in rows) - 10)
    parts = [Markup('<svg viewBox="0 0 {} {}" class="bars" role="img">').format(width, BAR * len(rows))]
    for i, (label, value, text) in enumerate(rows):
        parts.append(Markup("<g><title>{}: {}</title>").format(label, text))
        parts.append(svg_text(left - 8, BAR * i + 15, shorten(label, 22), "end"))
        for kind, end in (("track", along.end), ("bar", along(value if math.isfinite(value) else 0))):
            parts.append(_rect(left, BAR * i + 4, end - left, 14, kind))
        parts.append(svg_text(along.end + 8, BAR * i + 15, text) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


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
        _rect(left, top, cell * count, cell * count, "track"),
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
        parts.append(_rect(x, y, cell, cell, "cell", max(strength[i, j], FAINTEST)))
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
        _rect(left, top, cell * len(columns), cell * len(rows), "track"),
    ]
    for i, name in enumerate(short):
        parts.append(svg_text(left - 6, top + cell * (i + 0.5) + 4, name, "end"))
    for j, name in enumerate(top_names):
        turn = f"translate({left + cell * (j + 0.5) + 4:.1f} {top - 6:.1f}) rotate(-45)"
        parts.append(svg_text(0, 0, name, "start", turn))
    for (i, j), share in np.ndenumerate(shares):
        told = f"{rows[i]} looks at {columns[j]}: {share:.0%}"
        parts.append(Markup('<g class="right"><title>{}</title>').format(told))
        parts.append(_rect(left + cell * j, top + cell * i, cell, cell, "cell", float(share)) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])


def svg_file(chart: Markup) -> str:
    """The chart as a file of its own, in the colours of a light page."""
    head, _, rest = str(chart).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}'


def shorten(name: str, letters: int) -> str:
    """The name, cut to so many letters."""
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _scatter_axes(points: Sequence[Point], left: float, side: int, *, ticked: bool) -> tuple[Axis, Axis]:
    """Axes that hold all points; those with numbers end at ticks."""
    ends = []
    for values in ([point.x for point in points], [point.y for point in points]):
        low, high = min(values), max(values)
        ticks = nice_ticks(low, high)
        room = 0.04 * (high - low) or 1.0
        ends.append((ticks[0], ticks[-1]) if ticked else (low - room, high + room))
    return Axis(*ends[0], left, left + side), Axis(*ends[1], 10 + side, 10)


def _frame(across: Axis, up: Axis, x_label: str, y_label: str) -> list[Markup]:
    corners = (across.start, up.end, across.end, up.start)
    parts = [Markup('<path d="M{0:.1f} {1:.1f}H{2:.1f}V{3:.1f}H{0:.1f}Z" class="grid"/>').format(*corners)]
    if not x_label:
        return parts
    for tick in nice_ticks(across.low, across.high):
        parts.append(svg_line(across(tick), up.start, across(tick), up.end))
        parts.append(svg_text(across(tick), up.start + 16, f"{tick:g}", "middle"))
    for tick in nice_ticks(up.low, up.high):
        parts.append(svg_line(across.start, up(tick), across.end, up(tick)))
        parts.append(svg_text(across.start - 6, up(tick) + 4, f"{tick:g}", "end"))
    parts.append(svg_text((across.start + across.end) / 2, up.start + 33, x_label, "middle"))
    middle = f"translate(12 {(up.start + up.end) / 2:.1f}) rotate(-90)"
    return [*parts, svg_text(0, 0, y_label, "middle", middle)]


def _straight(slope: float, height: float, across: Axis, up: Axis) -> Markup:
    """A straight line, dashed, as far as it is within the frame."""
    low, high = sorted(((up.low - height) / slope, (up.high - height) / slope)) if slope else (across.low, across.high)
    ends = [max(across.low, low), min(across.high, high)]
    (x1, y1), (x2, y2) = ((across(x), up(height + slope * x)) for x in ends)
    shape = Markup('<path d="M{:.2f} {:.2f}L{:.2f} {:.2f}" style="stroke:gray;stroke-dasharray:5 4"/>')
    return shape.format(x1, y1, x2, y2)


def _beside(points: Sequence[Point], across: Axis, up: Axis) -> list[Markup]:
    """Each name right or left of its point, or up to two lines lower or higher, where it covers least of the others."""
    taken = [(across(p.x) - 5, up(p.y) - 5, across(p.x) + 5, up(p.y) + 5) for p in points]
    parts = []
    for point in points:
        wide = LETTER * len(point.name)
        places = [
            (across(point.x) + side * 7, up(point.y) + 4 + shift, "start" if side > 0 else "end")
            for shift in (0, 11, -11, 22, -22)
            for side in (1, -1)
        ]
        boxes = [(x if anchor == "start" else x - wide, y - 9) for x, y, anchor in places]
        covered = [
            sum(_overlap((*box, box[0] + wide, box[1] + 12), other) for other in taken)
            + (box[0] < across.start or box[0] + wide > across.end + 8)
            for box in boxes
        ]
        best = covered.index(min(covered))
        taken.append((*boxes[best], boxes[best][0] + wide, boxes[best][1] + 12))
        parts.append(svg_text(*places[best][:2], point.name, places[best][2]))
    return parts


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _group_color(number: int) -> str:
    turn, place = divmod(number, len(PALETTE))
    # Every further dozen is mixed with more white, so that neighbours in a long list still differ.
    return f"color-mix(in srgb, {PALETTE[place]} {max(30, 100 - 25 * turn)}%, white)" if turn else PALETTE[place]


def _path(line: Series, across: Axis, up: Axis) -> str:
    parts, command = [], "M"
    for x, y in line.points:
        if math.isfinite(y):
            parts.append(f"{command}{across(x):.2f} {up(y):.2f}")
        command = "L" if math.isfinite(y) else "M"
    return "".join(parts)


def _rect(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0) -> Markup:
    shape = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}" fill-opacity="{:.3f}"/>')
    return shape.format(x, y, width, height, kind, opacity)


def svg_line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """A line of the grid."""
    return Markup('<path d="M{:.2f} {:.2f}L{:.2f} {:.2f}" class="grid"/>').format(x1, y1, x2, y2)


def svg_text(x: float, y: float, text: str, anchor: str = "start", transform: str = "") -> Markup:
    """Words at a place; `anchor` says which part of them is there."""
    turned = Markup(' transform="{}"').format(transform) if transform else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(x, y, anchor, turned, text)
