"""Bar charts: one bar per row as HTML, and histograms as SVG."""

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from patchloom.report.charts.lines import vertical_label
from patchloom.report.charts.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    nice_ticks,
    svg_line,
    svg_start,
    svg_text,
)

CURVE_POINTS = 80  # of the Gaussian over a histogram
MAX_BINS = 20


def bars(rows: Sequence[tuple[str, float, str]]) -> Markup:
    """Return one bar per row of (label, percentage, text after the bar); a value that is not finite has no bar.

    Bars are HTML rather than SVG, so that long names wrap and text keeps its size on a phone.
    """
    row = Markup('<span>{}</span><i><b style="width:{:.4g}%"></b></i><span>{}</span>')
    parts = [row.format(name, value if math.isfinite(value) else 0, text) for name, value, text in rows]
    return Markup('<div class="bars">{}</div>').format(Markup("").join(parts))


def histogram_chart(values: Sequence[float], *, x_label: str, y_label: str = "runs") -> Markup:
    """Return a histogram of the values with the Gaussian of their mean and standard deviation (n − 1)."""
    samples = np.asarray(values, dtype=np.float64)
    mean, std = float(samples.mean()), float(samples.std(ddof=1)) if len(samples) > 1 else 0.0
    edges = _bin_edges(samples)
    counts = np.histogram(samples, edges)[0]
    x_ticks = nice_ticks(min(edges[0], mean - 3 * std), max(edges[-1], mean + 3 * std))
    across = Axis(x_ticks[0], x_ticks[-1], LEFT, WIDTH - RIGHT)
    # Height of the Gaussian, as an expected count.
    peak = len(samples) * (edges[1] - edges[0]) / (std * math.sqrt(2 * math.pi)) if std else 0.0
    y_ticks = nice_ticks(0, max(float(counts.max()), peak))
    up = Axis(0, y_ticks[-1], HEIGHT - BOTTOM, TOP)
    summary = f"mean {mean:.2f}, deviation {std:.2f}, {len(samples)} {y_label}"
    parts = [
        svg_start(WIDTH, HEIGHT, "lines", f"{y_label} by {x_label}", summary),
        vertical_label((up.start + up.end) / 2, y_label),
        svg_text(LEFT, 14, summary),
    ]
    for tick in y_ticks:
        parts.append(svg_line(LEFT, up(tick), WIDTH - RIGHT, up(tick)))
        parts.append(svg_text(LEFT - 6, up(tick) + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        parts.append(svg_line(across(tick), up.start, across(tick), up.start + 4))
        parts.append(svg_text(across(tick), up.start + 17, f"{tick:g}", "middle"))
    bar = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="bar" fill-opacity=".55">')
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        tooltip = Markup("<title>{}</title></rect>").format(f"{left:.4g} to {right:.4g}: {count} {y_label}")
        width, height = across(right) - across(left) - 1, up(0) - up(count)
        parts.append(bar.format(across(left) + 0.5, up(count), width, height) + tooltip)
    if std:
        xs = np.linspace(across.low, across.high, CURVE_POINTS)
        heights = peak * np.exp(-(((xs - mean) / std) ** 2) / 2)
        path = "L".join(f"{across(x):.2f} {up(y):.2f}" for x, y in zip(xs, heights, strict=True))
        parts.append(Markup('<path d="M{}" class="c1"/>').format(path))
    parts.append(svg_text((across.start + across.end) / 2, HEIGHT - 4, x_label, "middle"))
    return Markup("").join([*parts, Markup("</svg>")])


def _bin_edges(values: np.ndarray) -> np.ndarray:
    """Return edges of equal bins: by Freedman and Diaconis, or the square root of the count if that gives more."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low - 0.5, low + 0.5])
    lower_quartile, upper_quartile = np.percentile(values, [25, 75])
    width = 2 * (upper_quartile - lower_quartile) / len(values) ** (1 / 3)
    count = max(math.ceil((high - low) / width) if width else 1, math.ceil(math.sqrt(len(values))))
    return np.linspace(low, high, min(count, MAX_BINS) + 1)
