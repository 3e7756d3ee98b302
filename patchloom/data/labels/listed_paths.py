"""A picture's path as a list has it → its path in the tree.

images/a.jpg  images\\a.jpg  ./images/a.jpg     from the folder of the data, or from that of the list
/data/flowers/images/a.jpg  flowers/images/a.jpg    with the folder's own name, also from another machine
images/a  a  a.jpg                              without extension or folders, where one file alone fits

A list that lies in the data's folder came with the data: it names no file outside of that folder. A list elsewhere is
the user's own and may.
"""

import os
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator

from patchloom.data.trees.tree import Tree, below
from patchloom_runtime.images.decode import EXTENSIONS

_UNUSUAL = re.compile(r"\\|^[/.]|/\.|//")  # what a path relative to the folder has not, spelled as on disk


class ListedPaths:
    """Finds the pictures of a list; `base` is the list's folder from the root, `split` the split it is named for."""

    def __init__(self, tree: Tree, base: str | None = None, split: str = "") -> None:
        self._tree = tree
        self._anywhere = base is not None and base.split("/")[0] == ".."
        self._root = os.path.abspath(tree.root)
        self._base = base
        self._split = split
        self._found: dict[str, str | None] = {}
        self._by_name: dict[str, list[str]] | None = None
        self._by_path: dict[str, list[str]] = defaultdict(list)

    def find(self, cell: str) -> str | None:
        """The path in the tree; None where no file fits, or several do."""
        if cell not in self._found:
            self._found[cell] = self._look_for(cell)
        return self._found[cell]

    def finds(self, cell: str) -> bool:
        """Whether a file fits."""
        return self.find(cell) is not None

    def images(self) -> list[str]:
        """Every image file of the tree."""
        return [path for same in self._index().values() for path in same]

    def _look_for(self, cell: str) -> str | None:
        if not cell or cell in (".", ".."):
            return None
        if not _UNUSUAL.search(cell) and self._tree.is_file(cell):
            return cell
        candidates = [path for path in dict.fromkeys(self._candidates(cell)) if path is not None]
        direct = next((path for path in candidates if self._tree.is_file(path)), None)
        if direct is not None:
            return direct
        # An exact place first, then any folder: a list may leave folders out.
        for fitting in (self._at, self._below_any):
            for path in candidates:
                found = fitting(*_without_extension(path))
                if len(found) > 1 and self._split:
                    found = [one for one in found if self._split in one.lower().split("/")]
                if len(found) == 1:
                    return found[0]
        return None

    def _candidates(self, cell: str) -> Iterator[str | None]:
        path = cell.replace("\\", "/")
        for given in (cell, path, posixpath.join(self._base, path) if self._base else path, path.lstrip("/")):
            yield self._below(given)
        parts = path.split("/")
        for i, part in enumerate(parts[:-1]):
            if part == self._tree.name:
                yield self._below("/".join(parts[i + 1 :]))

    def _below(self, path: str) -> str | None:
        """One name for each file: from the root of the tree, or absolute where the list may name any file."""
        inside = below(self._root, path)
        if inside is None and self._anywhere:
            inside = os.path.normpath(os.path.join(self._root, path))
        return inside and inside.replace(os.sep, "/")

    def _at(self, stem: str, extension: str) -> list[str]:
        """Image files of this path; of any extension where none is given."""
        self._index()
        return [path for path in self._by_path.get(stem, ()) if path == stem + extension or not extension]

    def _below_any(self, stem: str, extension: str) -> list[str]:
        """Image files whose paths end so."""
        end = f"/{stem}{extension}"
        same = self._index().get(posixpath.basename(stem), ())
        return [path for path in same if (path if extension else posixpath.splitext(path)[0]).endswith(end)]

    def _index(self) -> dict[str, list[str]]:
        """Names without extension → image files."""
        if self._by_name is None:
            self._by_name = defaultdict(list)
            for path in self._tree.files():
                stem, extension = posixpath.splitext(path)
                if extension.lower() in EXTENSIONS:
                    self._by_name[posixpath.basename(stem)].append(path)
                    self._by_path[stem].append(path)
        return self._by_name


def _without_extension(path: str) -> tuple[str, str]:
    """Stem, and the extension where it is that of an image."""
    stem, extension = posixpath.splitext(path)
    return (stem, extension) if extension.lower() in EXTENSIONS else (path, "")
