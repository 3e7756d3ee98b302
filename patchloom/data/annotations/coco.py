"""Boxes and masks in COCO's format.

    annotations/instances_train2017.json  train2017/a.jpg      COCO; also lvis_v1_train.json
    train/_annotations.coco.json  train/a.jpg                  Roboflow

Masks are polygons or run lengths. Files without boxes have the class of each image (iNaturalist), with a taxonomy if
its categories have one. Crowds are ignored in training and evaluation. If masks overlap, a pixel belongs to the smaller
object in training; evaluation uses the masks as annotated.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotations.paired_files import changed_with
from patchloom.data.datasets import Fault, Listing, Source
from patchloom.data.images.image_store import Mask, Objects, Stamp, file_state
from patchloom.data.splits import group_by_split
from patchloom.data.trees.tree import ImageFiles, below
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import upright_size
from patchloom_runtime.images.object_masks import ObjectMask, Size, masks_from_coco, painted, refuse_many_objects
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

MOST_JSON_BYTES = 1 << 30  # instances_train2017.json has 0.45 GB
_COCO: dict[str, dict[str, Any]] = {
    "images": {"id": float | str, "file_name": str},
    "annotations": {},
    "categories": {"id": float | str, "name": float | str},
}
Content = Mapping[str, Any]  # lists of images, annotations and categories
RANKS = ("kingdom", "phylum", "class", "order", "family", "genus")  # of iNaturalist's categories, above the species
_MAX_MESSAGE_LETTERS = 60  # of a value
_LARGEST_BYTE = 254  # 255 marks unlabeled pixels


@dataclass
class _ImageAnnotations:
    """The annotations of one image."""

    boxes: list[tuple[float, ...]] = field(default_factory=list)  # corners and category
    crowd: list[bool] = field(default_factory=list)
    areas: list[float] = field(default_factory=list)
    outlines: list[Any] = field(default_factory=list)  # as in the file
    names: list[str] = field(default_factory=list)  # of the annotations, for messages


class CocoImages(ImageFiles):
    """Image files with the boxes and masks of one annotations file."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        file: Path,
        names: tuple[str, ...],
        annotations: Sequence[_ImageAnnotations],
    ) -> None:
        super().__init__(root, paths)
        self.object_names = names
        self._file, self._annotations = file, list(annotations)
        self._boxes = np.concatenate([np.zeros((0, 5)), *(np.array(one.boxes).reshape(-1, 5) for one in annotations)])
        self._starts = np.cumsum([0, *(len(one.boxes) for one in annotations)])
        outlined = [bool(outline) for one in annotations for outline in one.outlines]
        self.unoutlined = len(outlined) - sum(outlined)
        if outlined and all(outlined):
            self.tells_objects_apart = True
            self.mask_names = ("background", *names)
            self.mask_dtype = np.uint8 if len(names) < _LARGEST_BYTE else np.int16

    def boxes(self, index: int) -> np.ndarray:
        """Return the boxes of an image, (objects, 5): x0, y0, x1, y1 in pixels, not rounded, and the class index."""
        start, end = self._starts[index : index + 2]
        with self._named(index):
            refuse_many_objects(end - start)
        return self._boxes[start:end]

    def crowd(self, index: int) -> np.ndarray:
        """Return which boxes are of crowds."""
        return np.array(self._annotations[index].crowd, bool)

    def objects(self, index: int) -> Objects:
        """Return the objects, with the areas in the file and masks that may overlap."""
        masks = self._masks(index, self._size(index)) if self.tells_objects_apart else None
        return Objects(
            self.boxes(index), self.crowd(index), np.array(self._annotations[index].areas, np.float64), masks
        )

    def mask(self, index: int) -> Mask | None:
        """Return the mask, with the smallest object at each pixel and only the class of crowds, or None."""
        if not self.tells_objects_apart:
            return None
        size = self._size(index)
        masks = self._masks(index, size)
        return Mask(*painted(masks, self.boxes(index)[:, 4], self.crowd(index), size, self.mask_dtype))

    def _size(self, index: int) -> Size:
        return upright_size(self.encoded(index), self.where(index))

    def _masks(self, index: int, size: Size) -> list[ObjectMask]:
        annotations = self._annotations[index]
        with self._named(index):
            return masks_from_coco(annotations.outlines, size, annotations.names)

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        """Add the file and the image to errors about annotations."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{printable(self._file)}, image {printable(self.key(index))}: {error}") from error

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return stamps that change with image and annotations."""
        state = file_state(self._file)
        return changed_with(super().stamps(rows), [(b"", *state) if state else None] * len(rows))


def open_coco(root: Path, files: Sequence[Path], title: str, images: str | None = None) -> Source:
    """Open images with the annotations of COCO's files, one per split. `images` is their folder below the root."""
    contents = {file: _read_coco(file) for file in files}
    entries = [entry for content in contents.values() for entry in content["annotations"]]
    if entries and not any("bbox" in entry or "segmentation" in entry for entry in entries):
        return open_contents(root, contents, title, "COCO image labels", images, _labels_listing)
    return open_contents(root, contents, title, "COCO", images)


def open_contents(
    root: Path,
    contents: Mapping[Path, Content],
    title: str,
    kind: str,
    images: str | None = None,
    listing: "Callable[[Path, Path, Content, str | None, list[Fault]], Listing] | None" = None,
) -> Source:
    """Return a source of annotations in COCO's structure, by file. The paths of the files determine the splits."""
    named = {os.path.relpath(file, root): file for file in contents}
    words = {"".join(letter for letter in name if not letter.isdigit()): file for name, file in named.items()}
    groups = group_by_split(sorted(words))
    faults: list[Fault] = []
    make = listing or coco_listing
    train, val, test = (
        make(root, words[group[0]], contents[words[group[0]]], images, faults) if group else None
        for group in (groups.train, groups.val, groups.test)
    )
    assert train is not None
    unused = ", ".join(words[word].stem for word in groups.unused)
    notes: tuple[str, ...] = (f"annotations not used: {unused}",) if unused else ()
    store = train.images
    if isinstance(store, CocoImages):
        if store.unoutlined and store.unoutlined < len(store._boxes):
            lost = f"{store.unoutlined:,} of {len(store._boxes):,} annotations"
            notes += (f"{lost} of train have no segmentation, so masks are not learned",)
        kind += " boxes and masks" if store.tells_objects_apart else " boxes"
    return Source(f"{title} ({kind})", train, val, notes, tuple(faults), test)


def _labels_listing(root: Path, file: Path, content: Content, images: str | None, faults: list[Fault]) -> Listing:
    """List images with one class each, as in iNaturalist: annotations without boxes."""
    entries = _described(file, content["categories"])
    categories = {entry["id"]: str(entry["name"]) for entry in entries}
    number = {identity: i for i, identity in enumerate(categories)}
    folder = _image_folder(root, file, [image["file_name"] for image in content["images"]], images)
    paths = {image["id"]: _image_path(root, folder, image["file_name"], file) for image in content["images"]}
    labels: dict[str, int] = {}
    for entry in content["annotations"]:
        known = _is_one_of(entry.get("image_id"), paths) and _is_one_of(entry.get("category_id"), number)
        label = number[entry["category_id"]] if known else UNLABELED
        if not known or labels.setdefault(paths[entry["image_id"]], label) != label:
            where = f"{printable(file)}, annotation {_shortened(entry.get('id', '?'))}"
            why = "a second class of its image" if known else "an image or a category that is not listed"
            faults.append(Fault(where, "label cannot be read", why))
    there = [path for path in dict.fromkeys(paths.values()) if os.path.isfile(root / path)]
    if not there:
        raise DataError(f"{printable(file)}: none of its {len(paths)} images is in {printable(root / folder)}")
    faults += [
        Fault(printable(root / path), "image missing", f"{file.name} names it")
        for path in sorted({*paths.values()} - {*there})
    ]
    numbers = np.array([labels.get(path, UNLABELED) for path in there], dtype=np.int64)
    names = tuple(categories.values())
    return Listing(ImageFiles(root, there), np.arange(len(there)), numbers, names, _ranks(entries))


def _described(file: Path, categories: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the categories, completed by those of categories.json: iNaturalist's lists have numbers for names."""
    path = file.parent / "categories.json"
    if not os.path.isfile(path):
        return categories
    try:
        described = parse_json(read_plain(path, MOST_JSON_BYTES), MOST_JSON_BYTES)
        if not isinstance(described, list):
            raise ValueError(f"it is a {type(described).__name__}")
        for i, entry in enumerate(described):
            check_shape(entry, {"id": float | str, "name": str}, f"[{i}]")
    except OSError as error:
        raise DataError(f"{printable(path)}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{printable(path)}: {error}; expected a list of categories with id and name") from error
    by_id = {entry["id"]: entry for entry in described}
    return [{**category, **by_id.get(category["id"], {})} for category in categories]


def _ranks(categories: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the levels above the species. A name in two places (Prunella, a bird and a plant) is named by its path."""
    levels: dict[str, dict[str, str]] = {}
    for i, rank in enumerate(RANKS, 1):
        paths = {
            str(category["name"]): tuple(str(category.get(each, "")) for each in RANKS[:i])
            for category in categories
            if isinstance(category.get(rank), str) and category[rank]
        }
        if paths and len(paths) == len({str(category["name"]) for category in categories}):
            named = Counter(path[-1] for path in {*paths.values()})
            levels[rank] = {name: path[-1] if named[path[-1]] == 1 else "_".join(path) for name, path in paths.items()}
    return dict(reversed(levels.items()))


def coco_listing(
    root: Path,
    file: Path,
    content: Content,
    images: str | None,
    faults: list[Fault],
    make: "type[CocoImages] | None" = None,
) -> Listing:
    """List the existing images of one file, with their boxes."""
    categories = {category["id"]: str(category["name"]) for category in content["categories"]}
    number = {identity: i for i, identity in enumerate(categories)}
    folder = _image_folder(root, file, [image["file_name"] for image in content["images"]], images)
    paths = {image["id"]: _image_path(root, folder, image["file_name"], file) for image in content["images"]}
    entries = Counter(paths.values())
    annotations = {path: _ImageAnnotations() for path in entries if os.path.isfile(root / path)}
    for path, count in entries.items():
        if path not in annotations:
            faults.append(Fault(printable(root / path), "image missing", f"{file.name} names it"))
        elif count > 1:
            detail = f"{file.name} has {count:,} entries for it; their annotations are merged"
            faults.append(Fault(printable(root / path), "image listed several times", detail))
    for box in content["annotations"]:
        where = f"{printable(file)}, annotation {_shortened(box.get('id', '?'))}"
        if not _is_one_of(box.get("image_id"), paths):
            faults.append(Fault(where, "unknown image", f"image_id {_shortened(box.get('image_id'))}"))
        elif not _is_one_of(box.get("category_id"), categories):
            faults.append(Fault(where, "unknown category", f"category_id {_shortened(box.get('category_id'))}"))
        elif (corners := _corners(box.get("bbox"))) is None:
            faults.append(
                Fault(
                    where, "boxes cannot be read", f"bbox {_shortened(box.get('bbox'))}, expected x, y, width, height"
                )
            )
        elif of := annotations.get(paths[box["image_id"]]):
            of.boxes.append((*corners, number[box["category_id"]]))
            of.crowd.append(bool(box.get("iscrowd")))
            of.areas.append(_area(box.get("area"), corners))
            of.outlines.append(box.get("segmentation"))
            of.names.append(_shortened(box.get("id", "?")))
    if not annotations:
        raise DataError(f"{printable(file)}: none of its {len(entries)} images is in {printable(root / folder)}")
    objects = tuple(categories.values())
    store = (make or CocoImages)(root, list(annotations), file, objects, list(annotations.values()))
    return Listing(store, np.arange(len(store)), np.full(len(store), UNLABELED), objects)


def _read_coco(file: Path) -> Mapping[str, Any]:
    try:
        content = parse_json(read_plain(file, MOST_JSON_BYTES), MOST_JSON_BYTES)
    except OSError as error:
        raise DataError(f"{printable(file)}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{printable(file)}: cannot be read as JSON ({error})") from error
    if isinstance(content, dict) and isinstance(content.get("images"), list):
        for image in content["images"]:  # LVIS has URLs instead of names
            if isinstance(image, dict) and "file_name" not in image and isinstance(image.get("coco_url"), str):
                image["file_name"] = "/".join(image["coco_url"].split("/")[-2:])
    if not isinstance(content, dict) or not all(isinstance(content.get(name), list) for name in _COCO):
        raise DataError(f"{printable(file)}: expected an object with lists {', '.join(_COCO)}, as in COCO")
    try:
        for name, fields in _COCO.items():
            for i, entry in enumerate(content[name]):
                check_shape(entry, fields, f"{name}[{i}]")
    except ValueError as error:
        raise DataError(f"{printable(file)}: {error}") from error
    return content


def _image_folder(root: Path, file: Path, names: Sequence[str], images: str | None = None) -> str:
    """Return the image folder of a split: `images`, or else the first usual folder that has one of them."""
    if images is not None:
        return images
    split = file.stem.removeprefix("instances_")
    bases = list(dict.fromkeys(["", os.path.relpath(file.parent, root), os.path.relpath(file.parent.parent, root)]))
    bases = [base for base in bases if not base.startswith(os.pardir)]
    places = [os.path.join(base, p) for base in bases for p in (split, os.path.join("images", split), "images", "")]
    return next((p for p in places if any(_is_inside(root, p, name) for name in names[:100])), split)


def _is_inside(root: Path, folder: str, name: str) -> bool:
    path = below(root, os.path.join(folder, name))
    return path is not None and os.path.isfile(root / path)


def _image_path(root: Path, folder: str, name: str, file: Path) -> str:
    """Return the path relative to the root. Raise DataError if it leads out of it, since the file is untrusted."""
    path = below(root, os.path.join(folder, name))
    if path is None:
        outside = f"file_name {printable(name)!r} is outside of {printable(root)}"
        raise DataError(f"{printable(file)}: {outside}; expected an image in that folder")
    return path


def _is_one_of(value: Any, known: Mapping[Any, Any]) -> bool:
    return isinstance(value, int | float | str) and value in known


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_MESSAGE_LETTERS else f"{text[:_MAX_MESSAGE_LETTERS]}…"


def _corners(box: Any) -> tuple[float, float, float, float] | None:
    """Return the corners of (x, y, width, height), or None if `box` is not four numbers."""
    if not isinstance(box, list) or not {*map(type, box)} <= {int, float}:
        return None
    try:
        x, y, width, height = map(float, box)
    except (ValueError, OverflowError):
        return None
    corners = x, y, x + width, y + height
    return corners if all(math.isfinite(each) and abs(each) < 1 << 31 for each in corners) else None


def _area(value: Any, corners: tuple[float, ...]) -> float:
    """Return the area in the file, or that of the box if there is none."""
    if type(value) in (int, float) and 0 <= value < 1 << 63:
        return float(value)
    return (corners[2] - corners[0]) * (corners[3] - corners[1])
