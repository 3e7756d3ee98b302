"""What objects say of themselves: a line for a terminal, a piece of HTML for a notebook.

The HTML is in the style of the pages, light and dark, and stands alone; names from outside are escaped, never markup.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patchloom.report.page import render
from patchloom_runtime.printable import printable

NAMES_SHOWN = 8
_PERCENT = re.compile(r"top\d|accuracy|calibration_error|^real$|^map")


def piece(
    title: str,
    *,
    detail: str = "",
    facts: Sequence[tuple[str, str]] = (),
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
    looks: Sequence[Mapping[str, Any]] = (),
    queries: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> str:
    """A card: a title, names with values, a table, pictures, remarks."""
    html = render(
        "notebook.html.j2",
        title=title,
        detail=detail,
        facts=facts,
        columns=columns,
        rows=rows,
        looks=looks,
        queries=queries,
        notes=notes,
    )
    return html.encode("utf-8", "backslashreplace").decode()


def first_names(names: Sequence[str], limit: int = NAMES_SHOWN) -> str:
    """The first few, and how many more there are."""
    more = len(names) - limit
    return ", ".join(map(printable, names[:limit])) + (f" and {more:,} more" if more > 0 else "")


def likeliest(answers: Iterable[tuple[str, float]], limit: int = 3) -> str:
    """rose 93.0 %, tulip 4.1 %"""
    return ", ".join(f"{printable(name)} {share:.1%}".replace("%", " %") for name, share in list(answers)[:limit])


def number_texts(values: Mapping[str, float]) -> dict[str, str]:
    """Numbers under their names, as they are read; an interval stands behind its number."""
    return {name: _told(name, value, values) for name, value in values.items() if not name.endswith(("_low", "_high"))}


def numbers_line(values: Mapping[str, float], limit: int = 4) -> str:
    """top1 71.28 % (65.90…76.20), top5 …"""
    return ", ".join(f"{name} {told}" for name, told in list(number_texts(values).items())[:limit])


def _told(name: str, value: float, values: Mapping[str, float]) -> str:
    if name == "images":
        return f"{value:,.0f}"
    if not _PERCENT.search(name):
        return f"{value:.4g}"
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return f"{value:.2f} %" + (f" ({low:.1f}…{high:.1f})" if low is not None and high is not None else "")
