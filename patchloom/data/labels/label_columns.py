"""Which column of a labels file holds the classes, and what the others are: levels above them, splits, or nothing.

The classes are in the column that is asked for, else the first that is named like one, else in 0/1 columns named by the
classes, else in the only column of words. A cell may hold several labels, of which the first counts.
"""

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from patchloom.data.labels.label_table import (
    LABEL_NAMES,
    SPLIT_NAMES,
    Table,
    looks_like_a_file,
    plain,
    says_split,
    shortened,
)
from patchloom_runtime.errors import UsageError, nearest

_LABEL_WORDS = frozenset({"label", "class", "category", "species", "breed", "target", "diagnosis"})
_COARSE_WORDS = frozenset({"coarse", "super", "superclass", "supercategory", "parent", "genus", "family", "order"})
_VAGUE = ("name", "y", "tag", "tags")  # label names that give way to others
_FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "-1": False, "false": False, "true": True}
_MULTI_LABEL = 0.1  # share of rows with several labels from where they are no slips
_QUANTITY = 20  # numbers from where they are hardly classes, in a column that is not named as classes are
_ONE_EACH = 0.9  # share of rows with one class by which 0/1 columns are told from attributes


@dataclass(frozen=True)
class ColumnMeanings:
    """What the columns of a table mean; lists have an entry per row."""

    labels: list[str]  # '' for none
    said: str  # where the classes are, in a message
    numbers: bool  # the labels are class numbers
    several: int  # rows with several labels, of which the first counts
    levels: dict[str, list[str]]  # what may be a level above the classes
    splits: list[str] | None
    split_column: str  # in a message
    left_out: list[str]  # names of columns nobody reads
    chosen: bool = False  # the column was named by the user
    like_classes: bool = True  # it is called as classes are

    def other_task(self) -> str:
        """Why these labels are no classes of images, and what they ask for; '' where they are."""
        if self.several > 1 and self.several > _MULTI_LABEL * len(self.labels):
            rows = f"{self.several:,} of {len(self.labels):,} rows have several labels"
            return f"{rows} ({self.said}), which asks for multi-label classification"
        given = sorted({label for label in self.labels if label}) if _are_numbers(self.labels) else []
        shown = f"{', '.join(given[:3])} …"
        if any(not float(label).is_integer() for label in given):
            return f"{self.said} holds decimal numbers ({shown}), which asks for regression"
        few = len(self.labels) < 2 * len(given)
        if len(given) > _QUANTITY and not self.chosen and (few or not self.like_classes):
            return f"{self.said} holds {len(given):,} different numbers ({shown}), which asks for regression"
        return ""


def understand(table: Table, label_column: str | None) -> ColumnMeanings:
    """The columns of `table`; a UsageError where the classes could be in several or in none."""
    split = _split_column(table)
    rest = [i for i in range(len(table.columns)) if i not in (table.paths, split)]
    kinds = {i: _kind(table.column(i)) for i in rest}
    words = [i for i in rest if kinds[i] == "words"]
    hot = [i for i in rest if kinds[i] == "flags"] if table.headed and label_column is None else []
    chosen = _wanted(table, label_column) if label_column is not None else _named(table, rest, kinds)
    if chosen is None and len(hot) > 1 and (not words or _one_each(table, hot)):
        labels, several = _from_flags(table, hot)
        said, numbers = f"{len(hot)} columns of 0 and 1", False
        read = {*hot}
    else:
        chosen = _only(table, rest, kinds) if chosen is None else chosen
        labels, several = _first_labels(table.column(chosen))
        said, numbers = f"column {table.name(chosen)}", _are_numbers(labels)
        read = {chosen}
    classes = len(set(labels) - {""})
    candidates = [i for i in rest if i not in read and _may_be_level(table, i, kinds[i], classes)]
    levels = {_level_name(table, i, candidates): table.column(i) for i in candidates}
    left_out = [table.columns[i] for i in rest if i not in read and i not in candidates]
    splits = table.column(split) if split is not None else None
    split_column = f"column {table.name(split)}" if split is not None else ""
    usual = {*_LABEL_WORDS, *LABEL_NAMES, "id", "code"}
    called = set(plain(table.columns[chosen]).split("_")) if chosen is not None and table.headed else usual
    return ColumnMeanings(
        labels, said, numbers, several, levels, splits, split_column, left_out, label_column is not None,
        bool(called & usual),
    )  # fmt: skip


def _kind(cells: Sequence[str]) -> str:
    """words, numbers, flags (0 and 1), files or nothing."""
    values = {cell for cell in cells if cell}
    if not values:
        return "nothing"
    if all(value.lower() in _FLAGS for value in values):
        return "flags"
    if _are_numbers(values):
        return "numbers"
    files = sum(looks_like_a_file(value) for value in values)
    return "files" if 2 * files > len(values) else "words"


def _are_numbers(values: Sequence[str] | set[str]) -> bool:
    given = [value for value in values if value]
    return bool(given) and all(re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", value) for value in given)


def _split_column(table: Table) -> int | None:
    for i, column in enumerate(table.columns):
        cells = [cell for cell in table.column(i) if cell]
        named = plain(column) in SPLIT_NAMES if table.headed else all(map(says_split, cells))
        if i != table.paths and cells and named and any(map(says_split, cells)):
            return i
    return None


def _wanted(table: Table, label_column: str) -> int:
    """The column that was asked for, by name or, counted from 1, by number."""
    by_name = {column.lower(): i for i, column in reversed(list(enumerate(table.columns)))}
    found = by_name.get(label_column.strip().lower())
    if found is None and re.fullmatch("[0-9]{1,4}", label_column) and 1 <= int(label_column) <= len(table.columns):
        found = int(label_column) - 1
    if found is None:
        known = f"it has {', '.join(table.columns)}" if table.headed else f"it has 1 to {len(table.columns)}, no header"
        near = nearest(label_column.lower(), list(by_name))
        raise UsageError(f"{table.title}: no column {label_column!r} for --label-column; {known}.{near}")
    return found


def _named(table: Table, rest: Sequence[int], kinds: dict[int, str]) -> int | None:
    """The first column that is named like a label: of words before numbers, of exact names before others."""
    if not table.headed:
        return None
    names = {i: plain(table.columns[i]) for i in rest if kinds[i] not in ("nothing", "files")}
    alike = [i for i, name in names.items() if set(name.split("_")) & _LABEL_WORDS]
    finest = [i for i in alike if not set(names[i].split("_")) & _COARSE_WORDS]
    exact = [i for i, name in names.items() if name in LABEL_NAMES]
    ordered = [*(i for i in exact if names[i] not in _VAGUE), *finest, *exact, *alike]
    return next((i for i in ordered if kinds[i] == "words"), ordered[0] if ordered else None)


def _only(table: Table, rest: Sequence[int], kinds: dict[int, str]) -> int:
    """The column of words, or of numbers where there is none; without a header, the first."""
    for wanted in (("words",), ("numbers", "flags")):
        found = [i for i in rest if kinds[i] in wanted]
        if len(found) == 1 or (found and not table.headed):
            return found[0]
        if found:
            columns = shortened(", ".join(table.columns[i] for i in found))
            raise UsageError(f"{table.title}: the classes could be in any of {columns}; choose with --label-column")
    raise UsageError(
        f"{table.title}: the first line is {table.first_line!r}; expected a column of labels beside the paths "
        f"(column {table.name(table.paths)})"
    )


def _may_be_level(table: Table, column: int, kind: str, classes: int) -> bool:
    """Words, or fewer class numbers than classes; one value for all rows divides nothing."""
    values = len(set(table.column(column)) - {""})
    numbered = not table.headed or bool(set(plain(table.columns[column]).split("_")) & (_LABEL_WORDS | _COARSE_WORDS))
    return values > 1 and (kind == "words" or (kind in ("numbers", "flags") and numbered and values < classes))


def _level_name(table: Table, column: int, candidates: Sequence[int]) -> str:
    if table.headed:
        return table.columns[column].lower()
    return "coarse" if len(candidates) == 1 else f"coarse{candidates.index(column) + 1}"


# Several labels -------------------------------------------------------------------------------------------------------


def _one_each(table: Table, columns: Sequence[int]) -> bool:
    """Whether nearly every row has one class of 0/1 columns."""
    ones = sum(sum(_FLAGS.get(row[i].lower(), False) for i in columns) == 1 for row in table.rows)
    return ones >= _ONE_EACH * len(table.rows)


def _from_flags(table: Table, columns: Sequence[int]) -> tuple[list[str], int]:
    set_ = [[table.columns[i] for i in columns if _FLAGS.get(row[i].lower(), False)] for row in table.rows]
    return [names[0] if names else "" for names in set_], sum(len(names) > 1 for names in set_)


def _first_labels(cells: Sequence[str]) -> tuple[list[str], int]:
    """The first label of each cell, and how many cells have several."""
    values = Counter(cells)
    commas = _lists_by_comma(list(values))
    lists = {value: _labels_in(value, commas) for value in values}
    several = sum(count for value, count in values.items() if len(lists[value]) > 1)
    return [lists[cell][0] if lists[cell] else "" for cell in cells], several


def _labels_in(cell: str, commas: bool) -> list[str]:
    if cell.startswith("[") and cell.endswith("]"):
        try:
            inside = literal_eval(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            inside = cell[1:-1].split(",")
        return [text for value in inside if (text := str(value).strip(" '\""))]
    parts = re.split(r"[|;,]" if commas else r"[|;]", cell)
    return [part.strip() for part in parts if part.strip()]


def _lists_by_comma(values: Sequence[str]) -> bool:
    """Whether commas part labels. In names such as 'tench, Tinca tinca' the parts hardly ever stand elsewhere too."""
    listed = [value for value in values if "," in value]
    parts = {value: {part.strip() for part in value.split(",") if part.strip()} for value in values}
    times = Counter(part for of in parts.values() for part in of)
    shared = sum(any(times[part] > 1 for part in parts[value]) for value in listed)
    return bool(listed) and 2 * shared >= len(listed)
