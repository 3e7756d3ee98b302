"""The image files of a folder, or the images that Python code passes, with their classes, for `index`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchloom.data.datasets import Source
from patchloom.data.images.image_store import ImageStore
from patchloom.data.labels.taxonomy import level_named
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.class_folders import list_images
from patchloom.data.sources.python_objects import PythonData
from patchloom.data.sources.source import find_source
from patchloom.data.splits import level_of
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable


@dataclass(frozen=True)
class LabeledFiles:
    """Image files with their classes, and the levels above these."""

    files: tuple[tuple[str, str], ...]  # path or name, class; '' for none
    levels: dict[str, dict[str, str]]  # level → {class: coarse class}
    level: str = ""  # the requested one, or that with most of a model's classes; '' for the classes themselves
    in_memory: dict[str, tuple[ImageStore, int]] = field(default_factory=dict)  # images that are not files, by name

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
    for listing in source.listings.values():
        if isinstance(listing.images, ImageFiles):
            rows = zip(listing.rows.tolist(), listing.labels.tolist(), strict=True)
            home, key = listing.images.root, listing.images.key
            labels |= {os.path.join(home, key(row)): listing.names[n] for row, n in rows if n != UNLABELED}
    return LabeledFiles(tuple((file, labels.get(file, "")) for file in files), *_levels(source, classes, level))


def list_objects(
    data: PythonData, classes: Sequence[str], *, reading: Reading = AS_IT_IS, level: str | None = None
) -> LabeledFiles:
    """List the images that Python code passes with their classes; `list_labeled` describes the levels.

    An image that is not a file is named by a digest of the data and its position.
    """
    source = find_source(data, reading=reading)
    files: list[tuple[str, str]] = []
    in_memory: dict[str, tuple[ImageStore, int]] = {}
    for split, listing in source.listings.items():
        images = listing.images
        for row, number in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
            if isinstance(images, ImageFiles):
                name = os.path.join(images.root, images.key(row))
            else:
                name = f"{data}/{split}/{row}"
                in_memory[name] = images, row
            files.append((name, "" if number == UNLABELED else listing.names[number]))
    return LabeledFiles(tuple(files), *_levels(source, classes, level), in_memory)


def _levels(source: Source, classes: Sequence[str], level: str | None) -> tuple[dict[str, dict[str, str]], str]:
    """Return the levels above the classes, and the one to show."""
    levels: dict[str, dict[str, str]] = {}
    for listing in source.listings.values():
        for name, of in listing.levels.items():
            levels.setdefault(name, {}).update({own: of[own] for own in listing.names if own in of})
    names = {"": source.train.names} | {name: of.values() for name, of in source.train.levels.items()}
    chosen = level_named(level, levels) if level else level_of(classes, names) or ""
    return levels, chosen if chosen in levels else ""
