"""Taxonomies: levels of coarser classes above the classes of a data set.

Levels go from fine to coarse, by their number of classes, and form a tree: a class of one level has one parent in every
coarser level. They come from nested folders (`nesting`), from columns beside the label, or from a file:

    taxonomy.csv    class,family,order: the header names the levels; also .tsv
    taxonomy.json   {class: coarse}, {level: {class: coarse}}, [{"class": …, "family": …, "order": …}]; also .yaml

A file of one of these names in the folder of the data is read where no other is given. `imagenet127` is known by name.
"""

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import name_some
from patchloom.data.labels.imagenet_coarse import NAME, imagenet_coarse
from patchloom.recipes.plain_yaml import load_yaml
from patchloom_runtime.errors import DataError, UsageError, nearest
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import parse_json, read_plain

Taxonomy = Mapping[str, Mapping[str, str]]  # level name → {class: coarse class}
FINEST = "fine"  # what the classes themselves are called among levels
MAX_BYTES = 64 << 20  # a million classes
FILES = tuple(f"taxonomy.{end}" for end in ("csv", "tsv", "json", "yaml", "yml"))


def find_taxonomy(folder: Path) -> Path | None:
    """The taxonomy that lies in a folder of data."""
    there = (folder / name for name in FILES if os.path.lexists(folder / name))
    return next((path for path in there if not os.path.isdir(path)), None)


def read_taxonomy(path: Path) -> Taxonomy:
    """The levels of a file, or of the taxonomy of that name; what is no tree is a DataError."""
    shown = printable(path)
    if not os.path.isfile(path):
        if str(path) == NAME:
            return {"coarse": imagenet_coarse()}
        raise UsageError(
            f"taxonomy {shown} is not a file; expected a .json, .yaml or .csv of class → coarse class, or {NAME}."
            f"{nearest(str(path), [NAME])}"
        )
    try:
        records = _records(path)
    except MemoryError:
        raise
    except Exception as error:  # three parsers, each with its own errors
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"taxonomy {shown} cannot be read ({reason[:200]}); expected class → coarse class") from error
    levels: dict[str, dict[str, str]] = {}
    for level, fine, coarse in records:
        of_level = levels.setdefault(level, {})
        if coarse and of_level.setdefault(fine, coarse) != coarse:
            two = f"{of_level[fine]!r} and {coarse!r}"
            raise DataError(f"taxonomy {path}: {fine!r} is in both {two} at level {level!r}; expected one")
    return from_fine_to_coarse(levels, f"taxonomy {path}")


def _records(path: Path) -> list[tuple[str, str, str]]:
    """(level, class, coarse class) of each entry; '' where a table has an empty cell."""
    text = read_plain(path, MAX_BYTES).decode("utf-8-sig")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        header, *rows = csv.reader(text.splitlines(), delimiter="\t" if suffix == ".tsv" else ",")
        return [entry for line, row in enumerate(rows, start=2) if row for entry in _of_row(header, row, line)]
    content = load_yaml(text) if suffix in (".yaml", ".yml") else parse_json(text, object_pairs_hook=_each_once)
    if isinstance(content, list):
        return [
            entry
            for number, record in enumerate(content, start=1)
            for entry in _of_row(list(map(str, content[0])), list(map(str, record.values())), number)
        ]
    nested = all(isinstance(value, dict) for value in content.values())
    levels = content if nested else {"coarse": content}
    return [(str(level), str(fine), str(coarse)) for level, of in levels.items() for fine, coarse in of.items()]


def _of_row(header: Sequence[str], row: Sequence[str], number: int) -> list[tuple[str, str, str]]:
    names = [name.strip() for name in header]
    if len(row) != len(names) or len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"row {number} has {len(row)} fields for the columns {','.join(names)}")
    fine, *coarse = (value.strip() for value in row)
    return [(level, fine, value) for level, value in zip(names[1:], coarse, strict=True)]


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: json keeps the last of equal ones and says nothing."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise ValueError(f"{name!r} is both {found[name]!r} and {value!r}")
    return found


def from_fine_to_coarse(levels: Taxonomy, where: str) -> dict[str, Mapping[str, str]]:
    """The levels in the order of their classes, most first; a DataError where they are not a tree."""
    ordered = sorted(levels, key=lambda level: -len(set(levels[level].values())))
    for fine, coarse in pairwise(ordered):
        parents: dict[str, tuple[str, str]] = {}
        for name in (name for name in levels[fine] if name in levels[coarse]):
            child, parent = levels[fine][name], levels[coarse][name]
            first, by = parents.setdefault(child, (parent, name))
            if first != parent:
                raise DataError(
                    f"{where}: {child!r} of level {fine!r} is in both {first!r} ({by!r}) and {parent!r} ({name!r}) "
                    f"of level {coarse!r}; levels form a tree: expected one"
                )
    return {level: levels[level] for level in ordered}


def numbered_levels(
    names: Sequence[str], levels: Taxonomy, where: str
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """The levels of a class table: names of a level's classes, and the number of each class's own among them."""
    found = {}
    for level, mapping in levels.items():
        missing = [name for name in names if name not in mapping]
        if missing:
            raise DataError(f"{where}: label level {level!r} says nothing about {name_some(missing)}")
    used = {level: {name: mapping[name] for name in names} for level, mapping in levels.items()}
    for level, mapping in from_fine_to_coarse(used, where).items():
        coarse = tuple(sorted(set(mapping.values())))
        number = {name: i for i, name in enumerate(coarse)}
        found[level] = (coarse, tuple(number[mapping[name]] for name in names))
    return found


def levels_of_columns(
    labels: np.ndarray,
    names: Sequence[str],
    columns: Mapping[str, tuple[np.ndarray, Sequence[str]]],
    where: Callable[[int], str],
) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    """Levels from columns x_label beside the label, and notes.

    A class with two values is an error in coarse_label; another column in which that is so is no level, and noted.
    """
    levels: dict[str, dict[str, str]] = {}
    notes = []
    for level, (coarse, coarse_names) in columns.items():
        mapping = levels.setdefault(level, {})
        for row, (fine, group) in enumerate(zip(labels.tolist(), coarse.tolist(), strict=True)):
            if fine == UNLABELED or group == UNLABELED:
                continue
            first, now = mapping.setdefault(names[fine], coarse_names[group]), coarse_names[group]
            if first == now:
                continue
            two = f"{where(row)}: {names[fine]!r} is both {first!r} and {now!r}"
            if level == "coarse":
                raise DataError(f"{two}; expected one coarse label")
            notes.append(f"{two}, so column {level}_label is no level; left out")
            del levels[level]
            break
    return levels, tuple(notes)


def level_columns(columns: Iterable[str]) -> dict[str, str]:
    """Level → the column that holds it: coarse_label, family_label …; fine_label is the class itself."""
    ends = [column for column in columns if column.endswith("_label") and column != "fine_label"]
    return {column.removesuffix("_label"): column for column in ends}


def check_level(level: str, levels: Mapping[str, object]) -> None:
    """A UsageError with the nearest name where there is no such level."""
    if level not in levels:
        known = f"it has {', '.join(levels)}" if levels else "it has no levels (give a taxonomy file)"
        raise UsageError(f"no label level {level!r}; {known}.{nearest(level, list(levels))}")


def level_named(level: str, levels: Mapping[str, object]) -> str:
    """A level that a user names; '' for `FINEST`, the classes themselves."""
    if level == FINEST and level not in levels:
        return ""
    check_level(level, {**levels, FINEST: None})
    return level
