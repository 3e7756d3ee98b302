"""Images with a second file for each: found by name, and known as changed when either has changed."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.datasets import Fault, ImageStore, Listing, Source, Stamp
from patchloom.data.splits import SplitNames, says_a_split
from patchloom.data.trees.tree import FolderTree
from patchloom_runtime.images.decode import EXTENSIONS
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

# Ends of the names of masks, and of images that have masks: aachen_000000_leftImg8bit, aachen_000000_gtFine_labelIds.
_MASK_ENDS = re.compile(
    r"(_gt(Fine|Coarse)_label(Train)?Ids|"
    r"[ _-](L|masks?|labels?|labelids|gt|seg|segmentation|annot|annotation|instances?))$",
    re.IGNORECASE,
)
_IMAGE_ENDS = re.compile(r"_(leftImg8bit|sat|img|image|rgb)$", re.IGNORECASE)
_OTHER_MASKS = re.compile(r"_(color|instanceIds|instanceTrainIds)$")  # further pictures of what Cityscapes' masks show


class Pair(NamedTuple):
    """A folder of images and one with a second file for each of them, below the root of the data; they may be one."""

    images: str
    others: str


def mask_stem(stem: str) -> str:
    """The name of the image that a mask belongs to; '' where it is a further picture of a mask."""
    return "" if _OTHER_MASKS.search(stem) else _MASK_ENDS.sub("", stem)


def image_stem(stem: str) -> str:
    """The name by which an image and its mask are known."""
    return _IMAGE_ENDS.sub("", stem)


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


def files_of_pair(
    root: Path, pair: Pair, extensions: Sequence[str] = tuple(EXTENSIONS), *, masks: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """Images and second files of a pair by their common stems, as paths below its two folders.

    `masks` are images themselves: where several fit an image, numbers of classes to train on go before others.
    """
    images, others = images_by_stem(root / pair.images), by_stem(root / pair.others, extensions)
    if not masks:
        return images, others
    together = pair.images == pair.others
    inside = os.path.relpath(os.path.join("/", pair.others), os.path.join("/", pair.images)) + os.sep
    known = {image_stem(stem): path for stem, path in images.items() if not path.startswith(inside)}
    found: dict[str, str] = {}
    for stem, path in others.items():
        own = stem if stem in known and not together else mask_stem(stem)
        if own and own != (stem if together else "") and (own not in found or "TrainIds" in stem):
            found[own] = path
    masks_themselves = set(found.values()) if together else set()
    return {stem: path for stem, path in known.items() if path not in masks_themselves}, found


def split_of_path(pair: Pair, stem: str) -> str:
    """The folder on the way to an image that says its split; the folder it lies in where none does."""
    parts = os.path.join(pair.images, os.path.dirname(stem)).split(os.sep)
    return next((part for part in parts if says_a_split(part)), os.path.dirname(stem))


def lonely(folder: Path, files: Mapping[str, str], others: Mapping[str, str], kind: str, place: str) -> list[Fault]:
    """A fault for each file whose stem the others do not have."""
    return [
        Fault(printable(folder / path), kind, f"nothing called {printable(stem)} in {place}")
        for stem, path in files.items()
        if stem not in others
    ]


def source_of_splits(
    title: str,
    said: SplitNames,
    images: Callable[[Sequence[str]], ImageStore],
    faults: Sequence[Fault] = (),
    notes: tuple[str, ...] = (),
) -> Source:
    """A source of pictures without labels, whose splits are named; `pictures` are those of some of the names."""

    def listing(chosen: Sequence[str]) -> Listing:
        found = images(chosen)
        return Listing(
            found, np.arange(len(found)), np.full(len(found), UNLABELED), found.object_names or found.mask_names
        )

    unused = ", ".join(printable(name or "images beside them") for name in said.unused)
    notes += (f"beside train, val and test, not used: {unused}",) if unused else ()
    val, test = (listing(chosen) if chosen else None for chosen in (said.val, said.test))
    return Source(title, listing(said.train), val, notes, tuple(faults), test)
