"""Boxes or polygons as YOLO keeps them: one text file per picture, a line per object, in shares of the picture's sides.

    images/[train/]a.jpg  labels/[train/]a.txt      or  train/images/a.jpg  train/labels/a.txt
    class x y width height                          the middle of a box and its sides
    class x y x y x y …                             a polygon: a mask; where all lines have one, masks are learned

Names come from classes.txt, a name per line, or from any yaml beside (`names:`, a list or numbers with names). A yaml
may also be given itself: its `path`, `train`, `val` and `test` say where the images are. An image without a text file
has no objects.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchloom.data.annotations.paired_files import (
    Pair,
    changed_with,
    files_of_pair,
    images_by_stem,
    source_of_splits,
    split_of_path,
)
from patchloom.data.datasets import Mask, Objects, Source, Stamp, file_state
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.splits import group_by_split
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


class YoloImages(ImageFiles):
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


def open_yolo(root: Path, pairs: Sequence[Pair], title: str, names: Path | None = None) -> Source:
    """Images and text files of pairs of folders."""
    rows: list[tuple[str, str, str]] = []  # split, image, text
    for pair in pairs:
        images, _ = files_of_pair(root, pair, (".txt",))
        rows += [
            (split_of_path(pair, stem), os.path.join(pair.images, path), os.path.join(pair.others, f"{stem}.txt"))
            for stem, path in images.items()
        ]
    places = [root, *(root / os.path.dirname(pair.others) for pair in pairs)]
    known, said = (read_names(names), ()) if names is not None else _names(places)
    return _open_rows(root, rows, title, known, said)


def open_yolo_yaml(file: Path) -> Source:
    """The images that a yaml of YOLO's names, and their text files."""
    content = _yaml(file)
    if not isinstance(content, dict) or not isinstance(content.get("train"), str | list):
        raise DataError(
            f"{printable(file)}: expected `train:` and `val:` with a folder of images each, as YOLO has them"
        )
    rows: list[tuple[str, str, str]] = []
    for split in ("train", "val", "test"):
        told = content.get(split) or []
        for entry in told if isinstance(told, list) else [told]:
            rows += [(split, image, _text_of(image)) for image in _images_of(file, content.get("path"), str(entry))]
    if not any(split == "train" for split, _, _ in rows):
        raise DataError(f"{printable(file)}: no images in train, {printable(content['train'])!s}; expected a folder")
    names = _listed_names(content, file) if "names" in content else None
    root = Path(os.path.commonpath([os.path.dirname(image) for _, image, _ in rows]))
    below = [(split, os.path.relpath(image, root), os.path.relpath(text, root)) for split, image, text in rows]
    return _open_rows(root, below, printable(file.name), names, ())


def _images_of(file: Path, path: object, entry: str) -> list[str]:
    """The images of a folder or a list that a yaml names: from its `path`, from its own folder or one beside it."""
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
    """As YOLO finds it: in labels/ in place of the last images/, and beside the image where there is none."""
    before, found, after = image.rpartition(f"{os.sep}images{os.sep}")
    place = f"{before}{os.sep}labels{os.sep}{after}" if found else image
    return os.path.splitext(place)[0] + ".txt"


def _open_rows(
    root: Path, rows: Sequence[tuple[str, str, str]], title: str, names: tuple[str, ...] | None, notes: tuple[str, ...]
) -> Source:
    """Rows are of split, image and text, below the root."""

    def chosen(splits: Sequence[str]) -> YoloImages:
        own = [row for row in rows if row[0] in splits]
        return YoloImages(root, [image for _, image, _ in own], [text for _, _, text in own], names or ())

    every = chosen(sorted({split for split, *_ in rows}))
    if names is None:
        names = tuple(str(i) for i in range(min(every.most_number(), MOST_CLASSES) + 1))
        notes += ("no names of classes beside the labels (a .yaml, classes.txt, or --names FILE): they are numbers",)
    polygons = every.has_polygons_alone()

    def opened(splits: Sequence[str]) -> YoloImages:
        found = chosen(splits)
        found.object_names = names or ()
        if polygons:
            found.tells_objects_apart, found.mask_names = True, ("background", *(names or ()))
        return found

    said = group_by_split(sorted({split for split, *_ in rows}))
    return source_of_splits(f"{title} (YOLO {'polygons' if polygons else 'boxes'})", said, opened, (), notes)


def _names(places: Sequence[Path]) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """By a list or a yaml in one of the folders, or by a yaml beside that is named as the first; and a note on it."""
    folder = places[0].resolve()
    yamls = [file for place in places for end in ("*.yaml", "*.yml") for file in sorted(place.glob(end))]
    yamls += [file for end in (".yaml", ".yml") if (file := folder.parent / f"{folder.name}{end}").is_file()]
    for place in dict.fromkeys(places):
        for name in LISTED:
            if os.path.lexists(place / name):
                return read_names(place / name), ()
    found = {file: read_names(file) for file in dict.fromkeys(yamls) if file.name in NAMED or _says_names(file)}
    if len(set(found.values())) > 1:
        shown = ", ".join(printable(file.name) for file in found)
        raise UsageError(f"{printable(folder)}: {shown} name different classes; choose one with --names FILE")
    for file, names in found.items():
        return names, (f"names of classes from {printable(file.name)}",)
    return None, ()


def read_names(file: Path) -> tuple[str, ...]:
    """The names in a list, a name per line, or in a yaml."""
    if file.suffix.lower() in (".yaml", ".yml"):
        return _listed_names(_yaml(file), file)
    lines = names_by_line(file, MOST_BYTES)
    if lines is None:
        raise UsageError(f"--names {printable(file)} does not exist; expected a name per line, or a yaml with `names:`")
    return tuple(line.strip() for line in lines if line.strip())


def _says_names(file: Path) -> bool:
    try:
        content = _yaml(file)
    except DataError:
        return False  # of something else
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
        raise DataError(f"{printable(file)}: {error}, or numbers from 0 with a name each") from error
    if not 0 < len(names) <= MOST_CLASSES:
        raise DataError(f"{printable(file)}: {len(names):,} names, expected 1 to {MOST_CLASSES:,}")
    return tuple(map(str, names))


def reads_as_yolo(line: str) -> bool:
    """Whether a line of text is an object of YOLO's."""
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
    fits = count == _BOX_NUMBERS or (count >= _FEWEST_OF_POLYGON and count % 2)
    if not fits or not number.is_integer() or not 0 <= number < MOST_CLASSES:
        raise DataError(f"{where}: {count} numbers, expected a class and x, y, width, height, or 3 points or more")
    if max(map(abs, values)) > MOST_CLASSES:
        raise DataError(f"{where}: numbers that are no shares of a picture")
    return YoloObject(int(number), tuple(values))
