"""What the numbers, or the colours, in masks mean: a file beside the masks, in one of the forms that are around.

    classes.txt  labels.txt  class_names.txt     a name per line, by their order
    the same, labelmap.txt  class_dict.csv       a name and its colour per line: sky,128,128,128  sky:128,128,128::
    label_colors.txt  palette.txt                128 128 128 sky
    objectInfo150.txt                            ADE20K's table; its masks begin at 1, and 0 is not labelled

Where every line has a colour, masks are pictures in these colours. The masks of Pascal VOC, Cityscapes and CamVid (as
SegNet has it) are known by their files, and need none. A class called void, unlabelled or the like is no class: it is
the number that stands for 'not labelled', which is 255 otherwise.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from patchloom.data.datasets import NOT_LABELED
from patchloom.data.labels.class_names import names_by_line
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import printable

FILES = (
    *("classes.txt", "labels.txt", "class_names.txt", "labelmap.txt", "class_dict.csv"),
    *("label_colors.txt", "palette.txt"),
)
ADE20K = "objectInfo150.txt"
MOST_NAMES, MOST_BYTES = 256, 1 << 20  # of the numbers in a mask
VOC_NAMES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
# SegNet's 11 classes of CamVid and what it leaves out, by their numbers; the names of all its images begin alike.
CAMVID_NAMES = (
    *("Sky", "Building", "Pole", "Road", "Pavement", "Tree", "SignSymbol", "Fence", "Car", "Pedestrian", "Bicyclist"),
    "Unlabeled",
)
_CAMVID_FILE = re.compile(r"(0001TP|0006R0|0016E5|Seq05VD)_")
# Cityscapes' label id of each of its 19 classes that are trained on (cityscapesScripts, helpers/labels.py).
CITYSCAPES = {
    "road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19,
    "traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26, "truck": 27,
    "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33,
}  # fmt: skip
IGNORED_NAMES = ("void", "unlabelled", "unlabeled", "ignore", "ignored", "not labelled", "not labeled", "unknown")
_SHOWN = 3  # colours in a message


@dataclass(frozen=True)
class MaskNames:
    """Names of the classes by their numbers; and their colours, 0xRRGGBB, where masks are in colours."""

    names: tuple[str, ...] = ()
    colors: tuple[int, ...] = ()
    ignore: int | None = NOT_LABELED  # the number that stands for 'not labelled'
    meaning: tuple[int, ...] = ()  # the class of each of the 256 values in a file, where they are others

    def numbers(self, pixels: np.ndarray, where: str) -> np.ndarray:
        """(H, W, 3) in the colours → (H, W) class numbers; a DataError where a colour is none of them."""
        codes = (pixels.astype(np.int32) << (16, 8, 0)).sum(axis=2)
        known = np.array(self.colors)
        order = np.argsort(known)
        places = np.searchsorted(known, codes, sorter=order).clip(max=len(known) - 1)
        numbers = order[places]
        strange = known[numbers] != codes
        if strange.any():
            named = ", ".join(f"#{code:06x}" for code in np.unique(codes[strange])[:_SHOWN].tolist())
            raise DataError(f"{where}: a mask with colours of no class, {named} ({int(strange.sum()):,} pixels)")
        return numbers.astype(np.uint8)


def names_of_masks(
    places: Sequence[Path],
    masks: Sequence[str],
    values: Callable[[], set[int]],
    ignore: int | None = None,
    file: Path | None = None,
) -> tuple[MaskNames, tuple[str, ...]]:
    """What masks mean by a file of names, given or in one of the places, or by the masks' own names; and notes on it.

    `masks` are their paths, `values` looks up the numbers in some of them.
    """
    found = _in_file(file) if file is not None else _beside(places)
    if not found.names:
        found = _known_by(masks)
    if not found.colors and not found.meaning and ignore is None and values() == {0, NOT_LABELED}:
        names = found.names if len(found.names) == 2 else ("background", "foreground")
        whole = tuple(int(value == NOT_LABELED) for value in range(NOT_LABELED + 1))
        said = f"masks hold 0 and 255 alone: {names[0]} and {names[1]} (--ignore 255 reads 255 as not labelled)"
        return MaskNames(names, ignore=None, meaning=whole), (said,)
    if ignore is not None:
        first = found.names[0].lower() if found.names else ""
        if ignore == 0 and first and first not in IGNORED_NAMES and len(found.names) in values():
            found = replace(found, names=(IGNORED_NAMES[0], *found.names))  # names from 1 on
        return replace(found, ignore=ignore), (f"masks: {ignore} is not labelled, as given",)
    named = [number for number, name in enumerate(found.names) if name.strip().lower() in IGNORED_NAMES]
    if not named:
        return found, ()
    said = f"masks: {found.names[named[0]]!r} ({named[0]}) is not labelled; --ignore VALUE says another"
    return replace(found, ignore=named[0]), (said,)


def _known_by(masks: Sequence[str]) -> MaskNames:
    """Names that go with the files of a public dataset; none for others."""
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


def _beside(places: Sequence[Path]) -> MaskNames:
    """What a file in one of these folders says; nothing where there is none. A DataError where it says too much."""
    for place in dict.fromkeys(places):
        file = next((place / name for name in (*FILES, ADE20K) if (place / name).exists()), None)
        if file is not None:
            return _in_file(file)
    return MaskNames()


def _in_file(file: Path) -> MaskNames:
    lines = names_by_line(file, MOST_BYTES)
    if lines is None:
        raise UsageError(f"--names {printable(file)} does not exist; expected a name per line, or a name and a color")
    if file.name != ADE20K:
        return _checked(_parsed([line.strip() for line in lines]), file)
    columns = [line.split("\t") for line in lines[1:] if line.strip()]
    names = (IGNORED_NAMES[0], *(row[-1].split(",")[0].strip() for row in columns))
    return _checked(MaskNames(names), file)


def _parsed(lines: Sequence[str]) -> MaskNames:
    """Names alone, or names with colours where every line but a heading has one."""
    told = [line for line in lines if line and not line.startswith("#")]
    colored = [_color(line) for line in told]
    if told and colored[0] is None and all(colored[1:]) and len(told) > 1:  # a heading: name,r,g,b
        told, colored = told[1:], colored[1:]
    if told and all(each is not None for each in colored):
        known = [each for each in colored if each is not None]
        return MaskNames(tuple(name for name, _ in known), tuple(code for _, code in known))
    return MaskNames(tuple(lines))


def _color(line: str) -> tuple[str, int] | None:
    """Name and colour of a line with three numbers up to 255; None of any other."""
    parts = [part for part in re.split(r"[,;:\t ]+", line) if part]
    numbers = [part for part in parts if part.isascii() and part.isdecimal()]
    values = [int(part) for part in numbers if len(part) <= 3]
    name = " ".join(part for part in parts if not (part.isascii() and part.isdecimal()))
    if len(values) != 3 or not name or max(values) > 255:
        return None
    red, green, blue = values
    return name, red << 16 | green << 8 | blue


def _checked(found: MaskNames, file: Path) -> MaskNames:
    if len(found.names) > MOST_NAMES:
        raise DataError(
            f"{printable(file)}: {len(found.names):,} names, expected at most {MOST_NAMES}, the numbers of a mask"
        )
    if len(set(found.colors)) < len(found.colors):
        raise DataError(f"{printable(file)}: two classes of one colour; expected a colour for each")
    return found
