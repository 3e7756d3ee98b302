"""Boxes or polygons as YOLO keeps them: one text file per picture, a line per object, in shares of the picture's sides.

    images/[train/]a.jpg  labels/[train/]a.txt      or  train/images/a.jpg  train/labels/a.txt
    class x y width height                          the middle of a box and its sides
    class x y x y x y …                             a polygon: a mask; where all lines have one, masks are learned

Names come from data.yaml (`names:`, a list or numbers with names) or classes.txt, a name per line. A picture without a
text file has no objects.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchloom.data.labels.class_names import names_by_line
from patchloom.data.pictures.decode import upright_size
from patchloom.data.pictures.object_masks import MOST_POINTS, ObjectMask, masks_from_coco, painted, refuse_many_objects
from patchloom.data.sets import Mask, Objects, Source, Stamp, file_state
from patchloom.data.sources.beside import by_stem, changed_with, images_by_stem, source_of_splits
from patchloom.data.splits import group_by_split
from patchloom.data.trees.files import FilePictures
from patchloom.errors import DataError
from patchloom.foreign import check_shape, parse_number, read_plain
from patchloom.printable import printable
from patchloom.recipes.plain_yaml import load_yaml

IMAGES, LABELS = "images", "labels"
NAMED = ("data.yaml", "dataset.yaml", "data.yml", "dataset.yml")
LISTED = ("classes.txt", "obj.names")
MOST_BYTES, MOST_CLASSES = 1 << 22, 10_000
_BOX_NUMBERS, _FEWEST_OF_POLYGON = 5, 7


class YoloObject(NamedTuple):
    """One line: a class, and the middle and sides of a box or the points of a polygon, in shares of the picture."""

    number: int
    values: tuple[float, ...]

    @property
    def is_polygon(self) -> bool:
        """Whether it is more than a box."""
        return len(self.values) > _BOX_NUMBERS - 1

    def corners(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """x0, y0, x1, y1 in pixels of a picture of (height, width)."""
        height, width = size
        if self.is_polygon:
            xs, ys = self.values[0::2], self.values[1::2]
            return min(xs) * width, min(ys) * height, max(xs) * width, max(ys) * height
        x, y, w, h = self.values
        return (x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height


class YoloPictures(FilePictures):
    """Image files, each with a text file of objects or none."""

    def __init__(self, root: Path, paths: Sequence[str], texts: Sequence[str], names: tuple[str, ...]) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._texts = list(texts)

    def boxes(self, index: int) -> np.ndarray:
        """Its boxes, in fractions of pixels."""
        size = self._size(index)
        rows = [(*each.corners(size), each.number) for each in self._objects(index)]
        return np.array(rows, np.float64).reshape(-1, 5)

    def objects(self, index: int) -> Objects:
        """With masks that may overlap, where lines are polygons."""
        found = super().objects(index) if not self.tells_objects_apart else None
        if found is not None:
            return found
        masks, boxes = self._masks(index), self.boxes(index)
        return Objects(boxes, np.zeros(len(boxes), bool), np.array([mask.area for mask in masks], np.float64), masks)

    def mask(self, index: int) -> Mask | None:
        """Of the smallest object at each pixel."""
        if not self.tells_objects_apart:
            return None
        masks, boxes = self._masks(index), self.boxes(index)
        return Mask(*painted(masks, boxes[:, 4], np.zeros(len(boxes), bool), self._size(index), np.uint8))

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Of picture and text."""
        states = [file_state(os.path.join(self.root, self._texts[row])) or (0, 0) for row in rows]
        return changed_with(super().stamps(rows), [(b"", *state) for state in states])

    def has_polygons_alone(self) -> bool:
        """Whether every line of every file is a polygon; files that cannot be read are told by `check`."""
        found = False
        for index in range(len(self)):
            try:
                objects = self._objects(index)
            except DataError:
                continue
            if not all(each.is_polygon for each in objects):
                return False
            found = found or bool(objects)
        return found

    def most_number(self) -> int:
        """The largest class number of all files; −1 without any."""
        most = -1
        for index in range(len(self)):
            try:
                most = max([most, *(each.number for each in self._objects(index))])
            except DataError:
                continue
        return most

    def _size(self, index: int) -> tuple[int, int]:
        return upright_size(self.encoded(index), self.where(index))

    def _masks(self, index: int) -> list[ObjectMask]:
        height, width = size = self._size(index)
        sides = np.array([width, height])
        polygons = [(np.reshape(each.values, (-1, 2)) * sides).ravel().tolist() for each in self._objects(index)]
        try:
            return masks_from_coco([[polygon] for polygon in polygons], size)
        except DataError as error:
            raise DataError(f"{printable(self._text(index))}: {error}") from error

    def _objects(self, index: int) -> list[YoloObject]:
        place = self._text(index)
        if not os.path.lexists(place):
            return []
        try:
            text = read_plain(place, MOST_BYTES).decode("utf-8-sig")
            lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
            refuse_many_objects(len(lines))
        except (OSError, UnicodeDecodeError, DataError) as error:
            raise DataError(f"{printable(place)}: cannot be read ({error})") from error
        return [_parsed(line, f"{printable(place)}, line {i}") for i, line in lines]

    def _text(self, index: int) -> Path:
        return Path(self.root, self._texts[index])


def open_yolo(root: Path) -> Source | None:
    """The folder as pictures with text files; None where it has none."""
    if os.path.isdir(root / IMAGES) and os.path.isdir(root / LABELS) and by_stem(root / LABELS, (".txt",)):
        pairs = [
            (os.path.dirname(stem), os.path.join(IMAGES, path), os.path.join(LABELS, f"{stem}.txt"))
            for stem, path in images_by_stem(root / IMAGES).items()
        ]
    else:
        splits = [path.parent.name for path in sorted(root.glob(f"*/{LABELS}")) if (path.parent / IMAGES).is_dir()]
        if not any(by_stem(root / split / LABELS, (".txt",)) for split in splits):
            return None
        pairs = [
            (split, os.path.join(split, IMAGES, path), os.path.join(split, LABELS, f"{stem}.txt"))
            for split in splits
            for stem, path in images_by_stem(root / split / IMAGES).items()
        ]
    names = _names(root)

    def chosen(splits: Sequence[str]) -> YoloPictures:
        own = [pair for pair in pairs if pair[0] in splits]
        return YoloPictures(root, [path for _, path, _ in own], [text for *_, text in own], names or ())

    every = chosen(sorted({split for split, *_ in pairs}))
    if names is None:
        names = tuple(str(i) for i in range(min(every.most_number(), MOST_CLASSES) + 1))
    polygons = every.has_polygons_alone()

    def opened(splits: Sequence[str]) -> YoloPictures:
        found = chosen(splits)
        found.object_names = names or ()
        if polygons:
            found.tells_objects_apart, found.mask_names = True, ("background", *(names or ()))
        return found

    said = group_by_split(sorted({split for split, *_ in pairs}))
    what = "polygons" if polygons else "boxes"
    return source_of_splits(f"{printable(root.name)} (YOLO {what})", said, opened)


def _names(root: Path) -> tuple[str, ...] | None:
    """By data.yaml or a list; None where there is neither."""
    for name in LISTED:
        if listed := names_by_line(root / name, MOST_BYTES):
            return tuple(line.strip() for line in listed if line.strip())
    file = next((root / name for name in NAMED if os.path.isfile(root / name)), None)
    if file is None:
        return None
    try:
        told: Any = load_yaml(read_plain(file, MOST_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{printable(file)}: cannot be read as YAML ({error})") from error
    given: Any = told.get("names") if isinstance(told, dict) else None
    if isinstance(given, dict) and given.keys() == set(range(len(given))):
        given = [given[i] for i in range(len(given))]
    try:
        check_shape(given, list[str | float | bool], "names")
    except ValueError as error:
        raise DataError(f"{printable(file)}: {error}, or numbers from 0 with a name each") from error
    if not 0 < len(given) <= MOST_CLASSES:
        raise DataError(f"{printable(file)}: {len(given):,} names, expected 1 to {MOST_CLASSES:,}")
    return tuple(map(str, given))


def _parsed(line: str, where: str) -> YoloObject:
    words = line.split()
    if len(words) > 1 + 2 * MOST_POINTS:
        raise DataError(f"{where}: a polygon of {len(words) // 2:,} points, expected at most {MOST_POINTS:,}")
    try:
        number, *values = map(parse_number, words)
    except ValueError as error:
        raise DataError(f"{where}: expected a class and numbers ({error})") from error
    count = len(values) + 1
    fits = count == _BOX_NUMBERS or (count >= _FEWEST_OF_POLYGON and count % 2)
    if not fits or not number.is_integer() or not 0 <= number < MOST_CLASSES:
        raise DataError(f"{where}: {count} numbers, expected a class and x, y, width, height, or 3 points or more")
    if max(map(abs, values)) > MOST_CLASSES:
        raise DataError(f"{where}: numbers that are no shares of a picture")
    return YoloObject(int(number), tuple(values))
