"""Boxes and masks as COCO keeps them: annotations/instances_SPLIT.json, polygons or run lengths.

Crowds are neither learned nor asked for. Where masks overlap, a pixel of the picture belongs to the smaller object; a
network is judged by the masks as they are annotated.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.pictures.decode import upright_size
from patchloom.data.pictures.object_masks import ObjectMask, mask_from_coco
from patchloom.data.pictures.samples import UNLABELLED
from patchloom.data.sets import Fault, Listing, Mask, Objects, Source, Stamp, file_state
from patchloom.data.sources.beside import changed_with
from patchloom.data.splits import group_by_split
from patchloom.data.trees.files import FilePictures
from patchloom.errors import DataError
from patchloom.foreign import check_shape, parse_json, read_plain
from patchloom.printable import printable

MOST_JSON_BYTES = 1 << 30  # instances_train2017.json has 0.45 GB
_COCO: dict[str, dict[str, Any]] = {
    "images": {"id": float | str, "file_name": str},
    "annotations": {},
    "categories": {"id": float | str, "name": float | str},
}
_SHOWN = 60  # letters of a value in a message
_LARGEST_BYTE = 254  # 255 stands for 'not labelled'


@dataclass
class _OfPicture:
    """The annotations of one picture."""

    boxes: list[tuple[float, ...]] = field(default_factory=list)  # corners and category
    crowd: list[bool] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    outlines: list[Any] = field(default_factory=list)  # as the file has them
    names: list[str] = field(default_factory=list)  # of annotations, for messages


class CocoPictures(FilePictures):
    """Image files with the boxes and masks of one annotations file."""

    def __init__(
        self, root: Path, paths: Sequence[str], file: Path, names: tuple[str, ...], told: Sequence[_OfPicture]
    ) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._file, self._told = file, list(told)
        self._boxes = np.concatenate([np.zeros((0, 5)), *(np.array(one.boxes).reshape(-1, 5) for one in told)])
        self._starts = np.cumsum([0, *(len(one.boxes) for one in told)])
        outlined = [bool(outline) for one in told for outline in one.outlines]
        self.without_outline = len(outlined) - sum(outlined)
        if outlined and all(outlined):
            self.tells_objects_apart = True
            self.mask_names = ("background", *names)
            self.mask_dtype = np.uint8 if len(names) < _LARGEST_BYTE else np.int16

    def boxes(self, index: int) -> np.ndarray:
        """Its boxes, in fractions of pixels as COCO has them."""
        return self._boxes[self._starts[index] : self._starts[index + 1]]

    def crowd(self, index: int) -> np.ndarray:
        """Which of them are crowds."""
        return np.array(self._told[index].crowd, bool)

    def objects(self, index: int) -> Objects:
        """With areas as the file has them, and masks that may overlap."""
        masks = self._masks(index) if self.tells_objects_apart else None
        return Objects(self.boxes(index), self.crowd(index), np.array(self._told[index].areas, np.float64), masks)

    def mask(self, index: int) -> Mask | None:
        """Of the smallest object at each pixel; of crowds the class alone."""
        if not self.tells_objects_apart:
            return None
        size = upright_size(self.encoded(index), self.where(index))
        classes, instances = np.zeros(size, self.mask_dtype), np.zeros(size, np.int16)
        masks, crowd, boxes = self._masks(index), self.crowd(index), self.boxes(index)
        for number in sorted(range(len(masks)), key=lambda i: -masks[i].area):
            inside = masks[number].whole(size)
            classes[inside] = boxes[number, 4] + 1
            instances[inside] = 0 if crowd[number] else number + 1
        return Mask(classes, instances)

    def _masks(self, index: int) -> list[ObjectMask]:
        size, told, found = upright_size(self.encoded(index), self.where(index)), self._told[index], []
        for outline, name in zip(told.outlines, told.names, strict=True):
            try:
                found.append(ObjectMask.of(mask_from_coco(outline, size)))
            except DataError as error:
                raise DataError(f"{printable(self._file)}, annotation {name}: {error}") from error
        return found

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Of picture and annotations."""
        state = file_state(self._file)
        return changed_with(super().stamps(rows), [(b"", *state) if state else None] * len(rows))


def open_coco(root: Path) -> Source | None:
    """The folder as pictures with COCO's annotations; None where it has none."""
    files = sorted((root / "annotations").glob("instances_*.json"))
    if not files:
        return None
    by_split = {file.stem.removeprefix("instances_"): file for file in files}
    words = {"".join(letter for letter in split if not letter.isdigit()): split for split in by_split}
    said = group_by_split(sorted(words))
    faults: list[Fault] = []
    train, val, test = (
        _coco_listing(root, by_split[words[group[0]]], faults) if group else None
        for group in (said.train, said.val, said.test)
    )
    assert train is not None
    unused = ", ".join(words[word] for word in said.unused)
    notes: tuple[str, ...] = (f"annotations not used: {unused}",) if unused else ()
    pictures = train.pictures
    assert isinstance(pictures, CocoPictures)
    if pictures.without_outline and pictures.without_outline < len(pictures._boxes):
        lost = f"{pictures.without_outline:,} of {len(pictures._boxes):,} annotations"
        notes += (f"{lost} of train have no segmentation: masks are not learned",)
    what = "boxes and masks" if pictures.tells_objects_apart else "boxes"
    return Source(f"{printable(root.name)} (COCO {what})", train, val, notes, tuple(faults), test)


def _coco_listing(root: Path, file: Path, faults: list[Fault]) -> Listing:
    split = file.stem.removeprefix("instances_")
    content = _read_coco(file)
    categories = {category["id"]: str(category["name"]) for category in content["categories"]}
    number = {identity: i for i, identity in enumerate(categories)}
    names = {image["id"]: str(image["file_name"]) for image in content["images"]}
    folder = _image_folder(root, split, list(names.values()))
    told = {identity: _OfPicture() for identity, name in names.items() if os.path.isfile(root / folder / name)}
    faults += [
        Fault(printable(root / folder / name), "picture missing", f"{file.name} names it")
        for identity, name in names.items()
        if identity not in told
    ]
    for box in content["annotations"]:
        where = f"{printable(file)}, annotation {_shown(box.get('id', '?'))}"
        if not _is_one_of(box.get("image_id"), names):
            faults.append(Fault(where, "unknown picture", f"image_id {_shown(box.get('image_id'))}"))
        elif not _is_one_of(box.get("category_id"), categories):
            faults.append(Fault(where, "unknown category", f"category_id {_shown(box.get('category_id'))}"))
        elif (corners := _corners(box.get("bbox"))) is None:
            faults.append(
                Fault(where, "boxes cannot be read", f"bbox {_shown(box.get('bbox'))}, expected x, y, width, height")
            )
        elif box["image_id"] in told:
            of = told[box["image_id"]]
            of.boxes.append((*corners, number[box["category_id"]]))
            of.crowd.append(bool(box.get("iscrowd")))
            of.areas.append(_area(box.get("area"), corners))
            of.outlines.append(box.get("segmentation"))
            of.names.append(_shown(box.get("id", "?")))
    if not told:
        raise DataError(f"{printable(file)}: none of its {len(names)} pictures is in {printable(root / folder)}")
    paths = [os.path.join(folder, names[identity]) for identity in told]
    objects = tuple(categories.values())
    pictures = CocoPictures(root, paths, file, objects, list(told.values()))
    return Listing(pictures, np.arange(len(paths)), np.full(len(paths), UNLABELLED), objects)


def _read_coco(file: Path) -> Mapping[str, Any]:
    try:
        content = parse_json(read_plain(file, MOST_JSON_BYTES), MOST_JSON_BYTES)
    except OSError as error:
        raise DataError(f"{printable(file)}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{printable(file)}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict) or not all(isinstance(content.get(name), list) for name in _COCO):
        raise DataError(f"{printable(file)}: expected an object with lists {', '.join(_COCO)}, as COCO has them")
    try:
        for name, fields in _COCO.items():
            for i, entry in enumerate(content[name]):
                check_shape(entry, fields, f"{name}[{i}]")
    except ValueError as error:
        raise DataError(f"{printable(file)}: {error}") from error
    return content


def _image_folder(root: Path, split: str, names: Sequence[str]) -> str:
    """Where the pictures of a split lie, below the root: the first place that has one of them."""
    places = [split, os.path.join("images", split), "images", ""]
    return next((p for p in places if any(os.path.isfile(root / p / name) for name in names[:100])), split)


def _is_one_of(value: Any, known: Mapping[Any, Any]) -> bool:
    return isinstance(value, int | float | str) and value in known


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _corners(box: Any) -> tuple[float, float, float, float] | None:
    """Corners of (x, y, width, height); None where it is nothing of the kind."""
    try:
        x, y, width, height = map(float, box)
    except (TypeError, ValueError, OverflowError):
        return None
    corners = x, y, x + width, y + height
    return corners if all(math.isfinite(each) and abs(each) < 1 << 31 for each in corners) else None


def _area(given: Any, corners: tuple[float, ...]) -> float:
    """As the file has it; that of the box where it has none."""
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given) and given >= 0:
        return float(given)
    return (corners[2] - corners[0]) * (corners[3] - corners[1])
