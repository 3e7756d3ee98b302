"""Images with a mask each: the class of every pixel as a number or as a color.

    images/[train/]a.jpg  masks/[train/]a.png      in folders with any names (found by `layout`), or in one folder
    JPEGImages/  SegmentationClass/  ImageSets/    Pascal VOC, whose lists define train and val

`mask_names` reads the names of the classes and the number of unlabeled pixels. Images without a mask and masks without
an image are faults of the source.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from patchloom.data.annotations.mask_names import MaskNames, names_of_masks
from patchloom.data.annotations.paired_files import (
    Pair,
    PairedFile,
    changed_with,
    files_of_pair,
    pair_up,
    source_of_rows,
    unpaired,
)
from patchloom.data.datasets import Source
from patchloom.data.images.image_store import NOT_LABELED, Mask, Stamp
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import decode_ids, read_file
from patchloom_runtime.printable import printable

VOC_LISTS = os.path.join("ImageSets", "Segmentation")
MOST_NAMES_BYTES = 1 << 20  # of a list of images
_SAMPLED_MASKS = 8  # whose values are read


class MaskedFiles(ImageFiles):
    """Image files, each with a file of class numbers."""

    def __init__(self, root: Path, paths: Sequence[str], masks: Sequence[str], named: MaskNames) -> None:
        super().__init__(root, paths)
        self.mask_names = named.names
        self.mask_ignore = named.ignore
        self._named = named
        self._masks = ImageFiles(root, masks)

    def mask(self, index: int) -> Mask:
        """Read the class numbers of the mask, or convert its colors to them."""
        if self._named.colors:
            pixels = np.asarray(self._masks.read(index))
            return Mask(self._named.numbers(pixels, self._masks.where(index)), None)
        numbers = decode_ids(self._masks.encoded(index), self._masks.where(index))
        if self._named.meaning:
            numbers = np.array(self._named.meaning, np.uint8)[numbers]
        if self.mask_ignore not in (None, NOT_LABELED) and len(self.mask_names) <= NOT_LABELED:
            numbers = np.where(numbers == NOT_LABELED, np.uint8(self.mask_ignore), numbers)
        return Mask(numbers, None)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return stamps that change with image and mask."""
        return changed_with(super().stamps(rows), self._masks.stamps(rows))


def open_masks(
    root: Path, pairs: Sequence[Pair], title: str, ignore: int | None = None, names: Path | None = None
) -> Source:
    """Open images and masks in pairs of folders. `ignore` and `names` override what the data define."""
    rows: list[PairedFile] = []
    faults = []
    for pair in pairs:
        images, masks = files_of_pair(root, pair, masks=True)
        listed = _listed(root / os.path.dirname(pair.others))
        if listed:
            images, masks = ({stem: path for stem, path in of.items() if stem in listed} for of in (images, masks))
        faults += unpaired(root, pair, images, masks, "mask")
        rows += pair_up(pair, images, masks, listed)
    if not rows:
        first = pairs[0]
        raise DataError(
            f"{printable(root)}: no image of {first.images or 'it'} has a mask of the same name in {first.others}"
        )
    places = [root, *(root / os.path.dirname(pair.others) for pair in pairs), *(root / pair.others for pair in pairs)]
    paths = [row.other for row in rows]
    named, notes = names_of_masks(places, paths, lambda: _values(root, paths), ignore, names)
    open_files = partial(MaskedFiles, root, named=named)
    return source_of_rows(f"{title} (images and masks)", rows, open_files, faults, notes)


def _values(root: Path, masks: Sequence[str]) -> set[int]:
    """Return the numbers in a few of the masks. Masks without numbers are skipped."""

    def each() -> Iterator[int]:
        for path in masks[:: max(1, len(masks) // _SAMPLED_MASKS)][:_SAMPLED_MASKS]:
            try:
                yield from np.unique(decode_ids(read_file(root / path, path), path)).tolist()
            except DataError:
                continue  # reported by `check`

    return set(each())


def _listed(root: Path) -> dict[str, str]:
    """Map stems to train, val or test by Pascal VOC's lists; empty if there are none."""
    splits: dict[str, str] = {}
    for split in ("train", "val", "test"):
        lines = names_by_line(root / VOC_LISTS / f"{split}.txt", MOST_NAMES_BYTES) or ()
        splits |= {line.strip(): split for line in lines if line.strip()}
    return splits
