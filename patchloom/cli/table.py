"""Tables on a terminal, plain when nobody is looking."""

from collections.abc import Iterable, Sequence


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """Columns whose names start with '#' hold numbers and stand to the right."""
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix("#"), justify="right" if name.startswith("#") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 200
    Console(width=width, highlight=False).print(table)
