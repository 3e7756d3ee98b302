"""Tables on a narrow terminal: numbers whole, names folded, or a block for each row."""

import io
import re

import pytest

from patchloom.cli import output
from patchloom.cli.table import print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def rendered(monkeypatch):
    """What print_table prints on a terminal so wide."""

    def show(columns, rows, *, width, title=None):
        terminal = Terminal()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(output._verbosity, "stdout", terminal)
        print_table(columns, rows, title=title)
        lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in terminal.getvalue()
        return lines

    return show


NUMBERS = ["#top-1 points", "#only first", "#only second", "#McNemar p"]
CELLS = ["+12.34", "1234", "5678", "0.0123"]


def test_a_table_that_fits_stands_as_it_is(rendered) -> None:
    head, rule, row = (line for line in rendered(["run", *NUMBERS], [("a", *CELLS)], width=80) if line.strip())
    assert head.split() == ["run", "top-1", "points", "only", "first", "only", "second", "McNemar", "p"]
    assert set(rule.strip()) == {"─"}
    assert row.split() == ["a", *CELLS]


def test_names_fold_and_numbers_do_not(rendered) -> None:
    name = "runs/a_long_name_of_a_run_that_nobody_wants_to_read_twice_in_one_table_" * 2
    lines = rendered(["run", *NUMBERS], [(name, *CELLS)], width=80)
    assert all(any(cell in line.split() for line in lines) for cell in CELLS)
    first = next(i for i, line in enumerate(lines) if CELLS[0] in line)
    assert "".join(line[: line.find("  ") + 1].strip() for line in lines[first:]) == name


def test_names_of_columns_fold_before_the_table_turns(rendered) -> None:
    lines = rendered(["run", *NUMBERS], [("a", *CELLS)], width=52)
    assert next(line for line in lines if "+12.34" in line).split() == ["a", *CELLS]


def test_a_table_turns_where_its_numbers_do_not_fit(rendered) -> None:
    columns = ["run", *(f"#measure_{i:02}" for i in range(20))]
    cells = [f"{i}.{i:02}" for i in range(20)]
    lines = rendered(columns, [("first", *cells), ("second", *cells)], width=80, title="a title " * 20)
    assert [line.split() for line in lines if line.startswith("  measure_07")] == [["measure_07", "7.07"]] * 2
    assert [line for line in lines if line.startswith("run")] == ["run first", "run second"]


def test_markup_in_names_is_text(rendered) -> None:
    assert "[bold]" in "\n".join(rendered(["run [red]", "#n"], [("[bold]", "1")], width=80, title="[italic]"))
