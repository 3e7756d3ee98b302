"""A source looked through: which of its pictures can be read, and which are copies of one another.

`check` reports it, `train` leaves out what cannot be read, and a val split that has to be made keeps copies together.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from patchloom.data.checking.duplicates import digest, equal_groups, linked, similar_pairs
from patchloom.data.checking.scan import ScanItem, scan
from patchloom.data.checking.scan_cache import ImageScan
from patchloom.data.datasets import Listing, Progress, Source
from patchloom.data.splits import class_table
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.samples import UNLABELED

NAMED = 3  # files in a line


@dataclass(frozen=True)
class ImageLocation:
    """One picture: where it lies and what it is called."""

    where: str
    split: str
    label: str  # '' without one
    row: int  # in the pictures of its split


@dataclass(frozen=True)
class Unreadable:
    """A picture that training will leave out."""

    place: ImageLocation
    reason: str


class Copies(NamedTuple):
    """Positions of pictures that belong together."""

    equal: list[list[int]]  # the same pixels
    similar: list[list[int]]  # nearly the same, one of each equal group
    together: list[list[int]]  # both joined


@dataclass(frozen=True)
class Survey:
    """What a scan showed of each picture of a source, split by split in the order of its listings."""

    source: Source
    listings: dict[str, Listing]
    places: list[ImageLocation]
    sights: list[ImageScan]
    decoded: int  # pictures; the rest were known from an earlier scan

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """In the order of the listings."""
        pairs = zip(self.places, self.sights, strict=True)
        return tuple(Unreadable(place, sight.error) for place, sight in pairs if sight.error)

    def readable(self) -> Source:
        """The source without what cannot be read."""
        bad = {(found.place.split, found.place.row) for found in self.unreadable}

        def good(split: str) -> Listing:
            listing = self.listings[split]
            kept = np.array([(split, row) not in bad for row in listing.rows.tolist()], dtype=bool)
            return replace(listing, rows=listing.rows[kept], labels=listing.labels[kept])

        val = good("val") if "val" in self.listings else None
        test = good("test") if "test" in self.listings else None
        if self.source.test is not None and self.source.test is self.source.val:
            test = val
        return replace(self.source, train=good("train"), val=val, test=test)

    def digests(self, split: str) -> list[bytes]:
        """Of the files of a split, in their order; b'' for what is no file."""
        pairs = zip(self.places, self.sights, strict=True)
        return [sight.digest for place, sight in pairs if place.split == split]

    def leaks(self) -> dict[tuple[str, str], int]:
        """(split, later split) → pictures of the later whose very file the other has too, where there are any."""
        found = {}
        for first, second in combinations(self.listings, 2):
            known = set(self.digests(first)) - {b""}
            if count := sum(digest in known for digest in self.digests(second)):
                found[first, second] = count
        return found

    def copies(self) -> list[list[int]]:
        """Groups of equal and nearly equal pictures: positions in the readable pictures of train."""
        good = [i for i in range(len(self.source.train)) if not self.sights[i].error]
        sights, places = [self.sights[i] for i in good], [self.places[i] for i in good]
        return find_copies(sights, places, self.listings).together


def survey(
    source: Source, *, workers: int | None = None, cache: bool = True, progress: Progress | None = None
) -> Survey:
    """Look at every picture; `workers` are processes (default: one for each core)."""
    listings = source.listings
    for listing in listings.values():
        class_table(replace(listing, levels={}))  # refuses labels outside the names
    places = [place for split, listing in listings.items() for place in _places(split, listing)]
    number = {split: i for i, split in enumerate(listings)}
    tasks = [ScanItem(number[place.split], place.row) for place in places]
    stores = [listing.images for listing in listings.values()]
    sights, decoded = scan(stores, tasks, workers=workers, cache=cache, progress=progress)
    return Survey(source, listings, places, sights, decoded)


def is_made_in_memory(source: Source) -> bool:
    """Whether no file of it can be damaged."""
    return all(listing.images.always_readable for listing in source.listings.values())


def name_unreadable(found: Sequence[Unreadable]) -> str:
    """'3 files cannot be read: a.jpg (empty file), …' in one line."""
    shown = ", ".join(f"{bad.place.where} ({bad.reason})" for bad in found[:NAMED])
    more = f" and {len(found) - NAMED:,} more" if len(found) > NAMED else ""
    return f"{len(found):,} file{'s' * (len(found) != 1)} cannot be read: {shown}{more}"


def find_copies(sights: Sequence[ImageScan], places: Sequence[ImageLocation], listings: dict[str, Listing]) -> Copies:
    """Groups among pictures that could be read."""
    equal = equal_groups(pixel_digests(sights, places, listings))
    copies = {group[0]: group for group in equal}
    repeated = {i for group in equal for i in group[1:]}
    distinct = [i for i in range(len(sights)) if i not in repeated]
    pairs = similar_pairs([sights[i].thumbnail for i in distinct])
    similar = [[distinct[i] for i in group] for group in linked(len(distinct), pairs)]
    wide = [[i for first in group for i in copies.get(first, [first])] for group in similar]
    in_wide = {i for group in wide for i in group}
    return Copies(equal, similar, [*(group for group in equal if group[0] not in in_wide), *wide])


def _places(split: str, listing: Listing) -> Iterator[ImageLocation]:
    for row, label in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
        yield ImageLocation(listing.images.where(row), split, "" if label == UNLABELED else listing.names[label], row)


def pixel_digests(
    sights: Sequence[ImageScan], places: Sequence[ImageLocation], listings: dict[str, Listing]
) -> list[bytes]:
    """Equal for equal pixels. Only files that differ while their thumbnails do not are read once more for it."""
    digests = [sight.digest for sight in sights]
    for group in equal_groups([b"%d %d " % (s.width, s.height) + s.thumbnail for s in sights]):
        if len({digests[i] for i in group}) > 1:
            for i in group:
                with suppress(DataError):  # gone since the scan
                    digests[i] = digest(listings[places[i].split].images.read(places[i].row))
    return digests
