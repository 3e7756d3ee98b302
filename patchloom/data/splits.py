"""Train, val and test splits over one class table, made from listings.

Classes are numbered once, by name, from the training split. A class of val that train does not have never shifts a
number: it is left out with a note, or is an error with `strict`. A missing val split is made as a list of rows, without
copying files, and depends only on the names of the images and the seed.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from patchloom.data.datasets import ClassTable, LabeledImages, Listing, Source, Splits, name_some, plain_form
from patchloom.data.labels.similar_names import KINDS
from patchloom.data.labels.taxonomy import check_level, numbered_levels
from patchloom.data.labels.unlabeled import missing_labels
from patchloom.data.reading_options import Reading
from patchloom.data.targets import STRATA, ImageTargets, hold_out_labels
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED

if TYPE_CHECKING:
    from patchloom.data.buckets.remote_file import AnyFile

TRAIN_NAMES = ("train", "training")
VAL_NAMES = ("val", "valid", "validation")  # the first that a source has is used, as of the next
TEST_NAMES = ("test", "testing")
_UNKNOWN = -2  # number of a class that the table does not have


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
    """Return train, val and test of `source` over one class table.

    Args:
        source: The listings.
        val_fraction: Share of train to hold out if there is no val split.
        strict: Raise errors instead of leaving out unknown and empty classes.
        seed: Seed of the held-out split.
        level: Label by this coarser level.
        labeled: False accepts images without labels and sources with fewer than two classes.
        copies: Groups of positions in train that stay on one side of a split made here.
    """
    table, notes = usable_classes(source, strict=strict, level=level, labeled=labeled)
    notes += [f"{fault.kind}: {fault.detail}" for fault in source.faults if fault.kind in KINDS]
    train = match(source.train, table)
    if source.val is None:
        if source.fold:
            number, folds = source.fold
            fold_of_image = fold_numbers(train, folds, seed, copies)
            remaining, held_out = np.flatnonzero(fold_of_image != number), np.flatnonzero(fold_of_image == number)
            why = f"fold {number} of {folds}"
        else:
            remaining, held_out = split_rows(train, val_fraction, seed, copies)
            why = "no val split"
        train, val = train.subset(remaining), train.subset(held_out)
        together = ", copies together" if copies else ""
        unused = "; test stays unseen" if source.test is not None else ""
        total = len(train) + len(val)
        notes.append(f"{why}: {len(val)} of {total} images held out (seed {seed}{together}){unused}")
    else:
        val = match(source.val, table, strict=strict)
    test, test_notes = _matched_test(source, table, strict=strict)
    if level is not None:
        train, val, test = at_level(train, level), at_level(val, level), test and at_level(test, level)
    if not len(train) or not len(val):
        raise DataError(_empty_split(source, train, val, bool(copies)))
    return Splits(source.name, train, val, (*source.notes, *notes, *val.notes, *test_notes), test)


def _empty_split(source: Source, train: LabeledImages, val: LabeledImages, copies: bool) -> str:
    empty = "train" if not len(train) else "val"
    why = "; copies of one image are kept together" if copies and source.val is None else ""
    counts = f"{len(train)} train, {len(val)} val{why}"
    advice = ""
    if source.val is None and not len(val):
        advice = "; a class needs two images or more, or put images to validate with in a folder val/"
        advice += "; --val test validates on the test images" if source.test is not None else ""
    return f"{source.name}: no image is left for {empty} ({counts}){advice}"


def _matched_test(source: Source, table: ClassTable, *, strict: bool) -> tuple[LabeledImages | None, tuple[str, ...]]:
    """Return the test images with a class of train, and notes; None if val uses them or none has such a class."""
    if source.test is None or source.test is source.val:
        return None, ()
    try:
        test = match(source.test, table, strict=strict, what="test")
    except DataError as error:
        if strict:
            raise
        return None, (f"{error}; test is not used",)
    images = test.images
    annotated = bool(images.object_names or images.mask_names) or images.mask_ignore is not None
    if len(table) and not annotated and test.targets is None and np.all(test.labels == UNLABELED):
        return None, (f"the {len(test):,} images of test have no labels: they can be predicted, not evaluated",)
    return test, test.notes


def usable_classes(
    source: Source, *, strict: bool = False, level: str | None = None, labeled: bool = True
) -> tuple[ClassTable, list[str]]:
    """Return the class table of train, and notes. Raise DataError if it is not sufficient for the task."""
    images = source.train.images
    classify = labeled and not (images.mask_names or images.object_names) and source.train.learned is None
    if classify and np.any(source.train.labels == UNLABELED):
        raise DataError(f"{source.name}: {missing_labels(source.train)}")
    table, notes = class_table(source.train, strict=strict, where=source.name)
    if level is not None:
        check_level(level, table.levels)
    names = table.names if level is None else table.levels[level][0]
    if classify and len(names) < 2:
        classes = f"one class ({names[0]!r})" if names else "no class"
        classes += f" at level {level!r}" if level else ""
        raise DataError(
            f"{source.name}: {classes}; classification needs at least two: add a folder for another class, or pass "
            "--recipe dino, which learns from images without classes"
        )
    return table, notes


def class_table(listing: Listing, *, strict: bool = False, where: str = "train") -> tuple[ClassTable, list[str]]:
    """Return the classes with images in a training listing, in its order, and a note on the empty ones.

    `where` names the source in messages about levels.
    """
    counts = listing.counts
    if len(counts) > len(listing.names):
        row = int(np.argmax(listing.labels))
        where = listing.images.where(int(listing.rows[row]))
        raise DataError(f"{where}: label {listing.labels[row]} is outside 0…{len(listing.names) - 1}")
    # If no image has a label (masks, boxes), the names are those of objects, and all of them are used.
    labeled = bool(np.any(counts))
    used = [i for i in range(len(listing.names)) if counts[i] or not labeled]
    empty = [name for name, count in zip(listing.names, counts, strict=True) if not count and labeled]
    notes = []
    if empty:
        problem = f"no images in train for {name_some(empty)}"
        if strict:
            raise DataError(f"{problem}; add some or remove the class")
        notes.append(f"{problem}; left out")
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
    """Return the images of `listing` whose class is in `table`, renumbered by name, with a note on the others.

    `what` and `known_by` are the names of the listing and of the table in messages.
    """
    number = {name: i for i, name in enumerate(table.names)}
    forms = {name: plain_form(name) for name in listing.names if table.also and name not in number}
    others = {name: table.also[form] for name, form in forms.items() if form in table.also}
    number |= others
    renumbered = np.array([*(number.get(name, _UNKNOWN) for name in listing.names), UNLABELED], dtype=np.int64)
    labels = renumbered[listing.labels]  # UNLABELED (−1) picks the last entry
    unknown = np.flatnonzero(labels == _UNKNOWN)
    notes: tuple[str, ...] = ()
    if others:
        pairs = name_some([f"{name} = {table.names[of]}" for name, of in others.items()])
        notes = (f"{len(others)} of the {len(listing.names)} classes are known by other names: {pairs}",)
    if len(unknown):
        numbers, counts = np.unique(listing.labels[unknown], return_counts=True)
        named = name_some([listing.names[i] for i in numbers], [int(count) for count in counts])
        problem = f"{what} has {'a class' if len(numbers) == 1 else 'classes'} that {known_by} does not have: {named}"
        if len(unknown) == len(listing):
            raise DataError(f"{problem}, and no other; {known_by} has {name_some(table.names)}")
        if strict:
            raise DataError(f"{problem}; add images of it to train, or turn strict off to skip it")
        notes = (*notes, f"{problem}; left out")
    targets = listing.learned
    if targets is not None:
        notes = (*notes, *_unmatched_names(targets, table, strict=strict, what=what, known_by=known_by))
        targets = targets.named(table.names)
    known = np.flatnonzero(labels != _UNKNOWN)
    matched = LabeledImages(listing.images, listing.rows, labels, table, notes, targets=targets)
    return matched if len(known) == len(labels) else matched.subset(known)


def _unmatched_names(
    targets: ImageTargets, table: ClassTable, *, strict: bool, what: str, known_by: str
) -> tuple[str, ...]:
    """Return a note on labels or numbers that the table does not have. With `strict`, or if it has none, raise one."""
    counts = dict(zip(targets.names, targets.counts.tolist(), strict=True))
    unknown = [name for name, count in counts.items() if count and name not in table.names]
    if not unknown:
        return ()
    problem = f"{what} has {targets.kind} that {known_by} does not have: "
    problem += name_some(unknown, [counts[name] for name in unknown])
    if strict or not set(targets.names) & set(table.names):
        raise DataError(f"{problem}; {known_by} has {name_some(table.names)}")
    return (f"{problem}; left out",)


def split_rows(
    images: LabeledImages, fraction: float, seed: int, copies: Sequence[Sequence[int]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return the remaining and the held-out positions, with each group of `copies` on one side.

    Of every class, or label, `fraction` of the images are held out, as closely as whole groups allow. A class with two
    images that are not copies has at least one on each side. Numbers are held out in proportion to their quantiles.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"val_fraction is {fraction}, expected a number between 0 and 1")
    targets = images.targets
    if targets is not None and targets.kind == "labels":
        mask = hold_out_labels(_units(images, seed, copies), targets.values, fraction)
        return np.flatnonzero(~mask), np.flatnonzero(mask)
    labels = (images.labels if targets is None else targets.strata()).tolist()
    sizes = Counter(labels)
    wanted = {label: min(max(round(fraction * size), 1), size - 1) for label, size in sizes.items()}
    taken: Counter[int] = Counter()
    held_out = np.zeros(len(images), dtype=bool)
    units = [(unit, Counter(labels[i] for i in unit)) for unit in _units(images, seed, copies)]

    def fits(counts: Counter[int]) -> bool:
        """Return whether train still has an image of each class."""
        return all(taken[label] + count < sizes[label] for label, count in counts.items())

    def take(unit: Sequence[int], counts: Counter[int]) -> None:
        held_out[list(unit)] = True
        taken.update(counts)

    for unit, counts in units:
        nearer = all(2 * (wanted[label] - taken[label]) > count for label, count in counts.items())
        if nearer and fits(counts):
            take(unit, counts)
    # A class that consists of large groups may have none yet.
    for unit, counts in sorted(units, key=lambda one: len(one[0])):
        if any(wanted[label] and not taken[label] for label in counts) and fits(counts):
            take(unit, counts)
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def fold_numbers(images: LabeledImages, folds: int, seed: int, copies: Sequence[Sequence[int]] = ()) -> np.ndarray:
    """Return the fold of each image, 1 to `folds`, with each group of `copies` in one fold.

    Every class or label is spread over the folds as evenly as whole groups allow; folds of equal need are filled
    smallest first.
    """
    targets = images.targets
    classes_of: list[tuple[int, ...]] = [(label,) for label in images.labels.tolist()]
    if targets is not None:
        present = targets.values > 0 if targets.kind == "labels" else targets.strata()[:, None] == np.arange(STRATA)
        classes_of = [tuple(np.flatnonzero(row).tolist()) for row in present]
    # An image with several labels goes where the rare ones are missing.
    counts = Counter(label for labels in classes_of for label in labels)
    weights = {label: 1.0 if targets is None else 1 / count for label, count in counts.items()}
    units = _units(images, seed, copies)
    if len(units) < folds:
        together = ", counting copies of one image once" if copies else ""
        raise UsageError(f"{folds} folds need {folds} images or more; there are {len(units)}{together}")
    numbers = np.zeros(len(images), dtype=np.int64)
    images_of_class: list[Counter[int]] = [Counter() for _ in range(folds)]
    sizes = [0] * folds
    # Large groups first, while every fold has room for them. The sort is stable: the order of `_units` decides ties.
    for unit in sorted(units, key=len, reverse=True):
        classes = sorted({label for i in unit for label in classes_of[i]})

        def already(fold: int, classes: Sequence[int] = classes) -> tuple[float, int, int]:
            return sum(weights[c] * images_of_class[fold][c] for c in classes), sizes[fold], fold

        fold = min(range(folds), key=already)
        images_of_class[fold].update(label for i in unit for label in classes_of[i])
        sizes[fold] += len(unit)
        numbers[list(unit)] = fold + 1
    return numbers


def _units(images: LabeledImages, seed: int, copies: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return groups and single images in an order that depends only on their names and the seed."""
    salt = f"{seed}/".encode()
    keys = [images.key(i).encode("utf-8", "surrogateescape") for i in range(len(images))]
    ranks = [(hashlib.blake2b(salt + key, digest_size=8).digest(), key) for key in keys]
    grouped = {i for group in copies for i in group}
    units: list[Sequence[int]] = [*copies, *((i,) for i in range(len(keys)) if i not in grouped)]
    return sorted(units, key=lambda unit: min(ranks[i] for i in unit))


def name_files(files: Sequence["AnyFile"]) -> dict[str, "AnyFile"]:
    """Return files by name, or by folder/name if names repeat (train/0000.parquet, test/0000.parquet)."""
    unique = len({file.name for file in files}) == len(files)
    return {file.name if unique else f"{file.parent.name}/{file.name}": file for file in sorted(files)}


class SplitNames(NamedTuple):
    """Names of files, folders or splits, grouped by the split that they denote."""

    train: list[str]
    val: list[str]
    test: list[str]
    unused: list[str]


def group_by_split(names: Sequence[str]) -> SplitNames:
    """Group names by the split in them: cifar-train-0of3.parquet, Validation. Without a train split, all are train.

    If there are several words for val or for test, only the first is used.
    """
    words = {name: set(re.split(r"[^a-z]+", name.lower())) for name in names}
    train = [name for name in names if _is_train(name)]
    if not train:
        return SplitNames(list(names), [], [], [])
    rest = [name for name in names if name not in train]

    def with_word(known: Sequence[str]) -> list[str]:
        chosen = next((split for split in known if any(split in words[name] for name in rest)), "")
        return [name for name in rest if chosen and chosen in words[name]]

    val = with_word(VAL_NAMES)
    test = [name for name in with_word(TEST_NAMES) if name not in val]
    return SplitNames(train, val, test, [name for name in rest if name not in (*val, *test)])


def _is_train(name: str) -> bool:
    return bool(set(re.split(r"[^a-z]+", name.lower())) & set(TRAIN_NAMES))


def says_a_split(name: str) -> bool:
    """Return whether a word of the name is that of a split: train2017, Validation."""
    return bool(set(re.split(r"[^a-z]+", name.lower())) & {*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES})


def listings_by_split(
    whole: Listing, splits: Sequence[str]
) -> tuple[Listing, Listing | None, Listing | None, tuple[str, ...]]:
    """Divide a listing by the split of each row. Returns train, val or None, test or None, and notes."""
    names = group_by_split(sorted(set(splits)))
    split_of_row = np.array(splits)

    def pick(chosen: list[str]) -> Listing:
        return whole.subset(np.flatnonzero(np.isin(split_of_row, chosen)))

    notes = (f"rows of other splits, not used: {', '.join(names.unused)}",) if names.unused else ()
    if len(names.train) > 1 and not names.val and not names.test and not any(map(_is_train, names.train)):
        listed = name_some(names.train, [int(np.sum(split_of_row == name)) for name in names.train])
        notes = (f"the split column has {listed}, and none of them is train, val or test: all are train",)
    val, test = (pick(chosen) if chosen else None for chosen in (names.val, names.test))
    return pick(names.train), val, test, notes


def with_val(source: Source, reading: Reading) -> Source:
    """Return the source with the val split that the user chose: held-out images or a fold of train, or test."""
    if reading.fold and not source.is_part:
        return _with_fold(source, reading.fold)
    if reading.val == "test":
        if source.test is None:
            raise UsageError(f"--val test: {source.name} has no test split; it has {' and '.join(source.listings)}")
        note = "validated on test: the best epoch is chosen on the images that the result is reported on"
        return replace(source, val=source.test, notes=(*source.notes, note))
    if source.is_part or source.val is None or source.test is not None:
        return source  # it has no val split to set aside, or has a test split too
    note = f"val is held out of train; the {len(source.val):,} images of its own val split are left for a test"
    return replace(source, val=None, test=source.val, notes=(*source.notes, note))


def _with_fold(source: Source, fold: tuple[int, int]) -> Source:
    if source.val is None:
        return replace(source, fold=fold)
    own = f"the {len(source.val):,} images of its own val split are"
    if source.test is None:
        return replace(source, val=None, test=source.val, fold=fold, notes=(*source.notes, f"{own} left for a test"))
    return replace(source, val=None, fold=fold, notes=(*source.notes, f"{own} not used: the folds are of train"))


def share_of_train(splits: Splits, share: float) -> Splits:
    """Return the splits with a share of the training images of each class, at least one.

    The choice depends on their names alone, and a smaller share is a subset of a larger one.
    """
    train = splits.train
    if share >= 1 or not isinstance(train, LabeledImages):
        return splits
    labels, targets = train.labels, train.targets
    left = {int(label): max(1, round(share * int(np.sum(labels == label)))) for label in np.unique(labels)}
    kept = np.zeros(len(train.classes), bool)  # labels that apply to an image that was chosen
    chosen = []
    for (position,) in _units(train, 0, ()):
        new = targets.values[position] > 0 if targets is not None and targets.kind == "labels" else kept
        if left[int(labels[position])] or np.any(new & ~kept):
            left[int(labels[position])] = max(0, left[int(labels[position])] - 1)
            kept |= new
            chosen.append(position)
    note = f"{len(chosen):,} of the {len(train):,} training images are used (train_share {share:g})"
    return replace(splits, train=train.subset(np.sort(np.array(chosen))), notes=(*splits.notes, note))


def hold_out_of_train(splits: Splits, share: float, seed: int) -> Splits:
    """Return splits whose val is a share of the training images of each class; val and test are not used."""
    train = splits.train
    if not isinstance(train, LabeledImages):
        raise UsageError(f"{splits.name}: training images cannot be held out of this kind of dataset")
    remaining, held_out = split_rows(train, share, seed)
    return replace(splits, train=train.subset(remaining), val=train.subset(held_out), test=None)


def at_level(images: LabeledImages, level: str) -> LabeledImages:
    """Return the images labeled by a coarser level of their class table."""
    check_level(level, images.classes.levels)
    names, coarse = images.classes.levels[level]
    labels = np.array([*coarse, UNLABELED], dtype=np.int64)[images.labels]
    return replace(images, labels=labels, classes=ClassTable(names))


def level_of(classes: Sequence[str], levels: Mapping[str, Iterable[str]]) -> str | None:
    """Return the level with most of a model's `classes` (the first of equals), or None if none has any."""
    shared = {level: len(set(classes) & set(names)) for level, names in levels.items()}
    best = max(shared, key=lambda level: shared[level])
    return best if shared[best] else None


def coarsen(listing: Listing, level: str) -> Listing:
    """Return the listing labeled by a coarser level. A class that is not part of the level keeps its name."""
    check_level(level, listing.levels)
    coarse = [listing.levels[level].get(name, name) for name in listing.names]
    names = tuple(sorted(set(coarse)))
    number = np.array([*(names.index(name) for name in coarse), UNLABELED], dtype=np.int64)
    return replace(listing, labels=number[listing.labels], names=names, levels={})
