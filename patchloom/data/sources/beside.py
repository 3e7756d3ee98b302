"""Pictures with a second file beside each: found by name, and known as changed when either has changed."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from patchloom.data.pictures.decode import EXTENSIONS
from patchloom.data.pictures.samples import UNLABELLED
from patchloom.data.sets import Fault, Listing, Pictures, Source, Stamp
from patchloom.data.splits import SplitNames
from patchloom.data.trees.files import FolderTree
from patchloom.printable import printable


def changed_with(stamps: Sequence[Stamp | None], others: Sequence[Stamp | None]) -> list[Stamp | None]:
    """Stamps that also differ when a second file of the same row does."""
    return [
        (one[0], one[1] + other[1], one[2] ^ other[2]) if one and other else None
        for one, other in zip(stamps, others, strict=True)
    ]


def by_stem(folder: Path, extensions: Sequence[str]) -> dict[str, str]:
    """Path below the folder without its extension → the path, of every such file that is not hidden."""
    stems = ((os.path.splitext(path), path) for path in FolderTree(folder).files())
    return {stem: path for (stem, extension), path in stems if extension.lower() in extensions}


def images_by_stem(folder: Path) -> dict[str, str]:
    """Path below the folder without its extension → the path, of every image file that is not hidden."""
    return by_stem(folder, tuple(EXTENSIONS))


def lonely(folder: Path, files: Mapping[str, str], others: Mapping[str, str], kind: str, place: str) -> list[Fault]:
    """A fault for each file whose stem the others do not have."""
    return [
        Fault(printable(folder / path), kind, f"nothing called {printable(stem)} in {place}")
        for stem, path in files.items()
        if stem not in others
    ]


def source_of_splits(
    title: str, said: SplitNames, pictures: Callable[[Sequence[str]], Pictures], faults: Sequence[Fault] = ()
) -> Source:
    """A source of pictures without labels, whose splits are named; `pictures` are those of some of the names."""

    def listing(chosen: Sequence[str]) -> Listing:
        found = pictures(chosen)
        return Listing(found, np.arange(len(found)), np.full(len(found), UNLABELLED), found.object_names)

    unused = ", ".join(map(printable, said.unused))
    notes = (f"beside train, val and test, not used: {unused}",) if unused else ()
    val, test = (listing(chosen) if chosen else None for chosen in (said.val, said.test))
    return Source(title, listing(said.train), val, notes, tuple(faults), test)
