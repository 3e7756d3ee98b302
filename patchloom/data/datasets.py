"""What every source of images looks like to the rest of patchloom.

A source (a folder, a parquet file, torchvision's sets, shards …) lists its `Pictures` with class names;
`splits` turns listings into `ImageSet`s: pictures that can be read one by one, with integer labels that index
one `ClassTable`. Nothing here augments or batches.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import MAX_PIXELS, WHOLE, decode_shrunk
from patchloom_runtime.images.samples import PARTS, UNLABELED, LayerKind, Sample, checked_boxes, checked_layer

if TYPE_CHECKING:
    from patchloom_runtime.images.object_masks import ObjectMask

NOT_LABELED = 255  # the class of a pixel that has none, in masks of 8 bits
Stamp = tuple[bytes, int, int]  # a picture's name below its home; `file_state` of the file it is in

Progress = Callable[[int, int], None]  # pictures done, of so many


@dataclass(frozen=True)
class ClassTable:
    """Class names in the order of their numbers, built from the training split alone.

    `levels` holds coarser groupings of the same classes: level name → (names of its classes, the coarse
    number of each fine class). `also` are other names of the classes (`plain_form`) → their numbers.
    """

    names: tuple[str, ...]
    levels: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = field(default_factory=dict)
    also: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.names)


def plain_form(name: str) -> str:
    """A class name as other names of classes are compared: without case, with spaces for underscores."""
    return " ".join(name.replace("_", " ").casefold().split())


class Mask(NamedTuple):
    """What each pixel shows: `classes` holds numbers of `mask_names`; `instances` 0 for none, 1 for the object of the
    first of `boxes`, 2 for the second …"""

    classes: np.ndarray  # (H, W) of the source's `mask_dtype`
    instances: np.ndarray | None  # (H, W) uint8 or int16, or None where objects are not told apart


class Objects(NamedTuple):
    """The objects of one picture, as they are annotated."""

    boxes: np.ndarray  # (n, 5): x0, y0, x1, y1 in half-open pixels, number of `object_names`
    crowd: np.ndarray  # (n,) bool: a heap of them, or one too hard to tell; neither learned nor asked for
    areas: np.ndarray  # (n,) pixels
    masks: "list[ObjectMask] | None" = None


@runtime_checkable
class ImageSet(Protocol):
    """Pictures with labels, read by position; safe to use from several worker processes."""

    @property
    def classes(self) -> ClassTable:
        """The table that `labels` are numbers of."""
        ...

    @property
    def labels(self) -> np.ndarray:
        """(len,) int64, numbers of `classes`; UNLABELLED for a picture without a label."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """What `sample` reads beside the picture: names of `samples.PARTS`."""
        ...

    @property
    def layers(self) -> dict[str, LayerKind]:
        """What the layers among `parts` hold."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB. An unreadable file is a `DataError` that names it."""
        ...

    def sample(self, index: int, reduction: Callable[[tuple[int, int]], int] | None = None) -> Sample:
        """The picture with its `parts`. What cannot be read, or does not fit the picture, is a `DataError`.

        `reduction` says for (width, height) how many times smaller the picture may be decoded (`decode_shrunk`).
        """
        ...

    def where(self, index: int) -> str:
        """Where the picture came from, for messages: a path, or a file and a row."""
        ...

    def key(self, index: int) -> str:
        """The picture's name within its data set, the same wherever the data lie."""
        ...


class ImageStore(ABC):
    """The pictures of one source, read by position; picklable, and usable after a fork."""

    home: str = ""  # the folder its files lie in, by which `scan` keeps what it saw; '' for none
    always_readable = False  # made in memory, where no file can be damaged
    object_names: tuple[str, ...] = ()  # what the classes of `boxes` mean; empty without boxes
    mask_names: tuple[str, ...] = ()  # what the classes of `mask` mean; empty without masks
    mask_ignore: int | None = None  # the mask class that stands for 'not labelled'
    mask_dtype: type[np.integer] = np.uint8  # what all its masks fit into: uint8, int16 or int32
    tells_objects_apart = False  # `mask` has `instances`

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB."""

    @abstractmethod
    def where(self, index: int) -> str:
        """A path, or a file and a row, that can be printed."""

    def key(self, index: int) -> str:
        """A name that stays the same when the data move to another folder or are listed in another order."""
        return self.where(index)

    def encoded(self, index: int) -> bytes | None:  # noqa: ARG002
        """The file's bytes, undecoded (for checksums and header checks); None where there is no file."""
        return None

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """What differs once a picture has changed, of each row; None where that cannot be told."""
        return [None] * len(rows)

    def mask(self, index: int) -> Mask | None:  # noqa: ARG002
        """What each pixel shows, or None where the source has no masks."""
        return None

    def boxes(self, index: int) -> np.ndarray | None:  # noqa: ARG002
        """(objects, 5): x0, y0, x1, y1 in half-open pixels, number of `object_names`; or None."""
        return None

    def crowd(self, index: int) -> np.ndarray | None:  # noqa: ARG002
        """(objects,) bool: which of `boxes` are heaps of objects, or too hard to tell; None where none is."""
        return None

    def objects(self, index: int) -> Objects:
        """What there is to find in a picture of a source with boxes."""
        from patchloom_runtime.images.object_masks import masks_of_instances  # which naming classes does without

        boxes = np.asarray(self.boxes(index), np.float64).reshape(-1, 5)
        masks, mask = None, self.mask(index) if self.tells_objects_apart else None
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        if mask is not None and mask.instances is not None:
            try:
                masks = masks_of_instances(mask.instances, len(boxes))
            except DataError as error:
                raise DataError(f"{self.where(index)}: {error}") from error
            areas = np.array([one.area for one in masks], np.float64)
        crowd = self.crowd(index)
        return Objects(boxes, np.zeros(len(boxes), bool) if crowd is None else crowd, areas, masks)


class ArrayImages(ImageStore):
    """Pictures kept in memory, undecoded by nature: (N, H, W) grey or (N, H, W, 3) RGB, uint8."""

    always_readable = True

    def __init__(self, arrays: np.ndarray, name: str) -> None:
        self._arrays = arrays
        self._name = name

    def __len__(self) -> int:
        return len(self._arrays)

    def read(self, index: int) -> Image.Image:
        """The picture, mode RGB."""
        return Image.fromarray(self._arrays[index]).convert("RGB")

    def where(self, index: int) -> str:
        """Data set and position."""
        return f"{self._name}, picture {index}"


def name_some(names: Sequence[str], counts: Sequence[int] | None = None, limit: int = 8) -> str:
    """'a' (3 pictures), 'b' (1 picture) and 4 more."""
    shown = [repr(name) for name in names[:limit]]
    if counts is not None:
        shown = [f"{n} ({c} picture{'s' * (c != 1)})" for n, c in zip(shown, counts, strict=False)]
    more = len(names) - limit
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def file_state(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Bytes, and a number that is another once the file has changed or was replaced; None for what has gone.

    Anybody can set a file's modification time; the time of its last change of any kind and its inode are the system's.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    known = b"%d %d %d" % (status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return status.st_size, int.from_bytes(hashlib.blake2b(known, digest_size=7).digest(), "big")


def common_folder(files: Sequence[os.PathLike[str]]) -> str:
    """The deepest folder that all files lie in."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])


def stamps_inside(
    files: Sequence[os.PathLike[str]], home: str, places: Sequence[tuple[int, str]]
) -> list[Stamp | None]:
    """Stamps of pictures that share files: `places` holds the number of each one's file and its name in it."""
    states = [file_state(file) for file in files]
    names = [os.fsencode(os.path.relpath(file, home)) for file in files]
    return [
        (names[number] + b"\0" + os.fsencode(name), *state) if (state := states[number]) else None
        for number, name in places
    ]


@dataclass(frozen=True)
class Listing:
    """One split as its source has it, before classes are matched by name.

    `labels` are numbers of `names`, which may include classes without a picture. `levels` maps a level's name
    to {class: coarse class}. `rows` are positions in `pictures`, so that splits can share one store.
    """

    images: ImageStore
    rows: np.ndarray  # (len,) int64
    labels: np.ndarray  # (len,) int64
    names: tuple[str, ...]
    levels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Fault:
    """Something wrong with masks, boxes or sentences."""

    where: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Source:
    """A data set as it was found; `val` and `test` are None where it has no such split, `faults` those of its lists."""

    name: str
    train: Listing
    val: Listing | None = None
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    test: Listing | None = None
    is_part: bool = False  # the val or test folder of a larger set, given by itself

    @property
    def listings(self) -> dict[str, Listing]:
        """Split → its pictures; test only once where it stands for val."""
        splits = {"train": self.train, "val": self.val, "test": None if self.test is self.val else self.test}
        return {split: listing for split, listing in splits.items() if listing is not None}


@dataclass(frozen=True)
class LabeledImages:
    """The `ImageSet` of every source: some rows of its pictures, with their numbers in one class table."""

    images: ImageStore
    rows: np.ndarray  # (len,) int64
    labels: np.ndarray  # (len,) int64
    classes: ClassTable
    notes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    categories: tuple[int, ...] | None = None  # what each of `pictures.object_names` is told as, −1 for nothing

    def __len__(self) -> int:
        return len(self.rows)

    def with_object_names(self, names: Sequence[str], coarse: Mapping[str, str] | None = None) -> "LabeledImages":
        """The same pictures, whose objects are numbered by these names; `coarse` is the name of each at that level."""
        number = {name: i for i, name in enumerate(names)}
        own = self.images.object_names
        return replace(self, categories=tuple(number.get((coarse or {}).get(name, name), -1) for name in own))

    def with_parts(self, *parts: str) -> "LabeledImages":
        """The same pictures, of which `sample` reads these parts too."""
        source = self.images
        has_masks = bool(source.mask_names) or source.mask_ignore is not None
        offers = {
            "mask": has_masks,
            "instances": has_masks and source.tells_objects_apart,
            "boxes": bool(source.object_names),
        }
        offered = [name for name in PARTS if offers[name]]
        if missing := [name for name in parts if name not in offered]:
            has = " and ".join(offered) or "nothing"
            raise UsageError(f"these data have no {' and '.join(missing)}; beside pictures they have {has}")
        return replace(self, parts=parts)

    @property
    def layers(self) -> dict[str, LayerKind]:
        """What the layers among `parts` hold."""
        source = self.images
        ignored = source.mask_ignore
        if ignored is None:
            ignored = NOT_LABELED if source.mask_dtype is np.uint8 else UNLABELED
        kinds = {"mask": LayerKind(source.mask_dtype, ignored), "instances": LayerKind(np.int16, 0)}
        return {name: kinds[name] for name in self.parts if name in kinds}

    def sample(self, index: int, reduction: Callable[[tuple[int, int]], int] | None = None) -> Sample:
        """The picture with its `parts`, to which pixels belong: one with parts comes whole."""
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
            except (ValueError, TypeError, IndexError) as error:  # whatever a foreign column holds
                raise DataError(f"{where}: boxes cannot be read ({error})") from error
        return Sample(image, layers, boxes)

    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB."""
        image = self.images.read(int(self.rows[index]))
        self._refuse_reduced(image, index)
        return image

    def _refuse_reduced(self, image: Image.Image, index: int) -> None:
        """Boxes are in pixels of the whole picture, which one of too many pixels is not."""
        if self.images.object_names and (whole := image.info.get(WHOLE)):
            raise DataError(
                f"{self.where(index)}: {whole[0]}×{whole[1]} pixels, more than the limit of {MAX_PIXELS:,} for images "
                "with boxes; shrink image and boxes"
            )

    def where(self, index: int) -> str:
        """Where the picture came from, for messages."""
        return self.images.where(int(self.rows[index]))

    def key(self, index: int) -> str:
        """The picture's name within its data set."""
        return self.images.key(int(self.rows[index]))

    def encoded(self, index: int) -> bytes | None:
        """The undecoded file, or None where there is none."""
        return self.images.encoded(int(self.rows[index]))

    def mask(self, index: int) -> Mask | None:
        """What each pixel shows, in numbers of `pictures.mask_names`; None without masks."""
        return self.images.mask(int(self.rows[index]))

    def boxes(self, index: int) -> np.ndarray | None:
        """(objects, 5): x0, y0, x1, y1, number of `pictures.object_names`; None without boxes."""
        return self.images.boxes(int(self.rows[index]))

    def objects(self, index: int) -> Objects:
        """What there is to find in the picture."""
        found = self.images.objects(int(self.rows[index]))
        if self.categories is None or not len(found.boxes):
            return found
        boxes = found.boxes.copy()
        boxes[:, 4] = np.array(self.categories)[boxes[:, 4].astype(np.int64)]
        known = np.flatnonzero(boxes[:, 4] >= 0)
        masks = None if found.masks is None else [found.masks[i] for i in known]
        return Objects(boxes[known], found.crowd[known], found.areas[known], masks)


@dataclass(frozen=True)
class Splits:
    """A data set as `train` uses it: sets over one class table, and what was noticed while opening it."""

    name: str
    train: ImageSet
    val: ImageSet
    notes: Sequence[str] = ()
    test: ImageSet | None = None  # never looked at while training

    @property
    def classes(self) -> ClassTable:
        """The table all splits are numbered by."""
        return self.train.classes
