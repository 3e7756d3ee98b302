"""Images with a second file each, such as a mask, paired by name."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.datasets import Fault, Listing, Source
from patchloom.data.images.image_store import ImageStore, Stamp
from patchloom.data.splits import group_by_split, says_a_split
from patchloom.data.trees.tree import FolderTree
from patchloom_runtime.images.decode import EXTENSIONS
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

# Suffixes of the names of masks, and of images with masks: aachen_000000_gtFine_labelIds, aachen_000000_leftImg8bit.
_MASK_ENDS = re.compile(
    r"(_gt(Fine|Coarse)_label(Train)?Ids|"
    r"[ _-](L|masks?|labels?|labelids|gt|seg|segmentation|annot|annotation|instances?))$",
    re.IGNORECASE,
)
_IMAGE_ENDS = re.compile(r"_(leftImg8bit|sat|img|image|rgb)$", re.IGNORECASE)
_OTHER_MASKS = re.compile(r"_(color|instanceIds|instanceTrainIds)$")  # other renderings of the masks of Cityscapes


class Pair(NamedTuple):
    """A folder of images and the folder of their second files, relative to the root. They may be the same."""

    images: str
    others: str


class PairedFile(NamedTuple):
    """An image and its second file, as paths below the root."""

    split: str
    image: str
    other: str


def mask_stem(stem: str) -> str:
    """Return the stem of the image that a mask belongs to, or '' if it is another rendering of a mask."""
    return "" if _OTHER_MASKS.search(stem) else _MASK_ENDS.sub("", stem)


def image_stem(stem: str) -> str:
    """Return the stem that an image shares with its mask."""
    return _IMAGE_ENDS.sub("", stem)


def changed_with(stamps: Sequence[Stamp | None], others: Sequence[Stamp | None]) -> list[Stamp | None]:
    """Combine two stamps per row to one that changes with either file."""
    return [
        (one[0], one[1] + other[1], one[2] ^ other[2]) if one and other else None
        for one, other in zip(stamps, others, strict=True)
    ]


def by_stem(folder: Path, extensions: Sequence[str]) -> dict[str, str]:
    """Map paths without extension to paths, for all visible files with one of the extensions below a folder."""
    stems = ((os.path.splitext(path), path) for path in FolderTree(folder).files())
    return {stem: path for (stem, extension), path in stems if extension.lower() in extensions}


def images_by_stem(folder: Path) -> dict[str, str]:
    """Map paths without extension to paths, for all visible image files below a folder."""
    return by_stem(folder, tuple(EXTENSIONS))


def files_of_pair(
    root: Path, pair: Pair, extensions: Sequence[str] = tuple(EXTENSIONS), *, masks: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """Return images and second files of a pair by their common stems, as paths below its two folders.

    With `masks`, second files are images. If an image has several masks, TrainIds of Cityscapes are preferred.
    """
    images, others = images_by_stem(root / pair.images), by_stem(root / pair.others, extensions)
    if not masks:
        return images, others
    together = pair.images == pair.others
    inside = os.path.relpath(os.path.join("/", pair.others), os.path.join("/", pair.images)) + os.sep
    known = {image_stem(stem): path for stem, path in images.items() if not path.startswith(inside)}
    matched: dict[str, str] = {}
    for stem, path in others.items():
        own = stem if stem in known and not together else mask_stem(stem)
        if own and own != (stem if together else "") and (own not in matched or "TrainIds" in stem):
            matched[own] = path
    mask_paths = set(matched.values()) if together else set()
    return {stem: path for stem, path in known.items() if path not in mask_paths}, matched


def split_of_path(pair: Pair, stem: str) -> str:
    """Return the first folder in the path of an image that names a split, or else its own folder."""
    parts = os.path.join(pair.images, os.path.dirname(stem)).split(os.sep)
    return next((part for part in parts if says_a_split(part)), os.path.dirname(stem))


def pair_up(
    pair: Pair, images: Mapping[str, str], others: Mapping[str, str], listed: Mapping[str, str]
) -> list[PairedFile]:
    """Return the images that have a second file. `listed` maps stems to splits; if it is empty, paths name them."""
    return [
        PairedFile(
            listed.get(stem, "") if listed else split_of_path(pair, stem),
            os.path.join(pair.images, path),
            os.path.join(pair.others, others[stem]),
        )
        for stem, path in images.items()
        if stem in others
    ]


def unpaired(root: Path, pair: Pair, images: Mapping[str, str], others: Mapping[str, str], noun: str) -> list[Fault]:
    """Return a fault for each image without a second file, called `noun`, and each second file without an image."""

    def faults(files: Mapping[str, str], others: Mapping[str, str], kind: str, folder: str, place: str) -> list[Fault]:
        return [
            Fault(printable(root / folder / path), kind, f"no file named {printable(stem)} in {place}")
            for stem, path in files.items()
            if stem not in others
        ]

    return [
        *faults(images, others, f"image without {noun}", pair.images, pair.others),
        *faults(others, images, f"{noun} without image", pair.others, pair.images),
    ]


def source_of_rows(
    title: str,
    rows: Sequence[PairedFile],
    open_files: Callable[[Sequence[str], Sequence[str]], ImageStore],
    faults: Sequence[Fault] = (),
    notes: tuple[str, ...] = (),
) -> Source:
    """Return a source of images without labels. `open_files` makes the store of some images and their second files."""

    def listing(chosen: Sequence[str]) -> Listing:
        own = [row for row in rows if row.split in chosen]
        store = open_files([row.image for row in own], [row.other for row in own])
        return Listing(
            store, np.arange(len(store)), np.full(len(store), UNLABELED), store.object_names or store.mask_names
        )

    splits = group_by_split(sorted({row.split for row in rows}))
    unused = ", ".join(printable(name or "images outside of them") for name in splits.unused)
    notes += (f"folders other than train, val and test, not used: {unused}",) if unused else ()
    val, test = (listing(chosen) if chosen else None for chosen in (splits.val, splits.test))
    return Source(title, listing(splits.train), val, notes, tuple(faults), test)
