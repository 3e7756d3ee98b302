"""Masks of object numbers, one per image, as in Penn-Fudan. Boxes are computed from the pixels of each number.

PNGImages/a.png  PedMasks/a_mask.png
images/[train/]a.jpg  instances/[train/]a.png      classes.txt with one name; the default is 'object'
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from patchloom.data.annotations.paired_files import (
    Pair,
    changed_with,
    images_by_stem,
    pair_up,
    source_of_rows,
    unpaired,
)
from patchloom.data.datasets import Source
from patchloom.data.images.image_store import Mask, Stamp
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import decode_ids
from patchloom_runtime.images.object_masks import instance_corners, refuse_many_objects
from patchloom_runtime.printable import printable

MASKS = {"PedMasks": "pedestrian", "instances": "object", "instance_masks": "object"}  # folder → class name
_MARKS = ("_mask", "_instances", "_instance")  # suffixes of the names of masks
MOST_BYTES = 1 << 20


class InstanceImages(ImageFiles):
    """Image files, each with a mask of object numbers."""

    tells_objects_apart = True

    def __init__(self, root: Path, paths: Sequence[str], masks: Sequence[str], name: str) -> None:
        super().__init__(root, paths)
        self.object_names, self.mask_names = (name,), ("background", name)
        self._masks = ImageFiles(root, masks)

    def mask(self, index: int) -> Mask:
        """Return a mask with objects numbered from 1, in the order of `boxes`."""
        ids = decode_ids(self._masks.encoded(index), self._masks.where(index))
        values, numbers = np.unique(ids, return_inverse=True)
        try:
            refuse_many_objects(len(values))
        except DataError as error:
            raise DataError(f"{self._masks.where(index)}: {error}") from error
        numbers = numbers.reshape(ids.shape) + (0 if values[0] == 0 else 1)  # 0 is the background, if there is any
        return Mask((ids > 0).astype(np.uint8), numbers.astype(np.int16))

    def boxes(self, index: int) -> np.ndarray:
        """Return the box of each instance, (instances, 5): x0, y0, x1, y1 in pixels, and class 0."""
        instances = self.mask(index).instances
        assert instances is not None
        corners = instance_corners(instances, int(instances.max(initial=0)))
        return np.pad(corners, ((0, 0), (0, 1)))

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return stamps that change with image and mask."""
        return changed_with(super().stamps(rows), self._masks.stamps(rows))


def open_instances(root: Path, pair: Pair, title: str) -> Source:
    """Open a folder of images and a folder of masks of their objects."""
    images, masks = pair
    paths = images_by_stem(root / images)
    files = {_unmarked(stem): path for stem, path in images_by_stem(root / masks).items()}
    faults = unpaired(root, pair, paths, files, "mask")
    rows = pair_up(pair, paths, files, {stem: os.path.dirname(stem) for stem in paths})
    if not rows:
        raise DataError(f"{printable(root)}: no image of {images} has a mask of the same name in {masks}")
    file = root / os.path.dirname(masks) / "classes.txt"
    named = [line.strip() for line in names_by_line(file, MOST_BYTES) or () if line.strip()]
    if len(named) > 1:
        raise DataError(f"{printable(file)}: {len(named)} names; masks of object numbers have one class")
    name = named[0] if named else MASKS.get(os.path.basename(masks), "object")
    open_files = partial(InstanceImages, root, name=name)
    return source_of_rows(f"{title} (images and objects)", rows, open_files, faults)


def _unmarked(stem: str) -> str:
    return next((stem.removesuffix(mark) for mark in _MARKS if stem.endswith(mark)), stem)
