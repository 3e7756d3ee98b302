"""A source for segmentation: images without labels, whose classes are those of their masks."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import NOT_LABELED, ImageStore, Mask, Stamp
from patchloom.data.labels.taxonomy import check_level
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED

# Names that are dropped together with the number 0 if 0 means unlabeled.
_NO_CLASS = ("background", "other", "others", "void", "unlabelled", "unlabeled", "ignore")
MOST_CLASSES = 1 << 15


def of_masks(source: Source, *, reduce_zero_label: bool = False, level: str | None = None) -> Source:
    """Return the source with mask classes as its classes and without labels of images.

    With `reduce_zero_label`, 0 means unlabeled and 1 is the first class (ADE20K). A `level` of the taxonomy merges
    classes; classes that are not part of it stay.
    """
    if not has_masks(source.train.images):
        raise UsageError(
            f"{source.name} has no masks to learn from; expected a folder with images/ and masks/, "
            "parquet with a column 'mask', or the built-in dataset 'shapes'"
        )

    levels = source.train.levels
    if level is not None:
        check_level(level, dict.fromkeys(levels, ()))

    unnamed = not source.train.images.mask_names

    def images_of(listing: Listing) -> ImageStore:
        images = _from_one(listing.images) if reduce_zero_label else _drop_ignored(listing.images, numbers)
        return images if level is None else _joined(images, levels[level])

    # An ignored number between class numbers can only be removed if all of these are known.
    inside = unnamed and not reduce_zero_label and ignored_number(source.train.images) not in (NOT_LABELED, UNLABELED)
    numbers = _numbers(list(source.listings.values())) if inside else ()
    listings = {split: replace(listing, images=images_of(listing)) for split, listing in source.listings.items()}
    names = _names(listings["train"].images)
    notes = source.notes
    if not names:
        names = _numbers(list(listings.values()))
    if len(names) < 2:
        raise DataError(
            f"the masks of {source.name} have one class ({names[0]}); expected two or more. Name every number in "
            "them, the background too, or detect the objects instead if each has a number of its own (--boxes)."
        )
    if unnamed:
        note = f"classes are named {names[0]} to {names[-1]}"
        notes = (*notes, f"the numbers in masks have no names (classes.txt, or --names FILE): {note}")
    learned = {
        split: replace(listing, labels=np.full(len(listing), UNLABELED), names=names, levels={})
        for split, listing in listings.items()
    }
    test = learned.get("val") if source.test is source.val else learned.get("test")
    return replace(source, train=learned["train"], val=learned.get("val"), test=test, notes=notes)


def has_masks(images: ImageStore) -> bool:
    """Return whether the images of a store have masks."""
    return bool(images.mask_names) or images.mask_ignore is not None


def ignored_number(images: ImageStore) -> int:
    """Return the mask number of unlabeled pixels, or UNLABELED if there is none."""
    return UNLABELED if images.mask_ignore is None else images.mask_ignore


def _names(images: ImageStore) -> tuple[str, ...]:
    """Return the class names, without that of unlabeled pixels if it is the last one."""
    names = images.mask_names
    return names[:-1] if names and images.mask_ignore == len(names) - 1 else names


def _numbers(listings: Sequence[Listing]) -> tuple[str, ...]:
    """Return the numbers up to the largest one in any readable mask, as names."""
    largest = -1
    for listing in listings:
        for row in listing.rows.tolist():
            try:
                mask = listing.images.mask(row)
            except DataError:
                continue  # reported by the scan
            if mask is not None:
                numbers = mask.classes[mask.classes != ignored_number(listing.images)]
                largest = max(largest, int(numbers.max())) if numbers.size else largest
    if not 0 < largest < MOST_CLASSES:
        content = "no number" if largest < 0 else f"numbers up to {largest:,}"
        raise DataError(f"the masks hold {content}; expected class numbers from 0, of two classes or more")
    return tuple(map(str, range(largest + 1)))


def _drop_ignored(images: ImageStore, numbers: tuple[str, ...]) -> ImageStore:
    """Renumber classes without that of unlabeled pixels. `numbers` are the names if there are none."""
    names, ignored = images.mask_names or numbers, ignored_number(images)
    if not 0 <= ignored < len(names) - 1:
        return images
    renumbered = [UNLABELED if number == ignored else number - (number > ignored) for number in range(len(names))]
    return _Renumbered(images, renumbered, tuple(name for number, name in enumerate(names) if number != ignored))


def _from_one(images: ImageStore) -> ImageStore:
    """Renumber masks that start at 1, with 0 for unlabeled, from 0."""
    names = images.mask_names
    names = names[1:] if names and names[0].lower() in _NO_CLASS else names
    most = len(names) or int(np.iinfo(images.mask_dtype).max)
    return _Renumbered(images, (UNLABELED, *range(most)), names)


def _joined(images: ImageStore, coarse: Mapping[str, str]) -> ImageStore:
    """Merge classes that have the same coarse class."""
    merged = [coarse.get(name, name) for name in images.mask_names]
    names = tuple(dict.fromkeys(merged))
    return _Renumbered(images, [names.index(name) for name in merged], names)


class _Renumbered(ImageStore):
    """Images with renumbered masks: `numbers` maps old numbers to new ones, which are negative for unlabeled."""

    def __init__(self, images: ImageStore, numbers: Sequence[int], names: tuple[str, ...]) -> None:
        self._images = images
        self.mask_names = names
        self.mask_ignore = NOT_LABELED if images.mask_dtype is np.uint8 else UNLABELED
        self.mask_dtype = images.mask_dtype
        self.home, self.is_scanned, self.fingerprint = images.home, images.is_scanned, images.fingerprint
        self._numbers = np.array([*numbers, UNLABELED])
        self._stamp = hashlib.sha256(self._numbers.tobytes()).digest()[:8]

    def __len__(self) -> int:
        return len(self._images)

    def mask(self, index: int) -> Mask | None:
        """Return the renumbered mask. Unknown numbers stay, so that they are reported as faults."""
        mask = self._images.mask(index)
        if mask is None:
            return None
        known = (mask.classes >= 0) & (mask.classes < len(self._numbers) - 1)
        if (own := self._images.mask_ignore) is not None:
            known &= mask.classes != own
        renumbered = self._numbers[np.where(known, mask.classes, len(self._numbers) - 1)]
        unlabeled = ignored_number(self)
        ignored = np.zeros_like(known) if own is None else mask.classes == own
        numbers = np.where(known & (renumbered >= 0), renumbered, np.where(known | ignored, unlabeled, mask.classes))
        return Mask(numbers.astype(mask.classes.dtype), None)

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        return self._images.read(index)

    def where(self, index: int) -> str:
        """Return the location of the image."""
        return self._images.where(index)

    def key(self, index: int) -> str:
        """Return the key of the image."""
        return self._images.key(index)

    def encoded(self, index: int) -> Any:
        """Return the bytes of the image file, or None."""
        return self._images.encoded(index)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return stamps that differ from those of the original numbers, so that the scan cache keeps both."""
        return [stamp and (self._stamp + stamp[0], *stamp[1:]) for stamp in self._images.stamps(rows)]
