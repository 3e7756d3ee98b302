"""The image files of a folder with their classes, for `index`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchloom.data.labels.taxonomy import level_named
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.class_folders import list_images
from patchloom.data.sources.source import find_source
from patchloom.data.splits import level_of
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable


@dataclass(frozen=True)
class LabeledFiles:
    """Image files with their classes, and the levels above these."""

    files: tuple[tuple[str, str], ...]  # path, class; '' for none
    levels: dict[str, dict[str, str]]  # level → {class: coarse class}
    level: str = ""  # the requested one, or that with most of a model's classes; '' for the classes themselves

    def at(self, level: str) -> list[tuple[str, str]]:
        """Return the files with their classes at a level. Classes that are not part of the level keep their name."""
        coarse = self.levels[level] if level else {}
        return [(file, coarse.get(label, label)) for file, label in self.files]


def list_labeled(
    root: Path, classes: Sequence[str], *, reading: Reading = AS_IT_IS, level: str | None = None
) -> LabeledFiles:
    """List every image file below `root` with its class, as training would read it.

    The default level is the one with most of a model's `classes`.
    """
    files = list_images(root)
    if not files:
        raise DataError(f"{printable(root)}: no images found")
    try:
        source = find_source(root, reading=reading)
    except DataError:
        if reading != AS_IT_IS or level:
            raise
        return LabeledFiles(tuple((file, "") for file in files), {})  # an indexed folder need not be a dataset
    labels: dict[str, str] = {}
    levels: dict[str, dict[str, str]] = {}
    for listing in source.listings.values():
        if isinstance(listing.images, ImageFiles):
            rows = zip(listing.rows.tolist(), listing.labels.tolist(), strict=True)
            home, key = listing.images.root, listing.images.key
            labels |= {os.path.join(home, key(row)): listing.names[n] for row, n in rows if n != UNLABELED}
            for name, of in listing.levels.items():
                levels.setdefault(name, {}).update({own: of[own] for own in listing.names if own in of})
    names = {"": source.train.names} | {name: of.values() for name, of in source.train.levels.items()}
    chosen = level_named(level, levels) if level else level_of(classes, names) or ""
    labeled = tuple((file, labels.get(file, "")) for file in files)
    return LabeledFiles(labeled, levels, chosen if chosen in levels else "")
