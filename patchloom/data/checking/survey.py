"""Survey of a source: which images can be read, and which are copies of one another.

`check` reports it, `train` skips unreadable images, and copies stay on one side of a val split that has to be made.
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
from patchloom.data.datasets import Fault, Listing, Progress, Source
from patchloom.data.splits import class_table
from patchloom_runtime.errors import DataError

LISTED_FILES = 3  # in a message


@dataclass(frozen=True)
class ImageLocation:
    """Location and label of one image."""

    where: str
    split: str
    label: str  # its class, or its labels; '' if it has none
    row: int  # in the images of its split; in its shard, in a check in parts


@dataclass(frozen=True)
class Unreadable:
    """An image that training will skip."""

    place: ImageLocation
    reason: str


class Copies(NamedTuple):
    """Groups of positions of equal and nearly equal images."""

    equal: list[list[int]]  # equal pixels
    similar: list[list[int]]  # nearly equal, with one image of each equal group
    together: list[list[int]]  # union of both


@dataclass(frozen=True)
class Survey:
    """Scans of all images of a source, split by split, in the order of its listings."""

    source: Source
    listings: dict[str, Listing]
    places: list[ImageLocation]
    scans: list[ImageScan]
    decoded: int  # images; the others were in the cache

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """Images that cannot be read, in the order of the listings."""
        pairs = zip(self.places, self.scans, strict=True)
        return tuple(Unreadable(place, scan.error) for place, scan in pairs if scan.error)

    def annotation_faults(self) -> Iterator[Fault]:
        """Yield the faults of masks and boxes, in the order of the listings."""
        for place, scanned in zip(self.places, self.scans, strict=True):
            yield from (Fault(place.where, fault.kind, fault.detail) for fault in scanned.faults)

    def readable(self) -> Source:
        """Return the source without the images that cannot be read."""
        bad = {(one.place.split, one.place.row) for one in self.unreadable}

        def good(split: str) -> Listing:
            listing = self.listings[split]
            usable = np.array([(split, row) not in bad for row in listing.rows.tolist()], dtype=bool)
            return listing.subset(usable)

        val = good("val") if "val" in self.listings else None
        test = good("test") if "test" in self.listings else None
        if self.source.test is not None and self.source.test is self.source.val:
            test = val
        return replace(self.source, train=good("train"), val=val, test=test)

    def digests(self, split: str) -> list[bytes]:
        """Return the digests of the files of a split, with b'' for unreadable ones."""
        pairs = zip(self.places, self.scans, strict=True)
        return [scan.digest for place, scan in pairs if place.split == split]

    def leaks(self) -> dict[tuple[str, str], int]:
        """Map (split, later split) to the number of files of the later one that both contain, if there are any."""
        leaks = {}
        for first, second in combinations(self.listings, 2):
            known = set(self.digests(first)) - {b""}
            if count := sum(digest in known for digest in self.digests(second)):
                leaks[first, second] = count
        return leaks

    def copies(self) -> list[list[int]]:
        """Return groups of equal and nearly equal images, as positions in the readable images of train."""
        good = [i for i in range(len(self.source.train)) if not self.scans[i].error]
        return find_copies([self.scans[i] for i in good], [self.places[i] for i in good], self.listings).together


def survey(
    source: Source, *, workers: int | None = None, cache: bool = True, progress: Progress | None = None
) -> Survey:
    """Scan all images of a source with `workers` processes (default: one per core)."""
    listings = source.listings
    for listing in listings.values():
        class_table(replace(listing, levels={}))  # raises DataError for labels without a name
    places = [place for split, listing in listings.items() for place in _places(split, listing)]
    number = {split: i for i, split in enumerate(listings)}
    items = [ScanItem(number[place.split], place.row) for place in places]
    stores = [listing.images for listing in listings.values()]
    scans, decoded = scan(stores, items, workers=workers, cache=cache, progress=progress)
    return Survey(source, listings, places, scans, decoded)


def is_scanned(source: Source) -> bool:
    """Return whether training scans the source; one without files cannot be damaged."""
    return any(listing.images.is_scanned for listing in source.listings.values())


def name_unreadable(unreadable: Sequence[Unreadable]) -> str:
    """Return one line such as '3 files cannot be read: a.jpg (empty file), …'."""
    listed = ", ".join(f"{bad.place.where} ({bad.reason})" for bad in unreadable[:LISTED_FILES])
    more = f" and {len(unreadable) - LISTED_FILES:,} more" if len(unreadable) > LISTED_FILES else ""
    return f"{len(unreadable):,} file{'s' * (len(unreadable) != 1)} cannot be read: {listed}{more}"


def find_copies(scans: Sequence[ImageScan], places: Sequence[ImageLocation], listings: dict[str, Listing]) -> Copies:
    """Return groups of copies among readable images."""
    equal = equal_groups(pixel_digests(scans, places, listings))
    copies = {group[0]: group for group in equal}
    repeated = {i for group in equal for i in group[1:]}
    distinct = [i for i in range(len(scans)) if i not in repeated]
    pairs = similar_pairs([scans[i].thumbnail for i in distinct])
    similar = [[distinct[i] for i in group] for group in linked(len(distinct), pairs)]
    wide = [[i for first in group for i in copies.get(first, [first])] for group in similar]
    in_wide = {i for group in wide for i in group}
    return Copies(equal, similar, [*(group for group in equal if group[0] not in in_wide), *wide])


def _places(split: str, listing: Listing) -> Iterator[ImageLocation]:
    for position, row in enumerate(listing.rows.tolist()):
        yield ImageLocation(listing.images.where(row), split, ", ".join(listing.labels_of(position)), row)


def pixel_digests(
    scans: Sequence[ImageScan], places: Sequence[ImageLocation], listings: dict[str, Listing]
) -> list[bytes]:
    """Return digests of pixels. Only files that differ while their thumbnails are equal are read again."""
    digests = [scan.digest for scan in scans]
    for group in equal_groups([b"%d %d " % (s.width, s.height) + s.thumbnail for s in scans]):
        if len({digests[i] for i in group}) > 1:
            for i in group:
                with suppress(DataError):  # the file is gone since the scan
                    digests[i] = digest(listings[places[i].split].images.read(places[i].row))
    return digests
