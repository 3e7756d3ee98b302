"""Datasets of images: the interface between sources and the rest of patchloom.

    ImageStore       the images of one source (a folder, a parquet file, shards …), read by position (`image_store`)
    Listing          one split of a source: rows of a store, with class names
    Source           train, val and test listings
    LabeledImages    an `ImageSet`: rows of a store, with labels that index one `ClassTable`
    Splits           train, val and test as `ImageSet`s

`sources` makes listings and `splits` turns them into image sets. Nothing here augments or batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from patchloom.data.images.image_store import NOT_LABELED, ImageStore, Mask, Objects
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import MAX_PIXELS, WHOLE, decode_shrunk
from patchloom_runtime.images.samples import PARTS, UNLABELED, LayerKind, Sample, checked_boxes, checked_layer

if TYPE_CHECKING:
    from patchloom.data.targets import ImageTargets  # predicting does not need it

Progress = Callable[[int, int], None]  # images done, and their total


@dataclass(frozen=True)
class ClassTable:
    """Class names in the order of their numbers, built from the training split alone.

    `levels` maps the name of a level to (names of its classes, coarse number of each class). `also` maps alternative
    class names (in `plain_form`) to class numbers.
    """

    names: tuple[str, ...]
    levels: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = field(default_factory=dict)
    also: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.names)


def plain_form(name: str) -> str:
    """Return a class name in the form in which alternative names are compared: lower case, spaces for underscores."""
    return " ".join(name.replace("_", " ").casefold().split())


@runtime_checkable
class ImageSet(Protocol):
    """Labeled images, read by position. Safe to use from several worker processes."""

    @property
    def classes(self) -> ClassTable:
        """The class table that `labels` index."""
        ...

    @property
    def labels(self) -> np.ndarray:
        """(len,) int64 class numbers, UNLABELED for images without a label."""
        ...

    @property
    def targets(self) -> "ImageTargets | None":
        """Labels or numbers of each image that are learned instead of its class, or None."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """What `sample` reads in addition to the image: names of `samples.PARTS`."""
        ...

    @property
    def layers(self) -> dict[str, LayerKind]:
        """Type and fill value of each layer (mask, instances) in `parts`."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB. Raise DataError, with the file's name, if it cannot be read."""
        ...

    def sample(self, index: int, reduction: Callable[[tuple[int, int]], int] | None = None) -> Sample:
        """Read the image with its `parts`. Raise DataError if one cannot be read or does not fit the image.

        `reduction` maps (width, height) to the factor by which the image may be decoded smaller (`decode_shrunk`).
        """
        ...

    def where(self, index: int) -> str:
        """Return the location of the image for messages: a path, or a file and a row."""
        ...

    def key(self, index: int) -> str:
        """Return the name of the image within its dataset, which does not depend on where the data is stored."""
        ...


def name_some(names: Sequence[str], counts: Sequence[int] | None = None, limit: int = 8) -> str:
    """Return a list of names for messages: 'a' (3 images), 'b' (1 image) and 4 more."""
    listed = [repr(name) for name in names[:limit]]
    if counts is not None:
        listed = [f"{n} ({c} image{'s' * (c != 1)})" for n, c in zip(listed, counts, strict=False)]
    more = len(names) - limit
    return ", ".join(listed) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Listing:
    """One split of a source, before classes are matched by name.

    `labels` index `names`, which may include classes without an image. `levels` maps the name of a level to
    {class: coarse class}. `rows` are positions in `images`, so that splits can share one store.
    """

    images: ImageStore
    rows: np.ndarray  # (len,) int64
    labels: np.ndarray  # (len,) int64
    names: tuple[str, ...]
    levels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    targets: "ImageTargets | None" = None  # a file may have several labels, or numbers, in addition to `labels`

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, positions: np.ndarray) -> "Listing":
        """Return some of the images, by position or by a mask of booleans."""
        targets = self.targets and self.targets.rows(positions)
        return replace(self, rows=self.rows[positions], labels=self.labels[positions], targets=targets)

    @cached_property
    def is_classified(self) -> bool:
        """Whether an image has a class. Without any, the images have other targets, masks or boxes, or nothing."""
        return bool(np.any(self.labels != UNLABELED))

    @property
    def learned(self) -> "ImageTargets | None":
        """The targets, unless the images have classes, which come first."""
        return None if self.is_classified else self.targets

    @property
    def counts(self) -> np.ndarray:
        """Images of each class of `names`, or to which each label applies."""
        if self.learned is not None:
            return self.learned.counts
        return np.bincount(self.labels[self.labels != UNLABELED], minlength=len(self.names))

    def labels_of(self, position: int) -> list[str]:
        """Return the class of an image, or the labels that apply to it."""
        if self.learned is not None:
            return self.learned.labels_of(position)
        label = int(self.labels[position])
        return [] if label == UNLABELED else [self.names[label]]


@dataclass(frozen=True)
class Fault:
    """A fault of masks, boxes, labels or sentences."""

    where: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Source:
    """An opened dataset. `val` and `test` are None if it has no such split; `faults` are those of its lists."""

    name: str
    train: Listing
    val: Listing | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    test: Listing | None = None
    is_part: bool = False  # True for the val or test folder of a larger dataset, opened by itself
    fold: tuple[int, int] | None = None  # fold of train that becomes val, counted from 1, and the number of folds

    @property
    def listings(self) -> dict[str, Listing]:
        """Listings by split. A test split that is also used as val appears once, as val."""
        splits = {"train": self.train, "val": self.val, "test": None if self.test is self.val else self.test}
        return {split: listing for split, listing in splits.items() if listing is not None}


@dataclass(frozen=True)
class LabeledImages:
    """The `ImageSet` of every source: rows of a store, with labels that index one class table."""

    images: ImageStore
    rows: np.ndarray  # (len,) int64
    labels: np.ndarray  # (len,) int64
    classes: ClassTable
    notes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    categories: tuple[int, ...] | None = None  # box class of each of `images.object_names`; −1 drops its boxes
    targets: "ImageTargets | None" = None  # learned instead of `labels`; their names are those of `classes`

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, positions: np.ndarray) -> "LabeledImages":
        """Return some of the images, by position."""
        targets = self.targets and self.targets.rows(positions)
        return replace(self, rows=self.rows[positions], labels=self.labels[positions], targets=targets)

    def with_object_names(self, names: Sequence[str], coarse: Mapping[str, str] | None = None) -> "LabeledImages":
        """Return a copy whose box classes index `names`; `coarse` maps names to those of a coarser level."""
        number = {name: i for i, name in enumerate(names)}
        own = self.images.object_names
        return replace(self, categories=tuple(number.get((coarse or {}).get(name, name), -1) for name in own))

    def with_parts(self, *parts: str) -> "LabeledImages":
        """Return a copy whose `sample` also reads these parts."""
        source = self.images
        has_masks = bool(source.mask_names) or source.mask_ignore is not None
        has_part = {
            "mask": has_masks,
            "instances": has_masks and source.tells_objects_apart,
            "boxes": bool(source.object_names),
        }
        offered = [name for name in PARTS if has_part[name]]
        if missing := [name for name in parts if name not in offered]:
            available = " and ".join(offered) or "nothing"
            raise UsageError(f"these data have no {' and '.join(missing)}; in addition to images they have {available}")
        return replace(self, parts=parts)

    @property
    def layers(self) -> dict[str, LayerKind]:
        """Type and fill value of each layer (mask, instances) in `parts`."""
        source = self.images
        ignored = source.mask_ignore
        if ignored is None:
            ignored = NOT_LABELED if source.mask_dtype is np.uint8 else UNLABELED
        kinds = {"mask": LayerKind(source.mask_dtype, ignored), "instances": LayerKind(np.int16, 0)}
        return {name: kinds[name] for name in self.parts if name in kinds}

    def sample(self, index: int, reduction: Callable[[tuple[int, int]], int] | None = None) -> Sample:
        """Read the image with its `parts`. An image with parts is not reduced, since these refer to its pixels."""
        if reduction and not self.parts and (data := self.encoded(index)) is not None:
            image, whole = decode_shrunk(data, self.where(index), reduction)
            self._refuse_reduced(image, index)
            return Sample(image, whole=whole if whole != image.size else None)
        image = self.read(index)
        if not self.parts:
            return Sample(image)
        where, layers, boxes = self.where(index), {}, None
        mask = self.mask(index) if self.layers else None
        for name, kind in self.layers.items():
            numbers = None if mask is None else mask.classes if name == "mask" else mask.instances
            if numbers is None:
                raise DataError(f"{where}: has no {name}")
            layers[name] = checked_layer(numbers, kind, image.size, where)
        if "boxes" in self.parts:
            try:
                boxes = checked_boxes(self.boxes(index), self.images.object_names, where)
                crowd = self.images.crowd(int(self.rows[index]))
                boxes = boxes if crowd is None else boxes[~crowd]
                if self.categories is not None:
                    boxes[:, 4] = np.array(self.categories, np.float32)[boxes[:, 4].astype(np.int64)]
                    boxes = boxes[boxes[:, 4] >= 0]
            except (ValueError, TypeError, IndexError) as error:  # a column of foreign data may hold anything
                raise DataError(f"{where}: boxes cannot be read ({error})") from error
        return Sample(image, layers, boxes)

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        image = self.images.read(int(self.rows[index]))
        self._refuse_reduced(image, index)
        return image

    def prefetch(self, positions: Sequence[int]) -> None:
        """Read the bytes of these images now, all at once, where one by one is slow."""
        self.images.prefetch([int(self.rows[position]) for position in positions])

    def _refuse_reduced(self, image: Image.Image, index: int) -> None:
        """Raise DataError if an image with boxes was decoded smaller, since boxes are in pixels of the full image."""
        if self.images.object_names and (whole := image.info.get(WHOLE)):
            raise DataError(
                f"{self.where(index)}: {whole[0]}×{whole[1]} pixels, more than the limit of {MAX_PIXELS:,} for images "
                "with boxes; shrink image and boxes"
            )

    def where(self, index: int) -> str:
        """Return the location of the image, for messages."""
        return self.images.where(int(self.rows[index]))

    def key(self, index: int) -> str:
        """Return the name of the image within its dataset."""
        return self.images.key(int(self.rows[index]))

    def encoded(self, index: int) -> bytes | None:
        """Return the bytes of the file, or None if there is none."""
        return self.images.encoded(int(self.rows[index]))

    def mask(self, index: int) -> Mask | None:
        """Return the mask, whose classes index `images.mask_names`, or None."""
        return self.images.mask(int(self.rows[index]))

    def boxes(self, index: int) -> np.ndarray | None:
        """Return (objects, 5): x0, y0, x1, y1, index of `images.object_names`; or None."""
        return self.images.boxes(int(self.rows[index]))

    def objects(self, index: int) -> Objects:
        """Return the objects of the image."""
        objects = self.images.objects(int(self.rows[index]))
        if self.categories is None or not len(objects.boxes):
            return objects
        boxes = objects.boxes.copy()
        boxes[:, 4] = np.array(self.categories)[boxes[:, 4].astype(np.int64)]
        known = np.flatnonzero(boxes[:, 4] >= 0)
        masks = None if objects.masks is None else [objects.masks[i] for i in known]
        return Objects(boxes[known], objects.crowd[known], objects.areas[known], masks)


@dataclass(frozen=True)
class Splits:
    """A dataset as `train` uses it: splits over one class table, and notes on how it was opened."""

    name: str
    train: ImageSet
    val: ImageSet
    notes: Sequence[str] = ()
    test: ImageSet | None = None  # not used in training

    @property
    def classes(self) -> ClassTable:
        """The class table of all splits."""
        return self.train.classes
