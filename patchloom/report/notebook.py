"""How objects are displayed: one line in a terminal, an HTML card in a notebook.

A card has the style of the pages, light and dark, and needs nothing else; names from outside are escaped.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from patchloom.report.page import render
from patchloom_runtime.printable import printable

MAX_NAMES = 8
_PERCENT = re.compile(r"top\d|accuracy|macro_f1|calibration_error|^real$|^map")


def html_card(
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
    """Return a card with a title, facts (name, value), a table, predictions, search results and notes, as HTML."""
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


def first_names(names: Sequence[str], limit: int = MAX_NAMES) -> str:
    """Return the first names and how many more there are."""
    more = len(names) - limit
    return ", ".join(map(printable, names[:limit])) + (f" and {more:,} more" if more > 0 else "")


def likeliest(scores: Iterable[tuple[str, float]], limit: int = 3) -> str:
    """Return the first classes with their probabilities: 'rose 93.0 %, tulip 4.1 %'."""
    return ", ".join(f"{printable(name)} {share:.1%}".replace("%", " %") for name, share in list(scores)[:limit])


def number_texts(values: Mapping[str, float]) -> dict[str, str]:
    """Return name → formatted number; an interval follows its number in parentheses."""
    return {
        name: _number_text(name, value, values)
        for name, value in values.items()
        if not name.endswith(("_low", "_high"))
    }


def numbers_line(values: Mapping[str, float], limit: int = 4) -> str:
    """Return the first numbers in one line: 'top1 71.28 % (65.90…76.20), top5 …'."""
    return ", ".join(f"{name} {text}" for name, text in list(number_texts(values).items())[:limit])


def _number_text(name: str, value: float, values: Mapping[str, float]) -> str:
    if name == "images":
        return f"{value:,.0f}"
    if not _PERCENT.search(name):
        return f"{value:.4g}"
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    return f"{value:.2f} %" + (f" ({low:.1f}…{high:.1f})" if low is not None and high is not None else "")
