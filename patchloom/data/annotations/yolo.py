"""Boxes or polygons in YOLO's format: one text file per image, one line per object, in fractions of the image's sides.

    images/[train/]a.jpg  labels/[train/]a.txt      or  train/images/a.jpg  train/labels/a.txt
    class x y width height                          center and sides of a box
    class x y x y x y …                             a polygon; if all lines are polygons, masks are learned

Names come from classes.txt, with one name per line, or from a yaml next to it (`names:`, a list or numbers with names).
The yaml itself can also be opened: its `path`, `train`, `val` and `test` name the folders of images. An image without
a text file has no objects.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchloom.data.annotations.paired_files import (
    Pair,
    PairedFile,
    changed_with,
    files_of_pair,
    images_by_stem,
    source_of_rows,
    split_of_path,
)
from patchloom.data.datasets import Source
from patchloom.data.images.image_store import Mask, Objects, Stamp, file_state
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.trees.tree import ImageFiles
from patchloom.recipes.plain_yaml import load_yaml
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import upright_size
from patchloom_runtime.images.object_masks import MOST_POINTS, ObjectMask, masks_from_coco, painted, refuse_many_objects
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, parse_number, read_plain

NAMED = ("data.yaml", "dataset.yaml", "data.yml", "dataset.yml")
LISTED = ("classes.txt", "obj.names")
MOST_BYTES, MOST_CLASSES = 1 << 22, 10_000
_BOX_NUMBERS, _MIN_POLYGON_NUMBERS = 5, 7  # per line, with the class


class YoloObject(NamedTuple):
    """One line: a class, and center and sides of a box or the points of a polygon, in fractions of the image."""

    number: int
    values: tuple[float, ...]

    @property
    def is_polygon(self) -> bool:
        """True for a polygon, False for a box."""
        return len(self.values) > _BOX_NUMBERS - 1

    def corners(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return (x0, y0, x1, y1) in pixels, for an image of `size` (height, width)."""
        height, width = size
        if self.is_polygon:
            xs, ys = self.values[0::2], self.values[1::2]
            return min(xs) * width, min(ys) * height, max(xs) * width, max(ys) * height
        x, y, w, h = self.values
        return (x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height


class YoloImages(ImageFiles):
    """Image files, each with a text file of objects or without one."""

    def __init__(self, root: Path, paths: Sequence[str], texts: Sequence[str], names: tuple[str, ...]) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._texts = list(texts)

    def boxes(self, index: int) -> np.ndarray:
        """Return the boxes, in fractions of pixels."""
        size = self._size(index)
        rows = [(*each.corners(size), each.number) for each in self._objects(index)]
        return np.array(rows, np.float64).reshape(-1, 5)

    def objects(self, index: int) -> Objects:
        """Return the objects, with masks that may overlap if lines are polygons."""
        if not self.tells_objects_apart:
            return super().objects(index)
        masks, boxes = self._masks(index), self.boxes(index)
        return Objects(boxes, np.zeros(len(boxes), bool), np.array([mask.area for mask in masks], np.float64), masks)

    def mask(self, index: int) -> Mask | None:
        """Return the mask, with the smallest object at each pixel, or None."""
        if not self.tells_objects_apart:
            return None
        masks, boxes = self._masks(index), self.boxes(index)
        return Mask(*painted(masks, boxes[:, 4], np.zeros(len(boxes), bool), self._size(index), np.uint8))

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return stamps that change with image and text file."""
        states = [file_state(os.path.join(self.root, self._texts[row])) or (0, 0) for row in rows]
        return changed_with(super().stamps(rows), [(b"", *state) for state in states])

    def has_only_polygons(self) -> bool:
        """Return whether all lines of all files are polygons. `check` reports files that cannot be read."""
        any_objects = False
        for index in range(len(self)):
            try:
                objects = self._objects(index)
            except DataError:
                continue
            if not all(each.is_polygon for each in objects):
                return False
            any_objects = any_objects or bool(objects)
        return any_objects

    def largest_class(self) -> int:
        """Return the largest class number in all files, or −1 if there is none."""
        largest = -1
        for index in range(len(self)):
            try:
                largest = max([largest, *(each.number for each in self._objects(index))])
            except DataError:
                continue
        return largest

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


def open_yolo(root: Path, pairs: Sequence[Pair], title: str, names: Path | None = None) -> Source:
    """Open images and text files in pairs of folders."""
    rows: list[PairedFile] = []
    for pair in pairs:
        images, _ = files_of_pair(root, pair, (".txt",))
        rows += [
            PairedFile(
                split_of_path(pair, stem), os.path.join(pair.images, path), os.path.join(pair.others, f"{stem}.txt")
            )
            for stem, path in images.items()
        ]
    places = [root, *(root / os.path.dirname(pair.others) for pair in pairs)]
    known, notes = (read_names(names), ()) if names is not None else _find_names(places)
    return _open_rows(root, rows, title, known, notes)


def open_yolo_yaml(file: Path) -> Source:
    """Open the images that a yaml of YOLO names, and their text files."""
    content = _yaml(file)
    if not isinstance(content, dict) or not isinstance(content.get("train"), str | list):
        raise DataError(f"{printable(file)}: expected `train:` and `val:` with a folder of images each, as in YOLO")
    rows: list[PairedFile] = []
    for split in ("train", "val", "test"):
        folders = content.get(split) or []
        for entry in folders if isinstance(folders, list) else [folders]:
            rows += [
                PairedFile(split, image, _text_of(image)) for image in _images_of(file, content.get("path"), str(entry))
            ]
    if not any(row.split == "train" for row in rows):
        raise DataError(f"{printable(file)}: no images in train, {printable(content['train'])!s}; expected a folder")
    names = _listed_names(content, file) if "names" in content else None
    root = Path(os.path.commonpath([os.path.dirname(row.image) for row in rows]))
    below = [PairedFile(row.split, os.path.relpath(row.image, root), os.path.relpath(row.other, root)) for row in rows]
    return _open_rows(root, below, printable(file.name), names, ())


def _images_of(file: Path, path: object, entry: str) -> list[str]:
    """Return the images of a folder or a list that a yaml names, relative to its `path`, its folder or a sibling."""
    own = file.parent
    bases = [own / str(path), own / Path(str(path)).name, own] if path else [own]
    places = [base / entry for base in (*bases, own.parent)] + [own / entry.removeprefix("../")]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise DataError(f"{printable(file)}: there is no {printable(entry)}; looked in {printable(places[0])}")
    if place.is_dir():
        return [os.path.join(place, image) for image in images_by_stem(place).values()]
    lines = [line.strip() for line in names_by_line(place, MOST_BYTES) or () if line.strip()]
    return [os.path.normpath(place.parent / line) for line in lines if (place.parent / line).is_file()]


def _text_of(image: str) -> str:
    """Return the text file of an image: in labels/ instead of the last images/, or else next to the image."""
    before, separator, after = image.rpartition(f"{os.sep}images{os.sep}")
    place = f"{before}{os.sep}labels{os.sep}{after}" if separator else image
    return os.path.splitext(place)[0] + ".txt"


def _open_rows(
    root: Path, rows: Sequence[PairedFile], title: str, names: tuple[str, ...] | None, notes: tuple[str, ...]
) -> Source:
    """Return a source of images and text files, with paths relative to the root."""
    every = YoloImages(root, [row.image for row in rows], [row.other for row in rows], names or ())
    if names is None:
        names = tuple(str(i) for i in range(min(every.largest_class(), MOST_CLASSES) + 1))
        notes += ("no class names next to the labels (a .yaml, classes.txt, or --names FILE): classes are numbers",)
    polygons = every.has_only_polygons()

    def open_files(paths: Sequence[str], texts: Sequence[str]) -> YoloImages:
        images = YoloImages(root, paths, texts, names or ())
        if polygons:
            images.tells_objects_apart, images.mask_names = True, ("background", *(names or ()))
        return images

    return source_of_rows(f"{title} (YOLO {'polygons' if polygons else 'boxes'})", rows, open_files, (), notes)


def _find_names(places: Sequence[Path]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Read names from a list or a yaml in one of the folders, or from FOLDER.yaml next to the first; with a note."""
    folder = places[0].resolve()
    yamls = [file for place in places for end in ("*.yaml", "*.yml") for file in sorted(place.glob(end))]
    yamls += [file for end in (".yaml", ".yml") if (file := folder.parent / f"{folder.name}{end}").is_file()]
    for place in dict.fromkeys(places):
        for name in LISTED:
            if os.path.lexists(place / name):
                return read_names(place / name), ()
    named = {file: read_names(file) for file in dict.fromkeys(yamls) if file.name in NAMED or _has_names(file)}
    if len(set(named.values())) > 1:
        files = ", ".join(printable(file.name) for file in named)
        raise UsageError(f"{printable(folder)}: {files} name different classes; choose one with --names FILE")
    for file, names in named.items():
        return names, (f"class names from {printable(file.name)}",)
    return None, ()


def read_names(file: Path) -> tuple[str, ...]:
    """Read the names in a list, with one name per line, or in a yaml."""
    if file.suffix.lower() in (".yaml", ".yml"):
        return _listed_names(_yaml(file), file)
    lines = names_by_line(file, MOST_BYTES)
    if lines is None:
        raise UsageError(
            f"--names {printable(file)} does not exist; expected one name per line, or a yaml with `names:`"
        )
    return tuple(line.strip() for line in lines if line.strip())


def _has_names(file: Path) -> bool:
    try:
        content = _yaml(file)
    except DataError:
        return False  # a yaml of something else
    return isinstance(content, dict) and "names" in content


def _yaml(file: Path) -> Any:
    try:
        return load_yaml(read_plain(file, MOST_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{printable(file)}: cannot be read as YAML ({error})") from error


def _listed_names(content: Any, file: Path) -> tuple[str, ...]:
    names: Any = content.get("names") if isinstance(content, dict) else None
    if isinstance(names, dict) and names.keys() == set(range(len(names))):
        names = [names[i] for i in range(len(names))]
    try:
        check_shape(names, list[str | float | bool], "names")
    except ValueError as error:
        raise DataError(f"{printable(file)}: {error}, or numbers from 0 with one name each") from error
    if not 0 < len(names) <= MOST_CLASSES:
        raise DataError(f"{printable(file)}: {len(names):,} names, expected 1 to {MOST_CLASSES:,}")
    return tuple(map(str, names))


def reads_as_yolo(line: str) -> bool:
    """Return whether a line of text is an object in YOLO's format."""
    try:
        _parsed(line, "")
    except DataError:
        return False
    return True


def _parsed(line: str, where: str) -> YoloObject:
    words = line.split()
    if len(words) > 1 + 2 * MOST_POINTS:
        raise DataError(f"{where}: a polygon of {len(words) // 2:,} points, expected at most {MOST_POINTS:,}")
    try:
        number, *values = map(parse_number, words)
    except ValueError as error:
        raise DataError(f"{where}: expected a class and numbers ({error})") from error
    count = len(values) + 1
    fits = count == _BOX_NUMBERS or (count >= _MIN_POLYGON_NUMBERS and count % 2)
    if not fits or not number.is_integer() or not 0 <= number < MOST_CLASSES:
        raise DataError(f"{where}: {count} numbers, expected a class and x, y, width, height, or 3 points or more")
    if max(map(abs, values)) > MOST_CLASSES:
        raise DataError(f"{where}: numbers that are not fractions of an image")
    return YoloObject(int(number), tuple(values))
