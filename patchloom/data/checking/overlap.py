"""Training images that a test set also contains (MLP-Mixer, section 3): `check A --against B`.

Equal and nearly equal images are found as between splits: by pixel digests, difference hashes and color thumbnails.
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
    """A training image, and an equal or nearly equal image of the other dataset."""

    place: ImageLocation
    key: str  # of the training image, within its dataset
    of: ImageLocation
    near: bool  # nearly the same: saved again, scaled, slightly retouched

    @property
    def reason(self) -> str:
        """Why the image is left out, as written in a list of exclusions."""
        return f"{NEARLY if self.near else SAME} {self.of.where}"


@dataclass(frozen=True)
class OverlapReport:
    """Training images that another dataset also contains."""

    name: str  # split and dataset
    why: str  # the reason for the choice of the split
    images: int  # readable ones in that split
    overlaps: tuple[Overlap, ...]  # each training image once, in the order of train
    listing: Listing = field(repr=False, compare=False)

    @property
    def same(self) -> list[Overlap]:
        """Overlaps with an image of equal pixels."""
        return [overlap for overlap in self.overlaps if not overlap.near]

    @property
    def near(self) -> list[Overlap]:
        """Overlaps with a nearly equal image."""
        return [overlap for overlap in self.overlaps if overlap.near]


def against(
    own: Survey,
    other: Source,
    *,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> OverlapReport:
    """Compare the training images of a survey with the test images of another source."""
    split, listing, why = _tested(other)
    name = f"{split} of {other.name}" if split else other.name
    tested = survey(Source(other.name, listing), workers=workers, cache=cache, progress=progress)
    ours = [(place, scan) for place, scan in _readable(own) if place.split == "train"]
    theirs = [(replace(place, split=name), scan) for place, scan in _readable(tested)]
    places, scans = [place for place, _ in [*ours, *theirs]], [scan for _, scan in [*ours, *theirs]]
    digests = pixel_digests(scans, places, {"train": own.source.train, name: listing})
    same = _crossing(equal_groups(digests), len(ours))
    near = _crossing(similar_pairs([scan.thumbnail for scan in scans]).tolist(), len(ours))
    train = own.source.train.images
    overlaps = tuple(
        Overlap(places[i], train.key(places[i].row), places[j], i not in same) for i, j in sorted((near | same).items())
    )
    return OverlapReport(name, why, len(theirs), overlaps, listing)


def _tested(source: Source) -> tuple[str, Listing, str]:
    """Return the test split, or else val, or else everything, and the reason."""
    if source.test is not None:
        return "test", source.test, "it has a test split"
    if source.val is not None:
        return "val", source.val, "it has a val split and no test split"
    return "", source.train, "it has no splits: all of it"


def _readable(scanned: Survey) -> list[tuple[ImageLocation, ImageScan]]:
    return [(place, scan) for place, scan in zip(scanned.places, scanned.scans, strict=True) if not scan.error]


def _crossing(groups: Sequence[Sequence[int]], own: int) -> dict[int, int]:
    """Map positions among the first `own` to the first later position in one of their groups."""
    crossing: dict[int, int] = {}
    for group in groups:
        beyond = [int(i) for i in group if i >= own]
        for i in group:
            if i < own and beyond:
                crossing[int(i)] = min(beyond[0], crossing.get(int(i), beyond[0]))
    return crossing
