"""Sources whose images are learned as wholes with several labels, or with numbers, each."""

from dataclasses import replace

import numpy as np

from patchloom.data.annotations.mask_classes import has_masks, ignored_number
from patchloom.data.datasets import Listing, Source
from patchloom.data.targets import ImageTargets, labels_of_lists
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED


def of_labels(source: Source) -> Source:
    """Return the source with the labels that apply to each image, instead of classes, masks or boxes.

    They are those of the labels file, or else the classes of the objects or of the pixels in an image, or else its
    class alone.
    """
    return _with_targets(source, {split: _labels(listing) for split, listing in source.listings.items()})


def of_numbers(source: Source) -> Source:
    """Return the source with the numbers of its labels file, instead of classes."""
    targets = {split: listing.targets for split, listing in source.listings.items()}
    numbers = {split: of for split, of in targets.items() if of is not None and of.kind == "numbers"}
    if len(numbers) < len(targets):
        raise UsageError(
            f"{source.name} has no numbers to learn; expected a labels file with a column of numbers "
            "(--label-column NAME, or NAME,NAME for several)"
        )
    return _with_targets(source, numbers)


def _with_targets(source: Source, targets: dict[str, ImageTargets]) -> Source:
    listings = {
        split: replace(
            listing,
            labels=np.full(len(listing), UNLABELED),
            names=targets[split].names,
            levels={},
            targets=targets[split],
        )
        for split, listing in source.listings.items()
    }
    test = listings.get("val") if source.test is source.val else listings.get("test")
    return replace(source, train=listings["train"], val=listings.get("val"), test=test)


def _labels(listing: Listing) -> ImageTargets:
    images = listing.images
    if listing.targets is not None and listing.targets.kind == "labels":
        return listing.targets
    if images.object_names:
        present = [_classes_of_boxes(listing, row) for row in listing.rows.tolist()]
        return _present(present, images.object_names, listing)
    if has_masks(images):
        present = [_classes_of_mask(listing, row) for row in listing.rows.tolist()]
        return _present(present, images.mask_names, listing)
    if listing.is_classified:
        return _one_hot(listing)
    unlabeled = f"{images.where(int(listing.rows[0]))} has" if len(listing) else "the data have"
    raise DataError(
        f"{unlabeled} no labels; expected a labels file with one or several labels per image, class folders, boxes or "
        "masks"
    )


def _one_hot(listing: Listing) -> ImageTargets:
    """Return the classes as labels; an image without a class has unknown ones."""
    values = np.zeros((len(listing), len(listing.names)), np.float32)
    known = np.flatnonzero(listing.labels != UNLABELED)
    values[known, listing.labels[known]] = 1
    values[listing.labels == UNLABELED] = np.nan
    return ImageTargets("labels", listing.names, values, absent=0.0)


def _classes_of_boxes(listing: Listing, row: int) -> list[int] | None:
    boxes = listing.images.boxes(row)
    return None if boxes is None else sorted({int(number) for number in boxes[:, 4].tolist()})


def _classes_of_mask(listing: Listing, row: int) -> list[int] | None:
    """Return the classes in a mask, without that of unlabeled pixels; None if the mask cannot be read."""
    try:
        mask = listing.images.mask(row)
    except DataError:
        return None  # reported by the scan
    ignored = ignored_number(listing.images)
    return None if mask is None else [number for number in np.unique(mask.classes).tolist() if number != ignored]


def _present(present: list[list[int] | None], names: tuple[str, ...], listing: Listing) -> ImageTargets:
    """Return the classes that are present in each image as labels; images without annotations have unknown ones."""
    highest = max((number for own in present for number in own or ()), default=-1)
    every = names or tuple(map(str, range(highest + 1)))
    lists = [None if own is None else [every[n] for n in own if 0 <= n < len(every)] for own in present]
    targets = labels_of_lists(lists, listing.images.where(int(listing.rows[0])) if len(listing) else "the data")
    return targets.named([name for name in every if name in targets.names])
