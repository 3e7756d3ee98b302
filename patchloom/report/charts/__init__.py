"""Line charts, scatter charts and heat maps as SVG, bars as HTML, one kind per file; `svg_file` makes an SVG file.

We draw charts ourselves because we need few kinds, and matplotlib adds 78 MB and a second of import time.
"""

from patchloom.report.charts.bars import bars, histogram_chart
from patchloom.report.charts.heat_maps import block_map, count_table, heat_map, share_map
from patchloom.report.charts.lines import SeedRange, Series, line_chart, range_chart
from patchloom.report.charts.scatter import Point, scatter_chart
from patchloom.report.charts.svg import LINE_COLORS, svg_file

__all__ = [
    "LINE_COLORS",
    "Point",
    "SeedRange",
    "Series",
    "bars",
    "block_map",
    "count_table",
    "heat_map",
    "histogram_chart",
    "line_chart",
    "range_chart",
    "scatter_chart",
    "share_map",
    "svg_file",
]
