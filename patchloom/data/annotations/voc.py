"""Boxes in Pascal VOC's format: one XML file per image, splits as lists of names.

    JPEGImages/a.jpg  Annotations/a.xml  ImageSets/Main/train.txt val.txt test.txt
    images/[train/]a.jpg  annotations/[train/]a.xml    folders with any names (found by `layout`), or one folder

VOC counts pixels from 1 and includes the last: 1 … 10 is 0 … 10 half-open. Difficult objects are ignored in training
and evaluation, as in VOC's own evaluation. Images that were resized after annotation differ in size from their XML
file: boxes are scaled if both sides have the same ratio, and are an error otherwise.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from patchloom.data.annotations.paired_files import (
    Pair,
    PairedFile,
    changed_with,
    files_of_pair,
    pair_up,
    source_of_rows,
    unpaired,
)
from patchloom.data.datasets import Source
from patchloom.data.images.image_store import Stamp
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import upright_size
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import parse_number, read_plain
from patchloom_runtime.untrusted_xml import parse_xml

LISTS = os.path.join("ImageSets", "Main")
MOST_BYTES = 1 << 20  # of one file
MOST_PIXELS = 1 << 31  # in a coordinate
_SAMPLED_IMAGES = 64  # whose sizes are compared before all are read
_ROUNDING = 1.5  # pixels by which a resized side may deviate from the ratio
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocBox(NamedTuple):
    """One object of a file."""

    name: str
    corners: tuple[float, float, float, float]
    difficult: bool


class VocFile(NamedTuple):
    """The objects of a file, and the size (height, width) of its image, or None if it has none."""

    objects: list[VocBox]
    size: tuple[int, int] | None


class VocImages(ImageFiles):
    """Image files, each with an XML file of boxes."""

    def __init__(self, root: Path, paths: Sequence[str], files: Sequence[str], names: tuple[str, ...]) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._files = ImageFiles(root, files)

    def boxes(self, index: int) -> np.ndarray:
        """Return the boxes. An unknown name has class −1, which `check` reports."""
        number = {name: i for i, name in enumerate(self.object_names)}
        file = self._file(index)
        rows = [(*box.corners, number.get(box.name, -1)) for box in file.objects]
        boxes = np.array(rows, np.float64).reshape(-1, 5)
        boxes[:, :4] *= self.scale(index, file)
        return boxes

    def scale(self, index: int, file: VocFile | None = None) -> float:
        """Return the factor by which boxes are scaled to fit the image. Raise DataError if the shapes differ."""
        annotated = (file or self._file(index)).size
        if annotated is None:
            return 1.0
        size = upright_size(self.encoded(index), self.where(index))
        if size == annotated:
            return 1.0
        (height, width), (old_height, old_width) = size, annotated
        ratio = max(size) / max(annotated)
        if abs(height - ratio * old_height) > _ROUNDING or abs(width - ratio * old_width) > _ROUNDING:
            sizes = f"{old_width}×{old_height}, the image is {width}×{height}"
            raise DataError(f"{self._files.where(index)}: <size> is {sizes}; expected the same size or shape")
        return ratio

    def crowd(self, index: int) -> np.ndarray:
        """Return which boxes are of difficult objects."""
        return np.array([box.difficult for box in self._file(index).objects], bool)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return stamps that change with image and XML file."""
        return changed_with(super().stamps(rows), self._files.stamps(rows))

    def _file(self, index: int) -> VocFile:
        return read_voc(self._files.encoded(index), self._files.where(index))


def open_voc(root: Path, pairs: Sequence[Pair], title: str) -> Source:
    """Open images and XML files in pairs of folders."""
    rows: list[PairedFile] = []
    faults = []
    for pair in pairs:
        images, files = files_of_pair(root, pair, (".xml",))
        faults += unpaired(root, pair, images, files, "boxes")
        rows += pair_up(pair, images, files, _listed(root / os.path.dirname(pair.others)))
    if not rows:
        first = pairs[0]
        raise DataError(
            f"{printable(root)}: no image of {first.images} has an XML file of the same name in {first.others}"
        )
    names: set[str] = set()
    for row in rows:
        place = root / row.other
        try:
            names |= {box.name for box in read_voc(read_plain(place, MOST_BYTES), printable(place)).objects}
        except (DataError, OSError):
            continue  # reported by `check`
    open_files = partial(VocImages, root, names=tuple(sorted(names)))
    every = open_files([row.image for row in rows], [row.other for row in rows])
    return source_of_rows(f"{title} (VOC boxes)", rows, open_files, faults, _resized(every))


def _resized(images: VocImages) -> tuple[str, ...]:
    """Return a note if some sampled images differ in size from their XML file."""
    sampled = range(0, len(images), max(1, len(images) // _SAMPLED_IMAGES))[:_SAMPLED_IMAGES]
    scales = []
    for index in sampled:
        with suppress(DataError):  # reported by `check`
            scales.append(images.scale(index))
    other = [scale for scale in scales if scale != 1]
    if not other:
        return ()
    first = f"by {min(other):.3g}" + (f" to {max(other):.3g}" if max(other) - min(other) > 0.01 else "")
    return (
        f"{len(other)} of {len(sampled)} sampled images have another size than in their XML file: "
        f"boxes are scaled {first}",
    )


def _listed(folder: Path) -> dict[str, str]:
    """Map stems to splits by VOC's lists; empty if there are none."""
    lists = {
        path.stem: path for path in sorted((folder / LISTS).glob("*.txt")) if path.stem in ("train", "val", "test")
    }
    splits: dict[str, str] = {}
    for split, path in lists.items() if "train" in lists else ():
        try:
            lines = read_plain(path, MOST_BYTES).decode("utf-8", "replace").split("\n")
        except OSError as error:
            raise DataError(f"{printable(path)}: cannot be read ({error.strerror})") from error
        splits |= {line.split()[0]: split for line in lines if line.strip()}
    return splits


def read_voc(data: bytes, where: str) -> VocFile:
    """Parse one XML file. Raise DataError if it is damaged."""
    try:
        tree = parse_xml(data)
    except ValueError as error:
        raise DataError(f"{where}: cannot be read as XML ({error})") from error
    sides = [(tree.findtext(f"size/{side}") or "").strip() for side in ("height", "width")]
    height, width = (int(side) if side.isdecimal() and len(side) < 10 else 0 for side in sides)
    size = (height, width) if height and width else None
    return VocFile([_object(element, where) for element in tree.iter("object")], size)


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
