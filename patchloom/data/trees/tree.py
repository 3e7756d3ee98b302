"""Files below one root, in a folder or in an archive, under the same names: paths relative to it with forward slashes.

What finds classes, splits and labels (`folder`, `labels_file`, `label_pattern`) asks a tree and never the disk, so an
archive may hold whatever a folder may.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from patchloom.data.datasets import ImageStore
from patchloom_runtime.folders import TreeEntry, VisitedFolders, walk_files


class Tree(ABC):
    """Files below one root."""

    name: str  # of the root, printable
    where: str  # its path, printable
    root: Path  # a folder, or an archive's file

    @abstractmethod
    def entries(self, folder: str) -> list[TreeEntry]:
        """What is in a folder ('' for the root) and not hidden, ordered by name."""

    @abstractmethod
    def is_file(self, path: str) -> bool:
        """Whether there is a file of this path."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """A small file: a table of labels or names."""

    @abstractmethod
    def images(self, paths: Sequence[str]) -> ImageStore:
        """The pictures of these paths, by position."""

    @abstractmethod
    def identity(self, folder: str) -> str:
        """The same for two paths that lead to one folder."""

    def files(self) -> list[str]:
        """Every file that is not hidden, ordered by name."""
        return walk_files(self.entries, VisitedFolders(self.identity, "", self.where))
