"""The result of `check`: what a dataset contains and what is wrong with it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from patchloom.data.checking.overlap import OverlapReport
from patchloom.data.checking.survey import ImageLocation, Unreadable
from patchloom.data.datasets import Fault, Listing
from patchloom.data.text.sentences import is_train
from patchloom.recipes.auto import IMBALANCED_FROM
from patchloom_runtime.errors import shortened

Group = tuple[ImageLocation, ...]


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

    def leaks_between(self, *, near: bool = False) -> dict[str, list[Group]]:
        """Group `leaks` by their splits: 'train and val', 'train and test' …"""
        leaks: dict[str, list[Group]] = {}
        order = list(dict.fromkeys(map(self._side, self.splits)))
        for group in self.near_duplicates if near else self.duplicates:
            sides = sorted({self._side(place.split) for place in group}, key=order.index)
            if len(sides) > 1:
                leaks.setdefault(" and ".join(sides), []).append(group)
        return leaks

    def conflicts(self, *, near: bool = False) -> list[Group]:
        """Return groups of equal (or, with `near`, nearly equal) images with different labels."""
        groups = self.near_duplicates if near else self.duplicates
        return [group for group in groups if len({place.label for place in group}) > 1]

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
            yield f"{_count(len(self.unreadable), 'file')} cannot be read"
        if self.empty_classes:
            yield f"no images for {', '.join(map(repr, self.empty_classes))}"
        for where, names in self.strays().items():
            yield f"only {where} {'have' if ' and ' in where else 'has'} {', '.join(map(repr, names))}"
        for kind, count in Counter(fault.kind for fault in self.faults).items():
            yield f"{kind}, {_count(count, 'time')}"

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
            yield f"{same} in {splits}, {_count(len(leaks), 'time')}"
        if conflicts := self.conflicts(near=near):
            yield f"{same} under two labels, {_count(len(conflicts), 'time')}"
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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
