"""One bar per row."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from patchloom.pages.charts.axes import Axis
from patchloom.pages.charts.svg import LETTER, shorten, svg_box, svg_text

BAR, BARS_WIDTH = 22, 400  # from one bar to the next, and across


def bars(rows: Sequence[tuple[str, float, str]], *, high: float = 100.0, width: int = BARS_WIDTH) -> Markup:
    """One bar per row of (label, value, text after the bar); a value that is not finite has no bar."""
    left = LETTER * max(min(len(label), 22) for label, _, _ in rows) + 10
    along = Axis(0, high, left, width - LETTER * max(len(text) for _, _, text in rows) - 10)
    parts = [Markup('<svg viewBox="0 0 {} {}" class="bars" role="img">').format(width, BAR * len(rows))]
    for i, (label, value, text) in enumerate(rows):
        parts.append(Markup("<g><title>{}: {}</title>").format(label, text))
        parts.append(svg_text(left - 8, BAR * i + 15, shorten(label, 22), "end"))
        for kind, end in (("track", along.end), ("bar", along(value if math.isfinite(value) else 0))):
            parts.append(svg_box(left, BAR * i + 4, end - left, 14, kind))
        parts.append(svg_text(along.end + 8, BAR * i + 15, text) + Markup("</g>"))
    return Markup("").join([*parts, Markup("</svg>")])
