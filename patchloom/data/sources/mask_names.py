"""What the numbers, or the colours, in masks mean: a file beside the masks, in one of the forms that are around.

    classes.txt  labels.txt  class_names.txt     a name per line, by their order
    the same, labelmap.txt  class_dict.csv       a name and its colour per line: sky,128,128,128  sky:128,128,128::
    label_colors.txt  palette.txt                128 128 128 sky
    objectInfo150.txt                            ADE20K's table; its masks begin at 1 (segment.reduce_zero_label)

Where every line has a colour, masks are pictures in these colours. Pascal VOC's masks have VOC's names without a file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patchloom.data.labels.class_names import names_by_line
from patchloom.errors import DataError
from patchloom.printable import printable

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
_SHOWN = 3  # colours in a message


@dataclass(frozen=True)
class MaskNames:
    """Names of the classes by their numbers; and their colours, 0xRRGGBB, where masks are in colours."""

    names: tuple[str, ...] = ()
    colours: tuple[int, ...] = ()

    def numbers(self, pixels: np.ndarray, where: str) -> np.ndarray:
        """(H, W, 3) in the colours → (H, W) class numbers; a DataError where a colour is none of them."""
        codes = (pixels.astype(np.int32) << (16, 8, 0)).sum(axis=2)
        known = np.array(self.colours)
        order = np.argsort(known)
        places = np.searchsorted(known, codes, sorter=order).clip(max=len(known) - 1)
        numbers = order[places]
        strange = known[numbers] != codes
        if strange.any():
            named = ", ".join(f"#{code:06x}" for code in np.unique(codes[strange])[:_SHOWN].tolist())
            raise DataError(f"{where}: a mask with colours of no class, {named} ({int(strange.sum()):,} pixels)")
        return numbers.astype(np.uint8)


def find_mask_names(root: Path) -> MaskNames:
    """What a file in this folder says; nothing where there is none. A DataError where it says too much."""
    for name in FILES:
        lines = names_by_line(root / name, MOST_BYTES)
        if lines is not None:
            return _checked(_parsed([line.strip() for line in lines]), root / name)
    lines = names_by_line(root / ADE20K, MOST_BYTES)
    if lines is None:
        return MaskNames()
    columns = [line.split("\t") for line in lines[1:] if line.strip()]
    return _checked(MaskNames(tuple(row[-1].split(",")[0].strip() for row in columns)), root / ADE20K)


def _parsed(lines: Sequence[str]) -> MaskNames:
    """Names alone, or names with colours where every line but a heading has one."""
    told = [line for line in lines if line and not line.startswith("#")]
    coloured = [_colour(line) for line in told]
    if told and coloured[0] is None and all(coloured[1:]) and len(told) > 1:  # a heading: name,r,g,b
        told, coloured = told[1:], coloured[1:]
    if told and all(each is not None for each in coloured):
        known = [each for each in coloured if each is not None]
        return MaskNames(tuple(name for name, _ in known), tuple(code for _, code in known))
    return MaskNames(tuple(lines))


def _colour(line: str) -> tuple[str, int] | None:
    """Name and colour of a line with three numbers up to 255; None of any other."""
    parts = [part for part in re.split(r"[,;:\t ]+", line) if part]
    numbers = [part for part in parts if part.isascii() and part.isdecimal()]
    values = [int(part) for part in numbers if len(part) <= 3]
    name = " ".join(part for part in parts if part not in numbers)
    if len(values) != 3 or not name or max(values) > 255:
        return None
    red, green, blue = values
    return name, red << 16 | green << 8 | blue


def _checked(found: MaskNames, file: Path) -> MaskNames:
    if len(found.names) > MOST_NAMES:
        raise DataError(
            f"{printable(file)}: {len(found.names):,} names, expected at most {MOST_NAMES}, the numbers of a mask"
        )
    if len(set(found.colours)) < len(found.colours):
        raise DataError(f"{printable(file)}: two classes of one colour; expected a colour for each")
    return found
