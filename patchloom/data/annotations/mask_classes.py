"""A source as segmentation reads it: the class of every pixel is to be learned, and the classes are the masks'."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.datasets import NOT_LABELED, ImageStore, Listing, Mask, Source, Stamp
from patchloom.data.labels.taxonomy import check_level
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED

# Names of the number 0 that go with it where 0 means 'not labelled'.
_NO_CLASS = ("background", "other", "others", "void", "unlabelled", "unlabeled", "ignore")
MOST_CLASSES = 1 << 15


def of_masks(source: Source, *, reduce_zero_label: bool = False, level: str | None = None) -> Source:
    """The same pictures without labels of their own; the classes are what the numbers in their masks mean.

    With `reduce_zero_label` 0 means 'not labelled', and 1 is the first class (ADE20K). A `level` of the taxonomy joins
    classes; those that it does not name stay.
    """
    if not has_masks(source.train.images):
        raise UsageError(
            f"{source.name} has no masks to learn from; expected a folder with images/ and masks/, "
            "parquet with a column 'mask', or shapes"
        )

    levels = source.train.levels
    if level is not None:
        check_level(level, dict.fromkeys(levels, ()))

    unnamed = not source.train.images.mask_names

    def images_of(listing: Listing) -> ImageStore:
        images = _from_one(listing.images) if reduce_zero_label else _without_ignored(listing.images, numbers)
        return images if level is None else _joined(images, levels[level])

    # An ignored number among those of classes can only be taken out where they are all known.
    inside = unnamed and not reduce_zero_label and ignored_number(source.train.images) not in (NOT_LABELED, UNLABELED)
    numbers = _numbers(list(source.listings.values())) if inside else ()
    listings = {split: replace(listing, images=images_of(listing)) for split, listing in source.listings.items()}
    names = _names(listings["train"].images)
    notes = source.notes
    if not names:
        names = _numbers(list(listings.values()))
    if unnamed:
        told = f"classes are called {names[0]} to {names[-1]}"
        notes = (*notes, f"the masks' numbers have no names (classes.txt, or --names FILE): {told}")
    learned = {
        split: replace(listing, labels=np.full(len(listing), UNLABELED), names=names, levels={})
        for split, listing in listings.items()
    }
    test = learned.get("val") if source.test is source.val else learned.get("test")
    return replace(source, train=learned["train"], val=learned.get("val"), test=test, notes=notes)


def has_masks(images: ImageStore) -> bool:
    """Whether pictures of this source have masks."""
    return bool(images.mask_names) or images.mask_ignore is not None


def ignored_number(images: ImageStore) -> int:
    """The number in the masks that stands for 'not labelled'; none of them where the source says nothing."""
    return UNLABELED if images.mask_ignore is None else images.mask_ignore


def _names(images: ImageStore) -> tuple[str, ...]:
    """The names of the classes; that of 'not labelled' is no class where it stands last."""
    names = images.mask_names
    return names[:-1] if names and images.mask_ignore == len(names) - 1 else names


def _numbers(listings: Sequence[Listing]) -> tuple[str, ...]:
    """The numbers up to the largest in any mask that can be read, as names."""
    largest = -1
    for listing in listings:
        for row in listing.rows.tolist():
            try:
                mask = listing.images.mask(row)
            except DataError:
                continue  # which is named where the picture is trained on
            if mask is not None:
                numbers = mask.classes[mask.classes != ignored_number(listing.images)]
                largest = max(largest, int(numbers.max())) if numbers.size else largest
    if not 0 < largest < MOST_CLASSES:
        found = "no number" if largest < 0 else f"numbers up to {largest:,}"
        raise DataError(f"the masks hold {found}; expected class numbers from 0, of two classes or more")
    return tuple(map(str, range(largest + 1)))


def _without_ignored(images: ImageStore, numbers: tuple[str, ...]) -> ImageStore:
    """Classes numbered without the one that stands for 'not labelled'; `numbers` are the names where there are none."""
    names, ignored = images.mask_names or numbers, ignored_number(images)
    if not 0 <= ignored < len(names) - 1:
        return images
    told = [UNLABELED if number == ignored else number - (number > ignored) for number in range(len(names))]
    return _Renumbered(images, told, tuple(name for number, name in enumerate(names) if number != ignored))


def _from_one(images: ImageStore) -> ImageStore:
    """Masks that begin at 1, with 0 for 'not labelled', numbered from 0."""
    names = images.mask_names
    names = names[1:] if names and names[0].lower() in _NO_CLASS else names
    most = len(names) or int(np.iinfo(images.mask_dtype).max)
    return _Renumbered(images, (UNLABELED, *range(most)), names)


def _joined(images: ImageStore, coarse: Mapping[str, str]) -> ImageStore:
    """Classes that one class of the level stands for, as that one."""
    told = [coarse.get(name, name) for name in images.mask_names]
    names = tuple(dict.fromkeys(told))
    return _Renumbered(images, [names.index(name) for name in told], names)


class _Renumbered(ImageStore):
    """Pictures whose masks have other numbers: `numbers` of each of their own, negative for 'not labelled'."""

    def __init__(self, images: ImageStore, numbers: Sequence[int], names: tuple[str, ...]) -> None:
        self._images = images
        self.mask_names = names
        self.mask_ignore = NOT_LABELED if images.mask_dtype is np.uint8 else UNLABELED
        self.mask_dtype = images.mask_dtype
        self.home, self.always_readable = images.home, images.always_readable
        self._numbers = np.array([*numbers, UNLABELED])
        self._stamp = hashlib.sha256(self._numbers.tobytes()).digest()[:8]

    def __len__(self) -> int:
        return len(self._images)

    def mask(self, index: int) -> Mask | None:
        """In the other numbers; those that have none stay, to be named as faults."""
        mask = self._images.mask(index)
        if mask is None:
            return None
        known = (mask.classes >= 0) & (mask.classes < len(self._numbers) - 1)
        if (own := self._images.mask_ignore) is not None:
            known &= mask.classes != own
        told = self._numbers[np.where(known, mask.classes, len(self._numbers) - 1)]
        unlabeled = ignored_number(self)
        ignored = np.zeros_like(known) if own is None else mask.classes == own
        numbers = np.where(known & (told >= 0), told, np.where(known | ignored, unlabeled, mask.classes))
        return Mask(numbers.astype(mask.classes.dtype), None)

    def read(self, index: int) -> Image.Image:
        """The picture."""
        return self._images.read(index)

    def where(self, index: int) -> str:
        """As its source says."""
        return self._images.where(index)

    def key(self, index: int) -> str:
        """As its source says."""
        return self._images.key(index)

    def encoded(self, index: int) -> Any:
        """As its source says."""
        return self._images.encoded(index)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Others than those of the source, whose masks were looked at in other numbers."""
        return [stamp and (self._stamp + stamp[0], *stamp[1:]) for stamp in self._images.stamps(rows)]
