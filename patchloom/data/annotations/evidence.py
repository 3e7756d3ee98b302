"""Find the sets of annotations in a folder, for `layout` to choose from.

    masks    images of few values or colors, with the stems and sizes of other images: masks/, trainannot/, gtFine/
    boxes    .xml (VOC), .txt (YOLO) or .json (LabelMe) files with the stems of images
    files    COCO's .json, CVAT's .xml, Label Studio's .json, tables of boxes

Only a limited number of folders, names and images is read, so that a million images take no longer than a thousand.
"""

import os
import posixpath
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from patchloom.data.annotations.box_formats import box_columns
from patchloom.data.annotations.instance_masks import MASKS as INSTANCE_FOLDERS
from patchloom.data.annotations.paired_files import Pair, image_stem, mask_stem
from patchloom.data.annotations.yolo import reads_as_yolo
from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES
from patchloom.data.trees.tree import Tree
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import EXTENSIONS, decode, read_file, stored_mode, upright_size
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import open_plain

MOST_FOLDERS, MOST_CHILDREN, MOST_DEPTH, MOST_ENTRIES = 400, 40, 6, 2_000  # limits of the search
SAMPLED = 8  # names or files that decide what a folder contains
MOST_VALUES = 64  # colors or gray values of a mask
_PIXELS = 100_000  # of an image, among which colors are counted
_SNIFFED = 1 << 16  # first bytes of a file, which decide what it is
_LOSSLESS = (".png", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm", ".pbm", ".pnm")
_PER_IMAGE = {".xml": "voc", ".txt": "yolo", ".json": "labelme"}
# Names of folders of masks, and of other renderings of masks.
_MASK_NAME = re.compile(r"(annot|mask|label|gt|ground.?truth|segment|trimap)", re.IGNORECASE)
MASK_END = re.compile(r"(annot|annotations?|masks?|labels?|gt)$", re.IGNORECASE)
_NO_CLASSES = re.compile(r"(SegmentationObject|instances?|panoptic\w*|depth|disparity)$", re.IGNORECASE)
IMAGE_NAMES = ("images", "imgs", "image", "img", "jpegimages", "photos", "pictures", "original", "rgb", "leftimg8bit")
_SPLIT_WORD = re.compile(
    rf"(?<![a-z])({'|'.join(sorted((*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES), key=len, reverse=True))})", re.IGNORECASE
)
# Other files of COCO: captions, key points …
_OTHER_JSON = re.compile(r"^(captions|person_keypoints|panoptic|stuff|image_info)_", re.IGNORECASE)
KINDS = {
    "masks": "segmentation", "objects": "detection, by masks of objects", "voc": "detection, by VOC's XML files",
    "yolo": "detection, by YOLO's text files", "labelme": "detection, by LabelMe's files",
    "coco": "detection, by COCO's files", "table": "detection, by a table of boxes", "cvat": "detection, by CVAT's XML",
    "label studio": "detection, by Label Studio's export",
}  # fmt: skip


class FolderListing(NamedTuple):
    """The first entries of a folder, sorted by name."""

    images: list[str]  # names
    files: list[str]  # names of other files
    folders: list[str]


@dataclass(frozen=True)
class Annotations:
    """One set of annotations: pairs of folders, or files, of one kind."""

    kind: str  # of KINDS
    place: str  # relative to the root, with {split} if there are several
    pairs: tuple[Pair, ...] = ()
    files: tuple[Path, ...] = ()

    @property
    def option(self) -> str:
        """The command-line option that selects it."""
        return f"--{'masks' if self.kind == 'masks' else 'boxes'} {shlex.quote(self.place or '.')}"


@dataclass
class Evidence:
    """The first entries of a folder and of the folders below it."""

    root: Path
    folders: dict[str, FolderListing]  # by path relative to the root
    _stems: dict[str, set[str]] = field(default_factory=dict)
    _masks: dict[str, list[str]] = field(default_factory=dict)
    _together: set[str] = field(default_factory=set)  # folders with both images and their masks

    @classmethod
    def search(cls, root: Path, inside: Sequence[str] = ("",)) -> "Evidence":
        """List a folder and the folders below it, within limits. `inside` are the folders to start from."""
        folders: dict[str, FolderListing] = {}
        level = list(inside)
        for _ in range(MOST_DEPTH + 1):
            below: list[str] = []
            for path in level[: MOST_FOLDERS - len(folders)]:
                folders[path] = folder = _list_folder(root / path)
                below += [os.path.join(path, name) for name in folder.folders[:MOST_CHILDREN]]
            level = below
        return cls(root, folders)

    def names(self, folder: str) -> list[str]:
        """Return all images of a folder, not only the first ones."""
        known = self.folders[folder]
        if len(known.images) + len(known.files) + len(known.folders) < MOST_ENTRIES:
            return known.images
        names = sorted(os.listdir(self.root / folder))
        return [name for name in names if os.path.splitext(name)[1].lower() in EXTENSIONS]

    def stems(self, folder: str) -> set[str]:
        """Return the `image_stem`s of all images of a folder."""
        if folder not in self._stems:
            self._stems[folder] = {image_stem(_stem(name)) for name in self.names(folder)}
        return self._stems[folder]

    def masks(self, folder: str) -> list[str]:
        """Return the names of some masks in a folder, judged by their pixels (and names, next to images)."""
        if folder not in self._masks:
            names = [name for name in self.folders[folder].images if name.lower().endswith(_LOSSLESS)]
            marked = [name for name in names if mask_stem(_stem(name)) not in ("", _stem(name))]
            stems = self.stems(folder) if marked else set()
            marked = [name for name in marked if mask_stem(_stem(name)) in stems]
            sampled = _some(marked or [name for name in names if mask_stem(_stem(name))], 2)
            named = bool(marked) or bool(_MASK_NAME.search(folder))
            are_masks = bool(sampled) and all(self._is_mask(os.path.join(folder, name), named) for name in sampled)
            self._masks[folder] = _some(marked or names, SAMPLED) if are_masks else []
            self._together |= {folder} if marked and are_masks else set()
        return self._masks[folder]

    def has_photos(self, folder: str, masks: str) -> bool:
        """Return whether a folder may contain the images of the masks in another folder or in itself."""
        return folder in self._together if folder == masks else not self.masks(folder)

    def _is_mask(self, path: str, named: bool) -> bool:
        """Return whether an image has few values. One with several channels is decoded only if `named` like a mask."""
        place = self.root / path
        try:
            data, where = _read(place)
            if not named and stored_mode(data, where) not in ("P", "L", "1"):
                return False
            image = decode(data, where)
        except DataError:
            return False
        pixels = np.asarray(image, np.int32).reshape(-1, 3)[:: max(1, image.width * image.height // _PIXELS)]
        colors = len(np.unique(pixels @ (1 << 16, 1 << 8, 1)))
        return colors <= min(MOST_VALUES, max(4, len(pixels) // 8))


def _list_folder(path: Path) -> FolderListing:
    listing = FolderListing([], [], [])
    with suppress(OSError), os.scandir(path) as entries:  # reading the folder will report the error
        for entry in islice(entries, MOST_ENTRIES):
            if not entry.name.startswith((".", "__MACOSX")):
                is_image = os.path.splitext(entry.name)[1].lower() in EXTENSIONS
                (listing.folders if entry.is_dir() else listing.images if is_image else listing.files).append(
                    entry.name
                )
    for names in listing:
        names.sort()
    return listing


# Pairs of folders, and files ------------------------------------------------------------------------------------------


def find_annotations(evidence: Evidence) -> list[Annotations]:
    """Return the sets of annotations in a folder."""
    pairs: dict[tuple[str, str], set[Pair]] = {}
    for folder, entries in evidence.folders.items():
        for kind, stems in _candidates(evidence, folder, entries):
            pair = _partner(evidence, folder, kind, stems)
            if pair is not None:
                place = "" if pair.images == pair.others else _drop_split(pair.others)
                pairs.setdefault((kind, place), set()).add(pair)
    paired = [
        Annotations(kind, place if len(of) > 1 else next(iter(of)).others, tuple(sorted(of)))
        for (kind, place), of in sorted(pairs.items())
    ]
    return [*_files(evidence), *paired]


def _candidates(evidence: Evidence, folder: str, entries: FolderListing) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds of annotations that a folder may contain, with some stems of their images."""
    name = os.path.basename(folder)
    if name in INSTANCE_FOLDERS:
        yield "objects", [mask_stem(_stem(image)) for image in _some(entries.images, SAMPLED)]
    elif not _NO_CLASSES.search(name) and (masks := evidence.masks(folder)):
        yield "masks", [stem for image in masks if (stem := mask_stem(_stem(image)))]
    for end, kind in _PER_IMAGE.items():
        files = _some([file for file in entries.files if file.lower().endswith(end)], SAMPLED)
        known = kind == "yolo" and "labels" in folder.lower().split(os.sep)  # even if the files are faulty
        if files and (known or any(_reads_as(kind, evidence.root / folder / file) for file in files)):
            yield kind, [_stem(file) for file in files]


def _partner(evidence: Evidence, folder: str, kind: str, stems: Sequence[str]) -> Pair | None:
    """Return the folder of the images with these stems and this folder, without the folders they share at the end."""

    def similarity(other: str) -> tuple[bool, int, int]:
        mine, others = folder.split(os.sep), other.split(os.sep)
        tail = _equal(reversed(mine), reversed(others))
        return _split_in(folder) == _split_in(other), tail, _equal(mine, others)

    candidates = [
        other
        for other, entries in evidence.folders.items()
        if entries.images
        and (evidence.has_photos(other, folder) or (other == folder and kind != "masks"))
        and sum(stem in evidence.stems(other) for stem in stems) * 2 >= len(stems)
    ]
    best = max(candidates, key=similarity, default=None)
    if best is None or (kind == "masks" and not _same_sizes(evidence, best, folder, stems)):
        return None
    tail = _equal(reversed(folder.split(os.sep)), reversed(best.split(os.sep))) if best != folder else 0
    ends = [os.sep.join(path.split(os.sep)[: len(path.split(os.sep)) - tail]) for path in (best, folder)]
    return Pair(*ends)


def _same_sizes(evidence: Evidence, images: str, masks: str, stems: Sequence[str]) -> bool:
    """Return whether an image and its mask have the same size, for at least one pair."""
    by_stem = [
        {key(_stem(name)): evidence.root / folder / name for name in evidence.names(folder)}
        for folder, key in ((images, image_stem), (masks, mask_stem))
    ]
    for stem in stems[:SAMPLED]:
        with suppress(DataError, KeyError):
            if len({upright_size(*_read(files[stem])) for files in by_stem}) == 1:
                return True
    return False


def _read(file: Path) -> tuple[bytes, str]:
    return read_file(file, printable(file)), printable(file)


def _files(evidence: Evidence) -> list[Annotations]:
    """Return files with the annotations of many images, grouped by kind and name."""
    groups: dict[tuple[str, str], list[Path]] = {}
    for folder, entries in evidence.folders.items():
        stems = {_stem(image) for image in entries.images}
        for end in (".json", ".csv", ".xml"):
            names = [name for name in entries.files if name.lower().endswith(end) and _stem(name) not in stems]
            for name in names if len(names) <= MOST_CHILDREN else ():  # more files are one per image
                path = os.path.join(folder, name)
                if kind := kind_of_file(evidence.root / path):
                    groups.setdefault((kind, _drop_split(path)), []).append(evidence.root / path)
    return [
        Annotations(kind, place if len(of) > 1 else os.path.relpath(of[0], evidence.root), files=tuple(sorted(of)))
        for (kind, place), of in sorted(groups.items())
    ]


def kind_of_file(file: Path) -> str:
    """Return the kind of a file by its name or its first bytes, or '' if it is unknown."""
    name = file.name.lower()
    if (name.startswith("instances_") and name.endswith(".json")) or name.endswith(".coco.json"):
        return "coco"  # even if it is faulty: reading it will report that
    try:
        with open_plain(file) as opened:
            start = opened.read(_SNIFFED).decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    except OSError:
        return ""
    if name.endswith(".xml"):
        return "cvat" if "<annotations>" in start and ("<image " in start or "<track " in start) else ""
    if name.endswith(".csv"):
        return "table" if box_columns(start.partition("\n")[0].split(",")) else ""
    if start.startswith("[") and re.search(r'"(annotations|completions)"\s*:', start) and '"data"' in start:
        return "label studio"
    keys = set(re.findall(r'"(\w+)"\s*:\s*[\[{]', start))
    if start.startswith("{") and not _OTHER_JSON.search(name) and keys & {"images", "annotations", "categories"}:
        return "coco"
    return ""


def _reads_as(kind: str, file: Path) -> bool:
    """Return whether the annotations file of one image has this kind."""
    try:
        with open_plain(file) as opened:
            start = opened.read(_SNIFFED)
    except OSError:
        return False
    return _is_of(kind, start)


def _is_of(kind: str, data: bytes) -> bool:
    """Return whether the first bytes of the annotations file of one image have this kind."""
    start = data.decode("utf-8", "replace")
    if kind == "voc":
        return "<annotation" in start and "<annotations" not in start
    if kind == "labelme":
        return '"shapes"' in start
    lines = [line for line in start.splitlines() if line.strip()]
    return bool(lines) and reads_as_yolo(lines[0])


def kind_of_folder(path: Path) -> str:
    """Return the kind of the per-image annotation files in a folder, or '' if it is unknown."""
    if path.name in INSTANCE_FOLDERS:
        return "objects"
    for folder, entries in Evidence.search(path).folders.items():
        for end, kind in _PER_IMAGE.items():
            files = _some([file for file in entries.files if file.lower().endswith(end)], SAMPLED)
            if any(_reads_as(kind, path / folder / file) for file in files):
                return kind
    return ""


def named_as_masks(with_images: Sequence[str]) -> Iterator[Pair]:
    """Yield sibling folders named like images and masks: images and masks, train and trainannot."""
    ways = {tuple(path.split("/")[: i + 1]) for path in with_images if path for i in range(len(path.split("/")))}
    for *above, name in sorted(ways):
        base = MASK_END.sub("", name).rstrip("_-. ").lower()
        siblings = [way[-1] for way in sorted(ways) if [*way[:-1]] == above and way[-1] != name]
        images = [one for one in siblings if (one.lower() == base if base else one.lower() in IMAGE_NAMES)]
        if base != name.lower() and images:
            yield Pair("/".join([*above, images[0]]), "/".join([*above, name]))


def annotations_in_archive(tree: Tree) -> str:
    """Describe the masks or boxes in an archive; '' if it has none."""
    files = [(*posixpath.split(path), path) for path in tree.files()]
    images = [(folder, _stem(name)) for folder, name, _ in files if os.path.splitext(name)[1].lower() in EXTENSIONS]
    for pair in named_as_masks([folder for folder, _ in images]):
        return f"images and masks in {pair.images} and {pair.others}"
    stems = {stem for _, stem in images}
    for end, kind in _PER_IMAGE.items():
        annotations = [path for _, name, path in files if name.lower().endswith(end) and _stem(name) in stems]
        if any(_is_of(kind, tree.read(path)[:_SNIFFED]) for path in _some(annotations, SAMPLED)):
            return f"annotations ({KINDS[kind]}), such as {annotations[0]}"
    coco = [path for _, name, path in files if name.startswith("instances_") or name.endswith(".coco.json")]
    return f"COCO's annotations, {coco[0]}" if coco else ""


# Names ---------------------------------------------------------------------------------------------------------------


def _drop_split(path: str) -> str:
    return _SPLIT_WORD.sub("{split}", path)


def _split_in(path: str) -> str:
    match = _SPLIT_WORD.search(path)
    return match[1].lower()[:3] if match else ""


def _equal(mine: Iterable[str], others: Iterable[str]) -> int:
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(mine, others, strict=False):
        if one != other or not one:
            break
        count += 1
    return count


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _some(names: Sequence[str], count: int) -> list[str]:
    """Return a sample, spread over all names."""
    return list(names[:: max(1, len(names) // count)][:count])
