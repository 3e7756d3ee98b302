"""Files below one root, and their images.

A `Tree` is a folder (`FolderTree`) or an archive (`archive.ArchiveTree`). Paths are relative to the root, with forward
slashes. The readers of classes, splits and labels (`class_folders`, `labels_file`, `label_pattern`) use a tree instead
of the disk, so an archive may contain whatever a folder may.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.images.image_store import ImageStore, Stamp, file_state
from patchloom_runtime.folders import TreeEntry, VisitedFolders, folder_entries, walk_files
from patchloom_runtime.images.decode import decode, read_file
from patchloom_runtime.printable import printable


class Tree(ABC):
    """Files below one root."""

    name: str  # of the root, printable
    where: str  # path of the root, printable
    root: Path  # a folder, or the file of an archive

    @abstractmethod
    def entries(self, folder: str) -> list[TreeEntry]:
        """Return the visible entries of a folder ('' for the root), ordered by name."""

    @abstractmethod
    def is_file(self, path: str) -> bool:
        """Return whether `path` is a file."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Read a small file, such as a table of labels or names."""

    @abstractmethod
    def images(self, paths: Sequence[str]) -> ImageStore:
        """Return a store of the images at `paths`, in that order."""

    @abstractmethod
    def identity(self, folder: str) -> str:
        """Return a string that is the same for two paths that lead to one folder."""

    def files(self) -> list[str]:
        """Return all visible files, ordered by name."""
        return walk_files(self.entries, VisitedFolders(self.identity, "", self.where))


def below(root: str | os.PathLike[str], path: str) -> str | None:
    """Return `path` relative to `root`, without '.' and '..', or None if it leads out of that folder."""
    top = os.path.join(os.path.abspath(root), "")
    inside = os.path.normpath(os.path.join(top, path))
    return inside.removeprefix(top) if inside.startswith(top) else None


class ImageFiles(ImageStore):
    """Image files under one root.

    Paths are stored as one block of bytes: a list of millions of strings would be copied into every worker
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
        """Decode the image: upright, mode RGB."""
        path = self._path(index)
        return decode(path, printable(path))

    def encoded(self, index: int) -> bytes:
        """Read the bytes of the file."""
        path = self._path(index)
        return read_file(path, printable(path))

    def where(self, index: int) -> str:
        """Return the path of the file."""
        return printable(self._path(index))

    def key(self, index: int) -> str:
        """Return the path below the root, with forward slashes."""
        return self._relative(index).replace(os.sep, "/")

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the path and `file_state` of each file."""
        stamps = []
        for row in rows:
            path = self._relative(row)
            state = file_state(os.path.join(self.root, path))
            stamps.append((os.fsencode(path), *state) if state else None)
        return stamps


class FolderTree(Tree):
    """A folder on disk."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.name = printable(self.root.name or self.root.resolve().name or self.root)
        self.where = printable(self.root)

    def entries(self, folder: str) -> list[TreeEntry]:
        """Return the visible entries of a folder, ordered by name."""
        return folder_entries(os.path.join(self.root, folder))

    def is_file(self, path: str) -> bool:
        """Return whether `path` is a file."""
        return os.path.isfile(os.path.join(self.root, path))

    def read(self, path: str) -> bytes:
        """Read the bytes of a file."""
        place = self.root / path
        return read_file(place, printable(place))

    def images(self, paths: Sequence[str]) -> ImageStore:
        """Return a store of the image files at `paths`."""
        return ImageFiles(self.root, paths)

    def identity(self, folder: str) -> str:
        """Return the path of the folder with all links resolved."""
        return os.path.realpath(os.path.join(self.root, folder))
