"""Tables on a terminal, plain when nobody is looking."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST = 12  # letters of a column of words
WIDTH = 200  # letters of a line where there is no terminal
GAP = 3  # between columns, as the box has it


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """'1,16,64' → [1, 16, 64]."""
    from patchloom_runtime.errors import UsageError

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{option} takes numbers with commas, such as {example}; given {text!r}")
    return numbers


def mebibytes(value: float | None) -> str:
    """A cell with an amount of memory; a dash where it is not known or did not fit."""
    return "–" if value is None else f"{value:,.0f} MiB" if value >= 10 else f"{value:.2f} MiB"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Columns whose names start with '#' hold numbers and stand to the right.

    Numbers are never cut. A table that is too wide folds its names over lines; where even that is too wide, it turns:
    a block of "name: value" lines for each row.
    """
    from rich.console import Console

    from patchloom.cli.output import results
    from patchloom_runtime.printable import printable

    width = None if results().isatty() else WIDTH
    console = Console(file=results(), width=width, highlight=False)
    columns = [printable(name) for name in columns]
    kept = [[printable(cell) for cell in row] for row in rows]
    if title:  # as a line of its own: a table would wrap it to its width
        console.print(printable(title), markup=False)
    widths = _widths(columns, kept, console.width)
    if widths is None:
        _print_blocks(console, columns, kept)
    else:
        _print_columns(console, columns, kept, widths)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """How wide each column is, or None where they do not fit: numbers as they are, words folded to what is left."""
    from rich.cells import cell_len

    whole = [max(map(cell_len, [name.removeprefix("#"), *cells])) for name, *cells in zip(columns, *rows, strict=True)]
    # Of a number's column the name may fold too, as the numbers must not.
    least = [
        max(map(cell_len, [*_words(name), *cells])) if name.startswith("#") else min(full, NARROWEST)
        for (name, *cells), full in zip(zip(columns, *rows, strict=True), whole, strict=True)
    ]
    left = width - GAP * len(columns) - sum(least)
    if left < 0:
        return None
    widths: list[tuple[int, int]] = []
    # Columns that need little are given all of it first.
    for place in sorted(range(len(whole)), key=lambda i: whole[i] - least[i]):
        share = left // (len(whole) - len(widths))
        more = min(whole[place] - least[place], share)
        left -= more
        widths.append((place, least[place] + more))
    return [wide for _, wide in sorted(widths)]


def _words(name: str) -> list[str]:
    """The parts of a column's name, which may stand on lines of their own."""
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
    """A block of lines for each row, its first cell on the first."""
    wide = max(len(name.removeprefix("#")) for name in columns[1:])
    for first, *cells in rows:
        head = columns[0].removeprefix("#")
        console.print(f"{head} {first}".strip(), markup=False, overflow="fold")
        for name, cell in zip(columns[1:], cells, strict=True):
            console.print(f"  {name.removeprefix('#'):<{wide}}  {cell}", markup=False, overflow="fold")
        console.print()
