"""The result of `check`: what a dataset contains and what is wrong with it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from patchloom.data.checking.overlap import OverlapReport
from patchloom.data.checking.survey import ImageLocation, Unreadable
from patchloom.data.datasets import Fault, Listing
from patchloom.data.text.sentences import is_train
from patchloom.recipes.auto import IMBALANCED_FROM
from patchloom_runtime.errors import shortened

T = TypeVar("T")
Group = tuple[ImageLocation, ...]
DETAILED = ("strip", "tiny", "uneven sides", "no objects")  # kinds of odd files whose detail differs per file
MOST_LINES, MOST_GROUPS, MOST_MEMBERS = 500, 20, 100  # in the report of a joined check; its files have all


class FirstItems(tuple[T, ...]):
    """The first items of a list that may be too long for the memory. `total` counts all of them."""

    total: int

    def __new__(cls, items: Iterable[T] = (), total: int | None = None) -> "FirstItems[T]":
        self = super().__new__(cls, tuple(items))
        self.total = len(self) if total is None else total
        return self


def total_of(items: Sequence[Any]) -> int:
    """Return the number of items, with those that `FirstItems` leaves out."""
    return items.total if isinstance(items, FirstItems) else len(items)


@dataclass(frozen=True)
class OddImage:
    """An image that can be read, but perhaps not as its owner expects."""

    place: ImageLocation
    kind: str
    read_as: str


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Result of `check`. `problems` summarizes what is wrong."""

    name: str
    task: str = "classify"  # that the data suggest, as --task names it
    annotated: tuple[str, ...] = ()  # class names of masks or boxes
    unit: str = "image"  # what is counted: "image" or "pair" (of sentences)
    splits: dict[str, int]  # split → images, readable or not
    classes: dict[str, dict[str, int]]  # class → split → readable images
    widths: tuple[int, int, int] | None  # smallest, median, largest, upright; None if no image is readable
    heights: tuple[int, int, int] | None
    unreadable: tuple[Unreadable, ...]
    odd: tuple[OddImage, ...]
    duplicates: tuple[Group, ...]  # equal pixels
    near_duplicates: tuple[Group, ...]  # nearly equal, with one image of each group of duplicates
    faults: tuple[Fault, ...]  # of masks, boxes and sentences
    notes: tuple[str, ...]  # on files that were not read: other extensions, pipes, unused folders
    decoded: int  # images; the others were in the cache
    against: OverlapReport | None = None  # training images that another dataset also contains
    listings: dict[str, Listing] = field(repr=False, compare=False)  # split → images; not in `to_dict`

    @property
    def images(self) -> int:
        """Number of images in all splits, readable or not."""
        return sum(self.splits.values())

    def _side(self, split: str) -> str:
        """Return the side of a split; images of different sides must differ. Text has two sides: train and the rest."""
        if self.unit == "image":
            return split
        return "train" if is_train(split) else "val" if set(self.splits) <= {"train", "val"} else "val or test"

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes without a readable image in any split."""
        return tuple(name for name, counts in self.classes.items() if not any(counts.values()))

    @property
    def stray_classes(self) -> dict[str, int]:
        """Classes that only val or test contains, with their number of images."""
        counts = {name: sum(counts.values()) for name, counts in self.classes.items() if not counts["train"]}
        return {name: count for name, count in counts.items() if count}

    def strays(self) -> dict[str, dict[str, int]]:
        """Group `stray_classes` by where they are: val, test or 'val and test'."""
        strays: dict[str, dict[str, int]] = {}
        for name, count in self.stray_classes.items():
            where = " and ".join(split for split, images in self.classes[name].items() if images)
            strays.setdefault(where, {})[name] = count
        return strays

    @property
    def balance(self) -> tuple[int, int] | None:
        """Training images of the smallest and of the largest class, ignoring empty classes."""
        counts = [count["train"] for count in self.classes.values() if count["train"]]
        return (min(counts), max(counts)) if counts else None

    @property
    def is_imbalanced(self) -> bool:
        """Whether the largest class of train is so much larger than the smallest that training corrects for it."""
        return self.balance is not None and self.balance[1] >= IMBALANCED_FROM * self.balance[0]

    def balance_text(self) -> str:
        """Return `balance` in words; "" without classes."""
        if not self.balance:
            return ""
        low, high = self.balance
        return f"{low:,} … {high:,} per class" + (f", uneven: 1 to {high / low:.0f}" if self.is_imbalanced else "")

    def leaks(self, *, near: bool = False) -> list[Group]:
        """Return groups of equal (or, with `near`, nearly equal) images in different splits."""
        return [group for groups in self.leaks_between(near=near).values() for group in groups]

    def leaks_between(self, *, near: bool = False) -> dict[str, Sequence[Group]]:
        """Group `leaks` by their splits: 'train and val', 'train and test' …"""
        leaks: dict[str, list[Group]] = {}
        order = list(dict.fromkeys(map(self._side, self.splits)))
        for group in self.near_duplicates if near else self.duplicates:
            sides = sorted({self._side(place.split) for place in group}, key=order.index)
            if len(sides) > 1:
                leaks.setdefault(" and ".join(sides), []).append(group)
        return dict(leaks)

    def conflicts(self, *, near: bool = False) -> Sequence[Group]:
        """Return groups of equal (or, with `near`, nearly equal) images with different labels."""
        groups = self.near_duplicates if near else self.duplicates
        return [group for group in groups if len({place.label for place in group}) > 1]

    def odd_counts(self) -> dict[tuple[str, str], int]:
        """Count the odd images by kind and how they are read, without the details that differ per file."""
        return Counter((odd.kind, "" if odd.kind in DETAILED else odd.read_as) for odd in self.odd)

    def faults_by_kind(self) -> dict[str, Sequence[Fault]]:
        """Group the faults by kind."""
        kinds: dict[str, list[Fault]] = {}
        for fault in self.faults:
            kinds.setdefault(fault.kind, []).append(fault)
        return dict(kinds)

    def listing_of(self, place: ImageLocation) -> Listing | None:
        """Return the listing that contains an image; None for a pair of sentences."""
        if self.against and place.split == self.against.name:
            return self.against.listing
        return self.listings.get(place.split)

    def problems(self, *, strict: bool = False) -> list[str]:
        """Return one line per kind of problem. `strict` includes near-duplicates across splits and labels."""
        lines = [*self._file_problems(), *self._class_problems()]
        for near in (False, True)[: 1 + strict]:
            lines += self._duplicate_problems(near=near)
        return list(map(shortened, lines))  # class names may be long

    def _file_problems(self) -> Iterator[str]:
        if self.unreadable:
            yield f"{_count(total_of(self.unreadable), 'file')} cannot be read"
        if self.empty_classes:
            yield f"no images for {', '.join(map(repr, self.empty_classes))}"
        for where, names in self.strays().items():
            yield f"only {where} {'have' if ' and ' in where else 'has'} {', '.join(map(repr, names))}"
        for kind, faults in self.faults_by_kind().items():
            yield f"{kind}, {_count(total_of(faults), 'time')}"

    def _class_problems(self) -> Iterator[str]:
        if len(self.classes) == 1 and self.task == "classify":
            yield (
                f"one class ({next(iter(self.classes))!r}); classification needs two: add a folder for another class, "
                "or train with --recipe dino, which needs none"
            )
        elif self.classes and len(self.splits) == 1 and max(sum(of.values()) for of in self.classes.values()) < 2:
            yield (
                f"one {self.unit} per class, so none is left for val; a class needs two or more, or put "
                f"{self.unit}s to validate with in a folder val/"
            )

    def _duplicate_problems(self, *, near: bool) -> Iterator[str]:
        same = f"{'nearly ' * near}the same {self.unit}"
        for splits, leaks in self.leaks_between(near=near).items():
            yield f"{same} in {splits}, {_count(total_of(leaks), 'time')}"
        if conflicts := self.conflicts(near=near):
            yield f"{same} under two labels, {_count(total_of(conflicts), 'time')}"
        if self.against and (shared := self.against.near if near else self.against.same):
            yield f"{same} in train and {self.against.name}, {_count(len(shared), 'time')}"

    def to_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(replace(self, listings={}, against=None))
        fields = {name: value for name, value in plain.items() if name not in ("listings", "against")}
        return fields | {
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


@dataclass(frozen=True)
class GroupsOfCopies:
    """The groups of equal, or of nearly equal, images of a joined check."""

    groups: FirstItems[Group] = field(default_factory=FirstItems)
    leaks: dict[str, FirstItems[Group]] = field(default_factory=dict)  # by their splits: 'train and val'
    conflicts: FirstItems[Group] = field(default_factory=FirstItems)


@dataclass(frozen=True, kw_only=True)
class JoinedReport(CheckReport):
    """The report of a check in parts: the first problems of each kind, and the number of all. Files list all."""

    equal: GroupsOfCopies = field(default_factory=GroupsOfCopies)
    similar: GroupsOfCopies = field(default_factory=GroupsOfCopies)
    kinds_of_odd: dict[tuple[str, str], int] = field(default_factory=dict)
    kinds_of_faults: dict[str, FirstItems[Fault]] = field(default_factory=dict)
    folder: str  # of the parts and the report: the copy, if they are in a bucket
    lists: dict[str, str] = field(default_factory=dict)  # kind of problem → CSV file in that folder
    open_listing: Callable[[ImageLocation], Listing | None] = field(default=lambda _: None, repr=False, compare=False)

    def leaks_between(self, *, near: bool = False) -> dict[str, Sequence[Group]]:
        """Return the first groups per pair of splits."""
        return dict((self.similar if near else self.equal).leaks)

    def conflicts(self, *, near: bool = False) -> Sequence[Group]:
        """Return the first groups of images with different labels."""
        return (self.similar if near else self.equal).conflicts

    def odd_counts(self) -> dict[tuple[str, str], int]:
        """Count the odd images by kind and how they are read."""
        return self.kinds_of_odd

    def faults_by_kind(self) -> dict[str, Sequence[Fault]]:
        """Return the first faults of each kind."""
        return dict(self.kinds_of_faults)

    def listing_of(self, place: ImageLocation) -> Listing | None:
        """Open the shard of an image; None if it is gone."""
        return self.open_listing(place)

    def to_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """Return plain values for JSON: counts, and the first problems of each kind."""
        own = ("equal", "similar", "kinds_of_odd", "kinds_of_faults", "open_listing")
        plain = super().to_dict(strict=strict)
        counts = {
            name: total_of(getattr(self, name)) for name in ("unreadable", "odd", "duplicates", "near_duplicates")
        }
        counts["faults"] = sum(map(total_of, self.kinds_of_faults.values()))
        for near in (False, True):
            counts["near_leaks" if near else "leaks"] = sum(map(total_of, self.leaks_between(near=near).values()))
            counts["near_conflicts" if near else "conflicts"] = total_of(self.conflicts(near=near))
        return {name: value for name, value in plain.items() if name not in own} | {"counts": counts}


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
