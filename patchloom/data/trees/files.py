"""Image files on disk, and a folder of them as a `Tree`."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.datasets import ImageStore, Stamp, file_state
from patchloom.data.trees.tree import Tree
from patchloom_runtime.folders import TreeEntry, folder_entries
from patchloom_runtime.images.decode import decode, read_file
from patchloom_runtime.printable import printable


def below(root: str | os.PathLike[str], path: str) -> str | None:
    """The path from `root`, without '.' and '..'; None where it leads out of that folder."""
    top = os.path.join(os.path.abspath(root), "")
    inside = os.path.normpath(os.path.join(top, path))
    return inside.removeprefix(top) if inside.startswith(top) else None


class ImageFiles(ImageStore):
    """Image files under one root.

    Paths are kept as one block of bytes: a list of millions of strings would be copied into every worker
    process as their reference counts change.
    """

    def __init__(self, root: str | os.PathLike[str], paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self.home = self.root = os.fspath(root)
        self._block = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _relative(self, index: int) -> str:
        return os.fsdecode(self._block[self._ends[index] : self._ends[index + 1]])

    def _path(self, index: int) -> Path:
        return Path(self.root, self._relative(index))

    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB."""
        path = self._path(index)
        return decode(path, printable(path))

    def encoded(self, index: int) -> bytes:
        """The file's bytes."""
        path = self._path(index)
        return read_file(path, printable(path))

    def where(self, index: int) -> str:
        """The file's path."""
        return printable(self._path(index))

    def key(self, index: int) -> str:
        """The path below the root, with forward slashes."""
        return self._relative(index).replace(os.sep, "/")

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Path, size and time of each file."""
        found = []
        for row in rows:
            path = self._relative(row)
            state = file_state(os.path.join(self.root, path))
            found.append((os.fsencode(path), *state) if state else None)
        return found


class FolderTree(Tree):
    """A folder on disk."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.name = printable(self.root.name or self.root.resolve().name or self.root)
        self.where = printable(self.root)

    def entries(self, folder: str) -> list[TreeEntry]:
        """What is in a folder and not hidden, ordered by name."""
        return folder_entries(os.path.join(self.root, folder))

    def is_file(self, path: str) -> bool:
        """Whether there is a file of this path."""
        return os.path.isfile(os.path.join(self.root, path))

    def read(self, path: str) -> bytes:
        """The file's bytes."""
        place = self.root / path
        return read_file(place, printable(place))

    def images(self, paths: Sequence[str]) -> ImageStore:
        """The files of these paths."""
        return ImageFiles(self.root, paths)

    def identity(self, folder: str) -> str:
        """The folder's path without links."""
        return os.path.realpath(os.path.join(self.root, folder))
