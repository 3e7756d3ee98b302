"""Names of class numbers, from a file next to a list of images.

classes.txt     one name per line, in order; or a number and a name
classes.csv     Class Name,Class ID[,Coarse Class Name,Coarse Class ID]
"""

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from patchloom.data.labels.label_table import SPACES, Table, looks_like_a_file, parse_table, plain
from patchloom.data.trees.tree import Tree
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import MOST_BYTES, read_plain

FILES = tuple(f"{name}.{end}" for name in ("classes", "class_names", "label_names") for end in ("csv", "tsv", "txt"))
_NO_LEVEL_WORDS = ("class", "label", "name", "category")


class ClassNames:
    """Names of class numbers, read from the columns of the file `title`."""

    def __init__(self, title: str, columns: Mapping[str, Sequence[str]]) -> None:
        self.title = title
        texts = {name: list(of) for name, of in columns.items() if not _whole_numbers(of) and not _files(of)}
        self._texts = texts
        self._numbers = {name: list(of) for name, of in columns.items() if name not in texts and _whole_numbers(of)}

    def of(self, codes: Sequence[str]) -> dict[str, str] | None:
        """Return a map from class number to name, or None if a number has no name."""
        names = next((of for of in self._texts.values() if len(set(of)) == len(of)), None)
        if names is None:
            return None
        used = {code for code in codes if code}
        numbered = [of for of in self._numbers.values() if len(set(of)) == len(of)]
        counted = [[str(i) for i in range(start, start + len(names))] for start in (0, 1)]
        for of in numbered or counted:
            if used <= set(of):
                return dict(zip(of, names, strict=True))
        return None

    def of_level(self, names: Sequence[str], codes: Sequence[str]) -> tuple[str, dict[str, str]] | None:
        """Return the level in which the classes `names` have the numbers `codes`, and its names by number."""
        fine = next((of for of in self._texts.values() if len(set(of)) == len(of)), [])
        for column in self._numbers.values():
            known = dict(zip(fine, column, strict=True)) if fine else {}
            if not known or any(known.get(name) != code for name, code in zip(names, codes, strict=True) if name):
                continue
            for title, texts in self._texts.items():
                pairs = set(zip(column, texts, strict=True))
                if len(pairs) == len(set(column)) == len(set(texts)) and texts is not fine:
                    words = [word for word in plain(title).split("_") if word not in _NO_LEVEL_WORDS]
                    return "_".join(words) or "coarse", dict(pairs)
        return None


def names_by_line(path: Path, most: int = MOST_BYTES) -> tuple[str, ...] | None:
    """Read the lines of a file. Return None if it does not exist; raise DataError if it is not text."""
    try:
        return names_of_lines(read_plain(path, most), printable(path)) if os.path.lexists(path) else None
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror}); expected one name per line") from error


def names_of_lines(data: bytes, where: str) -> tuple[str, ...]:
    """Return the lines of a text. Raise DataError if it is not UTF-8."""
    try:
        return tuple(data.decode("utf-8-sig").splitlines())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 ({error.reason}); expected one name per line") from error


def find_class_names(places: Sequence[tuple[Tree, str]]) -> Iterator[ClassNames]:
    """Yield the class names of all names files in these folders."""
    for tree, folder in places:
        others = [e.name for e in tree.entries(folder) if re.fullmatch(r"categories\w*\.(csv|tsv|txt)", e.name.lower())]
        for name in (*FILES, *others):
            path = posixpath.join(folder, name)
            if tree.is_file(path):
                columns = _columns(tree.read(path), name)
                if columns:
                    yield ClassNames(name, columns)


def names_in(file: Path) -> ClassNames:
    """Read the names file that the user passed."""
    try:
        columns = _columns(read_plain(file), file.name)
    except OSError as error:
        raise UsageError(
            f"--names {printable(file)}: cannot be read ({error.strerror}); expected one name per line"
        ) from error
    return ClassNames(printable(file.name), columns)


def _columns(content: bytes, title: str) -> dict[str, list[str]]:
    table: Table | None = None
    with suppress(PatchloomError):  # then it has one name per line
        table = parse_table(content, title, lambda _: False)
    if table is not None:
        columns = {name: table.column(i) for i, name in enumerate(table.columns)}
        if table.separator != SPACES or any(map(_whole_numbers, columns.values())):
            return columns
    lines = [line.strip() for line in content.decode("utf-8-sig", "replace").splitlines()]
    return {"name": [line for line in lines if line]}


def _whole_numbers(values: Sequence[str]) -> bool:
    return all(value.isascii() and value.isdecimal() for value in values)


def _files(values: Sequence[str]) -> bool:
    return all(looks_like_a_file(value) for value in values)
