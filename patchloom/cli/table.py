"""Tables on a terminal, plain when nobody is looking."""

from collections.abc import Iterable, Sequence


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """'1,16,64' → [1, 16, 64]."""
    from patchloom.errors import UsageError

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
    """Columns whose names start with '#' hold numbers and stand to the right."""
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from patchloom.printable import printable

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        shown = Text(printable(name.removeprefix("#")))
        table.add_column(shown, justify="right" if name.startswith("#") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, highlight=False)
    if title:  # as a line of its own: a table would wrap it to its width
        console.print(Text(printable(title)))
    console.print(table)
