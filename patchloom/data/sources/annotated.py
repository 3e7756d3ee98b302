"""Folders of pictures with masks or boxes beside them, and what does not fit together in them.

    images/[train/]a.jpg  masks/[train/]a.png      a mask of class numbers, or colours, for each picture, 255 for 'not
                                                   labelled'; what they mean in classes.txt or another (`mask_names`)
    JPEGImages/  SegmentationClass/  ImageSets/    Pascal VOC's: its lists say train and val
    train2017/*.jpg  annotations/instances_train2017.json     boxes as COCO keeps them

A picture whose mask is missing, or a box of an unknown picture or category, is a fault of the source.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.labels.class_names import names_by_line
from patchloom.data.pictures.decode import EXTENSIONS, decode_ids
from patchloom.data.pictures.samples import UNLABELLED
from patchloom.data.sets import NOT_LABELLED, Fault, Listing, Mask, Source, Stamp, file_state
from patchloom.data.sources.mask_names import VOC_NAMES, MaskNames, find_mask_names
from patchloom.data.splits import group_by_split
from patchloom.data.trees.files import FilePictures, FolderTree
from patchloom.errors import DataError
from patchloom.foreign import check_shape, parse_json, read_plain
from patchloom.printable import printable

IMAGE_FOLDERS = ("images", "imgs", "JPEGImages")
MASK_FOLDERS = ("masks", "annotations", "labels", "SegmentationClass")
VOC_MASKS, VOC_LISTS = "SegmentationClass", os.path.join("ImageSets", "Segmentation")
MOST_NAMES_BYTES = 1 << 20  # of a list of pictures
MOST_JSON_BYTES = 1 << 30  # instances_train2017.json has 0.45 GB
_COCO: dict[str, dict[str, Any]] = {
    "images": {"id": float | str, "file_name": str},
    "annotations": {},
    "categories": {"id": float | str, "name": float | str},
}
_SHOWN = 60  # letters of a value in a message


def open_annotated(root: Path) -> Source | None:
    """The folder as pictures with boxes or masks; None where it is neither."""
    if files := sorted((root / "annotations").glob("instances_*.json")):
        return _open_coco(root, files)
    images = next((name for name in IMAGE_FOLDERS if os.path.isdir(root / name)), None)
    found = (name for name in MASK_FOLDERS if os.path.isdir(root / name) and _images_by_stem(root / name))
    masks = next(found, None) if images else None
    return _open_masks(root, images, masks) if images and masks else None


def _changed_with(stamps: Sequence[Stamp | None], others: Sequence[Stamp | None]) -> list[Stamp | None]:
    """Stamps that also differ when a second file of the same row does."""
    return [
        (one[0], one[1] + other[1], max(one[2], other[2])) if one and other else None
        for one, other in zip(stamps, others, strict=True)
    ]


# Masks ----------------------------------------------------------------------------------------------------------------


class MaskedFiles(FilePictures):
    """Image files, each with a file of class numbers."""

    mask_ignore = NOT_LABELLED

    def __init__(self, root: Path, paths: Sequence[str], masks: Sequence[str], named: MaskNames) -> None:
        super().__init__(root, paths)
        self.mask_names = named.names
        self._named = named
        self._masks = FilePictures(root, masks)

    def mask(self, index: int) -> Mask:
        """The numbers in the mask's file, or of its colours."""
        if self._named.colours:
            pixels = np.asarray(self._masks.read(index))
            return Mask(self._named.numbers(pixels, self._masks.where(index)), None)
        return Mask(decode_ids(self._masks.encoded(index), self._masks.where(index)), None)

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Of picture and mask."""
        return _changed_with(super().stamps(rows), self._masks.stamps(rows))


def _open_masks(root: Path, images: str, masks: str) -> Source:
    pictures, labels = _images_by_stem(root / images), _images_by_stem(root / masks)
    named = find_mask_names(root)
    if not named.names and masks == VOC_MASKS:
        named = MaskNames(VOC_NAMES)
    names, listed = named.names, _listed(root)
    if listed:
        pictures, labels = ({stem: path for stem, path in of.items() if stem in listed} for of in (pictures, labels))
    faults = _lonely(root / images, pictures, labels, "picture without mask", masks)
    faults += _lonely(root / masks, labels, pictures, "mask without picture", images)
    both = [stem for stem in pictures if stem in labels]
    if not both:
        raise DataError(f"{printable(root)}: no picture of {images} has a mask of the same name in {masks}")
    splits = {stem: listed[stem] if listed else os.path.dirname(stem) for stem in both}
    said = group_by_split(sorted(set(splits.values())))

    def listing(chosen: Sequence[str]) -> Listing:
        stems = [stem for stem in both if splits[stem] in chosen]
        paths = [os.path.join(images, pictures[stem]) for stem in stems]
        files = MaskedFiles(root, paths, [os.path.join(masks, labels[stem]) for stem in stems], named)
        return Listing(files, np.arange(len(stems)), np.full(len(stems), UNLABELLED), names)

    unused = ", ".join(map(printable, said.unused))
    notes = (f"beside train, val and test, not used: {unused}",) if unused else ()
    val, test = (listing(chosen) if chosen else None for chosen in (said.val, said.test))
    title = f"{printable(root.name)} (pictures and masks)"
    return Source(title, listing(said.train), val, notes, tuple(faults), test)


def _listed(root: Path) -> dict[str, str]:
    """Stem → train, val or test, as Pascal VOC's lists say; empty where there are none."""
    found: dict[str, str] = {}
    for split in ("train", "val", "test"):
        lines = names_by_line(root / VOC_LISTS / f"{split}.txt", MOST_NAMES_BYTES) or ()
        found |= {line.strip(): split for line in lines if line.strip()}
    return found


def _images_by_stem(folder: Path) -> dict[str, str]:
    """Path below the folder without its extension → the path, of every image file that is not hidden."""
    stems = ((os.path.splitext(path), path) for path in FolderTree(folder).files())
    return {stem: path for (stem, extension), path in stems if extension.lower() in EXTENSIONS}


def _lonely(folder: Path, files: Mapping[str, str], others: Mapping[str, str], kind: str, place: str) -> list[Fault]:
    """A fault for each file whose stem the others do not have."""
    return [
        Fault(printable(folder / path), kind, f"nothing called {printable(stem)} in {place}")
        for stem, path in files.items()
        if stem not in others
    ]


# Boxes ----------------------------------------------------------------------------------------------------------------


class CocoPictures(FilePictures):
    """Image files with the boxes of one annotations file."""

    def __init__(
        self, root: Path, paths: Sequence[str], file: Path, names: tuple[str, ...], boxes: Sequence[np.ndarray]
    ) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._file = file
        self._boxes = np.concatenate([np.zeros((0, 5)), *boxes])
        self._starts = np.cumsum([0, *map(len, boxes)])

    def boxes(self, index: int) -> np.ndarray:
        """Its boxes, in fractions of pixels as COCO has them."""
        return self._boxes[self._starts[index] : self._starts[index + 1]]

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Of picture and annotations."""
        state = file_state(self._file)
        return _changed_with(super().stamps(rows), [(b"", *state) if state else None] * len(rows))


def _open_coco(root: Path, files: Sequence[Path]) -> Source:
    by_split = {file.stem.removeprefix("instances_"): file for file in files}
    words = {"".join(letter for letter in split if not letter.isdigit()): split for split in by_split}
    said = group_by_split(sorted(words))
    faults: list[Fault] = []
    train, val, test = (
        _coco_listing(root, by_split[words[group[0]]], faults) if group else None
        for group in (said.train, said.val, said.test)
    )
    assert train is not None
    notes = (f"annotations not used: {', '.join(words[word] for word in said.unused)}",) if said.unused else ()
    title = f"{printable(root.name)} (COCO boxes)"
    return Source(title, train, val, notes, tuple(faults), test)


def _coco_listing(root: Path, file: Path, faults: list[Fault]) -> Listing:
    split = file.stem.removeprefix("instances_")
    content = _read_coco(file)
    categories = {category["id"]: str(category["name"]) for category in content["categories"]}
    number = {identity: i for i, identity in enumerate(categories)}
    names = {image["id"]: str(image["file_name"]) for image in content["images"]}
    folder = _image_folder(root, split, list(names.values()))
    boxes: dict[Any, list[tuple[float, ...]]] = {
        identity: [] for identity, name in names.items() if os.path.isfile(root / folder / name)
    }
    faults += [
        Fault(printable(root / folder / name), "picture missing", f"{file.name} names it")
        for identity, name in names.items()
        if identity not in boxes
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
        elif box["image_id"] in boxes:
            boxes[box["image_id"]].append((*corners, number[box["category_id"]]))
    if not boxes:
        raise DataError(f"{printable(file)}: none of its {len(names)} pictures is in {printable(root / folder)}")
    arrays = [np.array(found, dtype=np.float64).reshape(-1, 5) for found in boxes.values()]
    paths = [os.path.join(folder, names[identity]) for identity in boxes]
    objects = tuple(categories.values())
    pictures = CocoPictures(root, paths, file, objects, arrays)
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
