"""Boxes as Pascal VOC keeps them: one XML file per picture, splits as lists of names.

    JPEGImages/a.jpg  Annotations/a.xml  ImageSets/Main/train.txt val.txt test.txt
    images/[train/]a.jpg  annotations/[train/]a.xml

VOC counts pixels from 1 and includes the last: 1 … 10 are the half-open 0 … 10. What it calls difficult is neither
learned nor asked for, as in its own evaluation.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from patchloom.data.sets import Source, Stamp
from patchloom.data.sources.beside import by_stem, changed_with, images_by_stem, lonely, source_of_splits
from patchloom.data.splits import SplitNames, group_by_split
from patchloom.data.trees.files import FilePictures
from patchloom.errors import DataError
from patchloom.foreign import parse_number, read_plain
from patchloom.printable import printable

IMAGES, ANNOTATIONS = ("JPEGImages", "images", "imgs"), ("Annotations", "annotations", "labels", "xml")
LISTS = os.path.join("ImageSets", "Main")
MOST_BYTES = 1 << 20  # of one file
MOST_PIXELS = 1 << 31  # from the corner of an image
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocBox(NamedTuple):
    """One object of a file."""

    name: str
    corners: tuple[float, float, float, float]
    difficult: bool


class VocPictures(FilePictures):
    """Image files, each with an XML file of boxes."""

    def __init__(self, root: Path, paths: Sequence[str], files: Sequence[str], names: tuple[str, ...]) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._files = FilePictures(root, files)

    def boxes(self, index: int) -> np.ndarray:
        """Its boxes; an unknown name is a class of −1, which `check` tells."""
        number = {name: i for i, name in enumerate(self.object_names)}
        rows = [(*box.corners, number.get(box.name, -1)) for box in self._objects(index)]
        return np.array(rows, np.float64).reshape(-1, 5)

    def crowd(self, index: int) -> np.ndarray:
        """Which are difficult."""
        return np.array([box.difficult for box in self._objects(index)], bool)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Of picture and boxes."""
        return changed_with(super().stamps(rows), self._files.stamps(rows))

    def _objects(self, index: int) -> list[VocBox]:
        return read_voc(self._files.encoded(index), self._files.where(index))


def open_voc(root: Path) -> Source | None:
    """The folder as pictures with XML files; None where it has none."""
    images = next((name for name in IMAGES if os.path.isdir(root / name)), None)
    found = (name for name in ANNOTATIONS if os.path.isdir(root / name) and by_stem(root / name, (".xml",)))
    annotations = next(found, None) if images else None
    if images is None or annotations is None:
        return None
    pictures, files = images_by_stem(root / images), by_stem(root / annotations, (".xml",))
    faults = lonely(root / images, pictures, files, "picture without boxes", annotations)
    faults += lonely(root / annotations, files, pictures, "boxes without picture", images)
    both = [stem for stem in pictures if stem in files]
    if not both:
        raise DataError(f"{printable(root)}: no picture of {images} has an XML file of the same name in {annotations}")
    splits, said = _splits(root, both)
    names: set[str] = set()
    for stem in both:
        place = root / annotations / files[stem]
        try:
            names |= {box.name for box in read_voc(read_plain(place, MOST_BYTES), printable(place))}
        except (DataError, OSError):
            continue  # which `check` tells of the picture
    known = tuple(sorted(names))

    def chosen(groups: Sequence[str]) -> VocPictures:
        stems = [stem for stem in both if splits.get(stem) in groups]
        paths = [os.path.join(images, pictures[stem]) for stem in stems]
        return VocPictures(root, paths, [os.path.join(annotations, files[stem]) for stem in stems], known)

    return source_of_splits(f"{printable(root.name)} (VOC boxes)", said, chosen, faults)


def _splits(root: Path, stems: Sequence[str]) -> tuple[dict[str, str], SplitNames]:
    """Stem → its split, by the lists or by the folder it lies in; and what these names say."""
    lists = {path.stem: path for path in sorted((root / LISTS).glob("*.txt")) if path.stem in ("train", "val", "test")}
    if "train" in lists:
        splits: dict[str, str] = {}
        for split, path in lists.items():
            try:
                lines = read_plain(path, MOST_BYTES).decode("utf-8", "replace").split("\n")
            except OSError as error:
                raise DataError(f"{printable(path)}: cannot be read ({error.strerror})") from error
            splits |= {line.split()[0]: split for line in lines if line.strip()}
        return splits, group_by_split(sorted(lists))
    splits = {stem: os.path.dirname(stem) for stem in stems}
    return splits, group_by_split(sorted(set(splits.values())))


def read_voc(data: bytes, where: str) -> list[VocBox]:
    """The objects of one XML file; a DataError where it is none."""
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise DataError(f"{where}: declares entities, which annotations have no use for; refused")
    try:
        tree = ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{where}: cannot be read as XML ({error})") from error
    return [_object(element, where) for element in tree.iter("object")]


def _object(element: ElementTree.Element, where: str) -> VocBox:
    name = (element.findtext("name") or "").strip()
    if not name:
        raise DataError(f"{where}: an object without a name")
    try:
        x0, y0, x1, y1 = (parse_number(element.findtext(f"bndbox/{corner}") or "") for corner in _CORNERS)
    except ValueError as error:
        raise DataError(f"{where}: {name} has no bndbox of {', '.join(_CORNERS)} ({error})") from error
    if max(map(abs, (x0, y0, x1, y1))) > MOST_PIXELS:
        raise DataError(f"{where}: {name} has a bndbox of more than {MOST_PIXELS:,} pixels")
    return VocBox(name, (x0 - 1, y0 - 1, x1, y1), (element.findtext("difficult") or "0").strip() == "1")
