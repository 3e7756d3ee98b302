"""Datasets of the Hugging Face `datasets` library.

    flowers/dataset_dict.json  flowers/train/…    a folder written by `save_to_disk`
    hf:user/name                                  a dataset on the hub

Images are read undecoded, so that errors can name the file and row of a damaged one.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ImageStore, Stamp, common_folder, file_state
from patchloom.data.labels.taxonomy import level_columns, levels_of_columns
from patchloom.data.splits import group_by_split
from patchloom.data.targets import ImageTargets, labels_of_lists, numbers_of_columns
from patchloom.data.trees.tree import below
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import decode, read_file
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

_LABEL_COLUMNS = ("label", "labels", "fine_label")


class HubImages(ImageStore):
    """The image column of one split. `rows` is a `datasets.Dataset`, which supports pickling and forks."""

    def __init__(self, rows: Any, column: str, name: str, roots: Sequence[Path]) -> None:
        self._rows = rows
        self._roots = tuple(roots)  # folders whose files rows may name
        self._column = column
        self._name = name
        self._files = [file["filename"] for file in rows.cache_files]
        self.home = common_folder([Path(file) for file in self._files]) if self._files else ""

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        return decode(*self._data_and_place(index))

    def encoded(self, index: int) -> bytes:
        """Return the bytes of the image, from the table or from the file that it names."""
        return self._data_and_place(index)[0]

    def _data_and_place(self, index: int) -> tuple[bytes, str]:
        value = self._rows[index][self._column] or {}
        path = value.get("path")
        where = f"{self.where(index)} ({path})" if path else self.where(index)
        if value.get("bytes") is not None:
            return bytes(value["bytes"]), where
        if not path:
            raise DataError(f"{where}: no image in column {self._column!r}")
        for root in self._roots:
            if (inside := below(root, path)) is not None:
                return read_file(root / inside, where), where
        raise DataError(f"{where}: the image is a file outside of {printable(self._roots[0])}; expected one in it")

    def where(self, index: int) -> str:
        """Return dataset, split and row."""
        return f"{self._name}, row {index}"

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the fingerprint of the table with the row, and the state of its files."""
        states = [file_state(file) for file in self._files]
        known = [state for state in states if state]
        if not known or len(known) < len(states):
            return [None] * len(rows)
        size, changed = sum(size for size, _ in known), max(changed for _, changed in known)
        return [(f"{self._rows._fingerprint}\0{row}".encode(), size, changed) for row in rows]


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote this folder."""
    return any(os.path.isfile(folder / name) for name in ("dataset_dict.json", "state.json"))


def open_huggingface(name: str) -> Source:
    """Open a folder of `save_to_disk`, or a dataset of the hub, which is downloaded if it is not cached."""
    try:
        import datasets
    except ImportError:
        raise UsageError(f"hf:{name} needs the datasets library; pip install 'patchloom[stream]'") from None
    folder = Path(name)
    try:
        dataset = datasets.load_from_disk(name) if is_saved_dataset(folder) else datasets.load_dataset(name)
    except Exception as error:  # network, hub and file system have different errors
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"hf:{name} cannot be opened ({cause}); expected user/name or a saved folder") from error
    splits = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    groups = group_by_split(sorted(splits))
    notes: tuple[str, ...] = (f"splits not used: {', '.join(groups.unused)}",) if groups.unused else ()
    chosen = {"train": groups.train, "val": groups.val, "test": groups.test}
    # Rows may name files that were saved with them or that the library downloaded.
    caches = [Path(datasets.config.HF_CACHE_HOME), Path(datasets.config.HF_DATASETS_CACHE)]
    roots = [folder] if folder.exists() else caches
    opened = {split: _listing(splits[of[0]], f"hf:{name}, {of[0]}", roots) for split, of in chosen.items() if of}
    notes += tuple(note for _, more in opened.values() for note in more)
    listings = {split: listing for split, (listing, _) in opened.items()}
    title = f"{folder.name if folder.exists() else name} (Hugging Face)"
    return Source(title, listings["train"], listings.get("val"), notes, test=listings.get("test"))


def _listing(rows: Any, name: str, roots: Sequence[Path]) -> tuple[Listing, tuple[str, ...]]:
    """Return the rows with their labels and levels, and notes."""
    import datasets

    kinds = {column: type(feature).__name__ for column, feature in rows.features.items()}
    image = next((column for column, kind in kinds.items() if kind == "Image"), None)
    if image is None:
        raise DataError(f"{name}: columns {', '.join(kinds)}; expected a column of images")
    undecoded = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    images = HubImages(undecoded, image, name, roots)
    column = next((column for column in _LABEL_COLUMNS if column in kinds), None)
    order = np.arange(len(rows))
    if column is None:
        return Listing(images, order, np.full(len(rows), UNLABELED), ()), ()
    if (targets := _targets(rows, column, name)) is not None:
        return Listing(images, order, np.full(len(rows), UNLABELED), targets.names, targets=targets), ()
    labels, names = _numbered(rows, column)
    columns = {level: _numbered(rows, of) for level, of in level_columns(kinds).items()}
    levels, notes = levels_of_columns(labels, names, columns, images.where)
    return Listing(images, order, labels, names, levels), notes


def _targets(rows: Any, column: str, where: str) -> ImageTargets | None:
    """Return lists of labels, or decimal numbers, as targets; None for a column of classes."""
    values, feature = list(rows[column]), rows.features[column]
    filled = [value for value in values if value is not None]
    if filled and all(isinstance(value, float) for value in filled):
        return numbers_of_columns({column: values}, where)
    if not filled or not all(isinstance(value, list) for value in filled):
        return None
    names = tuple(getattr(getattr(feature, "feature", None), "names", ()) or ())
    lists = [None if row is None else [names[label] if names else str(label) for label in row] for row in values]
    return labels_of_lists(lists, where)


def _numbered(rows: Any, column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    values = list(rows[column])
    names = tuple(getattr(rows.features[column], "names", ()) or ())
    if names:
        return np.array([UNLABELED if value is None else value for value in values], dtype=np.int64), names
    names = tuple(sorted({str(value) for value in values}))
    number = {name: i for i, name in enumerate(names)}
    return np.array([number[str(value)] for value in values], dtype=np.int64), names
