"""Pictures of several stores as one, for data given in several files or folders."""

import os
from collections.abc import Sequence

import numpy as np
from PIL import Image

from patchloom.data.datasets import ImageStore, Listing, Stamp
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.samples import UNLABELED


class JoinedImages(ImageStore):
    """One store after the other; `names` tell apart pictures that have the same key in two of them."""

    def __init__(self, stores: Sequence[ImageStore], names: Sequence[str]) -> None:
        self._stores = tuple(stores)
        self._names = tuple(names)
        self._starts = np.cumsum([0, *map(len, stores)])
        homes = [os.path.abspath(store.home) for store in stores if store.home]
        self.home = os.path.commonpath(homes) if len(homes) == len(stores) else ""
        self.always_readable = all(store.always_readable for store in stores)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _place(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB."""
        number, row = self._place(index)
        return self._stores[number].read(row)

    def encoded(self, index: int) -> bytes | None:
        """The file's bytes, where its store has files."""
        number, row = self._place(index)
        return self._stores[number].encoded(row)

    def where(self, index: int) -> str:
        """As its store says it."""
        number, row = self._place(index)
        return self._stores[number].where(row)

    def key(self, index: int) -> str:
        """The name of its store, then its name there."""
        number, row = self._place(index)
        return f"{self._names[number]}/{self._stores[number].key(row)}"

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Those of the stores, with the way from the common folder to theirs before the names."""
        found: list[Stamp | None] = [None] * len(rows)
        places = [self._place(row) for row in rows]
        for number, store in enumerate(self._stores):
            mine = [i for i, (own, _) in enumerate(places) if own == number]
            way = os.fsencode(os.path.relpath(store.home, self.home) + os.sep) if self.home else b""
            for i, stamp in zip(mine, store.stamps([places[i][1] for i in mine]), strict=True):
                found[i] = (way + stamp[0], *stamp[1:]) if stamp else None
        return found


def join_listings(listings: Sequence[Listing], names: Sequence[str]) -> Listing:
    """One listing of all pictures, their classes matched by name; levels that all of them have are kept."""
    for listing in listings:
        if listing.images.mask_names or listing.images.object_names:
            raise DataError("data with masks or boxes are opened one at a time; give one folder or file")
    if len(listings) == 1:
        return listings[0]
    classes = tuple(sorted({name for listing in listings for name in listing.names}))
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
    return Listing(images, np.concatenate(rows), np.concatenate(labels), classes, levels)
