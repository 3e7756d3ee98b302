"""Scatter charts, colored by group."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup

from patchloom.report.charts.svg import (
    BOTTOM,
    LEFT,
    LEGEND_LINE,
    LETTER,
    LINE_COLORS,
    RIGHT,
    Axis,
    LogAxis,
    legend_places,
    nice_ticks,
    shorten,
    svg_line,
    svg_start,
    svg_text,
)

SIDE = 300  # pixels of the plot area, before the style sheet of the page stretches or shrinks the chart
MAX_LEGEND = 24  # groups
LEGEND_LETTERS = 24
NAME_LINE = 11  # pixels of height of a name beside a point
AXIS_LETTERS = 44  # as long as an axis
NAME_LETTERS = 24  # beside a point: about half of the plot area
LOG_ROOM = 1.5  # factor between the outermost points and the ends of a logarithmic axis
MOST_DECADES = 4  # with ticks at 2 and 5 times a power of ten too
# After the circle: square, triangle, diamond, around a center.
_SHAPES = ("m-{0} -{0}h{1}v{1}h-{1}z", "m0 -{0}l{0} {1}h-{1}z", "m0 -{0}l{0} {0}l-{0} {0}l-{0} -{0}z")


class Point(NamedTuple):
    """A point of a scatter chart; points of a group share a color."""

    x: float
    y: float
    name: str = ""  # in the tooltip, or written next to the point
    group: str = ""


def scatter_chart(
    points: Sequence[Point],
    *,
    x_label: str = "",
    y_label: str = "",
    named: bool = False,
    groups: Sequence[str] = (),
    line: tuple[float, float] | None = None,
    path: Sequence[tuple[float, float]] = (),
    log: bool = False,
) -> Markup:
    """Return points colored by group, with a legend; axes without labels have no numbers, as for t-SNE.

    `named` writes each point's name next to it. `groups` is the order of the legend (default: that of the points).
    `line` is the slope and intercept of a straight line, `path` the corners of a dashed one. With `log`, the x axis is
    logarithmic.
    """
    names = list(dict.fromkeys([*groups, *(point.group for point in points)]))
    listed = [name for name in names if name][:MAX_LEGEND]
    legend = [shorten(name, LEGEND_LETTERS) for name in listed]
    if more := len([name for name in names if name]) - len(listed):
        legend.append(f"{more} more")
    left, right, below = (LEFT + 12, RIGHT, BOTTOM + 4) if x_label else (8, 8, 8)
    width = left + SIDE + right
    places = legend_places(legend, width)
    top = 10 + (places[-1][1] + LEGEND_LINE if places else 0)
    across, up = _scatter_axes(points, left, top, ticked=bool(x_label), log=log)
    name = f"{y_label} by {x_label}" if x_label else "points by group"
    parts = [
        svg_start(width, top + SIDE + below, "scatter", name, f"{len(points)} points", fixed=True),
        *_frame(across, up, x_label, y_label),
        *([_straight_line(*line, across, up)] if line else []),
        *(_dashed(across(x1), up(y1), across(x2), up(y2)) for (x1, y1), (x2, y2) in pairwise(path)),
    ]
    for point in points:
        values = f" ({point.x:.4g}, {point.y:.4g})" if x_label else ""
        text = " · ".join(filter(None, [point.name, point.group])) + values
        parts.append(_mark(across(point.x), up(point.y), 4 if named else 3, names.index(point.group), text))
    if named:
        parts += _point_names(points, across, up)
    for group, (x, y) in zip(listed, places, strict=False):
        parts.append(_mark(x + 12, y + 11, 4, names.index(group), group))
    for text, (x, y) in zip(legend, places, strict=True):
        parts.append(svg_text(x + 22, y + 15, text))
    return Markup("").join([*parts, Markup("</svg>")])


def _scatter_axes(points: Sequence[Point], left: float, top: float, *, ticked: bool, log: bool) -> tuple[Axis, Axis]:
    """Return axes that contain all points; axes with numbers end at ticks."""
    ends = []
    for values in ([point.x for point in points], [point.y for point in points]):
        low, high = min(values), max(values)
        ticks = nice_ticks(low, high)
        room = 0.04 * (high - low) or 1.0
        ends.append((ticks[0], ticks[-1]) if ticked else (low - room, high + room))
    up = Axis(*ends[1], top + SIDE, top)
    if log:
        xs = [point.x for point in points]
        return LogAxis(min(xs) / LOG_ROOM, max(xs) * LOG_ROOM, left, left + SIDE), up
    return Axis(*ends[0], left, left + SIDE), up


def _ticks(axis: Axis) -> list[float]:
    """Return the ticks of an axis; of a logarithmic one, those of 1, 2 and 5 times powers of ten that it contains."""
    if not isinstance(axis, LogAxis):
        return nice_ticks(axis.low, axis.high)
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    factors = (1, 2, 5) if len(powers) <= MOST_DECADES else (1,)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    return [tick for tick in ticks if axis.low <= tick <= axis.high]


def _frame(across: Axis, up: Axis, x_label: str, y_label: str) -> list[Markup]:
    corners = (across.start, up.end, across.end, up.start)
    parts = [Markup('<path d="M{0:.1f} {1:.1f}H{2:.1f}V{3:.1f}H{0:.1f}Z" class="grid"/>').format(*corners)]
    if not x_label:
        return parts
    for tick in _ticks(across):
        parts.append(svg_line(across(tick), up.start, across(tick), up.end))
        parts.append(svg_text(across(tick), up.start + 16, f"{tick:g}", "middle"))
    for tick in _ticks(up):
        parts.append(svg_line(across.start, up(tick), across.end, up(tick)))
        parts.append(svg_text(across.start - 6, up(tick) + 4, f"{tick:g}", "end"))
    parts.append(svg_text((across.start + across.end) / 2, up.start + 33, shorten(x_label, AXIS_LETTERS), "middle"))
    middle = f"translate(12 {(up.start + up.end) / 2:.1f}) rotate(-90)"
    return [*parts, svg_text(0, 0, shorten(y_label, AXIS_LETTERS), "middle", middle)]


def _straight_line(slope: float, height: float, across: Axis, up: Axis) -> Markup:
    """Return a dashed straight line, clipped to the frame."""
    low, high = sorted(((up.low - height) / slope, (up.high - height) / slope)) if slope else (across.low, across.high)
    ends = [max(across.low, low), min(across.high, high)]
    (x1, y1), (x2, y2) = ((across(x), up(height + slope * x)) for x in ends)
    return _dashed(x1, y1, x2, y2)


def _dashed(x1: float, y1: float, x2: float, y2: float) -> Markup:
    shape = Markup('<path d="M{:.2f} {:.2f}L{:.2f} {:.2f}" style="stroke:gray;stroke-dasharray:5 4"/>')
    return shape.format(x1, y1, x2, y2)


def _point_names(points: Sequence[Point], across: Axis, up: Axis) -> list[Markup]:
    """Return the names, each next to its point or up to two lines above or below, where it overlaps least."""
    taken = [(across(p.x) - 5, up(p.y) - 5, across(p.x) + 5, up(p.y) + 5) for p in points]
    parts = []
    for point in points:
        name = shorten(point.name, NAME_LETTERS)
        wide = LETTER * len(name)
        places = [
            (across(point.x) + side * 7, up(point.y) + 4 + shift, "start" if side > 0 else "end")
            for shift in (0, NAME_LINE, -NAME_LINE, 2 * NAME_LINE, -2 * NAME_LINE)
            for side in (1, -1)
        ]
        boxes = [(x if anchor == "start" else x - wide, y - 9) for x, y, anchor in places]
        covered = [
            sum(_overlap((*box, box[0] + wide, box[1] + NAME_LINE), other) for other in taken)
            + len(points) * (box[0] < across.start - 8 or box[0] + wide > across.end + 8)  # cut off is worse
            for box in boxes
        ]
        best = covered.index(min(covered))
        taken.append((*boxes[best], boxes[best][0] + wide, boxes[best][1] + NAME_LINE))
        parts.append(svg_text(*places[best][:2], name, places[best][2]))
    return parts


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _mark(x: float, y: float, radius: float, group: int, text: str) -> Markup:
    """Return the mark of a group: every further lap of the colors has another shape."""
    lap, color = divmod(group, LINE_COLORS)
    tooltip = Markup("<title>{}</title>").format(text)
    if not lap % (len(_SHAPES) + 1):
        circle = Markup('<circle cx="{:.2f}" cy="{:.2f}" r="{}" class="mark c{}">{}</circle>')
        return circle.format(x, y, radius, color, tooltip)
    shape = _SHAPES[lap % (len(_SHAPES) + 1) - 1].format(radius, 2 * radius)
    return Markup('<path d="M{:.2f} {:.2f}{}" class="mark c{}">{}</path>').format(x, y, shape, color, tooltip)
