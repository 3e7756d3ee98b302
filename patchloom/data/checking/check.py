"""A data set looked through before anybody trains on it: `check(DATA)` → what is there and what is wrong with it.

Wrong is what would be left out, mislabelled or counted twice: files that cannot be read, classes without training
pictures, the same picture in train and val or under two labels. The data are only ever read.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from patchloom.data.checking.oddities import oddities
from patchloom.data.checking.overlap import OverlapReport
from patchloom.data.checking.overlap import against as compare_with
from patchloom.data.checking.scan_cache import ImageScan
from patchloom.data.checking.survey import ImageLocation, Unreadable, find_copies, survey
from patchloom.data.datasets import Fault, Listing, Progress
from patchloom.data.images.box_faults import NO_OBJECTS
from patchloom.data.labels.unlabeled import task_of_data
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source
from patchloom.data.specs import Spec
from patchloom.data.text.sentences import SentenceSplit, check_sentences, find_sentences, is_train
from patchloom_runtime.errors import UsageError, shortened, with_near_options
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable


@dataclass(frozen=True)
class OddImage:
    """A picture that is read, but perhaps not as its owner thinks."""

    place: ImageLocation
    kind: str
    read_as: str


Group = tuple[ImageLocation, ...]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a scan found; `problems` sums up what is wrong."""

    name: str
    task: str = "classify"  # as --task calls what the data are for
    annotated: tuple[str, ...] = ()  # names of what masks or boxes show; of unnamed masks none
    unit: str = "picture"  # what is counted: pictures, or pairs of sentences
    splits: dict[str, int]  # pictures in each, readable or not
    classes: dict[str, dict[str, int]]  # class → split → readable pictures
    widths: tuple[int, int, int] | None  # smallest, median, largest, upright; None where nothing could be read
    heights: tuple[int, int, int] | None
    unreadable: tuple[Unreadable, ...]
    odd: tuple[OddImage, ...]
    duplicates: tuple[Group, ...]  # the same pixels
    near_duplicates: tuple[Group, ...]  # nearly the same, one of each set of duplicates
    faults: tuple[Fault, ...]  # of masks, boxes and sentences
    notes: tuple[str, ...]  # on what was not looked at: other extensions, pipes, unused folders
    decoded: int  # pictures; the rest were known from an earlier scan
    against: OverlapReport | None = None  # what train shares with another set, where that was asked for
    listings: dict[str, Listing] = field(repr=False, compare=False)  # split → what was looked at; not in `to_dict`

    @property
    def images(self) -> int:
        """In all splits, readable or not."""
        return sum(self.splits.values())

    def _side(self, split: str) -> str:
        """Splits whose pictures must differ; of text, all that is not train is one."""
        if self.unit == "picture":
            return split
        return "train" if is_train(split) else "val" if set(self.splits) <= {"train", "val"} else "val or test"

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes without a readable picture anywhere."""
        return tuple(name for name, counts in self.classes.items() if not any(counts.values()))

    @property
    def stray_classes(self) -> dict[str, int]:
        """Classes that only val or test has → pictures."""
        counts = {name: sum(counts.values()) for name, counts in self.classes.items() if not counts["train"]}
        return {name: count for name, count in counts.items() if count}

    def strays(self) -> dict[str, dict[str, int]]:
        """val, test or 'val and test' → the classes that only they have → pictures."""
        found: dict[str, dict[str, int]] = {}
        for name, count in self.stray_classes.items():
            where = " and ".join(split for split, images in self.classes[name].items() if images)
            found.setdefault(where, {})[name] = count
        return found

    @property
    def balance(self) -> tuple[int, int] | None:
        """Training pictures of the smallest and of the largest class that has any."""
        counts = [count["train"] for count in self.classes.values() if count["train"]]
        return (min(counts), max(counts)) if counts else None

    def leaks(self, *, near: bool = False) -> list[Group]:
        """The same picture in two splits; `near` for nearly the same."""
        return [group for groups in self.leaks_between(near=near).values() for group in groups]

    def leaks_between(self, *, near: bool = False) -> dict[str, list[Group]]:
        """'train and val', 'train and test' … → the same picture in both."""
        found: dict[str, list[Group]] = {}
        order = list(dict.fromkeys(map(self._side, self.splits)))
        for group in self.near_duplicates if near else self.duplicates:
            sides = sorted({self._side(place.split) for place in group}, key=order.index)
            if len(sides) > 1:
                found.setdefault(" and ".join(sides), []).append(group)
        return found

    def conflicts(self, *, near: bool = False) -> list[Group]:
        """The same picture under two labels; `near` for nearly the same."""
        groups = self.near_duplicates if near else self.duplicates
        return [group for group in groups if len({place.label for place in group}) > 1]

    def listing_of(self, place: ImageLocation) -> Listing | None:
        """What a picture is read from; a pair of sentences has none."""
        if self.against and place.split == self.against.name:
            return self.against.listing
        return self.listings.get(place.split)

    def problems(self, *, strict: bool = False) -> list[str]:
        """A line for each kind of fault. `strict` counts near-duplicates across splits and labels too."""
        found = []
        if self.unreadable:
            found.append(f"{_count(len(self.unreadable), 'file')} cannot be read")
        if self.empty_classes:
            found.append(f"no pictures for {', '.join(map(repr, self.empty_classes))}")
        for where, names in self.strays().items():
            found.append(f"only {where} {'have' if ' and ' in where else 'has'} {', '.join(map(repr, names))}")
        for kind, count in Counter(fault.kind for fault in self.faults).items():
            found.append(f"{kind}, {_count(count, 'time')}")
        if len(self.classes) == 1:
            found.append(
                f"one class ({next(iter(self.classes))!r}); classification needs two: add a folder for another class, "
                "or train with --recipe dino, which needs none"
            )
        elif self.classes and len(self.splits) == 1 and max(sum(of.values()) for of in self.classes.values()) < 2:
            found.append(
                f"one {self.unit} per class, so none is left for val; a class needs two or more, or put "
                f"{self.unit}s to validate with in a folder val/"
            )
        for near in (False, True)[: 1 + strict]:
            same = f"{'nearly ' * near}the same {self.unit}"
            for splits, leaks in self.leaks_between(near=near).items():
                found.append(f"{same} in {splits}, {_count(len(leaks), 'time')}")
            if conflicts := self.conflicts(near=near):
                found.append(f"{same} under two labels, {_count(len(conflicts), 'time')}")
            if self.against and (shared := self.against.near if near else self.against.same):
                found.append(f"{same} in train and {self.against.name}, {_count(len(shared), 'time')}")
        return list(map(shortened, found))  # a class may have any name

    def to_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = asdict(replace(self, listings={}, against=None))
        found = {name: value for name, value in plain.items() if name not in ("listings", "against")}
        return found | {
            "against": self.against
            and {
                "name": self.against.name,
                "why": self.against.why,
                "pictures": self.against.images,
                "overlaps": [asdict(overlap) for overlap in self.against.overlaps],
            },
            "pictures": self.images,
            "empty_classes": list(self.empty_classes),
            "stray_classes": self.stray_classes,
            "balance": self.balance,
            "leaks": [[asdict(place) for place in group] for group in self.leaks()],
            "conflicts": [[asdict(place) for place in group] for group in self.conflicts()],
            "problems": self.problems(strict=strict),
        }


@with_near_options
def check(
    spec: Spec,
    *,
    reading: Reading = AS_IT_IS,
    against: Spec | None = None,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> CheckReport:
    """Look at every picture of a data set, as `open_data` would find it, or at every sentence pair.

    `against` is another data set: which of its test pictures (or val, or all) train holds too.
    `workers` are processes (default: one for each core); `cache` keeps what was seen of each file, outside the data,
    until its size or time changes; `progress` is called with the pictures done and their number.
    """
    sentences = find_sentences(Path(os.path.expanduser(spec))) if reading.labels is None else []
    if sentences and against is not None:
        raise UsageError(f"--against compares pictures, and {printable(spec)} holds sentence pairs")
    if sentences:
        return _sentence_report(printable(Path(os.path.expanduser(spec)).resolve().name), sentences)
    source = find_source(spec, reading=reading)
    other = find_source(against) if against is not None else None
    seen = survey(source, workers=workers, cache=cache, progress=progress)
    listings = seen.listings
    readable = [i for i, sight in enumerate(seen.sights) if not sight.error]
    places, sights = [seen.places[i] for i in readable], [seen.sights[i] for i in readable]
    copies = find_copies(sights, places, listings)
    task, images = task_of_data(source)[0], source.train.images
    ignored = images.mask_ignore if task == "segment" else None
    named = images.object_names if task == "detect" else images.mask_names
    return CheckReport(
        name=source.name,
        task=task,
        annotated=tuple(name for number, name in enumerate(named) if number != ignored),
        splits={split: len(listing) for split, listing in listings.items()},
        classes=_classes(listings, places),
        widths=_spread([sight.width for sight in sights]),
        heights=_spread([sight.height for sight in sights]),
        unreadable=seen.unreadable,
        odd=tuple(_odd(places, sights)),
        duplicates=_named(copies.equal, places),
        near_duplicates=_named(copies.similar, places),
        faults=(*source.faults, *_faults(places, sights)),
        notes=source.notes,
        decoded=seen.decoded,
        against=compare_with(seen, other, workers=workers, cache=cache, progress=progress) if other else None,
        listings=listings,
    )


def _sentence_report(name: str, splits: Sequence[SentenceSplit]) -> CheckReport:
    found = check_sentences(splits)

    def place(number: int, row: int) -> ImageLocation:
        return ImageLocation(splits[number].where(row), splits[number].name, "", row)

    return CheckReport(
        name=f"{name} (sentence pairs)",
        unit="pair",
        splits={split.name: count for split, count in zip(splits, found.counts, strict=True)},
        classes={},
        widths=None,
        heights=None,
        unreadable=(),
        odd=tuple(OddImage(place(number, row), "uneven sides", lengths) for number, row, lengths in found.uneven),
        duplicates=tuple(tuple(place(*pair) for pair in group) for group in found.duplicates),
        near_duplicates=(),
        faults=found.faults,
        notes=(),
        decoded=sum(found.counts),
        listings={},
    )


def _named(groups: Sequence[Sequence[int]], places: Sequence[ImageLocation]) -> tuple[Group, ...]:
    return tuple(tuple(places[i] for i in group) for group in groups)


def _faults(places: Sequence[ImageLocation], sights: Sequence[ImageScan]) -> Iterator[Fault]:
    for place, sight in zip(places, sights, strict=True):
        for line in sight.faults.splitlines():
            kind, _, detail = line.partition("\t")
            if kind != NO_OBJECTS:
                yield Fault(place.where, kind, detail)


def _classes(listings: dict[str, Listing], readable: Sequence[ImageLocation]) -> dict[str, dict[str, int]]:
    """Names without a picture count too, unless no picture has a label (masks and boxes have names of their own)."""
    if all(np.all(listing.labels == UNLABELED) for listing in listings.values()):
        return {}
    names = sorted({name for listing in listings.values() for name in listing.names})
    counts = Counter((place.label, place.split) for place in readable)
    return {name: {split: counts[name, split] for split in listings} for name in names}


def _odd(places: Sequence[ImageLocation], sights: Sequence[ImageScan]) -> Iterator[OddImage]:
    usual_side = median(min(sight.width, sight.height) for sight in sights) if sights else 0
    for place, sight in zip(places, sights, strict=True):
        yield from (OddImage(place, kind, read_as) for kind, read_as in oddities(sight, usual_side))
        told = [line.partition("\t") for line in sight.faults.splitlines()]
        yield from (OddImage(place, kind, detail) for kind, _, detail in told if kind == NO_OBJECTS)


def _spread(values: Sequence[int]) -> tuple[int, int, int] | None:
    return (min(values), int(median(values)), max(values)) if values else None


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
