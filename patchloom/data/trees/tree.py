"""Files below one root, in a folder or in an archive, under the same names: paths relative to it with forward slashes.

What finds classes, splits and labels (`folder`, `labels_file`, `label_pattern`) asks a tree and never the disk, so an
archive may hold whatever a folder may.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from patchloom.data.sets import Pictures
from patchloom.errors import DataError
from patchloom.printable import printable

MOST_LEVELS = 100  # of folders in folders


class Entry(NamedTuple):
    """One name in a folder of a tree."""

    name: str
    kind: Literal["folder", "file", "other"]  # other: pipes, devices, broken links
    linked: bool = False  # a link to it


class Tree(ABC):
    """Files below one root."""

    name: str  # of the root, printable
    where: str  # its path, printable
    root: Path  # a folder, or an archive's file

    @abstractmethod
    def entries(self, folder: str) -> list[Entry]:
        """What is in a folder ('' for the root) and not hidden, ordered by name."""

    @abstractmethod
    def is_file(self, path: str) -> bool:
        """Whether there is a file of this path."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A small file: a table of labels or names."""

    @abstractmethod
    def pictures(self, paths: Sequence[str]) -> Pictures:
        """The pictures of these paths, by position."""

    @abstractmethod
    def identity(self, folder: str) -> str:
        """The same for two paths that lead to one folder."""

    def files(self) -> list[str]:
        """Every file that is not hidden, ordered by name."""
        found: list[str] = []
        walked = Walked(self, "")

        def walk(folder: str, real: str) -> None:
            for entry in self.entries(folder):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.kind == "folder":
                    inside = walked.enter(entry, path, real)
                    if inside is not None:
                        walk(path, inside)
                elif entry.kind == "file":
                    found.append(path)

        walk("", walked.home)
        return found


class Walked:
    """The folders that a walk has entered: none twice, or thirty folders of two links each would be a billion.

    A link out of the folder where the walk began is followed, once to each target. One that leads into that folder, or
    to a folder around it, is not: what lies there is met by its own path.
    """

    def __init__(self, tree: Tree, start: str) -> None:
        self._tree = tree
        self.home = tree.identity(start)
        self._entered = {self.home}

    def enter(self, entry: Entry, path: str, above: str) -> str | None:
        """What `entry` of a folder known as `above` is known as itself; None where it is not to be entered."""
        if path.count("/") >= MOST_LEVELS:
            shown = f"{self._tree.where}/{printable(path)[:60]}…"
            raise DataError(f"{shown}: more than {MOST_LEVELS} folders in one another; expected a data set")
        known = self._tree.identity(path) if entry.linked else os.path.join(above, entry.name)
        if known in self._entered or (entry.linked and (_lies_in(known, self.home) or _lies_in(self.home, known))):
            return None
        self._entered.add(known)
        return known


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
