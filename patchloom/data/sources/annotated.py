"""Folders of pictures with masks or boxes beside them, and what does not fit together in them.

    images/[train/]a.jpg  masks/[train/]a.png      a mask of class numbers, or colours, for each picture, 255 for 'not
                                                   labelled'; what they mean in classes.txt or another (`mask_names`)
    JPEGImages/  SegmentationClass/  ImageSets/    Pascal VOC's masks: its lists say train and val
    train2017/*.jpg  annotations/instances_train2017.json     boxes and masks as COCO keeps them: `coco`
    JPEGImages/*.jpg  Annotations/*.xml            boxes as Pascal VOC keeps them: `voc`
    images/[train/]a.jpg  labels/[train/]a.txt     boxes or polygons as YOLO keeps them: `yolo`
    PNGImages/a.png  PedMasks/a_mask.png           a mask of objects' numbers for each picture: `instances`

A picture whose mask is missing, or a box of an unknown picture or category, is a fault of the source.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from patchloom.data.labels.class_names import names_by_line
from patchloom.data.pictures.decode import decode_ids
from patchloom.data.pictures.samples import UNLABELLED
from patchloom.data.sets import NOT_LABELLED, Listing, Mask, Source, Stamp
from patchloom.data.sources.beside import changed_with, images_by_stem, lonely
from patchloom.data.sources.coco import open_coco
from patchloom.data.sources.instances import open_instances
from patchloom.data.sources.mask_names import VOC_NAMES, MaskNames, find_mask_names
from patchloom.data.sources.voc import open_voc
from patchloom.data.sources.yolo import open_yolo
from patchloom.data.splits import group_by_split
from patchloom.data.trees.files import FilePictures
from patchloom.errors import DataError
from patchloom.printable import printable

IMAGE_FOLDERS = ("images", "imgs", "JPEGImages")
MASK_FOLDERS = ("masks", "annotations", "labels", "SegmentationClass")
VOC_MASKS, VOC_LISTS = "SegmentationClass", os.path.join("ImageSets", "Segmentation")
MOST_NAMES_BYTES = 1 << 20  # of a list of pictures


def open_annotated(root: Path) -> Source | None:
    """The folder as pictures with boxes or masks; None where it is neither."""
    if (source := open_coco(root)) or (source := open_instances(root)):
        return source
    images = next((name for name in IMAGE_FOLDERS if os.path.isdir(root / name)), None)
    found = (name for name in MASK_FOLDERS if os.path.isdir(root / name) and images_by_stem(root / name))
    masks = next(found, None) if images else None
    if images and masks:
        return _open_masks(root, images, masks)
    return open_voc(root) or open_yolo(root)


# Masks ----------------------------------------------------------------------------------------------------------------


class MaskedFiles(FilePictures):
    """Image files, each with a file of class numbers."""

    mask_ignore = NOT_LABELLED

    def __init__(self, root: Path, paths: Sequence[str], masks: Sequence[str], named: MaskNames) -> None:
        super().__init__(root, paths)
        self.mask_names = named.names
        self._named = named
        self._masks = FilePictures(root, masks)

    def mask(self, index: int) -> Mask:
        """The numbers in the mask's file, or of its colours."""
        if self._named.colours:
            pixels = np.asarray(self._masks.read(index))
            return Mask(self._named.numbers(pixels, self._masks.where(index)), None)
        return Mask(decode_ids(self._masks.encoded(index), self._masks.where(index)), None)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Of picture and mask."""
        return changed_with(super().stamps(rows), self._masks.stamps(rows))


def _open_masks(root: Path, images: str, masks: str) -> Source:
    pictures, labels = images_by_stem(root / images), images_by_stem(root / masks)
    named = find_mask_names(root)
    if not named.names and masks == VOC_MASKS:
        named = MaskNames(VOC_NAMES)
    names, listed = named.names, _listed(root)
    if listed:
        pictures, labels = ({stem: path for stem, path in of.items() if stem in listed} for of in (pictures, labels))
    faults = lonely(root / images, pictures, labels, "picture without mask", masks)
    faults += lonely(root / masks, labels, pictures, "mask without picture", images)
    both = [stem for stem in pictures if stem in labels]
    if not both:
        raise DataError(f"{printable(root)}: no picture of {images} has a mask of the same name in {masks}")
    splits = {stem: listed[stem] if listed else os.path.dirname(stem) for stem in both}
    said = group_by_split(sorted(set(splits.values())))

    def listing(chosen: Sequence[str]) -> Listing:
        stems = [stem for stem in both if splits[stem] in chosen]
        paths = [os.path.join(images, pictures[stem]) for stem in stems]
        files = MaskedFiles(root, paths, [os.path.join(masks, labels[stem]) for stem in stems], named)
        return Listing(files, np.arange(len(stems)), np.full(len(stems), UNLABELLED), names)

    unused = ", ".join(map(printable, said.unused))
    notes = (f"beside train, val and test, not used: {unused}",) if unused else ()
    val, test = (listing(chosen) if chosen else None for chosen in (said.val, said.test))
    title = f"{printable(root.name)} (pictures and masks)"
    return Source(title, listing(said.train), val, notes, tuple(faults), test)


def _listed(root: Path) -> dict[str, str]:
    """Stem → train, val or test, as Pascal VOC's lists say; empty where there are none."""
    found: dict[str, str] = {}
    for split in ("train", "val", "test"):
        lines = names_by_line(root / VOC_LISTS / f"{split}.txt", MOST_NAMES_BYTES) or ()
        found |= {line.strip(): split for line in lines if line.strip()}
    return found
