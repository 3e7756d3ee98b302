"""Masks of single objects: only as large as the object, to and from what COCO's files hold.

COCO stores a mask as polygons or as run lengths (RLE): counts of pixels outside, inside, outside …, column by column,
as a list or packed into a string of 6 bits a letter. Polygons are filled as its own code fills them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from patchloom.errors import DataError

Size = tuple[int, int]  # height, width
MOST_POINTS = 10_000  # of a polygon: each takes time, and no outline needs more
_FINER = 5  # polygons are followed at this many points per pixel
_MOST_RUNS = 1 << 24
_MOST_LETTERS = 7  # of one count: 5 bits each


class ObjectMask(NamedTuple):
    """Which pixels belong to an object; outside `bits` none does."""

    top: int
    left: int
    bits: np.ndarray  # (h, w) bool

    @classmethod
    def of(cls, mask: np.ndarray) -> "ObjectMask":
        """From (H, W), cut to what is set."""
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(rows):
            return cls(0, 0, np.zeros((0, 0), bool))
        top, left = int(rows[0]), int(columns[0])
        return cls(top, left, mask[top : rows[-1] + 1, left : columns[-1] + 1].astype(bool))

    @property
    def area(self) -> int:
        """Pixels."""
        return int(np.count_nonzero(self.bits))

    def overlap(self, other: "ObjectMask") -> int:
        """Pixels that belong to both."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom = min(self.top + self.bits.shape[0], other.top + other.bits.shape[0])
        right = min(self.left + self.bits.shape[1], other.left + other.bits.shape[1])
        if top >= bottom or left >= right:
            return 0
        ours, theirs = (
            mask.bits[top - mask.top : bottom - mask.top, left - mask.left : right - mask.left]
            for mask in (self, other)
        )
        return int(np.count_nonzero(ours & theirs))

    def whole(self, size: Size) -> np.ndarray:
        """(H, W) bool."""
        mask = np.zeros(size, bool)
        mask[self.top : self.top + self.bits.shape[0], self.left : self.left + self.bits.shape[1]] = self.bits
        return mask

    def to_coco(self, size: Size) -> dict[str, Any]:
        """Packed run lengths of the mask in a picture of `size`."""
        return {"size": list(size), "counts": _packed(_runs(self.whole(size)))}


def mask_from_coco(given: Any, size: Size) -> np.ndarray:
    """(H, W) bool of what a file of COCO's holds: polygons, or run lengths; a DataError where it does not fit."""
    if isinstance(given, dict):
        told, counts = given.get("size"), given.get("counts")
        if not isinstance(told, list) or tuple(told) != tuple(size):
            raise DataError(f"run lengths of a picture of {told}, expected {list(size)}")
        return _from_runs(_unpacked(counts) if isinstance(counts, str) else counts, size)
    if not isinstance(given, list) or not given or not all(isinstance(each, list) for each in given):
        raise DataError("expected polygons, each a list of x and y, or run lengths")
    mask = np.zeros(size, bool)
    for polygon in given:
        mask |= _filled(polygon, size)
    return mask


def _filled(polygon: Sequence[float], size: Size) -> np.ndarray:
    """The pixels inside a polygon, by COCO's own rule: its border at 5 points per pixel, cut by columns' middles."""
    try:
        points = np.asarray(polygon, np.float64).reshape(-1, 2)
    except (TypeError, ValueError) as error:
        raise DataError("a polygon that is no list of x and y") from error
    if len(points) > MOST_POINTS:
        raise DataError(f"a polygon of {len(points):,} points, expected at most {MOST_POINTS:,}")
    if len(points) < 3 or not np.isfinite(points).all() or np.abs(points).max() > 1 << 20:
        raise DataError(f"a polygon of {len(points)} points, expected at least 3, of finite numbers")
    height, width = size
    corners = np.trunc(_FINER * points + 0.5).astype(np.int64)
    x, y = map(np.concatenate, zip(*map(_line, corners, np.roll(corners, -1, axis=0)), strict=True))
    moved = np.flatnonzero(x[1:] != x[:-1]) + 1  # steps across a column
    column = (np.where(x[moved] < x[moved - 1], x[moved], x[moved] - 1) + 0.5) / _FINER - 0.5
    row = np.ceil(((np.minimum(y[moved], y[moved - 1]) + 0.5) / _FINER - 0.5).clip(0, height))
    crossed = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
    places = (column * height + row)[crossed].astype(np.int64)
    toggles = np.bincount(places, minlength=height * width + 1)[: height * width]
    return (np.cumsum(toggles) % 2).astype(bool).reshape(width, height).T


def _line(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole-numbered points from one corner to the next, both included."""
    steps = np.abs(end - start)
    along = 0 if steps[0] >= steps[1] else 1  # the axis that moves by one each time
    length = int(steps[along])
    backwards = start[along] > end[along]
    first, last = (end, start) if backwards else (start, end)
    t = np.arange(length + 1)
    slope = (last[1 - along] - first[1 - along]) / length if length else 0.0
    points = [t + first[along], np.trunc(first[1 - along] + slope * t + 0.5).astype(np.int64)]
    x, y = points if along == 0 else points[::-1]
    return (x[::-1], y[::-1]) if backwards else (x, y)


def _runs(mask: np.ndarray) -> list[int]:
    """Counts outside, inside, outside … down the columns."""
    pixels = mask.T.reshape(-1)
    changes = np.flatnonzero(np.diff(pixels)) + 1
    counts = np.diff(np.concatenate([[0], changes, [len(pixels)]])).tolist()
    return [0, *counts] if len(pixels) and pixels[0] else counts


def _from_runs(counts: Any, size: Size) -> np.ndarray:
    fits = isinstance(counts, list) and all(type(each) is int and each >= 0 for each in counts)
    if not fits or sum(counts) != size[0] * size[1]:
        total = f"of {sum(counts):,} pixels" if fits else "of no whole numbers"
        raise DataError(f"run lengths {total}, the picture has {size[0] * size[1]:,}")
    inside = np.arange(len(counts)) % 2 == 1
    return np.repeat(inside, counts).reshape(size[1], size[0]).T


def _packed(counts: Sequence[int]) -> str:
    """Letters of 5 bits and one that says that more follow; from the third count on the difference to two before."""
    letters = []
    for place, count in enumerate(counts):
        value = count - counts[place - 2] if place > 2 else count
        while True:
            low, value = value & 31, value >> 5
            done = value == (-1 if low & 16 else 0)
            letters.append(chr(48 + (low if done else low | 32)))
            if done:
                break
    return "".join(letters)


def _unpacked(text: str) -> list[int]:
    counts: list[int] = []
    value = shift = 0
    if len(text) > _MOST_RUNS:
        raise DataError(f"run lengths of {len(text):,} letters, more than the limit of {_MOST_RUNS:,}")
    for letter in text:
        bits = ord(letter) - 48
        if not 0 <= bits < 64 or shift >= 5 * _MOST_LETTERS:
            raise DataError(f"run lengths with the letter {letter!r}, which they do not have")
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            if bits & 16:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if shift:
        raise DataError("run lengths that end in the middle of a number")
    return counts
