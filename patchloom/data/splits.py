"""Listings → train, val and test over one class table.

Classes are numbered once, by name, from the training split. A class of val that train does not have never
shifts a number: it is named and left out, or is an error where `strict`. A missing val is made as a list of
rows, never by copying files, and depends only on the pictures' names and the seed.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from patchloom.data.datasets import ClassTable, LabeledImages, Listing, Source, Splits, name_some, plain_form
from patchloom.data.labels.similar_names import KINDS
from patchloom.data.labels.taxonomy import check_level, numbered_levels
from patchloom.data.labels.unlabeled import missing_labels
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation")  # of these and the next, the first that a source has is used
TEST_NAMES = ("test", "testing")
_STRANGER = -2  # the number of a class that the table does not have


def make_splits(
    source: Source,
    *,
    val_fraction: float = 0.2,
    strict: bool = False,
    seed: int = 0,
    level: str | None = None,
    labeled: bool = True,
    copies: Sequence[Sequence[int]] = (),
) -> Splits:
    """Train, val and test of `source`, numbered by one table. Without `labelled`, one class or none will do.

    `copies` are groups of positions in train that a split made here keeps on one side.
    """
    table, notes = usable_classes(source, strict=strict, level=level, labeled=labeled)
    notes += [f"{fault.kind}: {fault.detail}" for fault in source.faults if fault.kind in KINDS]
    train = match(source.train, table)
    if source.val is None:
        kept, held_out = split_rows(train, val_fraction, seed, copies)
        train, val = _subset(train, kept), _subset(train, held_out)
        together = ", copies together" if copies else ""
        unseen = "; test stays unseen" if source.test is not None else ""
        notes.append(
            f"no val split: {len(val)} of {len(kept) + len(val)} pictures held out (seed {seed}{together}){unseen}"
        )
    else:
        val = match(source.val, table, strict=strict)
    test, of_test = _matched_test(source, table, strict=strict)
    if level is not None:
        train, val, test = at_level(train, level), at_level(val, level), test and at_level(test, level)
    if not len(train) or not len(val):
        empty = "train" if not len(train) else "val"
        why = "; copies of one picture are kept together" if copies and source.val is None else ""
        counts = f"{len(train)} train, {len(val)} val{why}"
        needed = ""
        if source.val is None and not len(val):
            needed = "; a class needs two images or more, or put images to validate with in a folder val/"
            needed += "; --val test validates on the test images" if source.test is not None else ""
        raise DataError(f"{source.name}: no image is left for {empty} ({counts}){needed}")
    return Splits(source.name, train, val, (*source.notes, *notes, *val.notes, *of_test), test)


def _matched_test(source: Source, table: ClassTable, *, strict: bool) -> tuple[LabeledImages | None, tuple[str, ...]]:
    """The test pictures a run can be tested on later; None where val has them, or none has a class of train."""
    if source.test is None or source.test is source.val:
        return None, ()
    try:
        test = match(source.test, table, strict=strict, what="test")
    except DataError as error:
        if strict:
            raise
        return None, (f"{error}; test is not used",)
    images = test.images
    of_objects = bool(images.object_names or images.mask_names) or images.mask_ignore is not None
    if len(table) and not of_objects and np.all(test.labels == UNLABELED):
        return None, (f"the {len(test):,} pictures of test have no labels: they can be predicted, not tested on",)
    return test, test.notes


def usable_classes(
    source: Source, *, strict: bool = False, level: str | None = None, labeled: bool = True
) -> tuple[ClassTable, list[str]]:
    """The class table of train, refused where it is not enough for what is wanted; and notes on it."""
    images = source.train.images
    classify = labeled and not (images.mask_names or images.object_names)
    if classify and np.any(source.train.labels == UNLABELED):
        raise DataError(f"{source.name}: {missing_labels(source.train)}")
    table, notes = class_table(source.train, strict=strict, where=source.name)
    if level is not None:
        check_level(level, table.levels)
    names = table.names if level is None else table.levels[level][0]
    if classify and len(names) < 2:
        found = f"one class ({names[0]!r})" if names else "no class"
        found += f" at level {level!r}" if level else ""
        raise DataError(
            f"{source.name}: {found}; classification needs at least two: add a folder for another class, or pass "
            "--recipe dino, which learns from images without classes"
        )
    return table, notes


def class_table(listing: Listing, *, strict: bool = False, where: str = "train") -> tuple[ClassTable, list[str]]:
    """The classes that have pictures in a training listing, in its order, and a note on the others.

    `where` says in messages whose levels these are.
    """
    labels = listing.labels[listing.labels != UNLABELED]
    counts = np.bincount(labels, minlength=len(listing.names))
    if len(counts) > len(listing.names):
        row = int(np.argmax(listing.labels))
        where = listing.images.where(int(listing.rows[row]))
        raise DataError(f"{where}: label {listing.labels[row]} is outside 0…{len(listing.names) - 1}")
    # Where no picture as a whole has a label (masks, boxes), the names are those of the objects: all stay.
    used = [i for i in range(len(listing.names)) if counts[i] or not len(labels)]
    empty = [name for name, count in zip(listing.names, counts, strict=True) if not count and len(labels)]
    notes = []
    if empty:
        said = f"no pictures in train for {name_some(empty)}"
        if strict:
            raise DataError(f"{said}; add some or remove the class")
        notes.append(f"{said}; left out")
    names = tuple(listing.names[i] for i in used)
    return ClassTable(names, numbered_levels(names, listing.levels, where)), notes


def match(
    listing: Listing,
    table: ClassTable,
    *,
    strict: bool = False,
    what: str = "val",
    known_by: str = "train",
) -> LabeledImages:
    """The pictures of `listing` whose class `table` has, renumbered by name; the rest named and left out.

    `what` and `known_by` say in messages whose pictures and whose table these are.
    """
    number = {name: i for i, name in enumerate(table.names)}
    forms = {name: plain_form(name) for name in listing.names if table.also and name not in number}
    others = {name: table.also[form] for name, form in forms.items() if form in table.also}
    number |= others
    renumbered = np.array([*(number.get(name, _STRANGER) for name in listing.names), UNLABELED], dtype=np.int64)
    labels = renumbered[listing.labels]  # UNLABELLED (−1) picks the last entry
    strangers = np.flatnonzero(labels == _STRANGER)
    notes: tuple[str, ...] = ()
    if others:
        pairs = name_some([f"{name} = {table.names[of]}" for name, of in others.items()])
        notes = (f"{len(others)} of the {len(listing.names)} classes are known by other names: {pairs}",)
    if len(strangers):
        numbers, counts = np.unique(listing.labels[strangers], return_counts=True)
        named = name_some([listing.names[i] for i in numbers], [int(count) for count in counts])
        said = f"{what} has {'a class' if len(numbers) == 1 else 'classes'} that {known_by} has not: {named}"
        if len(strangers) == len(listing):
            raise DataError(f"{said}, and no other; {known_by} has {name_some(table.names)}")
        if strict:
            raise DataError(f"{said}; add pictures of it to train, or turn strict off to leave it out")
        notes = (*notes, f"{said}; left out")
    known = np.flatnonzero(labels != _STRANGER)
    return LabeledImages(listing.images, listing.rows[known], labels[known], table, notes)


def split_rows(
    images: LabeledImages, fraction: float, seed: int, copies: Sequence[Sequence[int]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Positions kept and held out, each group of `copies` on one side.

    Every class has `fraction` of its pictures held out, as near as whole groups allow, and at least one on either side
    where it has two pictures that are no copies.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"val_fraction is {fraction}, expected a number between 0 and 1")
    labels = images.labels.tolist()
    sizes = Counter(labels)
    wanted = {label: min(max(round(fraction * size), 1), size - 1) for label, size in sizes.items()}
    taken: Counter[int] = Counter()
    held_out = np.zeros(len(images), dtype=bool)
    units = [(unit, Counter(labels[i] for i in unit)) for unit in _units(images, seed, copies)]

    def fits(counts: Counter[int]) -> bool:
        """Whether train keeps a picture of each class."""
        return all(taken[label] + count < sizes[label] for label, count in counts.items())

    def take(unit: Sequence[int], counts: Counter[int]) -> None:
        held_out[list(unit)] = True
        taken.update(counts)

    for unit, counts in units:
        nearer = all(2 * (wanted[label] - taken[label]) > count for label, count in counts.items())
        if nearer and fits(counts):
            take(unit, counts)
    # A class of large groups alone may have none yet.
    for unit, counts in sorted(units, key=lambda one: len(one[0])):
        if any(wanted[label] and not taken[label] for label in counts) and fits(counts):
            take(unit, counts)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def _units(images: LabeledImages, seed: int, copies: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Groups and single pictures in an order that depends on the pictures' names and the seed alone."""
    salt = f"{seed}/".encode()
    keys = [images.key(i).encode("utf-8", "surrogateescape") for i in range(len(images))]
    ranks = [(hashlib.blake2b(salt + key, digest_size=8).digest(), key) for key in keys]
    grouped = {i for group in copies for i in group}
    units: list[Sequence[int]] = [*copies, *((i,) for i in range(len(keys)) if i not in grouped)]
    return sorted(units, key=lambda unit: min(ranks[i] for i in unit))


def name_files(files: Sequence[Path]) -> dict[str, Path]:
    """Files by name, or by folder/name where names repeat (train/0000.parquet, test/0000.parquet)."""
    unique = len({file.name for file in files}) == len(files)
    return {file.name if unique else f"{file.parent.name}/{file.name}": file for file in sorted(files)}


class SplitNames(NamedTuple):
    """Names of files, or of rows' splits, by the split they say."""

    train: list[str]
    val: list[str]
    test: list[str]
    unused: list[str]


def group_by_split(names: Sequence[str]) -> SplitNames:
    """Each name under the split it says, as a word: cifar-train-0of3.parquet, Validation; all train where none says so.

    Of several names of val or of test the first is used.
    """
    words = {name: set(re.split(r"[^a-z]+", name.lower())) for name in names}
    train = [name for name in names if _says_train(name)]
    if not train:
        return SplitNames(list(names), [], [], [])
    rest = [name for name in names if name not in train]

    def saying(known: Sequence[str]) -> list[str]:
        chosen = next((split for split in known if any(split in words[name] for name in rest)), "")
        return [name for name in rest if chosen and chosen in words[name]]

    val = saying(VAL_NAMES)
    test = [name for name in saying(TEST_NAMES) if name not in val]
    return SplitNames(train, val, test, [name for name in rest if name not in (*val, *test)])


def _says_train(name: str) -> bool:
    return bool(set(re.split(r"[^a-z]+", name.lower())) & set(TRAIN_NAMES))


def says_a_split(name: str) -> bool:
    """Whether a word of the name is that of a split: train2017, Validation."""
    return bool(set(re.split(r"[^a-z]+", name.lower())) & {*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES})


def listings_by_split(
    whole: Listing, splits: Sequence[str]
) -> tuple[Listing, Listing | None, Listing | None, tuple[str, ...]]:
    """`whole` divided by the split each row names: train, val or None, test or None, and a note on the others."""
    names = group_by_split(sorted(set(splits)))
    said = np.array(splits)

    def pick(chosen: list[str]) -> Listing:
        rows = np.flatnonzero(np.isin(said, chosen))
        return replace(whole, rows=whole.rows[rows], labels=whole.labels[rows])

    notes = (f"rows of other splits, not used: {', '.join(names.unused)}",) if names.unused else ()
    if len(names.train) > 1 and not names.val and not names.test and not any(map(_says_train, names.train)):
        told = name_some(names.train, [int(np.sum(said == name)) for name in names.train])
        notes = (f"the split column says {told}, and none of them train, val or test: all are train",)
    val, test = (pick(chosen) if chosen else None for chosen in (names.val, names.test))
    return pick(names.train), val, test, notes


def with_val(source: Source, choice: Literal["held-out", "test"]) -> Source:
    """Return the source with the val split that the user chose."""
    if choice == "test":
        if source.test is None:
            raise UsageError(f"--val test: {source.name} has no test split; it has {' and '.join(source.listings)}")
        note = "validated on test: the best epoch is chosen on the images that the result is reported on"
        return replace(source, val=source.test, notes=(*source.notes, note))
    if source.is_part or source.val is None or source.test is not None:
        return source  # has no val split to set aside, or one beside its test split
    note = f"val is taken out of train; the {len(source.val):,} images of its own are kept for a test"
    return replace(source, val=None, test=source.val, notes=(*source.notes, note))


def share_of_train(splits: Splits, share: float) -> Splits:
    """The splits with a share of the training pictures of each class, at least one.

    Which they are depends on their names alone, and a smaller share is part of a larger one.
    """
    train = splits.train
    if share >= 1 or not isinstance(train, LabeledImages):
        return splits
    labels = train.labels
    left = {int(label): max(1, round(share * int(np.sum(labels == label)))) for label in np.unique(labels)}
    kept = []
    for (position,) in _units(train, 0, ()):
        if left[int(labels[position])]:
            left[int(labels[position])] -= 1
            kept.append(position)
    said = f"{len(kept):,} of the {len(train):,} training pictures are used (train_share {share:g})"
    return replace(splits, train=_subset(train, np.sort(np.array(kept))), notes=(*splits.notes, said))


def at_level(images: LabeledImages, level: str) -> LabeledImages:
    """The same pictures labelled by a coarser level of their class table."""
    check_level(level, images.classes.levels)
    names, coarse = images.classes.levels[level]
    labels = np.array([*coarse, UNLABELED], dtype=np.int64)[images.labels]
    return LabeledImages(images.images, images.rows, labels, ClassTable(names), images.notes)


def level_of(classes: Sequence[str], levels: Mapping[str, Iterable[str]]) -> str | None:
    """The level with most of a model's `classes` among its names, the first of equals; None where none has any."""
    shared = {level: len(set(classes) & set(names)) for level, names in levels.items()}
    best = max(shared, key=lambda level: shared[level])
    return best if shared[best] else None


def coarsen(listing: Listing, level: str) -> Listing:
    """The same listing labelled by a coarser level; a class that the level does not know keeps its name."""
    check_level(level, listing.levels)
    coarse = [listing.levels[level].get(name, name) for name in listing.names]
    names = tuple(sorted(set(coarse)))
    number = np.array([*(names.index(name) for name in coarse), UNLABELED], dtype=np.int64)
    return replace(listing, labels=number[listing.labels], names=names, levels={})


def _subset(images: LabeledImages, positions: np.ndarray) -> LabeledImages:
    return LabeledImages(
        images.images,
        images.rows[positions],
        images.labels[positions],
        images.classes,
        images.notes,
    )
