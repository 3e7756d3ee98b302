"""Boxes and outlines of other tools, converted to the format that `coco` reads.

    train-annotations-bbox.csv  _annotations.csv   one row per box (Open Images, Roboflow): image, class, xmin, ymin, …
    project-1-at-….json                            Label Studio's export: rectangles and polygons
    annotations.xml                                CVAT for images 1.1: boxes and polygons
    a.jpg  a.json                                  LabelMe: rectangles and polygons

Shapes that COCO does not have (ellipses, brushes, points, tracks) are a DataError that names the export to choose.
"""

import csv
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from patchloom.data.annotations.coco import CocoImages, Content, coco_listing, open_contents
from patchloom.data.datasets import Source
from patchloom.data.images.image_store import Objects
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.trees.tree import FolderTree
from patchloom_runtime.errors import DataError, shortened
from patchloom_runtime.images.decode import EXTENSIONS, upright_size
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import parse_json, read_plain
from patchloom_runtime.untrusted_xml import parse_xml

MOST_BYTES = 1 << 30  # of one file, which is read into memory
DESCRIPTIONS = "class-descriptions*.csv"  # Open Images: /m/011k07,Tortoise
_COLUMNS = {
    "image": ("filename", "imageid", "image", "file", "path", "imagename", "img", "filepath", "imagepath"),
    "class": ("class", "labelname", "label", "classname", "category", "name"),
    "x0": ("xmin", "x1", "xtl", "left"), "y0": ("ymin", "y1", "ytl", "top"),
    "x1": ("xmax", "x2", "xbr", "right"), "y1": ("ymax", "y2", "ybr", "bottom"),
}  # fmt: skip
_UPLOADED = re.compile(r"^[0-9a-f]{8}-")  # prefix that Label Studio adds to file names

Box = tuple[str, tuple[float, float, float, float]]  # class, corners
Shape = tuple[str, list[float]]  # class, x and y of each point


class RelativeBoxes(CocoImages):
    """Boxes in fractions of the image's sides, as in Open Images."""

    def boxes(self, index: int) -> np.ndarray:
        """Return the boxes in pixels."""
        height, width = upright_size(self.encoded(index), self.where(index))
        return super().boxes(index) * np.array([width, height, width, height, 1])

    def objects(self, index: int) -> Objects:
        """Return the objects in pixels."""
        boxes = self.boxes(index)
        areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return Objects(boxes, self.crowd(index), areas)


class FolderImages:
    """The images of a folder, found by any part of their path that a tool records."""

    def __init__(self, root: Path) -> None:
        self._by_path: dict[str, str] = {}
        self._by_name: dict[str, list[str]] = {}
        for path in FolderTree(root).files():
            stem, extension = posixpath.splitext(path)
            if extension.lower() in EXTENSIONS:
                self._by_path[path] = path
                for name in (posixpath.basename(path), posixpath.basename(stem)):
                    self._by_name.setdefault(name, []).append(path)

    def find(self, name: str, folder: str = "") -> str:
        """Return the path of an image, or its bare name if there is none. Of several, the one in `folder` is chosen."""
        path = name.replace("\\", "/").lstrip("/")
        base = posixpath.basename(path)
        near = posixpath.join(folder, base)
        known = self._by_path.get(path) or self._by_path.get(near)
        same = self._by_name.get(base) or self._by_name.get(_UPLOADED.sub("", base)) or []
        split = [one for one in same if folder and folder in one.split("/")] if len(same) > 1 else same
        return known or (split[0] if len(split) == 1 else base)


def open_table(root: Path, files: Sequence[Path], title: str) -> Source:
    """Open tables with one row per box, one table per split."""
    images, names = FolderImages(root), _descriptions(root)
    rows = {file: list(_rows(file)) for file in files}
    relative = all(max(corners) <= 1 for own in rows.values() for _, _, corners, _ in own)
    contents = {}
    for file, own in rows.items():
        of_image: dict[str, list[tuple[Box | Shape, bool]]] = {}
        for image, label, corners, crowd in own:
            of_image.setdefault(image, []).append(((names.get(label, label), corners), crowd))
        folder = _folder_of(root, file)
        contents[file] = {images.find(image, folder): boxes for image, boxes in of_image.items()}
    source = _opened(root, contents, title, "table of", RelativeBoxes if relative else CocoImages)
    named = (f"class names from {printable(next(root.glob(DESCRIPTIONS)).name)}",) if names else ()
    return replace(source, notes=(*source.notes, *named))


def open_label_studio(root: Path, files: Sequence[Path], title: str) -> Source:
    """Open Label Studio's JSON export of rectangles and polygons."""
    images = FolderImages(root)
    contents = {}
    for file in files:
        of_image: dict[str, list[tuple[Box | Shape, bool]]] = {}
        with _expected(file, "Label Studio's JSON"):
            for task in _json(file):
                name = next(value for value in task["data"].values() if isinstance(value, str))
                own = of_image.setdefault(images.find(name.partition("?")[0]), [])
                for annotation in (task.get("annotations") or [])[:1]:
                    own += [(shape, False) for shape in _label_studio_shapes(annotation.get("result") or [], file)]
        contents[file] = of_image
    return _opened(root, contents, title, "Label Studio")


def open_cvat(root: Path, files: Sequence[Path], title: str) -> Source:
    """Open CVAT's XML of images."""
    images = FolderImages(root)
    contents = {}
    names: list[str] = []
    for file in files:
        try:
            tree = parse_xml(_bytes(file))
        except ValueError as error:
            raise DataError(f"{printable(file)}: cannot be read as XML ({error})") from error
        if tree.find("track") is not None:
            raise DataError(
                f"{printable(file)}: has tracks of a video; export the task as 'COCO 1.0' or 'YOLO' in CVAT"
            )
        names += [name for label in tree.iter("label") if (name := label.findtext("name"))]
        contents[file] = {
            images.find(image.get("name") or ""): [(shape, False) for shape in _cvat_shapes(image, file)]
            for image in tree.iter("image")
        }
    return _opened(root, contents, title, "CVAT", names=names)


def open_labelme(root: Path, folders: Mapping[str, Sequence[tuple[str, str]]], title: str) -> Source:
    """Open LabelMe's files. `folders` maps folders to pairs (image, JSON), relative to the root."""
    contents = {
        root / folder: {image: [(shape, False) for shape in _labelme_shapes(root / file)] for image, file in pairs}
        for folder, pairs in folders.items()
    }
    return _opened(root, contents, title, "LabelMe")


# One file of each tool ------------------------------------------------------------------------------------------------


def box_columns(header: Sequence[str]) -> dict[str, int] | None:
    """Return the columns of the image, the class and the corners, or None if one is missing."""
    plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in header]
    columns = {what: next((plain.index(n) for n in names if n in plain), -1) for what, names in _COLUMNS.items()}
    return columns if min(columns.values()) >= 0 else None


def _rows(file: Path) -> Iterator[tuple[str, str, tuple[float, float, float, float], bool]]:
    """Yield image, class, corners and whether the box is of a group, per row."""
    reader = csv.reader(_bytes(file).decode("utf-8-sig", "replace").splitlines())
    header = next(reader, [])
    columns = box_columns(header)
    if columns is None:
        raise DataError(f"{printable(file)}, line 1: expected columns of the image, the class and four corners")
    group = next((i for i, name in enumerate(header) if name.strip().lower() == "isgroupof"), None)
    for number, row in enumerate(reader, 2):
        try:
            x0, y0, x1, y1 = (float(row[columns[corner]]) for corner in ("x0", "y0", "x1", "y1"))
            image, label = row[columns["image"]].strip(), row[columns["class"]].strip()
            is_group = group is not None and row[group] == "1"
        except (ValueError, IndexError) as error:
            raise DataError(f"{printable(file)}, line {number}: expected an image, a class and four numbers") from error
        yield image, label, (x0, y0, x1, y1), is_group


def _label_studio_shapes(result: Sequence[Any], file: Path) -> Iterator[Box | Shape]:
    for part in result:
        value, kind = part.get("value") or {}, part.get("type")
        width, height = (float(part.get(side) or 0) / 100 for side in ("original_width", "original_height"))
        labels = value.get(kind) if isinstance(kind, str) else None
        if kind not in ("rectanglelabels", "polygonlabels") or not labels or not width or not height:
            how = "choose the export 'YOLO' or 'COCO' in Label Studio, or 'CSV' for classes of images"
            raise DataError(f"{printable(file)}: results of kind {kind!r}, expected rectangles or polygons; {how}")
        if kind == "polygonlabels":
            yield (
                str(labels[0]),
                [xy * side for point in value["points"] for xy, side in zip(point, (width, height), strict=True)],
            )
        else:
            x, y, w, h = (float(value[name]) for name in ("x", "y", "width", "height"))
            yield str(labels[0]), (x * width, y * height, (x + w) * width, (y + h) * height)


def _cvat_shapes(image: ElementTree.Element, file: Path) -> Iterator[Box | Shape]:
    for element in image:
        label = element.get("label") or ""
        try:
            if element.tag == "box":
                x0, y0, x1, y1 = (float(element.get(name) or "") for name in ("xtl", "ytl", "xbr", "ybr"))
                yield label, (x0, y0, x1, y1)
            elif element.tag == "polygon":
                yield (
                    label,
                    [float(xy) for point in (element.get("points") or "").split(";") for xy in point.split(",")],
                )
            else:
                how = "export the task as 'COCO 1.0' or 'YOLO' in CVAT, or 'ImageNet 1.0' for classes of images"
                raise DataError(f"{printable(file)}: has a {element.tag}, expected boxes and polygons; {how}")
        except ValueError as error:
            raise DataError(f"{printable(file)}: a {element.tag} of {image.get('name')} has no corners") from error


def _labelme_shapes(file: Path) -> Iterator[Box | Shape]:
    with _expected(file, "LabelMe's JSON"):
        for shape in _json(file).get("shapes") or ():
            kind = shape.get("shape_type") or "polygon"
            label, points = str(shape["label"]), [(float(x), float(y)) for x, y in shape["points"]]
            if kind == "rectangle":
                (xa, ya), (xb, yb) = points[:2]
                yield label, (min(xa, xb), min(ya, yb), max(xa, xb), max(ya, yb))
            elif kind == "polygon":
                yield label, [xy for point in points for xy in point]
            else:
                raise DataError(f"{printable(file)}: a shape of kind {kind!r}; expected polygons and rectangles")


@contextmanager
def _expected(file: Path, what: str) -> Iterator[None]:
    """Turn the errors of reading a file with another structure into a DataError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, StopIteration, TypeError, ValueError) as error:
        reason = f"{type(error).__name__} {error}".strip()
        raise DataError(f"{printable(file)}: does not have the structure of {what} ({shortened(reason)})") from error


# Conversion to COCO ---------------------------------------------------------------------------------------------------


def _opened(
    root: Path,
    contents: Mapping[Path, Mapping[str, Sequence[tuple[Box | Shape, bool]]]],
    title: str,
    kind: str,
    store_type: type[CocoImages] = CocoImages,
    names: Sequence[str] = (),
) -> Source:
    """Open the annotations of each file and image, with paths relative to the root. `names` are the known classes."""
    used = {shape[0] for images in contents.values() for own in images.values() for shape, _ in own}
    classes = list(dict.fromkeys([*names, *sorted(used)]))
    as_coco = {file: _content(images, classes) for file, images in contents.items()}
    return open_contents(root, as_coco, title, kind, "", partial(coco_listing, make=store_type))


def _content(images: Mapping[str, Sequence[tuple[Box | Shape, bool]]], classes: Sequence[str]) -> Content:
    annotations: list[dict[str, Any]] = []
    for image, own in images.items():
        for (label, outline), crowd in own:
            annotation = {"id": len(annotations), "image_id": image, "category_id": label, "iscrowd": int(crowd)}
            xs, ys = (
                (outline[0::2], outline[1::2])
                if isinstance(outline, list)
                else ((outline[0], outline[2]), (outline[1], outline[3]))
            )
            annotation["bbox"] = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)] if xs else None
            annotation["segmentation"] = [outline] if isinstance(outline, list) else None
            annotations.append(annotation)
    return {
        "images": [{"id": image, "file_name": image} for image in images],
        "annotations": annotations,
        "categories": [{"id": name, "name": name} for name in classes],
    }


def _descriptions(root: Path) -> dict[str, str]:
    """Read the class names of Open Images, by their codes."""
    file = next(root.glob(DESCRIPTIONS), None)
    lines = names_by_line(file) if file else None
    return {row[0]: row[1] for row in csv.reader(lines or ()) if len(row) == 2}


def _folder_of(root: Path, file: Path) -> str:
    """Return the image folder of a table: its own folder, or the one with which its name starts."""
    below = os.path.relpath(file.parent, root)
    if below != ".":
        return below
    folders = [entry.name for entry in FolderTree(root).entries("") if entry.kind == "folder"]
    return next((name for name in folders if file.name.lower().startswith(name.lower())), "")


def _bytes(file: Path) -> bytes:
    try:
        return read_plain(file, MOST_BYTES)
    except OSError as error:
        raise DataError(f"{printable(file)}: cannot be read ({error.strerror})") from error


def _json(file: Path) -> Any:
    try:
        return parse_json(_bytes(file), MOST_BYTES)
    except ValueError as error:
        raise DataError(f"{printable(file)}: cannot be read as JSON ({error})") from error
