"""Several files or folders as one dataset.

train/ val/        names of splits: they become the splits
cats/ dogs/        images without classes: each becomes a class
2023/ 2024/        class folders in each: merged by class name
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ImageStore, Stamp
from patchloom.data.sources.labels_file import split_of
from patchloom.data.targets import ImageTargets, joined
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED


def join_sources(names: Sequence[str], sources: Sequence[Source]) -> Source:
    """Join sources as their names and contents suggest. A mixture is a UsageError."""
    title = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    notes = tuple(dict.fromkeys(note for source in sources for note in source.notes))
    splits = [split_of(name) for name in names]
    if all(splits) and "train" in splits:
        return replace(_as_splits(names, sources, splits), name=f"{title} (given splits)", notes=notes)
    unlabeled = [
        not source.train.is_classified and source.train.targets is None and len(source.train) > 0 for source in sources
    ]
    if any(unlabeled) and not all(unlabeled):
        one, other = names[unlabeled.index(True)], names[unlabeled.index(False)]
        raise UsageError(
            f"{one} holds images only and {other} holds classes; pass either folders of images, one per class, "
            "or folders of class folders"
        )
    if all(unlabeled):
        listings = [_as_class(name, source) for name, source in zip(names, sources, strict=True)]
        note = f"each folder is a class: {len(set(names))} classes"
        return Source(f"{title} (class folders)", join_listings(listings, _unique(names)), None, (note, *notes))
    note = f"{len(names)} datasets merged by class name"
    joined = {split: _join_split(names, sources, split) for split in ("train", "val", "test")}
    train = joined["train"]
    assert train is not None
    return Source(f"{title} (merged)", train, joined["val"], (note, *notes), test=joined["test"])


def _as_splits(names: Sequence[str], sources: Sequence[Source], splits: Sequence[str]) -> Source:
    for name, source in zip(names, sources, strict=True):
        if source.val is not None or source.test is not None:
            raise UsageError(
                f"{name} is passed as one split but contains several; "
                f"pass {name} alone, or pass the folders of its splits"
            )
    joined = {}
    for split in ("train", "val", "test"):
        own = [i for i, other in enumerate(splits) if other == split]
        if own:
            joined[split] = join_listings([sources[i].train for i in own], _unique([names[i] for i in own]))
    return Source("", joined["train"], joined.get("val"), test=joined.get("test"))


def _as_class(name: str, source: Source) -> Listing:
    return replace(
        source.train, labels=np.zeros(len(source.train), dtype=np.int64), names=(name,), levels={}, targets=None
    )


def _join_split(names: Sequence[str], sources: Sequence[Source], split: str) -> Listing | None:
    """Join one split of all sources. Either all of them have it or none."""
    listings: list[Listing | None] = [getattr(source, split) for source in sources]
    existing = [listing for listing in listings if listing is not None]
    if existing and len(existing) < len(listings):
        has = next(name for name, listing in zip(names, listings, strict=True) if listing is not None)
        lacks = next(name for name, listing in zip(names, listings, strict=True) if listing is None)
        raise DataError(f"{has} has a {split} split and {lacks} has none; pass datasets with the same splits")
    return join_listings(existing, _unique(names)) if existing else None


def _unique(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}-{i + 1}" for i, name in enumerate(names)]


class JoinedImages(ImageStore):
    """Several stores, one after the other. `names` distinguish images with the same key in two of them."""

    def __init__(self, stores: Sequence[ImageStore], names: Sequence[str]) -> None:
        self._stores = tuple(stores)
        self._names = tuple(names)
        self._starts = np.cumsum([0, *map(len, stores)])
        homes = [os.path.abspath(store.home) for store in stores if store.home]
        self.home = os.path.commonpath(homes) if len(homes) == len(stores) else ""
        self.is_scanned = any(store.is_scanned for store in stores)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _place(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        number, row = self._place(index)
        return self._stores[number].read(row)

    def encoded(self, index: int) -> bytes | None:
        """Read the bytes of the file, or return None if the store has no files."""
        number, row = self._place(index)
        return self._stores[number].encoded(row)

    def where(self, index: int) -> str:
        """Return the location that the image's own store reports."""
        number, row = self._place(index)
        return self._stores[number].where(row)

    def key(self, index: int) -> str:
        """Return the name of the store, followed by the key there."""
        number, row = self._place(index)
        return f"{self._names[number]}/{self._stores[number].key(row)}"

    def prefetch(self, rows: Sequence[int]) -> None:
        """Read images of the stores where that is slow one by one."""
        places = [self._place(row) for row in rows]
        for number, store in enumerate(self._stores):
            store.prefetch([row for own, row in places if own == number])

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the stamps of the stores, with paths relative to their common folder."""
        stamps: list[Stamp | None] = [None] * len(rows)
        places = [self._place(row) for row in rows]
        for number, store in enumerate(self._stores):
            mine = [i for i, (own, _) in enumerate(places) if own == number]
            way = os.fsencode(os.path.relpath(store.home, self.home) + os.sep) if self.home else b""
            for i, stamp in zip(mine, store.stamps([places[i][1] for i in mine]), strict=True):
                stamps[i] = (way + stamp[0], *stamp[1:]) if stamp else None
        return stamps


def join_listings(listings: Sequence[Listing], names: Sequence[str]) -> Listing:
    """Join listings, matching classes by name. Levels that all of them have are kept."""
    for listing in listings:
        if listing.images.mask_names or listing.images.object_names:
            raise DataError("data with masks or boxes are opened one at a time; pass one folder or file")
    if len(listings) == 1:
        return listings[0]
    targets = _joined_targets(listings)
    classes = tuple(sorted({name for listing in listings for name in listing.names}))
    if targets is not None and not any(listing.is_classified for listing in listings):
        classes = targets.names
    number = {name: i for i, name in enumerate(classes)}
    starts = np.cumsum([0, *(len(listing.images) for listing in listings)])
    rows = [listing.rows + start for listing, start in zip(listings, starts, strict=False)]
    labels = [
        np.array([*(number[name] for name in listing.names), UNLABELED], dtype=np.int64)[listing.labels]
        for listing in listings
    ]
    shared = set.intersection(*(set(listing.levels) for listing in listings))
    levels = {
        level: {name: coarse for listing in listings for name, coarse in listing.levels[level].items()}
        for level in listings[0].levels
        if level in shared
    }
    images = JoinedImages([listing.images for listing in listings], names)
    return Listing(images, np.concatenate(rows), np.concatenate(labels), classes, levels, targets)


def _joined_targets(listings: Sequence[Listing]) -> ImageTargets | None:
    """Return the targets of all listings, or None if one of them has classes only."""
    targets = [listing.targets for listing in listings if listing.targets is not None]
    learned = [listing.learned for listing in listings]
    kinds = {of.kind for of in targets}
    if any(learned) and (not all(learned) or len(kinds) > 1):
        raise DataError(
            "some of these data have several labels, or numbers, per image and others do not; pass one kind"
        )
    if len(targets) < len(listings) or len(kinds) > 1:
        return None
    return joined(targets)
