"""Lines over a common x axis."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from patchloom.report.charts.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, LogAxis, nice_ticks
from patchloom.report.charts.svg import LEGEND_LINE, LETTER, shorten, svg_line, svg_text

FEW = 12  # points that are drawn as dots too


class Series(NamedTuple):
    """A named line through points (x, y); it breaks where y is not finite."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    strength: float = 1.0  # opacity: fainter ones lie behind
    listed: bool = True  # in the legend


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
                middle = min(across(tick), WIDTH - LETTER * len(f"{tick:g}") / 2)  # inside the chart
                parts.append(svg_text(middle, bottom + 17, f"{tick:g}", "middle"))
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


def _path(line: Series, across: Axis, up: Axis) -> str:
    parts, command = [], "M"
    for x, y in line.points:
        if math.isfinite(y):
            parts.append(f"{command}{across(x):.2f} {up(y):.2f}")
        command = "L" if math.isfinite(y) else "M"
    return "".join(parts)
