"""Line charts."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from patchloom.report.charts.svg import (
    BOTTOM,
    HEIGHT,
    LABEL_LETTERS,
    LEFT,
    LETTER,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    LogAxis,
    legend_places,
    nice_ticks,
    shorten,
    svg_line,
    svg_start,
    svg_text,
)

FEW_POINTS = 12  # up to here, points are drawn as dots too


class Series(NamedTuple):
    """A named line through points (x, y), with gaps where y is not finite."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 0
    strength: float = 1.0  # opacity
    listed: bool = True  # in the legend


class SeedRange(NamedTuple):
    """Statistics of a value over several runs at one epoch."""

    epoch: int
    mean: float
    std: float
    low: float
    high: float


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    log: bool = False,
    x_names: Sequence[str] = (),
) -> Markup:
    """Return lines over a common x axis that starts at 0; each point has a tooltip with its values.

    With `from_zero`, the y axis starts at 0 too. With `log`, the x axis is logarithmic from the smallest to the largest
    x, which must be positive, with ticks at the values. With `x_names`, the positions 0, 1 … have names instead of
    numbers.
    """
    lines = [line._replace(points=[p for p in line.points if math.isfinite(p[1])]) for line in series]
    if not any(line.points for line in lines):
        return Markup('<p class="muted">no finite values</p>')
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    y_ticks = nice_ticks(min(0.0, *ys) if from_zero else min(ys), max(ys))
    listed = [line for line in lines if line.listed and line.points]
    places = legend_places([shorten(line.name, 40) for line in listed]) if len(listed) > 1 else []
    shift = places[-1][1] if places else 0  # further lines of the legend push the chart down
    across, x_ticks = _x_axis(xs, log, len(x_names))
    up = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM + shift, TOP + shift)
    marks, height = _x_marks(across, up.start, x_label, x_ticks, x_names)
    summary = "; ".join(_summary(line, x_names) for line in listed)
    parts = [
        svg_start(WIDTH, height, "lines", f"{y_label} by {x_label}", summary),
        vertical_label((up.start + up.end) / 2, y_label),
    ]
    for tick in y_ticks:
        parts.append(svg_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)))
        parts.append(svg_text(LEFT - 6, up(tick) + 4, f"{tick:g}", "end"))
    parts += marks
    dot = Markup('<circle cx="{:.2f}" cy="{:.2f}" r="4" class="c{}{}"><title>{}</title></circle>')
    for whole, line in zip(series, lines, strict=True):
        parts.append(
            Markup('<path d="{}" class="c{}"{}/>').format(_path(whole, across, up), line.color, _opacity(line))
        )
        visible = " seen" if len(line.points) <= FEW_POINTS and line.strength == 1 else ""
        for x, y in line.points:
            tooltip = f"{line.name} {y:.4g}, {x_label} {x_names[round(x)] if x_names else f'{x:.4g}'}"
            parts.append(dot.format(across(x), up(y), line.color, visible, tooltip))
    for (x, y), line in zip(places, listed, strict=False):
        parts.append(Markup('<path d="M{:.1f} {}h20" class="c{}"{}/>').format(x, y + 11, line.color, _opacity(line)))
        parts.append(svg_text(x + 24, y + 15, shorten(line.name, 40)))
    return Markup("").join([*parts, Markup("</svg>")])


def vertical_label(middle: float, text: str) -> Markup:
    """Return the name of a y axis, upwards along the left edge of a line chart."""
    tilt = f"translate(10 {middle:.1f}) rotate(-90)"
    return svg_text(0, 0, shorten(text, LABEL_LETTERS), "middle", tilt)


def _summary(line: Series, x_names: Sequence[str]) -> str:
    """Return the first and the last value of a line in words."""

    def at(x: float) -> str:
        return x_names[round(x)] if x_names else f"{x:.4g}"

    (first_x, first), (last_x, last) = line.points[0], line.points[-1]
    return f"{line.name}: {first:.4g} at {at(first_x)}, {last:.4g} at {at(last_x)}"


def range_chart(ranges: Sequence[SeedRange], *, y_label: str) -> Markup:
    """Return mean, one standard deviation, minimum and maximum of several runs by epoch."""
    lines = {
        "mean": [(float(at.epoch), at.mean) for at in ranges],
        "min, max": [(float(at.epoch), at.low) for at in ranges],
        "± one deviation": [(float(at.epoch), at.mean - at.std) for at in ranges],
    }
    upper = {
        "min, max": [(float(at.epoch), at.high) for at in ranges],
        "± one deviation": [(float(at.epoch), at.mean + at.std) for at in ranges],
    }
    styles = {"mean": (0, 1.0), "± one deviation": (0, 0.45), "min, max": (1, 0.6)}
    series = [Series(name, points, *styles[name]) for name, points in lines.items()]
    series += [Series(name, points, *styles[name], listed=False) for name, points in upper.items()]
    return line_chart(series, x_label="epoch", y_label=y_label)


def _x_axis(xs: Sequence[float], log: bool, names: int) -> tuple[Axis, list[float]]:
    if names:
        return Axis(-0.4, names - 0.6, LEFT, WIDTH - RIGHT), []
    if log and min(xs) < max(xs):
        axis = LogAxis(min(xs), max(xs), LEFT + 10, WIDTH - RIGHT - 10)
        return axis, _readable_ticks(sorted(set(xs)), axis)
    linear = Axis(0, max(xs) or 1, LEFT, WIDTH - RIGHT)
    return linear, nice_ticks(0, linear.high, 6)


def _readable_ticks(values: Sequence[float], across: Axis) -> list[float]:
    """Return those of the rising values whose labels do not overlap."""
    ticks: list[float] = []
    for value in values:
        if not ticks or across(value) - across(ticks[-1]) > LETTER * max(len(f"{value:g}"), len(f"{ticks[-1]:g}")):
            ticks.append(value)
    return ticks


def _x_marks(
    across: Axis, bottom: float, label: str, ticks: Sequence[float], names: Sequence[str]
) -> tuple[list[Markup], float]:
    """Return the ticks below `bottom` with numbers or names (tilted if they are wide), and the height of the chart."""
    parts, depth = [], 17.0
    if names:
        short = [shorten(name, 16) for name in names]
        widest = LETTER * max(map(len, short))
        tilted = widest > across(1) - across(0) - 4
        depth = 12 + 0.57 * widest if tilted else depth
        for place, name in enumerate(short):
            tilt = f"translate({across(place) + 4:.1f} {bottom + 14:.1f}) rotate(-35)"
            parts.append(svg_line(across(place), bottom, across(place), bottom + 4))
            parts.append(
                svg_text(0, 0, name, "end", tilt) if tilted else svg_text(across(place), bottom + 17, name, "middle")
            )
    for tick in ticks:
        if tick <= across.high:
            parts.append(svg_line(across(tick), bottom, across(tick), bottom + 4))
            middle = min(across(tick), WIDTH - LETTER * len(f"{tick:g}") / 2)  # inside the chart
            parts.append(svg_text(middle, bottom + 17, f"{tick:g}", "middle"))
    end = bottom + depth + BOTTOM - 17
    return [*parts, svg_text((across.start + across.end) / 2, end - 4, label, "middle")], end


def _opacity(line: Series) -> Markup | str:
    return Markup(' opacity="{:.2f}"').format(line.strength) if line.strength < 1 else ""


def _path(line: Series, across: Axis, up: Axis) -> str:
    parts, command = [], "M"
    for x, y in line.points:
        if math.isfinite(y):
            parts.append(f"{command}{across(x):.2f} {up(y):.2f}")
        command = "L" if math.isfinite(y) else "M"
    return "".join(parts)
