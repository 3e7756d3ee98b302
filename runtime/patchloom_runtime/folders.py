"""Files below a folder, listed in a fixed order; hidden ones are skipped and no folder is entered twice."""

import os
from collections.abc import Callable
from typing import Literal, NamedTuple

from patchloom_runtime.errors import DataError
from patchloom_runtime.printable import printable

MOST_LEVELS = 100  # nested folders


class TreeEntry(NamedTuple):
    """One name in a folder."""

    name: str
    kind: Literal["folder", "file", "other"]  # other: pipes, devices, broken links
    linked: bool = False  # whether it is a symbolic link


class VisitedFolders:
    """The folders that a walk has entered. Each is entered once: 30 nested folders with 2 links each have 2³⁰ paths.

    A link that leaves the folder where the walk began is followed, once per target. A link into that folder, or to one
    of its parents, is not followed: its contents are reached by their own path.
    """

    def __init__(self, identity: Callable[[str], str], start: str, where: str) -> None:
        self._identity, self._where = identity, where
        self.home = identity(start)
        self._entered = {self.home}

    def enter(self, entry: TreeEntry, path: str, above: str) -> str | None:
        """Return the identity of `entry` in the folder with identity `above`, or None if it must not be entered."""
        if path.count("/") >= MOST_LEVELS:
            place = f"{self._where}/{printable(path)[:60]}…"
            raise DataError(f"{place}: more than {MOST_LEVELS} nested folders; expected a dataset")
        known = self._identity(path) if entry.linked else os.path.join(above, entry.name)
        if known in self._entered or (entry.linked and (_lies_in(known, self.home) or _lies_in(self.home, known))):
            return None
        self._entered.add(known)
        return known


def folder_entries(folder: str | os.PathLike[str]) -> list[TreeEntry]:
    """List a folder without hidden names, ordered by name."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from error
    return [
        TreeEntry(e.name, _kind(e), e.is_symlink()) for e in sorted(visible, key=lambda entry: os.fsencode(entry.name))
    ]


def walk_files(entries: Callable[[str], list[TreeEntry]], visited: VisitedFolders) -> list[str]:
    """List every file below a root, as paths relative to it, ordered by name."""
    files: list[str] = []

    def walk(folder: str, real: str) -> None:
        for entry in entries(folder):
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.kind == "folder":
                inside = visited.enter(entry, path, real)
                if inside is not None:
                    walk(path, inside)
            elif entry.kind == "file":
                files.append(path)

    walk("", visited.home)
    return files


def files_below(root: str) -> list[str]:
    """List every file below a folder on disk, as paths relative to it."""
    visited = VisitedFolders(lambda folder: os.path.realpath(os.path.join(root, folder)), "", printable(root))
    return walk_files(lambda folder: folder_entries(os.path.join(root, folder)), visited)


def _kind(entry: os.DirEntry[str]) -> Literal["folder", "file", "other"]:
    """Return the kind of an entry. A link that leads to itself is "other"."""
    try:
        return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"
    except OSError:
        return "other"


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)
