"""Tables for a terminal, and of a fixed width for files and pipes."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

MIN_TEXT_WIDTH = 12  # characters of a text column
WIDTH = 200  # characters per line without a terminal
GAP = 3  # characters between columns in rich's SIMPLE_HEAD box


def mebibytes(value: float | None) -> str:
    """Format an amount of memory; a dash if it is unknown or did not fit."""
    return "–" if value is None else f"{value:,.0f} MiB" if value >= 10 else f"{value:.2f} MiB"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table. Columns whose names start with '#' hold numbers and are aligned to the right.

    Numbers are never cut. A table that is too wide wraps its text columns; if that is still too wide, each row becomes
    a block of "name  value" lines.
    """
    from rich.console import Console

    from patchloom.cli.output import results
    from patchloom_runtime.printable import printable

    width = None if results().isatty() else WIDTH
    console = Console(file=results(), width=width, highlight=False)
    columns = [printable(name) for name in columns]
    cells = [[printable(cell) for cell in row] for row in rows]
    if title:  # on a line of its own: rich would wrap it to the width of the table
        console.print(printable(title), markup=False)
    widths = _widths(columns, cells, console.width)
    if widths is None:
        _print_blocks(console, columns, cells)
    else:
        _print_columns(console, columns, cells, widths)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return the width of each column, or None if they do not fit. Text columns share what the numbers leave."""
    from rich.cells import cell_len

    whole = [max(map(cell_len, [name.removeprefix("#"), *cells])) for name, *cells in zip(columns, *rows, strict=True)]
    # The name of a number column may wrap; its numbers may not.
    least = [
        max(map(cell_len, [*_words(name), *cells])) if name.startswith("#") else min(full, MIN_TEXT_WIDTH)
        for (name, *cells), full in zip(zip(columns, *rows, strict=True), whole, strict=True)
    ]
    left = width - GAP * len(columns) - sum(least)
    if left < 0:
        return None
    widths: list[tuple[int, int]] = []
    # Columns that need little get all of it first.
    for place in sorted(range(len(whole)), key=lambda i: whole[i] - least[i]):
        share = left // (len(whole) - len(widths))
        more = min(whole[place] - least[place], share)
        left -= more
        widths.append((place, least[place] + more))
    return [wide for _, wide in sorted(widths)]


def _words(name: str) -> list[str]:
    """Return the words of a column name, which may wrap onto several lines."""
    return name.removeprefix("#").split() or [""]


def _print_columns(
    console: "Console", columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, wide in zip(columns, widths, strict=True):
        is_number = name.startswith("#")
        table.add_column(
            Text(name.removeprefix("#")),
            justify="right" if is_number else "left",
            width=wide,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_blocks(console: "Console", columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a block of lines per row, headed by its first cell."""
    wide = max(len(name.removeprefix("#")) for name in columns[1:])
    for first, *cells in rows:
        head = columns[0].removeprefix("#")
        console.print(f"{head} {first}".strip(), markup=False, overflow="fold")
        for name, cell in zip(columns[1:], cells, strict=True):
            console.print(f"  {name.removeprefix('#'):<{wide}}  {cell}", markup=False, overflow="fold")
        console.print()
