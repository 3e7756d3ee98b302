"""Resolve the paths in a list to paths in a tree.

    images/a.jpg  images\\a.jpg  ./images/a.jpg     relative to the data folder, or to the folder of the list
    /data/flowers/images/a.jpg  flowers/images/a.jpg    with the name of the data folder, also from another machine
    images/a  a  a.jpg                              without extension or folders, if exactly one file matches

A list inside the data folder came with the data and may not name files outside of it. A list elsewhere is the user's
own and may.
"""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator

from patchloom.data.trees.tree import Tree, below
from patchloom_runtime.images.decode import EXTENSIONS

_UNUSUAL = re.compile(r"\\|^[/.]|/\.|//")  # not in a normalized path relative to the folder


class ListedPaths:
    """Finds the images of a list. `base` is its folder relative to the root, `split` the split in its name."""

    def __init__(self, tree: Tree, base: str | None = None, split: str = "") -> None:
        self._tree = tree
        self._anywhere = base is not None and base.split("/")[0] == ".."
        self._root = os.path.abspath(tree.root)
        self._base = base
        self._split = split
        self._cache: dict[str, str | None] = {}
        self._by_name: dict[str, list[str]] | None = None
        self._by_path: dict[str, list[str]] = defaultdict(list)

    def find(self, cell: str) -> str | None:
        """Return the path in the tree, or None if no file or several files match."""
        if cell not in self._cache:
            self._cache[cell] = self._search(cell)
        return self._cache[cell]

    def finds(self, cell: str) -> bool:
        """Return whether one file matches."""
        return self.find(cell) is not None

    def images(self) -> list[str]:
        """Return all image files of the tree."""
        return [path for same in self._index().values() for path in same]

    def _search(self, cell: str) -> str | None:
        if not cell or cell in (".", ".."):
            return None
        if not _UNUSUAL.search(cell) and self._tree.is_file(cell):
            return cell
        candidates = [path for path in dict.fromkeys(self._candidates(cell)) if path is not None]
        direct = next((path for path in candidates if self._tree.is_file(path)), None)
        if direct is not None:
            return direct
        # The exact folder first, then any folder: lists may omit folders.
        for matching in (self._at, self._below_any):
            for path in candidates:
                matches = matching(*_strip_extension(path))
                if len(matches) > 1 and self._split:
                    matches = [one for one in matches if self._split in one.lower().split("/")]
                if len(matches) == 1:
                    return matches[0]
        return None

    def _candidates(self, cell: str) -> Iterator[str | None]:
        path = cell.replace("\\", "/")
        for candidate in (cell, path, posixpath.join(self._base, path) if self._base else path, path.lstrip("/")):
            yield self._below(candidate)
        parts = path.split("/")
        for i, part in enumerate(parts[:-1]):
            if part == self._tree.name:
                yield self._below("/".join(parts[i + 1 :]))

    def _below(self, path: str) -> str | None:
        """Return the path relative to the root, or absolute if the list may name any file, or else None."""
        inside = below(self._root, path)
        if inside is None and self._anywhere:
            inside = os.path.normpath(os.path.join(self._root, path))
        return inside and inside.replace(os.sep, "/")

    def _at(self, stem: str, extension: str) -> list[str]:
        """Return image files at this path, with any extension if it has none."""
        self._index()
        return [path for path in self._by_path.get(stem, ()) if path == stem + extension or not extension]

    def _below_any(self, stem: str, extension: str) -> list[str]:
        """Return image files whose paths end with this one."""
        end = f"/{stem}{extension}"
        same = self._index().get(posixpath.basename(stem), ())
        return [path for path in same if (path if extension else posixpath.splitext(path)[0]).endswith(end)]

    def _index(self) -> dict[str, list[str]]:
        """Map file names without extension to image files."""
        if self._by_name is None:
            self._by_name = defaultdict(list)
            for path in self._tree.files():
                stem, extension = posixpath.splitext(path)
                if extension.lower() in EXTENSIONS:
                    self._by_name[posixpath.basename(stem)].append(path)
                    self._by_path[stem].append(path)
        return self._by_name


def _strip_extension(path: str) -> tuple[str, str]:
    """Return the stem and the extension, if the latter is that of an image."""
    stem, extension = posixpath.splitext(path)
    return (stem, extension) if extension.lower() in EXTENSIONS else (path, "")
