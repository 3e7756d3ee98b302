"""Taxonomies: levels of coarser classes above the classes of a dataset.

Levels are ordered from fine to coarse, by their number of classes, and form a tree: a class of one level has one parent
in every coarser level. They come from nested folders (`nested_folders`), from further label columns, or from a file:

    taxonomy.csv    class,family,order: the header names the levels; also .tsv
    taxonomy.json   {class: coarse}, {level: {class: coarse}}, [{"class": …, "family": …, "order": …}]; also .yaml

A file with one of these names in the data folder is the default. `imagenet127` is built in: ImageNet's 1,000 classes in
127 coarse ones (Huh et al., arXiv 1608.08614), as in thesis 2.4.1. `imagenet127.csv` was derived from WordNet 3.0
(Princeton University) by the authors' rule: every class goes to its parent, and a parent below another parent is
replaced by that one. For the 38 classes with several parents, the authors' code takes the first by name, not by
WordNet's order, which would give 121 coarse classes. The resulting 127 synsets are those of the authors' published
list; their lists of images were not compared.
"""

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import name_some
from patchloom.recipes.plain_yaml import load_yaml
from patchloom_runtime.errors import DataError, UsageError, nearest
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import parse_json, read_plain

Taxonomy = Mapping[str, Mapping[str, str]]  # level name → {class: coarse class}
FINEST = "fine"  # name of the classes themselves among the levels
MAX_BYTES = 64 << 20  # enough for a million classes
FILES = tuple(f"taxonomy.{end}" for end in ("csv", "tsv", "json", "yaml", "yml"))
IMAGENET_127 = "imagenet127"  # the built-in taxonomy


def find_taxonomy(folder: Path) -> Path | None:
    """Return the taxonomy file in a data folder, or None."""
    there = (folder / name for name in FILES if os.path.lexists(folder / name))
    return next((path for path in there if not os.path.isdir(path)), None)


def read_taxonomy(path: Path) -> Taxonomy:
    """Read the levels of a file or of a built-in taxonomy. Raise DataError if they are not a tree."""
    where = f"taxonomy {printable(path)}"
    if not os.path.isfile(path):
        if str(path) == IMAGENET_127:
            return {"coarse": imagenet_coarse()}
        raise UsageError(
            f"{where} is not a file; expected a .json, .yaml or .csv of class → coarse class, or {IMAGENET_127}."
            f"{nearest(str(path), [IMAGENET_127])}"
        )
    try:
        records = _records(path)
    except MemoryError:
        raise
    except Exception as error:  # three parsers with different errors
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise UsageError(f"{where} cannot be read ({reason[:200]}); expected class → coarse class") from error
    levels: dict[str, dict[str, str]] = {}
    for level, fine, coarse in records:
        of_level = levels.setdefault(level, {})
        if coarse and of_level.setdefault(fine, coarse) != coarse:
            two = f"{of_level[fine]!r} and {coarse!r}"
            raise DataError(f"{where}: {fine!r} is in both {two} at level {level!r}; expected one")
    return from_fine_to_coarse(levels, where)


def _records(path: Path) -> list[tuple[str, str, str]]:
    """Return (level, class, coarse class) of each entry, with '' for an empty cell."""
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
    """Return the object, or raise ValueError for a repeated name: json would silently keep the last value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if values.setdefault(name, value) != value:
            raise ValueError(f"{name!r} is both {values[name]!r} and {value!r}")
    return values


def from_fine_to_coarse(levels: Taxonomy, where: str) -> dict[str, Mapping[str, str]]:
    """Order levels by their number of classes, most first. Raise DataError if they are not a tree."""
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
    """Return the levels of a class table: the names of the coarse classes, and the coarse number of each class."""
    numbered = {}
    for level, mapping in levels.items():
        missing = [name for name in names if name not in mapping]
        if missing:
            raise DataError(f"{where}: label level {level!r} has no entry for {name_some(missing)}")
    used = {level: {name: mapping[name] for name in names} for level, mapping in levels.items()}
    for level, mapping in from_fine_to_coarse(used, where).items():
        coarse = tuple(sorted(set(mapping.values())))
        number = {name: i for i, name in enumerate(coarse)}
        numbered[level] = (coarse, tuple(number[mapping[name]] for name in names))
    return numbered


def levels_of_columns(
    labels: np.ndarray,
    names: Sequence[str],
    columns: Mapping[str, tuple[np.ndarray, Sequence[str]]],
    where: Callable[[int], str],
) -> tuple[dict[str, dict[str, str]], tuple[str, ...]]:
    """Return the levels in further columns named x_label, and notes.

    A class with two values in coarse_label is an error. Any other such column is not a level, which a note reports.
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
            notes.append(f"{two}, so column {level}_label is not a level; left out")
            del levels[level]
            break
    return levels, tuple(notes)


def level_columns(columns: Iterable[str]) -> dict[str, str]:
    """Map levels to their columns: coarse_label, family_label …; fine_label is the class itself."""
    ends = [column for column in columns if column.endswith("_label") and column != "fine_label"]
    return {column.removesuffix("_label"): column for column in ends}


def check_level(level: str, levels: Mapping[str, object]) -> None:
    """Raise UsageError, with the nearest name, if there is no such level."""
    if level not in levels:
        known = f"it has {', '.join(levels)}" if levels else "it has no levels (pass a taxonomy file)"
        raise UsageError(f"no label level {level!r}; {known}.{nearest(level, list(levels))}")


def level_named(level: str, levels: Mapping[str, object]) -> str:
    """Return the level with a name, '' for `FINEST`, the classes themselves. Raise UsageError if there is none."""
    if level == FINEST and level not in levels:
        return ""
    check_level(level, {**levels, FINEST: None})
    return level


def imagenet_coarse() -> dict[str, str]:
    """Map every name of the 1,000 ImageNet classes to its coarse class: WordNet ids, timm's and torchvision's names."""
    with (Path(__file__).parent / f"{IMAGENET_127}.csv").open(encoding="utf-8", newline="") as file:
        coarse_of_id = {row["class"]: row["coarse"] for row in csv.DictReader(file)}
    coarse_of = coarse_of_id.copy()
    ambiguous: set[str] = set()  # names shared by classes with different coarse ones: "crane" is a bird and a machine
    for names, coarse in zip(_imagenet_names(), coarse_of_id.values(), strict=True):
        for name in names:
            if coarse_of.setdefault(name, coarse) != coarse:
                ambiguous.add(name)
    unique = {name: coarse for name, coarse in coarse_of.items() if name not in ambiguous}
    return unique | dict(zip(_unique_imagenet_names(), coarse_of_id.values(), strict=True))


def _imagenet_names() -> list[Sequence[str]]:
    """Return 'tench, Tinca tinca', as some datasets name a class, and each part, in the order of WordNet ids."""
    from timm.data import ImageNetInfo

    texts = ImageNetInfo("imagenet-1k").label_descriptions()
    return [(text, *(word.strip() for word in text.split(","))) for text in texts]


def _unique_imagenet_names() -> Sequence[str]:
    """Return one unique name per class, as in published networks."""
    from torchvision.models import ResNet50_Weights

    return list(ResNet50_Weights.IMAGENET1K_V1.meta["categories"])
