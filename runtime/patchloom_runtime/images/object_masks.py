"""Masks of single objects, stored in the size of the object; conversion from and to COCO's formats.

COCO stores a mask as polygons or as run lengths (RLE): counts of pixels outside, inside, outside …, column by column,
as a list or packed into a string of 6 bits per letter. Polygons are filled as COCO's own code does it, but only inside
their bounding box, so the cost depends on the object and not on the image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from patchloom_runtime.errors import DataError
from patchloom_runtime.images.geometry import Size, resized_rows

# Limits on the annotations of one image, so that no file takes minutes (docs/detection.md).
MOST_OBJECTS = 10_000
MOST_POLYGONS = 20_000
MOST_POINTS = 10_000  # per polygon
MOST_IMAGE_POINTS = 1 << 22  # points of polygons and columns crossed by their edges, run lengths or their letters
MOST_MASK_PIXELS = 1 << 29  # in bounding boxes: as much as 20 objects that fill 25 megapixels
_FINER = 5  # polygons are followed at this many points per pixel
_MOST_LETTERS = 7  # per count, 5 bits each
INSIDE = 0.5  # probability above which a pixel belongs to an object


class _Budget:
    """The remaining limits while the annotations of one image are decoded."""

    def __init__(self) -> None:
        self._left = {
            "polygons": MOST_POLYGONS,
            "points and crossings": MOST_IMAGE_POINTS,
            "mask pixels": MOST_MASK_PIXELS,
        }
        self._most = dict(self._left)

    def spend(self, what: str, amount: int) -> None:
        """Raise DataError if the image exceeds the limit."""
        self._left[what] -= amount
        if self._left[what] < 0:
            raise DataError(f"more than {self._most[what]:,} {what} in the annotations of one image")


class ObjectMask(NamedTuple):
    """The pixels of an object. Pixels outside of `bits` do not belong to it."""

    top: int
    left: int
    bits: np.ndarray  # (h, w) bool

    @classmethod
    def of(cls, mask: np.ndarray) -> "ObjectMask":
        """Crop a mask (H, W) to its nonzero pixels."""
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(rows):
            return cls(0, 0, np.zeros((0, 0), bool))
        top, left = int(rows[0]), int(columns[0])
        return cls(top, left, mask[top : rows[-1] + 1, left : columns[-1] + 1].astype(bool))

    @property
    def window(self) -> tuple[slice, slice]:
        """Rows and columns of `bits` in the image."""
        return slice(self.top, self.top + self.bits.shape[0]), slice(self.left, self.left + self.bits.shape[1])

    @property
    def area(self) -> int:
        return int(np.count_nonzero(self.bits))

    def overlap(self, other: "ObjectMask") -> int:
        """Count the pixels that belong to both objects."""
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
        """Return the mask of an image of `size`, (H, W) bool."""
        mask = np.zeros(size, bool)
        mask[self.window] = self.bits
        return mask

    def to_coco(self, size: Size) -> dict[str, Any]:
        """Return the packed run lengths for an image of `size`."""
        return {"size": list(size), "counts": _packed(_runs(self.whole(size)))}


def masks_from_coco(outlines: Sequence[Any], size: Size, names: Sequence[str] = ()) -> list[ObjectMask]:
    """Decode the objects of one image. Raises DataError with the faulty annotation or the exceeded limit."""
    refuse_many_objects(len(outlines))
    budget, masks = _Budget(), []
    for number, outline in enumerate(outlines):
        try:
            masks.append(_from_coco(outline, size, budget))
        except DataError as error:
            raise DataError(f"annotation {names[number]}: {error}" if names else str(error)) from error
    return masks


def refuse_many_objects(count: int) -> None:
    """Raise DataError if an image has more objects than the limit."""
    if count > MOST_OBJECTS:
        raise DataError(f"{count:,} objects in one image, expected at most {MOST_OBJECTS:,}")


def painted(
    masks: Sequence[ObjectMask], classes: np.ndarray, crowd: np.ndarray, size: Size, dtype: type[np.integer]
) -> tuple[np.ndarray, np.ndarray]:
    """Return class numbers from 1 and instance numbers (H, W) of the smallest object at each pixel.

    Crowds have a class but no instance number.
    """
    painted_classes, instances = np.zeros(size, dtype), np.zeros(size, np.int16)
    for number in sorted(range(len(masks)), key=lambda i: -masks[i].area):
        mask = masks[number]
        painted_classes[mask.window][mask.bits] = classes[number] + 1
        instances[mask.window][mask.bits] = 0 if crowd[number] else number + 1
    return painted_classes, instances


def instance_corners(instances: np.ndarray, count: int) -> np.ndarray:
    """Return left, top, right, bottom (count, 4) of each instance number from 1 in (H, W); zeros if it is absent."""
    height, width = instances.shape
    flat = instances.reshape(-1)
    begins = np.ones(flat.shape, bool)  # where runs of one number begin
    begins[1:] = flat[1:] != flat[:-1]
    begins[::width] = True
    starts = np.flatnonzero(begins)
    stops = np.append(starts[1:], flat.size)
    inside = (flat[starts] > 0) & (flat[starts] <= count)
    number, starts, stops = flat[starts][inside].astype(np.int64) - 1, starts[inside], stops[inside]
    first = np.full((count, 2), max(height, width))
    last = np.zeros((count, 2), np.int64)
    row, left = starts // width, starts % width
    np.minimum.at(first, number, np.stack([left, row], 1))
    np.maximum.at(last, number, np.stack([left + stops - starts, row + 1], 1))
    return np.concatenate([np.where(last > 0, first, 0), last], 1)


def masks_of_instances(instances: np.ndarray, count: int) -> list[ObjectMask]:
    """Return the mask of each instance number from 1 in (H, W)."""
    refuse_many_objects(count)
    budget, masks = _Budget(), []
    for number, (left, top, right, bottom) in enumerate(instance_corners(instances, count).tolist(), 1):
        budget.spend("mask pixels", (right - left) * (bottom - top))
        masks.append(ObjectMask(top, left, instances[top:bottom, left:right] == number))
    return masks


def _from_coco(outline: Any, size: Size, budget: _Budget) -> ObjectMask:
    if isinstance(outline, dict):
        stated, counts = outline.get("size"), outline.get("counts")
        if not isinstance(stated, list) or tuple(stated) != tuple(size):
            raise DataError(f"run lengths for an image of size {_shortened(stated)}, expected {list(size)}")
        if isinstance(counts, list | str):
            budget.spend("points and crossings", len(counts))
        return _from_runs(_unpacked(counts) if isinstance(counts, str) else counts, size, budget)
    if not isinstance(outline, list) or not outline or not all(isinstance(each, list) for each in outline):
        raise DataError("expected polygons, each a list of x and y, or run lengths")
    budget.spend("polygons", len(outline))
    return _union([_filled(polygon, size, budget) for polygon in outline], budget)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _union(masks: Sequence[ObjectMask], budget: _Budget) -> ObjectMask:
    masks = [mask for mask in masks if mask.bits.size] or list(masks[:1])
    if len(masks) == 1:
        return masks[0]
    windows = [mask.window for mask in masks]
    top, left = (min(window[axis].start for window in windows) for axis in (0, 1))
    bottom, right = (max(window[axis].stop for window in windows) for axis in (0, 1))
    budget.spend("mask pixels", (bottom - top) * (right - left))
    bits = np.zeros((bottom - top, right - left), bool)
    for mask in masks:
        bits[mask._replace(top=mask.top - top, left=mask.left - left).window] |= mask.bits
    return ObjectMask(top, left, bits)


def _filled(polygon: Sequence[float], size: Size, budget: _Budget) -> ObjectMask:
    """Fill a polygon by COCO's rule: its border, at 5 points per pixel, cut by the middles of columns."""
    if len(polygon) > 2 * MOST_POINTS:
        raise DataError(f"a polygon of {len(polygon) // 2:,} points, expected at most {MOST_POINTS:,}")
    budget.spend("points and crossings", len(polygon) // 2)
    try:
        points = np.array(polygon if {*map(type, polygon)} <= {int, float} else None, np.float64).reshape(-1, 2)
    except (ValueError, OverflowError) as error:  # an odd number of values, or an integer too large for a float
        raise DataError("a polygon that is not a list of x and y") from error
    if len(points) < 3 or not np.isfinite(points).all() or np.abs(points).max() > 1 << 20:
        raise DataError(f"a polygon of {len(points)} points, expected at least 3, of finite numbers")
    columns, y = _crossings(np.trunc(_FINER * points + 0.5).astype(np.int64), size[1], budget)
    rows = np.ceil(((y + 0.5) / _FINER - 0.5).clip(0, size[0])).astype(np.int64)
    return _between(columns, rows, budget)


def _crossings(corners: np.ndarray, width: int, budget: _Budget) -> tuple[np.ndarray, np.ndarray]:
    """Return where edges cross the middles of columns: the column, and y in fifths of a pixel.

    COCO's code draws an edge point by point along its longer axis, from its lower end. Here only the two points on both
    sides of a middle are computed. The middle of column c lies between x = 5 c + 2 and 5 c + 3.
    """
    ends = np.stack([corners, np.roll(corners, -1, axis=0)])  # (2, edges, x and y)
    steps = np.abs(ends[1] - ends[0])
    is_steep = steps[:, 1] > steps[:, 0]
    along = is_steep.astype(np.int64)
    every = np.arange(len(corners))
    is_backward = ends[0, every, along] > ends[1, every, along]
    first, last = np.where(is_backward[:, None], ends[::-1], ends)
    before_middle = _FINER // 2
    from_column = -(-(ends[..., 0].min(0) - before_middle) // _FINER)
    to_column = (ends[..., 0].max(0) - before_middle - 1) // _FINER
    from_column, to_column = from_column.clip(0), to_column.clip(max=width - 1)
    counts = (to_column - from_column + 1).clip(0)
    total = int(counts.sum())
    budget.spend("points and crossings", total)
    edge = np.repeat(every, counts)
    column = np.arange(total) - np.repeat(np.cumsum(counts) - counts - from_column, counts)
    middle = _FINER * column + before_middle
    length = np.where(is_steep, steps[:, 1], steps[:, 0]).clip(1)
    slope = (np.where(is_steep, last[:, 0] - first[:, 0], last[:, 1] - first[:, 1]) / length)[edge]
    x, y, steep = first[edge, 0], first[edge, 1], is_steep[edge]

    def other_axis(start: np.ndarray, t: np.ndarray) -> np.ndarray:
        return np.trunc(start + slope * t + 0.5)

    t = middle - x
    flat_y = np.minimum(other_axis(y, t), other_axis(y, t + 1))
    falls = slope < 0
    # The step at which x passes the middle: the result of a division, corrected for rounding.
    t = np.ceil((middle + 0.5 - x) / np.where(slope == 0, 1, slope))
    t -= (other_axis(x, t - 1) > middle) != falls
    t += (other_axis(x, t) > middle) == falls
    return column, np.where(steep, y + t - 1, flat_y)


def _between(columns: np.ndarray, rows: np.ndarray, budget: _Budget) -> ObjectMask:
    """Fill the pixels between the first and second, third and fourth, … crossing of each column."""
    if not len(columns) or rows.min() == rows.max():
        return ObjectMask(0, 0, np.zeros((0, 0), bool))
    top, left = int(rows.min()), int(columns.min())
    height, width = int(rows.max()) - top, int(columns.max()) - left + 1
    budget.spend("mask pixels", height * width)
    positions = np.sort((columns - left) * height + rows - top)
    lengths = np.diff(positions, prepend=0, append=max(height * width, int(positions[-1])))
    bits = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)[: height * width].reshape(width, height)
    cut = ObjectMask.of(np.ascontiguousarray(bits.T))
    return cut._replace(top=cut.top + top, left=cut.left + left) if cut.bits.size else cut


def _runs(mask: np.ndarray) -> list[int]:
    """Return the counts of pixels outside, inside, outside … down the columns."""
    pixels = mask.T.reshape(-1)
    changes = np.flatnonzero(np.diff(pixels)) + 1
    counts = np.diff(np.concatenate([[0], changes, [len(pixels)]])).tolist()
    return [0, *counts] if len(pixels) and pixels[0] else counts


def _from_runs(counts: Any, size: Size, budget: _Budget) -> ObjectMask:
    pixels = size[0] * size[1]
    fits = isinstance(counts, list) and all(type(each) is int and each >= 0 for each in counts)
    if not fits or sum(counts) != pixels:
        total = f"of {sum(counts):,} pixels" if fits else "that are not whole numbers"
        raise DataError(f"run lengths {total}, but the image has {pixels:,} pixels")
    changes = np.cumsum(counts)
    starts, ends = changes[:-1:2], changes[1::2]
    starts, ends = starts[ends > starts], ends[ends > starts]
    columns = np.concatenate([starts, ends - 1]) // size[0]
    rows = np.concatenate([starts % size[0], (ends - 1) % size[0] + 1])
    if (columns[: len(starts)] != columns[len(starts) :]).any():  # a run across several columns needs all rows
        columns, rows = np.append(columns, [columns.min()] * 4), np.append(rows, [0, 0, size[0], size[0]])
    return _between(columns, rows, budget)


def _packed(counts: Sequence[int]) -> str:
    """Encode counts in letters of 5 bits and a continuation bit, from the fourth on as differences to two before."""
    letters = []
    for index, count in enumerate(counts):
        value = count - counts[index - 2] if index > 2 else count
        while True:
            low, value = value & 31, value >> 5
            done = value == (-1 if low & 16 else 0)
            letters.append(chr(48 + (low if done else low | 32)))
            if done:
                break
    return "".join(letters)


def _unpacked(text: str) -> list[int]:
    bits = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int64) - ord("0")
    invalid = np.flatnonzero((bits < 0) | (bits >= 64))
    if len(invalid):
        raise DataError(f"run lengths with the invalid letter {text[invalid[0]]!r}")
    if len(bits) and bits[-1] & 32:
        raise DataError("run lengths that end in the middle of a number")
    ends = np.flatnonzero(bits & 32 == 0)
    lengths = np.diff(ends, prepend=-1)
    if len(bits) and lengths.max() > _MOST_LETTERS:
        raise DataError(f"run lengths with a number of {lengths.max()} letters, expected at most {_MOST_LETTERS}")
    starts = ends - lengths + 1
    shifts = 5 * (np.arange(len(bits)) - np.repeat(starts, lengths))
    counts = np.add.reduceat((bits & 31) << shifts, starts) if len(bits) else bits
    counts -= np.where(bits[ends] & 16, 1 << 5 * lengths, 0)
    # From the fourth on, each is the difference to the one two before.
    for chain in (counts[1::2], counts[2::2]):
        np.cumsum(chain, out=chain)
    return counts.tolist()


def paste_mask(mask: np.ndarray, box: np.ndarray, size: Size) -> ObjectMask:
    """Resize mask probabilities (28, 28) float32 into their box in an image of `size` (height, width).

    The values are those of torchvision's paste_masks_in_image, but only the box is computed: for 100 small objects in
    an image of 12 megapixels that is a small part of it.
    """
    padded = np.float32((mask.shape[-1] + 2) / mask.shape[-1])  # torchvision adds an empty border
    center, half = (box[2:] + box[:2]) / 2, (box[2:] - box[:2]) / 2 * padded
    left, top, right, bottom = (int(value) for value in (*(center - half), *(center + half)))
    width, height = max(1, right - left + 1), max(1, bottom - top + 1)
    y0, x0, y1, x1 = max(0, top), max(0, left), min(size[0], bottom + 1), min(size[1], right + 1)
    if y0 >= y1 or x0 >= x1:
        return ObjectMask(0, 0, np.zeros((0, 0), bool))
    shares = resized_rows(np.pad(mask, 1)[None], (height, width), slice(y0 - top, y1 - top))[0]
    return ObjectMask(y0, x0, shares[:, x0 - left : x1 - left] > INSIDE)
