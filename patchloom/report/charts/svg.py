"""What every chart is made of: words, lines and boxes as SVG text, their colours, and a chart as a file of its own.

Colours and fonts come from the style sheet of the page a chart stands in; only a scatter has many colours of its own.
"""

from markupsafe import Markup

LETTER = 6.3  # pixels a letter takes on average in the charts' font, 11 pixels high
LEGEND_LINE = 16  # from one line of a legend to the next
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


def svg_file(chart: Markup) -> str:
    """The chart as a file of its own, in the colours of a light page."""
    head, _, rest = str(chart).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}'


def svg_line(x1: float, y1: float, x2: float, y2: float) -> Markup:
    """A line of the grid."""
    return Markup('<path d="M{:.2f} {:.2f}L{:.2f} {:.2f}" class="grid"/>').format(x1, y1, x2, y2)


def svg_text(x: float, y: float, text: str, anchor: str = "start", transform: str = "") -> Markup:
    """Words at a place; `anchor` says which part of them is there."""
    turned = Markup(' transform="{}"').format(transform) if transform else ""
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}"{}>{}</text>').format(x, y, anchor, turned, text)


def svg_box(x: float, y: float, width: float, height: float, kind: str, opacity: float = 1.0) -> Markup:
    """A rectangle; `kind` is its class in the page's style."""
    shape = Markup('<rect x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" class="{}" fill-opacity="{:.3f}"/>')
    return shape.format(x, y, width, height, kind, opacity)


def shorten(name: str, letters: int) -> str:
    """The name, cut to so many letters."""
    return name if len(name) <= letters else name[: letters - 1] + "…"
