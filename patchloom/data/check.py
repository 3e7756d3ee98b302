"""A data set looked through before anybody trains on it: `check(DATA)` → what is there and what is wrong with it.

Wrong is what would be left out, mislabelled or counted twice: files that cannot be read, classes without training
pictures, the same picture in train and val or under two labels. The data are only ever read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from patchloom.data.duplicates import digest, equal_groups, linked, similar_pairs
from patchloom.data.odd import oddities
from patchloom.data.scan import Progress, Sight, Task, scan
from patchloom.data.sets import UNLABELLED, Listing, Source
from patchloom.data.source import Spec, find_source
from patchloom.data.splits import class_table, match, split_rows
from patchloom.errors import DataError

VAL_FRACTION, SEED = 0.2, 0  # of the split that `train` makes by default


@dataclass(frozen=True)
class Place:
    """One picture: where it lies and what it is called."""

    where: str
    split: str
    label: str  # '' without one
    row: int  # in the pictures of its split


@dataclass(frozen=True)
class Unreadable:
    """A picture that training will leave out."""

    place: Place
    reason: str


@dataclass(frozen=True)
class Odd:
    """A picture that is read, but perhaps not as its owner thinks."""

    place: Place
    kind: str
    read_as: str


Group = tuple[Place, ...]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a scan found; `problems` sums up what is wrong."""

    name: str
    splits: dict[str, int]  # pictures in each, readable or not
    classes: dict[str, dict[str, int]]  # class → split → readable pictures
    widths: tuple[int, int, int] | None  # smallest, median, largest, upright; None where nothing could be read
    heights: tuple[int, int, int] | None
    unreadable: tuple[Unreadable, ...]
    odd: tuple[Odd, ...]
    duplicates: tuple[Group, ...]  # the same pixels
    near_duplicates: tuple[Group, ...]  # nearly the same, one of each set of duplicates
    divided: tuple[Group, ...]  # duplicates of either kind that the split made by default would put on both sides
    notes: tuple[str, ...]  # on what was not looked at: other extensions, pipes, unused folders
    decoded: int  # pictures; the rest were known from an earlier scan
    listings: dict[str, Listing] = field(repr=False, compare=False)  # split → what was looked at; not in `to_dict`

    @property
    def pictures(self) -> int:
        """In all splits, readable or not."""
        return sum(self.splits.values())

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes without a readable picture anywhere."""
        return tuple(name for name, counts in self.classes.items() if not any(counts.values()))

    @property
    def stray_classes(self) -> dict[str, int]:
        """Classes that only val has → pictures."""
        return {
            name: counts["val"] for name, counts in self.classes.items() if not counts["train"] and any(counts.values())
        }

    @property
    def balance(self) -> tuple[int, int] | None:
        """Training pictures of the smallest and of the largest class that has any."""
        counts = [count["train"] for count in self.classes.values() if count["train"]]
        return (min(counts), max(counts)) if counts else None

    def leaks(self, *, near: bool = False) -> list[Group]:
        """The same picture in train and val; `near` for nearly the same."""
        groups = self.near_duplicates if near else self.duplicates
        return [group for group in groups if len({place.split for place in group}) > 1]

    def conflicts(self, *, near: bool = False) -> list[Group]:
        """The same picture under two labels; `near` for nearly the same."""
        groups = self.near_duplicates if near else self.duplicates
        return [group for group in groups if len({place.label for place in group}) > 1]

    def problems(self, *, strict: bool = False) -> list[str]:
        """A line for each kind of fault. `strict` counts near-duplicates across splits and labels too."""
        found = []
        if self.unreadable:
            found.append(f"{_count(len(self.unreadable), 'file')} cannot be read")
        if self.empty_classes:
            found.append(f"no pictures for {', '.join(map(repr, self.empty_classes))}")
        if self.stray_classes:
            found.append(f"only val has {', '.join(map(repr, self.stray_classes))}")
        if len(self.classes) == 1:
            found.append(f"one class ({next(iter(self.classes))!r}); classification needs two")
        for near in (False, True)[: 1 + strict]:
            same = "nearly the same picture" if near else "the same picture"
            if leaks := self.leaks(near=near):
                found.append(f"{same} in train and val, {_count(len(leaks), 'time')}")
            if conflicts := self.conflicts(near=near):
                found.append(f"{same} under two labels, {_count(len(conflicts), 'time')}")
        return found

    def to_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {name: value for name, value in asdict(replace(self, listings={})).items() if name != "listings"}
        return found | {
            "pictures": self.pictures,
            "empty_classes": list(self.empty_classes),
            "stray_classes": self.stray_classes,
            "balance": self.balance,
            "leaks": [[asdict(place) for place in group] for group in self.leaks()],
            "conflicts": [[asdict(place) for place in group] for group in self.conflicts()],
            "problems": self.problems(strict=strict),
        }


def check(
    spec: Spec,
    *,
    labels: Spec | None = None,
    taxonomy: Spec | None = None,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> CheckReport:
    """Look at every picture of a data set, as `open_data` would find it.

    `workers` are processes (default: one for each core); `cache` keeps what was seen of each file, outside the data,
    until its size or time changes; `progress` is called with the pictures done and their number.
    """
    source = find_source(spec, labels=labels, taxonomy=taxonomy)
    listings = {"train": source.train} | ({"val": source.val} if source.val is not None else {})
    for listing in listings.values():
        class_table(replace(listing, levels={}))  # refuses labels outside the names
    places = [place for split, listing in listings.items() for place in _places(split, listing)]
    stores = [listing.pictures for listing in listings.values()]
    number = {split: i for i, split in enumerate(listings)}
    tasks = [Task(number[place.split], place.row) for place in places]
    sights, decoded = scan(stores, tasks, workers=workers, cache=cache, progress=progress)
    readable = [i for i, sight in enumerate(sights) if not sight.error]
    seen = [sights[i] for i in readable]
    equal, similar, together = _duplicates(seen, [places[i] for i in readable], listings)
    return CheckReport(
        name=source.name,
        splits={split: len(listing) for split, listing in listings.items()},
        classes=_classes(listings, [places[i] for i in readable]),
        widths=_spread([sight.width for sight in seen]),
        heights=_spread([sight.height for sight in seen]),
        unreadable=tuple(Unreadable(p, s.error) for p, s in zip(places, sights, strict=True) if s.error),
        odd=tuple(_odd([places[i] for i in readable], seen)),
        duplicates=equal,
        near_duplicates=similar,
        divided=_divided(source, places, together),
        notes=source.notes,
        decoded=decoded,
        listings=listings,
    )


def _places(split: str, listing: Listing) -> Iterator[Place]:
    for row, label in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
        yield Place(listing.pictures.where(row), split, "" if label == UNLABELLED else listing.names[label], row)


def _classes(listings: dict[str, Listing], readable: Sequence[Place]) -> dict[str, dict[str, int]]:
    """Names without a picture count too, unless no picture has a label (masks and boxes have names of their own)."""
    if all(np.all(listing.labels == UNLABELLED) for listing in listings.values()):
        return {}
    names = sorted({name for listing in listings.values() for name in listing.names})
    counts = Counter((place.label, place.split) for place in readable)
    return {name: {split: counts[name, split] for split in listings} for name in names}


def _odd(places: Sequence[Place], sights: Sequence[Sight]) -> Iterator[Odd]:
    usual_side = median(min(sight.width, sight.height) for sight in sights) if sights else 0
    for place, sight in zip(places, sights, strict=True):
        yield from (Odd(place, kind, read_as) for kind, read_as in oddities(sight, usual_side))


def _duplicates(
    sights: Sequence[Sight], places: Sequence[Place], listings: dict[str, Listing]
) -> tuple[tuple[Group, ...], tuple[Group, ...], list[Group]]:
    """Groups of equal pictures, groups of similar ones that are not equal, and both joined."""
    equal = equal_groups(_pixel_digests(sights, places, listings))
    copies = {group[0]: group for group in equal}
    repeated = {i for group in equal for i in group[1:]}
    distinct = [i for i in range(len(sights)) if i not in repeated]
    pairs = similar_pairs([sights[i].thumbnail for i in distinct])
    similar = [[distinct[i] for i in group] for group in linked(len(distinct), pairs)]
    wide = [[i for first in group for i in copies.get(first, [first])] for group in similar]
    in_wide = {i for group in wide for i in group}

    def name(groups: Sequence[Sequence[int]]) -> list[Group]:
        return [tuple(places[i] for i in group) for group in groups]

    alone = [group for group in equal if group[0] not in in_wide]
    return tuple(name(equal)), tuple(name(similar)), name([*alone, *wide])


def _pixel_digests(sights: Sequence[Sight], places: Sequence[Place], listings: dict[str, Listing]) -> list[bytes]:
    """Equal for equal pixels. Only files that differ while their thumbnails do not are read once more for it."""
    digests = [sight.digest for sight in sights]
    for group in equal_groups([b"%d %d " % (s.width, s.height) + s.thumbnail for s in sights]):
        if len({digests[i] for i in group}) > 1:
            for i in group:
                with suppress(DataError):  # gone since the scan
                    digests[i] = digest(listings[places[i].split].pictures.read(places[i].row))
    return digests


def _divided(source: Source, places: Sequence[Place], together: Sequence[Group]) -> tuple[Group, ...]:
    """Groups that lie on both sides of the split `train` would make; none where the data bring their own."""
    if source.val is not None or not len(source.train):
        return ()
    table, _ = class_table(source.train)
    _, held_out = split_rows(match(source.train, table), VAL_FRACTION, SEED)
    val = {places[position].row for position in held_out.tolist()}
    return tuple(group for group in together if len({place.row in val for place in group}) > 1)


def _spread(values: Sequence[int]) -> tuple[int, int, int] | None:
    return (min(values), int(median(values)), max(values)) if values else None


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
