"""The meaning of the columns of a labels file: classes, labels or numbers, levels above classes, splits.

The classes are in the column that the user chose, or else the first with a usual name, or else in 0/1 columns named by
the classes, or else in the only column of words. If cells have several labels, or several of the 0/1 columns apply,
these are labels of which any number applies (`ImageTargets`), as are several columns that the user chose; if few do,
the first is the class. Columns of numbers are also read as numbers.
"""

import math
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from patchloom.data.labels.label_table import (
    LABEL_NAMES,
    SPLIT_NAMES,
    Table,
    looks_like_a_file,
    plain,
    says_split,
    shortened,
)
from patchloom.data.targets import ImageTargets, labels_of_lists, numbers_of_columns
from patchloom_runtime.errors import UsageError, nearest

_LABEL_WORDS = frozenset({"label", "class", "category", "species", "breed", "target", "diagnosis"})
_COARSE_WORDS = frozenset({"coarse", "super", "superclass", "supercategory", "parent", "genus", "family", "order"})
_VAGUE = ("name", "y", "tag", "tags")  # label names with lower priority
_FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "-1": False, "false": False, "true": True}
_MULTI_LABEL = 0.1  # share of rows with several labels from which they are intended
_QUANTITY = 20  # distinct numbers from which they are hardly classes, in a column without a usual name for classes
_ONE_EACH = 0.9  # share of rows with one class from which 0/1 columns are classes and not attributes


@dataclass(frozen=True)
class ColumnMeanings:
    """Meaning of the columns of a table. Lists have one entry per row."""

    labels: list[str]  # '' for none
    label_column: str  # description for messages
    numbers: bool  # True if the labels are class numbers
    several: int  # rows with several labels, of which the first is the class
    uneven: int  # rows with several labels, or in 0/1 columns with none
    targets: ImageTargets | None  # all labels of each row, or its numbers
    levels: dict[str, list[str]]  # candidates for levels above the classes
    splits: list[str] | None
    split_column: str  # description for messages
    left_out: list[str]  # names of unused columns
    chosen: bool = False  # True if the user named the column
    like_classes: bool = True  # True if it has a usual name for classes
    many_columns: bool = False  # True if the user named several columns

    def other_task(self) -> str:
        """Return why these labels are not one class per image, and which task they suggest; '' if they are."""
        if self.many_columns and self.targets is not None:
            task = "multi-label classification" if self.targets.kind == "labels" else "regression"
            return f"{self.label_column} have one target each, which suggests {task}"
        if self.uneven > max(1, _MULTI_LABEL * len(self.labels)):
            rows = f"{self.uneven:,} of {len(self.labels):,} rows do not have exactly one label"
            return f"{rows} ({self.label_column}), which suggests multi-label classification"
        numbers = sorted({label for label in self.labels if label}) if _are_numbers(self.labels) else []
        listed = f"{', '.join(numbers[:3])} …"
        if any(not float(label).is_integer() for label in numbers):
            return f"{self.label_column} holds decimal numbers ({listed}), which suggests regression"
        few = len(self.labels) < 2 * len(numbers)
        if len(numbers) > _QUANTITY and not self.chosen and (few or not self.like_classes):
            return f"{self.label_column} holds {len(numbers):,} different numbers ({listed}), which suggests regression"
        return ""


def understand(table: Table, label_column: str | None) -> ColumnMeanings:
    """Interpret the columns of a table. Raise UsageError if the classes could be in several columns or in none."""
    split = _split_column(table)
    rest = [i for i in range(len(table.columns)) if i not in (table.paths, split)]
    kinds = {i: _kind(table.column(i)) for i in rest}
    words = [i for i in rest if kinds[i] == "words"]
    hot = [i for i in rest if kinds[i] == "flags"] if table.headed and label_column is None else []
    several_chosen = _chosen_columns(table, label_column) if label_column is not None else []
    chosen = _named(table, rest, kinds) if label_column is None else several_chosen[0]
    targets, uneven = None, 0
    if len(several_chosen) > 1:
        targets, labels, several = _of_columns(table, several_chosen), [""] * len(table.rows), 0
        description, numbers = f"columns {', '.join(map(table.name, several_chosen))}", False
        read = {*several_chosen}
    elif chosen is None and len(hot) > 1 and (not words or _one_each(table, hot)):
        targets, labels, several, uneven = _from_flags(table, hot)
        description, numbers = f"{len(hot)} columns of 0 and 1", False
        read = {*hot}
    else:
        chosen = _only(table, rest, kinds) if chosen is None else chosen
        lists = _label_lists(table.column(chosen))
        labels, several = [names[0] if names else "" for names in lists], sum(len(names) > 1 for names in lists)
        # A list of one number, such as "|8", is a label.
        description, numbers, uneven = f"column {table.name(chosen)}", _are_numbers(table.column(chosen)), several
        if several:
            targets = labels_of_lists(lists, table.title)
        elif numbers:
            targets = _numbers(table, [chosen])
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
        labels, description, numbers, several, uneven, targets, levels, splits, split_column, left_out,
        label_column is not None, bool(called & usual), len(several_chosen) > 1,
    )  # fmt: skip


def _kind(cells: Sequence[str]) -> str:
    """Return the kind of a column: words, numbers, flags (0 and 1), files or nothing."""
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
    filled = [value for value in values if value]
    return bool(filled) and all(re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?", value) for value in filled)


def _split_column(table: Table) -> int | None:
    for i, column in enumerate(table.columns):
        cells = [cell for cell in table.column(i) if cell]
        named = plain(column) in SPLIT_NAMES if table.headed else all(map(says_split, cells))
        if i != table.paths and cells and named and any(map(says_split, cells)):
            return i
    return None


def _chosen_columns(table: Table, label_column: str) -> list[int]:
    """Return the columns that the user chose: one, or several with commas between them."""
    names = [name for part in label_column.split(",") if (name := part.strip())]
    if len(names) < 2 or label_column.strip().lower() in map(str.lower, table.columns):
        return [_chosen_column(table, label_column)]
    return list(dict.fromkeys(_chosen_column(table, name) for name in names))


def _chosen_column(table: Table, label_column: str) -> int:
    """Return the column that the user chose by name or by number, counted from 1."""
    by_name = {column.lower(): i for i, column in reversed(list(enumerate(table.columns)))}
    column = by_name.get(label_column.strip().lower())
    if column is None and re.fullmatch("[0-9]{1,4}", label_column) and 1 <= int(label_column) <= len(table.columns):
        column = int(label_column) - 1
    if column is None:
        known = f"it has {', '.join(table.columns)}" if table.headed else f"it has 1 to {len(table.columns)}, no header"
        near = nearest(label_column.lower(), list(by_name))
        raise UsageError(f"{table.title}: no column {label_column!r} for --label-column; {known}.{near}")
    return column


def _named(table: Table, rest: Sequence[int], kinds: dict[int, str]) -> int | None:
    """Return the first column with a usual name: words before numbers, exact names before others."""
    if not table.headed:
        return None
    names = {i: plain(table.columns[i]) for i in rest if kinds[i] not in ("nothing", "files")}
    label_like = [i for i, name in names.items() if set(name.split("_")) & _LABEL_WORDS]
    finest = [i for i in label_like if not set(names[i].split("_")) & _COARSE_WORDS]
    exact = [i for i, name in names.items() if name in LABEL_NAMES]
    ordered = [*(i for i in exact if names[i] not in _VAGUE), *finest, *exact, *label_like]
    return next((i for i in ordered if kinds[i] == "words"), ordered[0] if ordered else None)


def _only(table: Table, rest: Sequence[int], kinds: dict[int, str]) -> int:
    """Return the only column of words, or else of numbers; without a header, the first one."""
    for wanted in (("words",), ("numbers", "flags")):
        columns = [i for i in rest if kinds[i] in wanted]
        if len(columns) == 1 or (columns and not table.headed):
            return columns[0]
        if columns:
            names = shortened(", ".join(table.columns[i] for i in columns))
            raise UsageError(
                f"{table.title}: the labels could be in any of {names}; choose one with --label-column, or several "
                "with commas"
            )
    raise UsageError(
        f"{table.title}: the first line is {table.first_line!r}; expected a column of labels next to the paths "
        f"(column {table.name(table.paths)})"
    )


def _may_be_level(table: Table, column: int, kind: str, classes: int) -> bool:
    """Return whether a column has words, or fewer numbers than there are classes, and more than one value."""
    values = len(set(table.column(column)) - {""})
    numbered = not table.headed or bool(set(plain(table.columns[column]).split("_")) & (_LABEL_WORDS | _COARSE_WORDS))
    return values > 1 and (kind == "words" or (kind in ("numbers", "flags") and numbered and values < classes))


def _level_name(table: Table, column: int, candidates: Sequence[int]) -> str:
    if table.headed:
        return table.columns[column].lower()
    return "coarse" if len(candidates) == 1 else f"coarse{candidates.index(column) + 1}"


# Several labels -------------------------------------------------------------------------------------------------------


def _one_each(table: Table, columns: Sequence[int]) -> bool:
    """Return whether nearly every row has exactly one of these 0/1 columns set."""
    ones = sum(sum(_FLAGS.get(row[i].lower(), False) for i in columns) == 1 for row in table.rows)
    return ones >= _ONE_EACH * len(table.rows)


def _from_flags(table: Table, columns: Sequence[int]) -> tuple[ImageTargets, list[str], int, int]:
    """Return all labels, the first of each row, and the rows with several and with another number than one."""
    targets = _flags(table, columns)
    ones = (targets.values > 0).sum(axis=1)
    first = np.where(ones > 0, np.argmax(targets.values > 0, axis=1), -1).tolist()
    labels = [targets.names[i] if i >= 0 else "" for i in first]
    return targets, labels, int(np.sum(ones > 1)), int(np.sum(ones != 1))


def _of_columns(table: Table, columns: Sequence[int]) -> ImageTargets:
    """Return the targets in several columns: labels in 0/1 columns or in words, or else numbers."""
    kinds = {_kind(table.column(i)) for i in columns} - {"nothing"}
    if table.paths in columns or (len(kinds) > 1 and not kinds <= {"flags", "numbers"}):
        listed = ", ".join(f"{table.name(i)} ({_kind(table.column(i))})" for i in columns)
        raise UsageError(
            f"{table.title}: --label-column {listed}; expected columns of one kind: 0 and 1, words or numbers"
        )
    if kinds <= {"flags"}:
        return _flags(table, columns)
    if "numbers" in kinds:
        return _numbers(table, columns)
    lists = [_label_lists(table.column(i)) for i in columns]
    return labels_of_lists([list(chain(*cells)) for cells in zip(*lists, strict=True)], table.title)


def _flags(table: Table, columns: Sequence[int]) -> ImageTargets:
    """Return 0/1 columns as labels. An empty cell is unknown, and so is −1 where 0 says that a label does not apply."""
    cells = [[cell.lower() for cell in table.column(i)] for i in columns]
    has_zero = any(cell in ("0", "0.0", "false") for column in cells for cell in column)
    value = {cell: float(applies) for cell, applies in _FLAGS.items()} | {"": math.nan}
    value |= {"-1": math.nan} if has_zero else {}
    values = np.array([[value[cell] for cell in column] for column in cells], np.float32).T
    names = tuple(table.columns[i] for i in columns)
    return ImageTargets("labels", names, values).renamed(names)  # merges columns of one name


def _numbers(table: Table, columns: Sequence[int]) -> ImageTargets:
    cells = {table.columns[i]: table.column(i) for i in columns}
    numbers = {name: [float(cell) if cell else None for cell in of] for name, of in cells.items()}
    return numbers_of_columns(numbers, table.title)


def _label_lists(cells: Sequence[str]) -> list[list[str]]:
    """Return the labels of each cell."""
    values = set(cells)
    commas = _lists_by_comma(list(values))
    lists = {value: list(dict.fromkeys(_labels_in(value, commas))) for value in values}
    return [lists[cell] for cell in cells]


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
    """Return whether commas separate labels. Parts of 'tench, Tinca tinca' rarely occur in other cells."""
    listed = [value for value in values if "," in value]
    parts = {value: {part.strip() for part in value.split(",") if part.strip()} for value in values}
    times = Counter(part for of in parts.values() for part in of)
    shared = sum(any(times[part] > 1 for part in parts[value]) for value in listed)
    return bool(listed) and 2 * shared >= len(listed)
