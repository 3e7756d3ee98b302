"""Line charts, scatters, bars and heat maps as SVG text, one kind per file; `svg_file` makes a file of one.

Our own, since few kinds are needed and matplotlib costs 78 MB and a second to import.
"""

from patchloom.pages.charts.bars import BARS_WIDTH, bars
from patchloom.pages.charts.heat_maps import heat_map, share_map
from patchloom.pages.charts.lines import Series, line_chart
from patchloom.pages.charts.scatter import Point, scatter_chart
from patchloom.pages.charts.svg import LINE_COLORS, svg_file

__all__ = [
    "BARS_WIDTH",
    "LINE_COLORS",
    "Point",
    "Series",
    "bars",
    "heat_map",
    "line_chart",
    "scatter_chart",
    "share_map",
    "svg_file",
]
