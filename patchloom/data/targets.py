"""Targets of whole images: vectors of labels, each of which applies or not, or of numbers.

Letters: N images, K names. Like masks and boxes, such targets replace the class of an image, so the `labels` of these
images are UNLABELED. A batch has them as a (B, K) float tensor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from patchloom_runtime.errors import DataError

MOST_VALUES = 1 << 30
STRATA, LEAST_PER_STRATUM = 10, 5  # quantiles of numbers that a held-out split keeps in proportion, and their images


@dataclass(frozen=True, eq=False)
class ImageTargets:
    """One row of values per image. NaN is an unknown value, which losses and metrics ignore."""

    kind: Literal["labels", "numbers"]
    names: tuple[str, ...]
    values: np.ndarray  # (N, K) float32; of labels 1 (applies), 0 (does not) or NaN
    absent: float = math.nan  # value of a name that the data do not have: 0 in lists of labels, else unknown

    @property
    def counts(self) -> np.ndarray:
        """(K,) images to which each label applies, or that have each number."""
        present = self.values > 0 if self.kind == "labels" else ~np.isnan(self.values)
        return np.asarray(np.sum(present, axis=0, dtype=np.int64))

    def rows(self, positions: np.ndarray) -> "ImageTargets":
        """Return the targets of some images, by position or by a mask of booleans."""
        return replace(self, values=self.values[positions])

    def named(self, names: Sequence[str]) -> "ImageTargets":
        """Return the targets with other columns, matched by name. Columns that are missing here are `absent`."""
        number = {name: i for i, name in enumerate(self.names)}
        values = np.full((len(self.values), len(names)), self.absent, np.float32)
        known = [(to, number[name]) for to, name in enumerate(names) if name in number]
        values[:, [to for to, _ in known]] = self.values[:, [own for _, own in known]]
        values[np.isnan(self.values).all(axis=1)] = math.nan  # nothing is known about these images
        return replace(self, names=tuple(names), values=values)

    def renamed(self, new: Sequence[str]) -> "ImageTargets":
        """Return the targets with new names. Labels that get one name are merged, and those that get '' are dropped."""
        names = tuple(dict.fromkeys(name for name in new if name))
        columns = [[i for i, name in enumerate(new) if name == one] for one in names]
        merged = [np.fmax.reduce(self.values[:, own], axis=1) for own in columns]
        values = np.stack(merged, axis=1) if merged else np.zeros((len(self.values), 0), np.float32)
        return replace(self, names=names, values=values)

    def labels_of(self, row: int) -> list[str]:
        """Return the labels that apply to an image, or its numbers with their names: 'age 3'."""
        pairs = list(zip(self.names, self.values[row].tolist(), strict=True))
        if self.kind == "numbers":
            return [f"{name} {value:g}" for name, value in pairs]
        return [name for name, value in pairs if value > 0]

    def strata(self) -> np.ndarray:
        """Return the quantile of each image, (N,) int64, by the mean rank of its numbers."""
        ranks = np.argsort(np.argsort(self.values, axis=0, kind="stable"), axis=0)  # NaN ranks last
        order = np.argsort(np.argsort(ranks.mean(axis=1), kind="stable"))
        strata: np.ndarray = order * max(1, min(STRATA, len(order) // LEAST_PER_STRATUM)) // max(1, len(order))
        return strata


def labels_of_lists(lists: Sequence[Sequence[str] | None], where: str) -> ImageTargets:
    """Return the labels that lists name, in `natural_order`; None instead of a list is unknown."""
    names = tuple(sorted({name for row in lists for name in row or ()}, key=natural_order))
    if len(lists) * len(names) > MOST_VALUES:
        raise DataError(
            f"{where}: {len(names):,} labels of {len(lists):,} images are more than the {MOST_VALUES:,} values that "
            "patchloom keeps; use fewer labels"
        )
    number = {name: i for i, name in enumerate(names)}
    values = np.zeros((len(lists), len(names)), np.float32)
    for row, own in enumerate(lists):
        values[row, [number[name] for name in own or ()]] = 1
        values[row] = math.nan if own is None else values[row]
    return ImageTargets("labels", names, values, absent=0.0)


def numbers_of_columns(columns: Mapping[str, Sequence[float | None]], where: str) -> ImageTargets:
    """Return columns of numbers as targets; None is unknown."""
    values = np.array([[math.nan if value is None else value for value in of] for of in columns.values()], np.float64).T
    if len(large := np.argwhere(np.abs(values) > np.finfo(np.float32).max)):
        row, column = large[0].tolist()
        raise DataError(
            f"{where}: {values[row, column]:g} in column {list(columns)[column]!r} is not a finite float32 number"
        )
    return ImageTargets("numbers", tuple(columns), values.astype(np.float32))


def natural_order(name: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by value, before words."""
    return (not name.isdecimal(), int(name) if name.isdecimal() and len(name) < 19 else 0, name)


def joined(parts: Sequence[ImageTargets]) -> ImageTargets:
    """Return the targets of several lists of images of one kind, one after the other, with all their names."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    absent = 0.0 if all(part.absent == 0 for part in parts) else math.nan
    values = np.concatenate([part.named(names).values for part in parts])
    return ImageTargets(parts[0].kind, names, values, absent)


def hold_out_labels(units: Sequence[Sequence[int]], values: np.ndarray, fraction: float) -> np.ndarray:
    """Return (N,) booleans: the images to hold out, such that every label keeps its share on both sides.

    This is iterative stratification (Sechidis et al., ECML 2011) with two subsets and whole counts: the rarest label
    is distributed first, each unit to the side that lacks more images of that label, then more images in all. A label
    of two units or more has one on each side unless that takes another label's last one.

    Args:
        units: Groups of positions that stay together, in the order in which they are distributed.
        values: (N, K), above 0 if a label applies.
        fraction: Share of the images to hold out.
    """
    present = np.nan_to_num(values) > 0  # (N, K)
    counts = np.stack([present[list(unit)].sum(axis=0) for unit in units])  # (units, K)
    sizes = np.array([len(unit) for unit in units])
    total = counts.sum(axis=0)
    wanted = np.clip(np.round(fraction * total), np.minimum(1, total), np.maximum(total - 1, 0))
    lacking = np.stack([total - wanted, wanted])  # (train and val, K)
    room = np.array([(1 - fraction) * sizes.sum(), fraction * sizes.sum()])
    side = np.full(len(units), -1)
    left = total.copy()

    def place(unit: int, at: int) -> None:
        side[unit] = at
        lacking[at] -= counts[unit]
        room[at] -= sizes[unit]

    while np.any(left):
        rarest = int(np.argmin(np.where(left > 0, left, np.iinfo(np.int64).max)))
        for unit in np.flatnonzero((side < 0) & (counts[:, rarest] > 0)).tolist():
            first, second = lacking[0, rarest], lacking[1, rarest]
            place(unit, int(second > first or (second == first and room[1] > room[0])))
            left -= counts[unit]
    for unit in np.flatnonzero(side < 0).tolist():
        place(unit, int(room[1] > room[0]))
    _put_on_both_sides(side, counts)
    held_out = np.zeros(len(values), bool)
    for unit in np.flatnonzero(side == 1).tolist():
        held_out[list(units[unit])] = True
    return held_out


def _put_on_both_sides(side: np.ndarray, counts: np.ndarray) -> None:
    """Move units so that labels of one side are on both, without taking another label from a side."""
    units_of = (counts > 0).astype(np.int64)  # (units, K)
    for label in np.argsort(units_of.sum(axis=0), kind="stable").tolist():
        own = np.flatnonzero(units_of[:, label])
        for at in (0, 1):
            if len(own) < 2 or np.any(side[own] == at):
                continue
            others = units_of[side == 1 - at].sum(axis=0)  # units of each label on the side that has them all
            movable = [u for u in own.tolist() if np.all(others[units_of[u] > 0] > 1)]
            if movable:
                side[movable[0]] = at
