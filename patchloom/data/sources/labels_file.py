"""Images labeled by a file with a path and a label per line (see `label_table`, `label_columns` for its forms).

    photos/**/*.jpg + labels.csv             path,label[,coarse level …][,split], with or without a header
    images/ + train.txt, val.txt, test.txt   one list per split: passing one of them includes the others;
                                             classes.csv or classes.txt next to them names class numbers

A note reports how the file was interpreted.
"""

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from patchloom.data.datasets import Listing, Source, name_some
from patchloom.data.labels.class_names import ClassNames, find_class_names, names_in
from patchloom.data.labels.label_columns import ColumnMeanings, understand
from patchloom.data.labels.label_table import Table, parse_table
from patchloom.data.labels.listed_paths import ListedPaths
from patchloom.data.labels.taxonomy import Taxonomy
from patchloom.data.splits import listings_by_split
from patchloom.data.targets import ImageTargets, joined, labels_of_lists, natural_order
from patchloom.data.trees.tree import FolderTree, Tree
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

SUFFIXES = (".csv", ".tsv", ".txt")
_SPLIT_WORDS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_SPLIT_WORD = re.compile(r"(?<![a-z])(train|training|val|valid|validation|test|testing)(?![a-z])")


@dataclass(frozen=True)
class ListFile:
    """A labels file: its tree, and its path in that tree."""

    place: Tree
    path: str

    @property
    def name(self) -> str:
        """Name of the file, for messages."""
        return printable(posixpath.basename(self.path))

    @property
    def folder(self) -> str:
        """Folder of the file, in its tree."""
        return posixpath.dirname(self.path)

    @property
    def where(self) -> str:
        """Full path, for messages."""
        return f"{self.place.where}/{printable(self.path)}"


def open_labels_file(
    file: Path,
    root: Path | None = None,
    taxonomy: Taxonomy | None = None,
    strict: bool = False,
    label_column: str | None = None,
    names: Path | None = None,
) -> Source:
    """Open the images that a file on disk lists, with paths relative to `root` or to the file's folder."""
    return open_listed(file, FolderTree(root) if root is not None else None, taxonomy, strict, label_column, names)


def open_listed(
    file: Path,
    tree: Tree | None,
    taxonomy: Taxonomy | None = None,
    strict: bool = False,
    label_column: str | None = None,
    names: Path | None = None,
) -> Source:
    """Open the images of a tree that a file lists. The file is on disk or, if there is none, in the tree."""
    if os.path.isfile(file):
        listed = ListFile(FolderTree(file.parent), file.name)
    elif tree is not None and tree.is_file(file.as_posix()):
        listed = ListFile(tree, file.as_posix())
    elif os.path.lexists(file):
        raise DataError(f"labels file {printable(file)} is not a file; expected lines of path,label")
    else:
        raise UsageError(f"labels file {printable(file)} does not exist; expected lines of path,label")
    return open_list(listed, tree or listed.place, taxonomy, strict, label_column, names, whole=tree is not None)


def open_list(
    listed: ListFile,
    tree: Tree,
    taxonomy: Taxonomy | None = None,
    strict: bool = False,
    label_column: str | None = None,
    names: Path | None = None,
    *,
    whole: bool = True,
) -> Source:
    """Open the images of `tree` that a labels file and its siblings list. `whole` adds a note on unlisted images."""
    rows = _Rows(class_names=names_in(names) if names is not None else None)
    first = _read(listed, tree, label_column, strict, rows)
    if first.splits is None:
        _read_siblings(listed, tree, label_column, strict, rows)
    notes = [*rows.notes]
    targets = _targets(rows)
    if rows.other_tasks:
        if targets is None:
            raise DataError(f"{listed.where}: {'; '.join(rows.other_tasks)}; expected lists of one kind")
        rows.labels, rows.levels = [""] * len(rows.paths), {}
    levels, more = _levels(rows.labels, rows.levels, listed.name)
    if whole and (unlisted := len(set(first.paths.images()) - set(rows.paths))):
        are = "image is" if unlisted == 1 else "images are"
        more.append(f"{unlisted:,} {are} in {tree.name} but in no list; left out")
    classes = tuple(sorted({*rows.labels} - {""}, key=natural_order))
    if rows.other_tasks and targets is not None:
        classes = targets.names
    number = {name: i for i, name in enumerate(classes)}
    labels = np.array([number.get(label, UNLABELED) for label in rows.labels], dtype=np.int64)
    levels = {} if rows.other_tasks else {**levels, **(taxonomy or {})}
    listing = Listing(tree.images(rows.paths), np.arange(len(labels)), labels, classes, levels, targets)
    title = f"{listed.name} (labels file)"
    if not any(rows.splits):
        return Source(title, listing, None, (*notes, *more))
    train, val, test, unused = listings_by_split(listing, rows.splits)
    return Source(title, train, val, (*notes, *more, *unused), test=test)


@dataclass
class _Rows:
    """The content of the lists, one row per image, and notes."""

    class_names: ClassNames | None = None  # of class numbers, if the user passed a file
    paths: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    levels: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    targets: list[ImageTargets | None] = field(default_factory=list)  # of each list
    starts: list[int] = field(default_factory=list)  # the first row of each list
    other_tasks: list[str] = field(default_factory=list)  # why lists do not have one class per image


def _targets(rows: _Rows) -> ImageTargets | None:
    """Return the targets of all lists. Classes of a list are labels if another list has several per image."""
    kinds = {part.kind for part in rows.targets if part is not None}
    if "labels" in kinds:
        ends = [*rows.starts[1:], len(rows.labels)]
        lists = [
            [[label] if label else [] for label in rows.labels[a:b]] for a, b in zip(rows.starts, ends, strict=True)
        ]
        parts = [
            part if part is not None and part.kind == "labels" else labels_of_lists(classes, "labels")
            for part, classes in zip(rows.targets, lists, strict=True)
        ]
    else:
        parts = [part for part in rows.targets if part is not None]
        if not parts or len(parts) < len(rows.targets):
            return None
    whole = joined(parts)
    return whole.named(sorted(whole.names, key=natural_order)) if whole.absent == 0 else whole


@dataclass(frozen=True)
class _Read:
    """Splits, image paths and labels read from one list."""

    splits: list[str] | None
    paths: ListedPaths


def _read(listed: ListFile, tree: Tree, label_column: str | None, strict: bool, rows: _Rows) -> _Read:
    """Add the images of one list to `rows`."""
    base = _folder_below(listed, tree)
    own_split = split_of(listed.name)
    paths = ListedPaths(tree, base, own_split)
    table = parse_table(listed.place.read(listed.path), listed.where, paths.finds)
    if not table.rows:
        raise DataError(
            f"{listed.where}: the first line is {table.first_line!r} and no other; expected one image per line"
        )
    known = [rows.class_names] if rows.class_names else find_class_names([(listed.place, listed.folder), (tree, "")])
    columns = _with_names(understand(table, label_column), known)
    rows.notes.append(_interpretation(listed.name, table, columns))
    if why := columns.other_task():
        rows.other_tasks.append(why)
        rows.notes.append(f"{listed.name}: {why}")
    if columns.left_out:
        unused = ", ".join(columns.left_out[:8]) + (" …" if len(columns.left_out) > 8 else "")
        rows.notes.append(f"{listed.name}: columns not used: {unused}")
    if columns.several and not why:
        several = f"{listed.name}: {columns.several:,} of {len(table.rows):,} rows have several labels"
        if strict:
            raise DataError(f"{several}; expected one per image")
        rows.notes.append(f"{several}; the first is used")
    _add(table, columns, paths, own_split, tree, strict, rows)
    return _Read(columns.splits, paths)


def _add(
    table: Table, columns: ColumnMeanings, paths: ListedPaths, own_split: str, tree: Tree, strict: bool, rows: _Rows
) -> None:
    resolved = [paths.find(cell) for cell in table.column(table.paths)]
    missing = [cell for cell, path in zip(table.column(table.paths), resolved, strict=True) if path is None]
    if missing:
        count = f"{len(missing):,} of {len(resolved):,}"
        problem = f"{table.title}: {count} files are not in {tree.where}, the first is {printable(missing[0])}"
        if strict or len(missing) == len(resolved):
            raise DataError(
                problem if len(missing) < len(resolved) else f"{problem}; the first line is {table.first_line!r}"
            )
        rows.notes.append(f"{problem}; left out")
    splits = columns.splits or [own_split] * len(resolved)
    labels = dict(zip(rows.paths, rows.labels, strict=True))
    known = set(zip(rows.paths, rows.splits, strict=True))
    start, twice, kept = len(rows.paths), 0, []
    several = columns.targets if rows.other_tasks else None
    for i, path in enumerate(resolved):
        if path is None:
            continue
        label = columns.labels[i] if several is None else ", ".join(several.labels_of(i))
        if labels.setdefault(path, label) != label:
            two = f"{labels[path]!r} and {label!r}"
            raise DataError(f"{table.title}: {printable(path)} is listed twice, as {two}; expected one label")
        if (path, splits[i]) in known:
            twice += 1
            continue
        known.add((path, splits[i]))
        rows.paths.append(path)
        rows.labels.append(label)
        kept.append(i)
        rows.splits.append(splits[i])
        for level, values in columns.levels.items():
            rows.levels.setdefault(level, [""] * start).append(values[i])
    for values in rows.levels.values():
        values += [""] * (len(rows.paths) - len(values))
    rows.starts.append(start)
    rows.targets.append(columns.targets and columns.targets.rows(np.array(kept, dtype=np.int64)))
    if twice:
        rows.notes.append(f"{table.title}: {twice:,} row{'s' * (twice != 1)} repeated with the same label; merged")


def _interpretation(name: str, table: Table, columns: ColumnMeanings) -> str:
    what, count = "classes", len({*columns.labels} - {""})
    if columns.targets is not None and columns.other_task():
        what, count = columns.targets.kind, len(columns.targets.names)
    facts = [f"{name}: paths from column {table.name(table.paths)}", f"{what} from {columns.label_column} ({count})"]
    facts += [f"splits from {columns.split_column}"] if columns.split_column else []
    facts += [] if table.headed else ["no header"]
    facts += [f"separator {table.separated_by}"]
    facts += [f"read as {table.encoding}"] if table.encoding != "utf-8" else []
    return ", ".join(facts)


def _with_names(columns: ColumnMeanings, files: Iterable[ClassNames]) -> ColumnMeanings:
    """Replace class numbers by the names in the first file that has a name for each of them."""
    if not columns.numbers:
        return columns
    for names in files:
        known = names.of(columns.labels)
        if known is None:
            continue
        labels = [known.get(code, "") for code in columns.labels]
        levels = {}
        for level, codes in columns.levels.items():
            title, of = names.of_level(labels, codes) or (level, {})
            levels[title] = [of.get(code, code) for code in codes]
        targets = columns.targets
        if targets is not None and targets.kind == "labels":
            named = names.of(targets.names) or {}
            targets = targets.renamed([named.get(code, code) for code in targets.names])
        return replace(
            columns,
            labels=labels,
            targets=targets if targets is not None and targets.kind == "labels" else None,
            levels=levels,
            label_column=f"{columns.label_column} named by {names.title}",
        )
    return columns


# Levels ---------------------------------------------------------------------------------------------------------------


def _levels(
    labels: Sequence[str], columns: Mapping[str, Sequence[str]], title: str
) -> tuple[dict[str, Mapping[str, str]], list[str]]:
    """Return the columns that form a tree above the classes, and notes on those that do not."""
    levels: dict[str, Mapping[str, str]] = {}
    notes: list[str] = []
    for name in sorted(columns, key=lambda name: -len(set(columns[name]))):
        mapping, why = _above(labels, columns[name])
        for finer, known in levels.items():
            if not why:
                children = [known[label] for label in mapping]
                _, why = _above(children, [mapping[label] for label in mapping], f" of {finer}")
        if why:
            notes.append(f"{title}: column {name!r} is ignored: it does not group the classes ({why})")
        else:
            levels[name] = mapping
    return levels, notes


def _above(fine: Sequence[str], coarse: Sequence[str], of: str = "") -> tuple[dict[str, str], str]:
    """Map fine to coarse classes, and return why that is not a tree, or ''."""
    mapping: dict[str, str] = {}
    for child, parent in zip(fine, coarse, strict=True):
        if child and parent and mapping.setdefault(child, parent) != parent:
            return {}, f"{child!r}{of} belongs to {mapping[child]!r} and to {parent!r}"
    missing = sorted({*fine} - {""} - {*mapping})
    return mapping, f"nothing for {name_some(missing, limit=3)}" if missing else ""


# Lists by split -------------------------------------------------------------------------------------------------------


def split_of(name: str) -> str:
    """Return train, val or test if the name of a list contains it (train.txt, labels_val.csv), or else ''."""
    word = _SPLIT_WORD.search(posixpath.splitext(name.lower())[0])
    return next((split for split, words in _SPLIT_WORDS.items() if word and word[0] in words), "")


def _read_siblings(listed: ListFile, tree: Tree, label_column: str | None, strict: bool, rows: _Rows) -> None:
    """Add the lists of the other splits in the same folder, which differ from this one only in the split."""
    own = split_of(listed.name)
    if not own:
        return
    taken = {own}
    for sibling in _siblings(listed):
        split = split_of(sibling.name)
        if split in taken:
            continue
        try:
            _read(sibling, tree, label_column, strict, rows)
        except PatchloomError as error:
            rows.notes.append(f"{sibling.name} is not used ({error})")
        taken.add(split)
    absent = [split for split in _SPLIT_WORDS if split not in taken]
    if absent:
        rows.notes.append(f"next to {listed.name} there is no list for {' or '.join(absent)}")


def _siblings(listed: ListFile) -> Iterator[ListFile]:
    """Yield lists that differ in the split only, then those with the same beginning: places365_val.txt."""

    def shape(name: str) -> tuple[str, str, str]:
        stem, suffix = posixpath.splitext(name.lower())
        before, _, after = _SPLIT_WORD.sub("*", stem, count=1).partition("*")
        return before, suffix, after

    wanted = shape(posixpath.basename(listed.path))
    names = [entry.name for entry in listed.place.entries(listed.folder) if entry.kind == "file"]
    others = [name for name in names if posixpath.join(listed.folder, name) != listed.path]
    same = [name for name in others if shape(name) == wanted]
    similar = [
        name for name in others if wanted[0] and name not in same and shape(name)[:2] == wanted[:2] and split_of(name)
    ]
    for name in (*same, *similar):
        yield ListFile(listed.place, posixpath.join(listed.folder, name))


def _folder_below(listed: ListFile, tree: Tree) -> str | None:
    """Return the folder of the list, relative to the root of `tree`.

    None if it is that root, or if one of them is not on disk.
    """
    if listed.place is tree:
        return listed.folder or None
    if isinstance(listed.place, FolderTree) and isinstance(tree, FolderTree):
        below = os.path.relpath(os.path.join(listed.place.root, listed.folder), tree.root)
        return below.replace(os.sep, "/") if below != "." else None
    return None
