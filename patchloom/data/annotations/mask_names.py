"""Class names of the numbers or colors in masks, from a file next to the masks.

    classes.txt  labels.txt  class_names.txt     one name per line, in order
    the same, labelmap.txt  class_dict.csv       a name and its color per line: sky,128,128,128  sky:128,128,128::
    label_colors.txt  palette.txt                128 128 128 sky
    objectInfo150.txt                            ADE20K's table; its masks start at 1, and 0 is unlabeled

If every line has a color, masks are images in these colors. The masks of Pascal VOC, Cityscapes and CamVid (SegNet's
version) are recognized by their file names and need no such file. A class named void, unlabeled or similar is not a
class: its number marks unlabeled pixels. Otherwise 255 does.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.data.images.image_store import NOT_LABELED
from patchloom.data.labels.class_names import names_by_line
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import printable

FILES = (
    *("classes.txt", "labels.txt", "class_names.txt", "labelmap.txt", "class_dict.csv"),
    *("label_colors.txt", "palette.txt"),
)
ADE20K = "objectInfo150.txt"
MOST_NAMES, MOST_BYTES = 256, 1 << 20  # of a names file; 8-bit masks have 256 numbers
VOC_NAMES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
# SegNet's 11 classes of CamVid, and the rest, by number. The names of its images have one of these prefixes.
CAMVID_NAMES = (
    *("Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist"),
    "Unlabeled",
)
_CAMVID_FILE = re.compile(r"(0001TP|0006R0|0016E5|Seq05VD)_")
# Label ids of the 19 training classes of Cityscapes (cityscapesScripts, helpers/labels.py).
CITYSCAPES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
IGNORED_NAMES = ("void", "unlabelled", "unlabeled", "ignore", "ignored", "not labelled", "not labeled", "unknown")
_LISTED_COLORS = 3  # in a message


@dataclass(frozen=True)
class MaskNames:
    """Class names by number, and their colors (0xRRGGBB) if masks are in colors."""

    names: tuple[str, ...] = ()
    colors: tuple[int, ...] = ()
    ignore: int | None = NOT_LABELED  # the number of unlabeled pixels
    meaning: tuple[int, ...] = ()  # class of each of the 256 values in a file, if they differ

    def numbers(self, pixels: np.ndarray, where: str) -> np.ndarray:
        """Convert (H, W, 3) colors to (H, W) class numbers. Raise DataError for an unknown color."""
        codes = (pixels.astype(np.int32) << (16, 8, 0)).sum(axis=2)
        known = np.array(self.colors)
        order = np.argsort(known)
        places = np.searchsorted(known, codes, sorter=order).clip(max=len(known) - 1)
        numbers = order[places]
        unknown = known[numbers] != codes
        if unknown.any():
            named = ", ".join(f"#{code:06x}" for code in np.unique(codes[unknown])[:_LISTED_COLORS].tolist())
            raise DataError(f"{where}: a mask with unknown colors, {named} ({int(unknown.sum()):,} pixels)")
        return numbers.astype(np.uint8)


def names_of_masks(
    places: Sequence[Path],
    masks: Sequence[str],
    values: Callable[[], set[int]],
    ignore: int | None = None,
    file: Path | None = None,
) -> tuple[MaskNames, tuple[str, ...]]:
    """Return the names of mask classes, and notes.

    Args:
        places: Folders to search for a names file.
        masks: Paths of the masks, by which public datasets are recognized.
        values: Reads the numbers in some of the masks.
        ignore: Number of unlabeled pixels that the user chose.
        file: Names file that the user chose.
    """
    named = _in_file(file) if file is not None else _in_folders(places)
    if not named.names:
        named = _known_by(masks)
    if not named.colors and not named.meaning and ignore is None and values() == {0, NOT_LABELED}:
        names = named.names if len(named.names) == 2 else ("background", "foreground")
        whole = tuple(int(value == NOT_LABELED) for value in range(NOT_LABELED + 1))
        note = f"masks hold only 0 and 255: {names[0]} and {names[1]} (--ignore 255 reads 255 as unlabeled)"
        return MaskNames(names, ignore=None, meaning=whole), (note,)
    if ignore is not None:
        first = named.names[0].lower() if named.names else ""
        if ignore == 0 and first and first not in IGNORED_NAMES and len(named.names) in values():
            named = replace(named, names=(IGNORED_NAMES[0], *named.names))  # names from 1 on
        return replace(named, ignore=ignore), (f"masks: {ignore} is unlabeled, as chosen",)
    ignored = [number for number, name in enumerate(named.names) if name.strip().lower() in IGNORED_NAMES]
    if not ignored:
        return named, ()
    note = f"masks: {named.names[ignored[0]]!r} ({ignored[0]}) is unlabeled; --ignore VALUE chooses another"
    return replace(named, ignore=ignored[0]), (note,)


def _known_by(masks: Sequence[str]) -> MaskNames:
    """Return the class names of a public dataset that is recognized by its file names, or none."""
    stems = [Path(mask).stem for mask in masks]
    if all(Path(mask).parent.name == "SegmentationClass" for mask in masks):
        return MaskNames(VOC_NAMES)
    if all(stem.endswith("_labelTrainIds") for stem in stems):
        return MaskNames(tuple(CITYSCAPES))
    if all(stem.endswith("_labelIds") for stem in stems):
        numbers = {value: number for number, value in enumerate(CITYSCAPES.values())}
        return MaskNames(tuple(CITYSCAPES), meaning=tuple(numbers.get(value, NOT_LABELED) for value in range(256)))
    if all(map(_CAMVID_FILE.match, stems)):
        return MaskNames(CAMVID_NAMES)
    return MaskNames()


def _in_folders(places: Sequence[Path]) -> MaskNames:
    """Read the first names file in these folders, or return no names."""
    for place in dict.fromkeys(places):
        file = next((place / name for name in (*FILES, ADE20K) if (place / name).exists()), None)
        if file is not None:
            return _in_file(file)
    return MaskNames()


def _in_file(file: Path) -> MaskNames:
    lines = names_by_line(file, MOST_BYTES)
    if lines is None:
        raise UsageError(f"--names {printable(file)} does not exist; expected one name per line, or a name and a color")
    if file.name != ADE20K:
        return _checked(_parsed([line.strip() for line in lines]), file)
    columns = [line.split("\t") for line in lines[1:] if line.strip()]
    names = (IGNORED_NAMES[0], *(row[-1].split(",")[0].strip() for row in columns))
    return _checked(MaskNames(names), file)


def _parsed(lines: Sequence[str]) -> MaskNames:
    """Parse names, or names with colors if every line except a header has one."""
    entries = [line for line in lines if line and not line.startswith("#")]
    colored = [_color(line) for line in entries]
    if entries and colored[0] is None and all(colored[1:]) and len(entries) > 1:  # a heading: name,r,g,b
        entries, colored = entries[1:], colored[1:]
    if entries and all(each is not None for each in colored):
        known = [each for each in colored if each is not None]
        return MaskNames(tuple(name for name, _ in known), tuple(code for _, code in known))
    return MaskNames(tuple(lines))


def _color(line: str) -> tuple[str, int] | None:
    """Return name and color of a line with three numbers up to 255, or None for any other line."""
    parts = [part for part in re.split(r"[,;:\t ]+", line) if part]
    numbers = [part for part in parts if part.isascii() and part.isdecimal()]
    values = [int(part) for part in numbers if len(part) <= 3]
    name = " ".join(part for part in parts if not (part.isascii() and part.isdecimal()))
    if len(values) != 3 or not name or max(values) > 255:
        return None
    red, green, blue = values
    return name, red << 16 | green << 8 | blue


def _checked(named: MaskNames, file: Path) -> MaskNames:
    if len(named.names) > MOST_NAMES:
        raise DataError(
            f"{printable(file)}: {len(named.names):,} names, expected at most {MOST_NAMES}, the values of a mask"
        )
    if len(set(named.colors)) < len(named.colors):
        raise DataError(f"{printable(file)}: two classes have the same color; expected one color per class")
    return named
