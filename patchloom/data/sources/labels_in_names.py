"""Pictures whose file names tell their classes (`label_pattern`). Folders train, val and test at the top are splits."""

import posixpath

import numpy as np

from patchloom.data.datasets import Listing, Source
from patchloom.data.labels.label_pattern import LabelPattern, read_pattern
from patchloom.data.labels.label_table import says_split
from patchloom.data.splits import listings_by_split
from patchloom.data.trees.tree import Tree
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import EXTENSIONS
from patchloom_runtime.printable import printable

_NAMED = 3  # files in a note


def open_by_pattern(tree: Tree, given: str, strict: bool = False) -> Source:
    """The pictures of a tree, each of the class in its name; those that do not match are named and left out."""
    pattern = read_pattern(given)
    images = [path for path in tree.files() if posixpath.splitext(path)[1].lower() in EXTENSIONS]
    if not images:
        raise DataError(f"{tree.where}: no images found")
    labels = {path: label for path in images if (label := pattern.label(path))}
    others = [path for path in images if path not in labels]
    if not labels:
        raise DataError(f"{tree.where}: no name matches --label-pattern {given!r}; one is {_shown(pattern, others[0])}")
    names = tuple(sorted(set(labels.values())))
    if len(names) == len(labels) > 1:
        raise DataError(
            f"{tree.where}: by --label-pattern {given!r} every picture is a class of its own, such as {names[0]!r} of "
            f"{_shown(pattern, next(iter(labels)))}; expected a part that several names share"
        )
    notes = [f"classes from file names by {given!r} ({len(names)})"]
    if others:
        shown = ", ".join(_shown(pattern, path) for path in others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
        said = f"{len(others):,} of {len(images):,} names do not match {given!r}: {shown}"
        if strict:
            raise DataError(f"{tree.where}: {said}")
        notes.append(f"{said}; left out")
    number = {name: i for i, name in enumerate(names)}
    numbers = np.array([number[label] for label in labels.values()], dtype=np.int64)
    whole = Listing(tree.images(list(labels)), np.arange(len(numbers)), numbers, names)
    title = f"{tree.name} (classes from file names)"
    splits = [path.split("/")[0] if "/" in path else "" for path in labels]
    if not any(map(says_split, splits)):
        return Source(title, whole, None, tuple(notes))
    train, val, test, unused = listings_by_split(whole, splits)
    return Source(title, train, val, (*notes, *unused), test=test)


def _shown(pattern: LabelPattern, path: str) -> str:
    return printable(path if "/" in pattern.given else posixpath.basename(path))
