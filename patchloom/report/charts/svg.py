"""Parts that all charts share: axes and their ticks, text, lines and boxes as SVG, colors, and charts as SVG files.

Colors and fonts come from the style sheet of the page; only scatter charts have more colors of their own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 28, 36  # margins of a line chart
LETTER = 6.3  # average width of a letter in pixels, in the charts' font of 11 pixels
LEGEND_START = 24.0  # pixels from the left, beside the name of the y axis
LEGEND_LINE = 16  # pixels from one line of a legend to the next
LABEL_LETTERS = 34  # of the name of a y axis: as long as a line chart is high
# Colors that differ for color-blind readers too, and from the page: classes c0 … c7 of the style sheet. They were
# chosen for the largest least distance (OKLab) between two of them in the simulations of Machado et al. (2009).
LIGHT_COLORS = ("#2563eb", "#fc6000", "#004f4b", "#b58693", "#700099", "#002e41", "#bf348a", "#576621")
DARK_COLORS = ("#6ea2ff", "#ffb200", "#acd2b2", "#b8546d", "#8958f2", "#00feff", "#d277a5", "#849e48")
LINE_COLORS = len(LIGHT_COLORS)
DASHES = ("none", "none", "7 3", "2 2.5", "9 3 2 3", "12 4", "4 4", "1 3.5")  # the same lines without color
STYLE = (
    "svg{background:#fff} text{fill:#1a2230;font:11px sans-serif} path{fill:none;stroke-width:1.8} "
    "path.grid{stroke:#e2e6ec;stroke-width:1} circle{fill:transparent} circle.seen{r:2.5px} .track{fill:#eef1f5} "
    ".bar,.right rect{fill:#2563eb} .wrong rect{fill:#dc2626} .strong text{fill:#fff} .mark{fill-opacity:.8} "
    + " ".join(
        f"path.c{i}{{stroke:{color};stroke-dasharray:{dash}}} .c{i}.seen,.mark.c{i}{{fill:{color}}}"
        for i, (color, dash) in enumerate(zip(LIGHT_COLORS, DASHES, strict=True))
    )
    + " path.mark{stroke:none}"
)


class Axis(NamedTuple):
    """A linear map from values (`low` to `high`) to pixels (`start` to `end`)."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


class LogAxis(Axis):
    """A logarithmic axis, for values above 0."""

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return Axis(math.log(self.low), math.log(self.high), self.start, self.end)(math.log(value))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` ticks that span `low` to `high`, in steps of 1, 2 or 5 times a power of ten."""
    span = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else 0.0  # ignore rounding errors
    rough = (span or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if first == last:  # a single value that is a tick: the axis ends there (as at 100 %), or begins at 0
        first, last = (first - 1, last) if high > 0 else (first, last + 1)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def svg_file(chart: Markup) -> str:
    """Return the chart as an SVG file of its own, in the colors of a light page."""
    head, _, rest = str(chart).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}'


def svg_start(width: float, height: float, kind: str, name: str, summary: str = "", *, fixed: bool = False) -> Markup:
    """Return the start of an SVG of the class `kind`, with a name and a summary for screen readers.

    A `fixed` one has its width in pixels; others are as wide as the style sheet says.
    """
    attribute = Markup(' width="{:.0f}"').format(width) if fixed else ""
    head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}"{} class="{}" role="img" aria-label="{}">')
    description = Markup("<desc>{}</desc>").format(summary) if summary else ""
    return head.format(width, height, attribute, kind, name) + description


def svg_line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Return a grid line."""
    return Markup('<path d="M{:.2f} {:.2f}L{:.2f} {:.2f}" class="grid"/>').format(x1, y1, x2, y2)


def svg_text(x: float, y: float, text: str, anchor: str = "start", transform: str = "") -> Markup:
    """Return text whose `anchor` (start, middle or end) is at (x, y)."""
    attribute = Markup(' transform="{}"').format(transform) if transform else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(x, y, anchor, attribute, text)


def svg_box(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0) -> Markup:
    """Return a rectangle; `kind` is its class in the style sheet."""
    shape = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}" fill-opacity="{:.3f}"/>')
    return shape.format(x, y, width, height, kind, opacity)


def legend_places(names: Sequence[str], chart_width: float = WIDTH) -> list[tuple[float, int]]:
    """Return where each name of a legend starts: side by side, wrapped at the width of the chart."""
    places: list[tuple[float, int]] = []
    x, y = LEGEND_START, 0
    for name in names:
        width = 36 + LETTER * len(name)
        if x > LEGEND_START and x + width > chart_width:
            x, y = LEGEND_START, y + LEGEND_LINE
        places.append((x, y))
        x += width
    return places


def shorten(name: str, letters: int) -> str:
    """Cut a name to at most `letters` letters."""
    return name if len(name) <= letters else name[: letters - 1] + "…"
