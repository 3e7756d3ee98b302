"""Stores of images: the images of one source, with their masks and boxes, read by position."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from patchloom_runtime.errors import DataError

if TYPE_CHECKING:
    from patchloom.data.buckets.remote_file import AnyFile
    from patchloom_runtime.images.object_masks import ObjectMask

NOT_LABELED = 255  # class of an unlabeled pixel, in 8-bit masks
Stamp = tuple[bytes, int, int]  # name of an image below its home; `file_state` of its file


class Mask(NamedTuple):
    """The class of each pixel, as an index of `mask_names`, and its object: 0 for none, 1 for the first of `boxes` …"""

    classes: np.ndarray  # (H, W), with the store's `mask_dtype`
    instances: np.ndarray | None  # (H, W) uint8 or int16, or None for masks of classes only


class Objects(NamedTuple):
    """The annotated objects of one image."""

    boxes: np.ndarray  # (n, 5): x0, y0, x1, y1 in half-open pixels, index of `object_names`
    crowd: np.ndarray  # (n,) bool: groups of objects and difficult objects, ignored in training and evaluation
    areas: np.ndarray  # (n,) in pixels
    masks: "list[ObjectMask] | None" = None


class ImageStore(ABC):
    """The images of one source, read by position. Picklable, and usable after a fork."""

    home: str = ""  # folder of its files, the key of the scan cache; '' for none
    is_scanned = True  # False for images without files: training does not look for damaged ones first
    fingerprint: str = ""  # of the contents, for images that are not scanned; '' if their names suffice
    object_names: tuple[str, ...] = ()  # class names of `boxes`; empty without boxes
    mask_names: tuple[str, ...] = ()  # class names of `mask`; empty without masks
    mask_ignore: int | None = None  # the mask class of unlabeled pixels
    mask_dtype: type[np.integer] = np.uint8  # that holds the values of all masks: uint8, int16 or int32
    tells_objects_apart = False  # True if `mask` has `instances`

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Return a printable path, or a file and a row."""

    def key(self, index: int) -> str:
        """Return a name that does not change if the data moves to another folder or is listed in another order."""
        return self.where(index)

    def encoded(self, index: int) -> bytes | None:  # noqa: ARG002
        """Return the bytes of the file, for checksums and header checks, or None if there is no file."""
        return None

    def prefetch(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Read these images now, all at once; they are decoded next. For stores where one by one is slow."""

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return a value per row that differs once the image has changed, or None if that cannot be determined."""
        return [None] * len(rows)

    def mask(self, index: int) -> Mask | None:  # noqa: ARG002
        """Return the mask, or None if the source has no masks."""
        return None

    def boxes(self, index: int) -> np.ndarray | None:  # noqa: ARG002
        """Return (objects, 5): x0, y0, x1, y1 in half-open pixels, index of `object_names`; or None."""
        return None

    def crowd(self, index: int) -> np.ndarray | None:  # noqa: ARG002
        """Return (objects,) bool, True for boxes of groups and of difficult objects; None if there are none."""
        return None

    def objects(self, index: int) -> Objects:
        """Return the objects of an image of a source with boxes."""
        from patchloom_runtime.images.object_masks import masks_of_instances  # not needed for classification

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
    """Images in memory: (N, H, W) gray or (N, H, W, 3) RGB, uint8."""

    is_scanned = False

    def __init__(self, arrays: np.ndarray, name: str) -> None:
        self._arrays = arrays
        self._name = name

    def __len__(self) -> int:
        return len(self._arrays)

    def read(self, index: int) -> Image.Image:
        """Return the image, mode RGB."""
        return Image.fromarray(self._arrays[index]).convert("RGB")

    def where(self, index: int) -> str:
        """Return dataset and position."""
        return f"{self._name}, image {index}"

    def key(self, index: int) -> str:
        """Return dataset and position, in the words that runs have recorded and held-out splits depend on."""
        return f"{self._name}, picture {index}"


def file_state(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the size of a file and a number that changes with it, or None if it does not exist.

    The number depends on modification time, change time and inode: users can set the first, only the system the others.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    known = b"%d %d %d" % (status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return status.st_size, int.from_bytes(hashlib.blake2b(known, digest_size=7).digest(), "big")


def _path_of(file: "AnyFile") -> str:
    """Return the path of a file, or one that stands for a file in a bucket."""
    return os.fspath(file) if isinstance(file, str | os.PathLike) else file.stands_at


def common_folder(files: Sequence["AnyFile"]) -> str:
    """Return the deepest folder that contains all files."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(_path_of(file))) for file in files])


def stamps_inside(files: Sequence["AnyFile"], home: str, places: Sequence[tuple[int, str]]) -> list[Stamp | None]:
    """Return stamps of images that share files. `places` has the file number and the name in it per image."""
    states = [file_state(file) if isinstance(file, str | os.PathLike) else file.state for file in files]
    names = [os.fsencode(os.path.relpath(_path_of(file), home)) for file in files]
    return [
        (names[number] + b"\0" + os.fsencode(name), *state) if (state := states[number]) else None
        for number, name in places
    ]
