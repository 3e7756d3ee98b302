"""Line charts, scatters and heat maps as SVG text, bars as HTML, one kind per file; `svg_file` makes a file of an SVG.

Our own, since few kinds are needed and matplotlib costs 78 MB and a second to import.
"""

from patchloom.report.charts.bars import bars
from patchloom.report.charts.heat_maps import count_table, heat_map, share_map
from patchloom.report.charts.lines import Series, line_chart
from patchloom.report.charts.scatter import Point, scatter_chart
from patchloom.report.charts.svg import LINE_COLORS, svg_file

__all__ = [
    "LINE_COLORS",
    "Point",
    "Series",
    "bars",
    "count_table",
    "heat_map",
    "line_chart",
    "scatter_chart",
    "share_map",
    "svg_file",
]
