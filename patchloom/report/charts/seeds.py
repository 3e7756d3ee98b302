"""What chance does to a number, as SVG: a histogram with its Gaussian, and its range while runs are trained.

The measures and colours are those of `charts`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from patchloom.report.charts import Series, line_chart
from patchloom.report.charts.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, nice_ticks
from patchloom.report.charts.svg import svg_line, svg_text

CURVE_POINTS = 80
MOST_BINS = 20


class SeedRange(NamedTuple):
    """A number over several runs at one epoch."""

    epoch: int
    mean: float
    std: float
    low: float
    high: float


def histogram_chart(values: Sequence[float], *, x_label: str, y_label: str = "runs") -> Markup:
    """How often values fall into equal bins, and the Gaussian of their mean and deviation (n − 1) over it."""
    of = np.asarray(values, dtype=np.float64)
    mean, std = float(of.mean()), float(of.std(ddof=1)) if len(of) > 1 else 0.0
    edges = _bins(of)
    counts = np.histogram(of, edges)[0]
    x_ticks = nice_ticks(min(edges[0], mean - 3 * std), max(edges[-1], mean + 3 * std))
    across = Axis(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    wide = edges[1] - edges[0]
    bell = len(of) * wide / (std * math.sqrt(2 * math.pi)) if std else 0.0  # its height, as an expected count
    y_ticks = nice_ticks(0, max(float(counts.max()), bell))
    up = Axis(0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [Markup('<svg viewBox="0 0 {} {}" class="lines" role="img">').format(WIDTH, HEIGHT)]
    for tick in y_ticks:
        parts += [
            svg_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)),
            svg_text(LEFT - 6, up(tick) + 4, f"{tick:g}", "end"),
        ]
    for tick in x_ticks:
        parts.append(svg_line(across(tick), up.start, across(tick), up.start + 4))
        parts.append(svg_text(across(tick), up.start + 17, f"{tick:g}", "middle"))
    bar = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="bar" fill-opacity=".55">')
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        told = Markup("<title>{}</title></rect>").format(f"{left:.4g} to {right:.4g}: {count} {y_label}")
        parts.append(
            bar.format(across(left) + 0.5, up(count), across(right) - across(left) - 1, up(0) - up(count)) + told
        )
    if std:
        xs = np.linspace(across.low, across.high, CURVE_POINTS)
        heights = bell * np.exp(-(((xs - mean) / std) ** 2) / 2)
        path = "L".join(f"{across(x):.2f} {up(y):.2f}" for x, y in zip(xs, heights, strict=True))
        parts.append(Markup('<path d="M{}" class="c1"/>').format(path))
    parts.append(svg_text(LEFT, 14, f"mean {mean:.2f}, deviation {std:.2f}, {len(of)} {y_label}"))
    parts.append(svg_text((across.start + across.end) / 2, HEIGHT - 4, x_label, "middle"))
    return Markup("").join([*parts, Markup("</svg>")])


def _bins(values: np.ndarray) -> np.ndarray:
    """Edges of equal bins: as Freedman and Diaconis, or the square root of the count, whichever gives more."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low - 0.5, low + 0.5])
    quarter, three = np.percentile(values, [25, 75])
    apart = 2 * (three - quarter) / len(values) ** (1 / 3)
    count = max(math.ceil((high - low) / apart) if apart else 1, math.ceil(math.sqrt(len(values))))
    return np.linspace(low, high, min(count, MOST_BINS) + 1)


def range_chart(ranges: Sequence[SeedRange], *, x_label: str = "epoch") -> Markup:
    """The mean, one deviation around it, and the least and most of the runs, by epoch."""
    lines = {
        "mean": [(float(at.epoch), at.mean) for at in ranges],
        "min, max": [(float(at.epoch), at.low) for at in ranges],
        "± one deviation": [(float(at.epoch), at.mean - at.std) for at in ranges],
    }
    upper = {
        "min, max": [(float(at.epoch), at.high) for at in ranges],
        "± one deviation": [(float(at.epoch), at.mean + at.std) for at in ranges],
    }
    shades = {"mean": (0, 1.0), "± one deviation": (0, 0.45), "min, max": (1, 0.6)}
    series = [Series(name, points, *shades[name]) for name, points in lines.items()]
    series += [Series(name, points, *shades[name], listed=False) for name, points in upper.items()]
    return line_chart(series, x_label=x_label)
