"""Several files or folders as one data set.

train/ val/        named like splits: they are the splits
cats/ dogs/        pictures alone: each is a class
2023/ 2024/        class folders in each: merged by class name
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from patchloom.data.datasets import Listing, Source
from patchloom.data.sources.joined import join_listings
from patchloom.data.sources.labels_file import split_of
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED


def join_sources(names: Sequence[str], sources: Sequence[Source]) -> Source:
    """One source of several, by what their names and contents say; a mixture is a UsageError."""
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    notes = tuple(dict.fromkeys(note for source in sources for note in source.notes))
    splits = [split_of(name) for name in names]
    if all(splits) and "train" in splits:
        return replace(_as_splits(names, sources, splits), name=f"{shown} (given splits)", notes=notes)
    bare = [bool(np.all(source.train.labels == UNLABELED)) and len(source.train) > 0 for source in sources]
    if any(bare) and not all(bare):
        one, other = names[bare.index(True)], names[bare.index(False)]
        raise UsageError(
            f"{one} holds pictures alone and {other} holds classes; give folders of pictures alone, each a class, "
            "or folders of class folders"
        )
    if all(bare):
        listings = [_as_class(name, source) for name, source in zip(names, sources, strict=True)]
        note = f"each folder given is a class: {len(set(names))} classes"
        return Source(f"{shown} (class folders)", join_listings(listings, _unique(names)), None, (note, *notes))
    note = f"{len(names)} data sets merged by class name"
    found = {split: _join(names, sources, split) for split in ("train", "val", "test")}
    train = found["train"]
    assert train is not None
    return Source(f"{shown} (merged)", train, found["val"], (note, *notes), test=found["test"])


def _as_splits(names: Sequence[str], sources: Sequence[Source], splits: Sequence[str]) -> Source:
    for name, source in zip(names, sources, strict=True):
        if source.val is not None or source.test is not None:
            raise UsageError(f"{name} is given as a split and has splits of its own; give it alone, or its folders")
    of = {
        split: [(name, source.train) for name, source, own in zip(names, sources, splits, strict=True) if own == split]
        for split in ("train", "val", "test")
    }
    found = {
        split: join_listings([listing for _, listing in given], _unique([name for name, _ in given]))
        for split, given in of.items()
        if given
    }
    return Source("", found["train"], found.get("val"), test=found.get("test"))


def _as_class(name: str, source: Source) -> Listing:
    return replace(source.train, labels=np.zeros(len(source.train), dtype=np.int64), names=(name,), levels={})


def _join(names: Sequence[str], sources: Sequence[Source], split: str) -> Listing | None:
    """One split of all sources; those that have it must all have it, or pictures would be judged unevenly."""
    listings: list[Listing | None] = [getattr(source, split) for source in sources]
    given = [listing for listing in listings if listing is not None]
    if given and len(given) < len(listings):
        has, lacks = (
            next(n for n, of in zip(names, listings, strict=True) if (of is None) == no) for no in (False, True)
        )
        raise DataError(f"{has} has a {split} split and {lacks} has none; give data sets alike")
    return join_listings(given, _unique(names)) if given else None


def _unique(names: Sequence[str]) -> list[str]:
    """Names that tell the stores apart."""
    return [name if names.count(name) == 1 else f"{name}-{i + 1}" for i, name in enumerate(names)]
