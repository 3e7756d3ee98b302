"""Training pictures that a test set holds too, the same or nearly (Mixer, section 3): `check A --against B`.

The means are those that find copies between splits: digests of pixels, difference hashes and colour thumbnails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from patchloom.data.checking.duplicates import equal_groups, similar_pairs
from patchloom.data.checking.scan_cache import ImageScan
from patchloom.data.checking.survey import ImageLocation, Survey, pixel_digests, survey
from patchloom.data.datasets import Listing, Progress, Source

SAME, NEARLY = "the same as", "nearly the same as"


@dataclass(frozen=True)
class Overlap:
    """A training picture, and one of the other set that shows the same."""

    place: ImageLocation
    key: str  # its name within its data set
    of: ImageLocation
    near: bool  # nearly the same: saved again, scaled, slightly retouched

    @property
    def reason(self) -> str:
        """In words, as a list has it."""
        return f"{NEARLY if self.near else SAME} {self.of.where}"


@dataclass(frozen=True)
class OverlapReport:
    """What train shares with another data set."""

    name: str  # which split of which set
    why: str  # this split
    images: int  # of it that can be read
    overlaps: tuple[Overlap, ...]  # each training picture once, in the order of train
    listing: Listing = field(repr=False, compare=False)

    @property
    def same(self) -> list[Overlap]:
        """Pixel for pixel."""
        return [overlap for overlap in self.overlaps if not overlap.near]

    @property
    def near(self) -> list[Overlap]:
        """Nearly the same."""
        return [overlap for overlap in self.overlaps if overlap.near]


def against(
    seen: Survey,
    other: Source,
    *,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> OverlapReport:
    """Compare the training pictures of a source that was looked through with the test pictures of another."""
    split, listing, why = _tested(other)
    name = f"{split} of {other.name}" if split else other.name
    looked = survey(Source(other.name, listing), workers=workers, cache=cache, progress=progress)
    own = [(place, sight) for place, sight in _readable(seen) if place.split == "train"]
    theirs = [(replace(place, split=name), sight) for place, sight in _readable(looked)]
    places, sights = [place for place, _ in [*own, *theirs]], [sight for _, sight in [*own, *theirs]]
    digests = pixel_digests(sights, places, {"train": seen.source.train, name: listing})
    found = _crossing(equal_groups(digests), len(own))
    near = _crossing(similar_pairs([sight.thumbnail for sight in sights]).tolist(), len(own))
    train = seen.source.train.images
    overlaps = tuple(
        Overlap(places[i], train.key(places[i].row), places[j], i not in found)
        for i, j in sorted((near | found).items())
    )
    return OverlapReport(name, why, len(theirs), overlaps, listing)


def _tested(source: Source) -> tuple[str, Listing, str]:
    """Its test split, else val, else everything; and why."""
    if source.test is not None:
        return "test", source.test, "it has a test split"
    if source.val is not None:
        return "val", source.val, "it has a val split and no test split"
    return "", source.train, "it has no splits: all of it"


def _readable(seen: Survey) -> list[tuple[ImageLocation, ImageScan]]:
    return [(place, sight) for place, sight in zip(seen.places, seen.sights, strict=True) if not sight.error]


def _crossing(groups: Sequence[Sequence[int]], own: int) -> dict[int, int]:
    """Position among the first `own` → the first beyond them that it is in a group with."""
    found: dict[int, int] = {}
    for group in groups:
        beyond = [int(i) for i in group if i >= own]
        for i in group:
            if i < own and beyond:
                found[int(i)] = min(beyond[0], found.get(int(i), beyond[0]))
    return found
