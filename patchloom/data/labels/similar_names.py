"""Class names that look the same: 'cat' and 'cat ', 'Cat' and 'cat', é as one character and as two.

Names that differ only in outer spaces or in Unicode form are merged to one class. Names that differ in case, in
invisible characters or in inner spaces stay separate and are reported, as are the words that spreadsheets use for
missing values.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from patchloom.data.datasets import Fault, Listing, Source, name_some
from patchloom_runtime.images.samples import UNLABELED

SIMILAR, MISSING, BARE = "look-alike classes", "missing value as a class", "no label"
KINDS = (SIMILAR, MISSING)  # reported by training, to which a missing label is an error
_MISSING_VALUES = ("nan", "na", "n/a", "#n/a", "null", "none", "<na>")


def tidy(source: Source) -> Source:
    """Merge names that differ in outer spaces or Unicode form. Other suspicious names become faults of the source."""
    train, notes = _merged(source.train)
    val, test = (listing and _merged(listing)[0] for listing in (source.val, source.test))
    if source.test is source.val:
        test = val
    faults = [*look_alikes(train.names, train.counts.tolist(), source.name), *_unlabeled(train, source.name)]
    known = {fault.detail for fault in source.faults}  # joined sources have them already
    fresh = tuple(fault for fault in faults if fault.detail not in known)
    return replace(
        source, train=train, val=val, test=test, notes=(*source.notes, *notes), faults=(*source.faults, *fresh)
    )


def canonical(name: str) -> str:
    """Return a class name without outer spaces and in Unicode's composed form."""
    return unicodedata.normalize("NFC", name).strip()


def _merged(listing: Listing) -> tuple[Listing, list[str]]:
    """Return the listing with canonical names, where '' is not a class, and a note on merged names."""
    plain = [canonical(name) for name in listing.names]
    if plain == list(listing.names):
        return listing, []
    names = tuple(dict.fromkeys(name for name in plain if name))
    number = {"": UNLABELED} | {name: i for i, name in enumerate(names)}
    renumbered = np.array([*(number[name] for name in plain), UNLABELED], dtype=np.int64)
    ways: dict[str, list[str]] = {}
    for original, name in zip(listing.names, plain, strict=True):
        ways.setdefault(name, []).append(original)
    levels = {
        level: {canonical(fine): canonical(coarse) for fine, coarse in of.items()}
        for level, of in listing.levels.items()
    }
    merged = [f"{name_some(of)} are one class" for name, of in ways.items() if len(of) > 1 and name]
    labels, targets = renumbered[listing.labels], listing.targets
    if targets is not None and targets.kind == "labels":
        targets = targets.renamed(list(map(canonical, targets.names)))
    tidied = replace(listing, names=names, labels=labels, levels=levels, targets=targets)
    return tidied, [f"names that differ in outer spaces or Unicode form: {'; '.join(merged)}"] if merged else []


def look_alikes(names: Sequence[str], counts: Sequence[int], where: str) -> Iterator[Fault]:
    """Yield faults of class names; `counts` has the images of each class."""
    groups: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        groups.setdefault(_to_the_eye(name), []).append(number)
    for same in groups.values():
        if len(same) > 1:
            yield Fault(where, SIMILAR, _counted(names, counts, same))
    missing = [number for number, name in enumerate(names) if name.lower() in _MISSING_VALUES]
    if missing:
        yield Fault(where, MISSING, _counted(names, counts, missing))


def _to_the_eye(name: str) -> str:
    """Return a form that is equal for names that look the same except for case."""
    visible = (letter for letter in unicodedata.normalize("NFKC", name) if unicodedata.category(letter) != "Cf")
    return " ".join("".join(visible).casefold().split())


def _counted(names: Sequence[str], counts: Sequence[int], chosen: Sequence[int]) -> str:
    return name_some([names[i] for i in chosen], [counts[i] for i in chosen])


def _unlabeled(listing: Listing, where: str) -> Iterator[Fault]:
    """Yield a fault if some training images have no label while others have one."""
    bare = np.flatnonzero(listing.labels == UNLABELED)
    if len(bare) and len(bare) < len(listing):
        first = listing.images.where(int(listing.rows[bare[0]]))
        yield Fault(where, BARE, f"{len(bare):,} of {len(listing):,} images, the first is {first}")
