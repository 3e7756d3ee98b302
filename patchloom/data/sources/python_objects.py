"""Data that Python code passes instead of a path. `as_spec` turns it into a `PythonData`, which `find_source` opens.

    Dataset                       torch.utils.data.Dataset of (image, target)
    (images, targets)             arrays, tensors or lists of equal length; an array or a tensor alone has no targets
    [(image, target), …]          a list of pairs; paths are read like the files of a folder
    table                         pandas or pyarrow, with a column of paths or images and one of labels
    {"train": …, "val": …}        splits, each one of the above or a path

An image is anything that `predict` accepts (`patchloom_runtime.images.inputs`). A target is None if it is unknown, or

    a name or a whole number      the class
    a list of names, a 0/1 vector several labels
    a decimal number, a vector    numbers

Training does not scan images that are not files: those in memory cannot be damaged, and a Dataset may compute them.
They are recognized by a fingerprint instead: a digest of all targets and of the pixels, of `SAMPLED` images if they are
read one by one or are large.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

from patchloom.data.checking.scan import scan_bar
from patchloom.data.datasets import Listing
from patchloom.data.images.image_store import ImageStore, common_folder
from patchloom.data.labels.label_table import LABEL_NAMES, PATH_NAMES, SPLIT_NAMES, plain
from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES
from patchloom.data.targets import ImageTargets, labels_of_lists, numbers_of_columns
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError, PatchloomError, UsageError, first_line, nearest
from patchloom_runtime.images.inputs import read_image
from patchloom_runtime.images.samples import UNLABELED

PREFIX = "python:"
SAMPLED = 64  # images that a fingerprint reads, if not all
WHOLE_BYTES = 64 << 20  # arrays up to this size are part of the fingerprint as a whole
READ_TWICE = 4  # images of a Dataset that are read twice, to see whether it draws random numbers
_SPLITS = {name: names[0] for names in (TRAIN_NAMES, VAL_NAMES, TEST_NAMES) for name in names}
_ACCEPTED = (
    "a path, a torch Dataset of (image, target), (images, targets) as arrays, tensors or lists, a list of "
    "(image, target), a pandas or pyarrow table, or a dict of splits of these"
)


class PythonData(str):
    """The name of Python objects that are used as data, 'python:arrays-1a2b…', which carries the objects.

    It is text wherever data are named (records, messages, run folders), and ends with a digest of the contents, so that
    equal names are equal data.
    """

    splits: "dict[str, Examples | str]"  # by train, val and test; a path is opened as always

    def __new__(cls, data: Any) -> "PythonData":
        """Name the objects. Raise UsageError if they are nothing that can be used as data."""
        splits: dict[str, Examples | str]
        splits = _splits_of(data) if isinstance(data, Mapping) else {"train": examples_of(data)}
        digest = hashlib.sha256()
        for split, part in splits.items():
            text = part if isinstance(part, str) else part.digest
            digest.update(f"{split}\0{text}\0".encode("utf-8", "surrogateescape"))
        first = next((part.name for part in splits.values() if isinstance(part, Examples)), "splits")
        self = super().__new__(cls, f"{PREFIX}{re.sub('[^A-Za-z0-9_]+', '-', first)}-{digest.hexdigest()[:12]}")
        self.splits = splits
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name alone."""
        return str, (str(self),)


@runtime_checkable
class Items(Protocol):
    """Anything with a length and items by position: a Dataset, an array, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ObjectImages(ImageStore):
    """Images that Python code passes, read by position from `items`."""

    is_scanned = False

    def __init__(self, items: Any, name: str) -> None:
        self._items, self._name = items, name

    def __len__(self) -> int:
        return len(self._items)

    def item(self, index: int) -> Any:
        """Return the image as the code passes it."""
        return self._items[index]

    def read(self, index: int) -> Image.Image:
        """Return the image, upright and RGB."""
        where = self.where(index)
        try:
            item = self.item(index)
        except PatchloomError:
            raise
        except Exception as error:  # code of the user
            raise DataError(f"{where}: {type(error).__name__} while reading it: {first_line(error)}") from error
        try:
            return read_image(item, where)
        except UsageError as error:  # of one image among others
            raise DataError(str(error)) from error

    def where(self, index: int) -> str:
        """Return name and position."""
        return f"{self._name}, image {index}"

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Digest of the pixels, of some images if they are large or read one by one."""
        return self.digest()

    def digest(self) -> str:
        """Return the digest of the pixels."""
        digest = hashlib.sha256(f"{len(self)}\0".encode())
        is_small = _is_array(self._items) and self._items.nbytes <= WHOLE_BYTES
        for row in range(len(self)) if is_small else spread(len(self), SAMPLED):
            digest.update(self._pixels(row))
        return digest.hexdigest()

    def _pixels(self, row: int) -> bytes:
        try:
            image = self.read(row)
        except DataError:
            return b"unreadable"  # training leaves it out
        return f"{image.size}".encode() + image.tobytes()


class DatasetImages(ObjectImages):
    """The images of a Dataset whose items are (image, target)."""

    def item(self, index: int) -> Any:
        """Return the first part of the item."""
        return _pair(self._items[index], self.where(index))[0]

    @cached_property
    def draws(self) -> bool:
        """Whether reading an image again gives other pixels."""
        return any(self._pixels(row) != self._pixels(row) for row in spread(len(self), READ_TWICE))

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Digest of the pixels of some images; of their number alone if they are random."""
        return f"{len(self)} random images" if self.draws else self.digest()


@dataclass(frozen=True)
class Examples:
    """Images with one value per image in each column; the columns of all but tables are one, '' for targets."""

    name: str
    images: ImageStore
    columns: Mapping[str, Sequence[Any]]
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()  # by number, if the data have them

    @property
    def digest(self) -> str:
        """Digest of the images and all columns."""
        digest = hashlib.sha256(self.images.fingerprint.encode())
        if isinstance(self.images, ImageFiles):  # their bytes are read by the scan
            keys = [self.images.where(row) for row in range(len(self.images))]
            digest.update("\0".join(keys).encode("utf-8", "surrogateescape"))
        for name, values in self.columns.items():
            digest.update(f"\0{name}\0".encode("utf-8", "surrogateescape"))
            digest.update("\0".join(map(repr, values)).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def listing(self, label_column: str | None = None) -> Listing:
        """Return the images with the classes of their targets."""
        rows = np.arange(len(self.images))
        names = [name.strip() for name in label_column.split(",")] if label_column else []
        if len(names) > 1 and label_column not in self.columns:
            several = self._of_columns(list(dict.fromkeys(str(self._label_column(name)) for name in names)))
            return Listing(self.images, rows, np.full(len(rows), UNLABELED), several.names, targets=several)
        column = self._label_column(label_column)
        if column is None:
            return Listing(self.images, rows, np.full(len(rows), UNLABELED), ())
        values = self.columns[column]
        if (targets := self._targets(values, column or "target")) is not None:
            return Listing(self.images, rows, np.full(len(rows), UNLABELED), targets.names, targets=targets)
        return Listing(self.images, rows, *_classes(values, self.images, self.class_names))

    def _of_columns(self, names: Sequence[str]) -> ImageTargets:
        """Return labels in columns of 0 and 1 or of words, or numbers."""
        columns = {name: self.columns[name] for name in names}
        known = {value for values in columns.values() for value in values if value is not None}
        if all(isinstance(value, str) for value in known):
            cells = zip(*columns.values(), strict=True)
            return labels_of_lists([[cell for cell in row if cell is not None] for row in cells], self.name)
        if not all(isinstance(value, int | float) for value in known):
            raise UsageError(
                f"{self.name}: label_column {','.join(names)}; expected columns of one kind: 0 and 1, words or numbers"
            )
        numbers = numbers_of_columns(columns, self.name)
        return replace(numbers, kind="labels") if known <= {0, 1} else numbers

    def _targets(self, values: Sequence[Any], column: str) -> ImageTargets | None:
        """Return several labels or numbers per image; None for classes."""
        known = [value for value in values if value is not None]
        if known and all(isinstance(value, float | int) for value in known) and _has_decimals(known):
            return numbers_of_columns({column: values}, self.name)
        if not known or not all(isinstance(value, list | tuple | set | frozenset) for value in known):
            return None
        items = {type(item) for value in known for item in value}
        if items <= {str}:
            return labels_of_lists([None if value is None else sorted(set(value)) for value in values], self.name)
        lengths = {len(value) for value in known}
        if not items <= {int, float, bool} or len(lengths) > 1:
            raise UsageError(f"{self.name}: vectors of {min(lengths)} to {max(lengths)} values; expected equal lengths")
        rows = np.array([value if value is not None else [np.nan] * max(lengths) for value in values], np.float32)
        is_hot = float not in items and {item for value in known for item in value} <= {0, 1}
        named = self.class_names if len(self.class_names) == rows.shape[1] else ()
        if is_hot:
            return ImageTargets("labels", named or tuple(map(str, range(rows.shape[1]))), rows)
        return ImageTargets("numbers", named or tuple(f"{column} {i}" for i in range(rows.shape[1])), rows)

    def split_names(self) -> list[str] | None:
        """Return the split of each row of a table that has such a column."""
        column = next((name for name in self.columns if name and plain(name) in SPLIT_NAMES), None)
        return [str(value) for value in self.columns[column]] if column else None

    def _label_column(self, wanted: str | None) -> str | None:
        if "" in self.columns or not self.columns:
            if wanted is not None:
                raise UsageError(f"label_column chooses a column of a table, and {self.name} is not a table; drop it")
            return "" if self.columns else None
        if wanted is not None:
            if wanted not in self.columns:
                raise UsageError(f"{self.name} has no column {wanted!r}.{nearest(wanted, list(self.columns))}")
            return wanted
        usual = [name for known in LABEL_NAMES for name in self.columns if plain(name) == known]
        others = [name for name in self.columns if plain(name) not in SPLIT_NAMES]
        if not usual and len(others) > 1:
            raise UsageError(
                f"{self.name} has columns {', '.join(others)}, none with a usual name such as label; pass label_column"
            )
        return next(iter([*usual, *others]), None)


def examples_of(data: Any) -> Examples:
    """Return the images and targets of one split."""
    kind = type(data).__name__
    if _is_table(data):
        return _of_table(data, "table")
    if _is_array(data):
        return Examples("arrays", ObjectImages(_array(data), "arrays"), {})
    if isinstance(data, tuple) and len(data) == 2 and (_is_array(data[0]) or isinstance(data[0], list)):
        return _of_columns(*data, "arrays")
    if isinstance(data, list | tuple) and not any(map(_is_batch, data)):
        return _of_list(data, "list")
    if kind == "DataLoader":
        raise UsageError("the data are a DataLoader, which patchloom makes itself; pass its dataset")
    if isinstance(data, Items) and not isinstance(data, Mapping | list | tuple):
        return _of_dataset(data, kind)
    lacks = " without __len__ and __getitem__, which training reads by position" if _is_dataset(data) else ""
    raise UsageError(f"the data are of type {kind}{lacks}; expected {_ACCEPTED}")


def labeled_images(data: Any) -> tuple[Any, list[str]]:
    """Return the images of data with targets, and the class or labels of each, '' if unknown.

    Anything that is not such data, such as images alone, is returned as it is, without labels.
    """
    if not _has_targets(data):
        return data, []
    listing = examples_of(data).listing()
    return listing.images, [", ".join(listing.labels_of(row)) for row in range(len(listing.rows))]


def _has_targets(data: Any) -> bool:
    if isinstance(data, list | tuple):
        if len(data) == 2 and isinstance(data, tuple) and (isinstance(data[0], list) or _is_batch(data[0])):
            return True
        return bool(data) and all(isinstance(item, tuple) and len(item) == 2 for item in data)
    if _is_table(data):
        return True
    is_image = (
        isinstance(data, str | bytes | bytearray | memoryview | Mapping) or _is_array(data) or hasattr(data, "read")
    )
    return isinstance(data, Items) and not is_image


def _is_batch(images: Any) -> bool:
    return _is_array(images) and images.ndim == 4


def spread(total: int, count: int) -> list[int]:
    """Return at most `count` positions spread evenly over `total`."""
    return sorted({i * total // min(count, total) for i in range(min(count, total))})


# Forms ----------------------------------------------------------------------------------------------------------------


def _splits_of(data: Mapping[Any, Any]) -> "dict[str, Examples | str]":
    if unknown := [key for key in data if str(key).lower() not in _SPLITS]:
        raise UsageError(f"the data have a split {unknown[0]!r}; expected train, val and test")
    named = {_SPLITS[str(key).lower()]: value for key, value in data.items() if value is not None}
    if "train" not in named:
        raise UsageError(f"the data have the splits {', '.join(named) or 'none'}; expected train, val and test")
    return {
        split: os.fspath(named[split]) if isinstance(named[split], str | os.PathLike) else examples_of(named[split])
        for split in ("train", "val", "test")
        if split in named
    }


def _of_columns(images: Any, targets: Any, name: str) -> Examples:
    if len(images) != len(targets):
        raise UsageError(f"the data have {len(images):,} images and {len(targets):,} targets; expected as many")
    return Examples(name, _store(images, name), {"": _plain_values(targets)})


def _of_list(items: Sequence[Any], name: str) -> Examples:
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        if any(isinstance(item, tuple | list) for item in items):
            raise UsageError("the data are a list of which some items are not (image, target); expected all pairs")
        return Examples(name, _store(list(items), name), {})
    return _of_columns([image for image, _ in items], [target for _, target in items], name)


def _of_table(table: Any, name: str) -> Examples:
    columns = {str(column): _column(table, column) for column in _column_names(table)}
    image = next((column for known in PATH_NAMES for column in columns if plain(column) == known), None)
    if image is None:
        raise UsageError(f"the table has columns {', '.join(columns)}; expected one called path or image")
    images = columns.pop(image)
    if images and isinstance(images[0], Mapping):  # an image of Hugging Face's libraries
        images = [cell.get("bytes") or cell.get("path") for cell in images]
    return Examples(name, _store(images, name), {key: _plain_values(values) for key, values in columns.items()})


def _of_dataset(dataset: Any, name: str) -> Examples:
    if not len(dataset):
        raise UsageError(f"the {name} is empty; expected at least one (image, target)")
    images = DatasetImages(dataset, name)
    names: Any = getattr(dataset, "classes", None)
    is_named = isinstance(names, list | tuple) and all(isinstance(each, str) for each in names)
    notes: tuple[str, ...] = ()
    if images.draws:
        notes = (
            f"{name} returns other pixels when an image is read again: a resumed run is not exact. Pass random "
            "transforms as transform=, not inside the dataset",
        )
    targets = _targets(dataset, images)
    return Examples(name, images, {"": targets}, notes, tuple(names) if is_named else ())


def _targets(dataset: Any, images: DatasetImages) -> list[Any]:
    """Return all targets: those that the dataset lists, if some items confirm them, else those of its items."""

    def target(row: int) -> Any:
        return _plain_values([_pair(dataset[row], images.where(row))[1]])[0]

    for listed in (getattr(dataset, "targets", None), getattr(dataset, "labels", None)):
        if isinstance(listed, Items) and len(listed) == len(dataset):
            values = _plain_values(listed)
            if all(repr(values[row]) == repr(target(row)) for row in spread(len(dataset), READ_TWICE)):
                return values
    targets = []
    with scan_bar(what="reading targets") as progress:
        for row in range(len(dataset)):
            targets.append(target(row))
            if progress:
                progress(row + 1, len(dataset))
    return targets


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):  # as of Hugging Face's datasets
        keys = {plain(str(key)): key for key in item}
        image = next((keys[name] for name in ("image", "img", "pixel_values") if name in keys), None)
        label = next((keys[name] for name in LABEL_NAMES if name in keys), None)
        if image is not None:
            return item[image], None if label is None else item[label]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    length = f" of {len(item)}" if isinstance(item, tuple | list | Mapping) else ""
    raise UsageError(f"{where}: the dataset returns a {type(item).__name__}{length}; expected (image, target)")


def _store(images: Any, name: str) -> ImageStore:
    """Return a store of images; paths are read like the files of a folder."""
    if _is_array(images):
        return ObjectImages(_array(images), name)
    items = list(images)
    if items and all(isinstance(item, str | os.PathLike) for item in items):
        paths = [os.path.abspath(os.path.expanduser(os.fspath(item))) for item in items]
        root = common_folder(paths)
        return ImageFiles(root, [os.path.relpath(path, root) for path in paths])
    return ObjectImages(items, name)


# Values ---------------------------------------------------------------------------------------------------------------


def _classes(
    values: Sequence[Any], images: ImageStore, class_names: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return class numbers and the names of the classes, numbers in order of value."""
    known = [value for value in values if value is not None]
    for row, value in enumerate(values):
        if value is not None and not isinstance(value, int | str):
            raise UsageError(
                f"{images.where(row)}: the target is {value!r:.60} ({type(value).__name__}); expected the name or the "
                "number of a class"
            )
    if len({isinstance(value, str) for value in known}) > 1:
        raise UsageError("some targets are names and some are numbers; expected one of the two")
    distinct = sorted(set(known))
    number = {value: i for i, value in enumerate(distinct)}
    names = tuple(map(str, distinct))
    if (
        class_names
        and distinct
        and isinstance(distinct[0], int)
        and 0 <= distinct[0] <= distinct[-1] < len(class_names)
    ):
        names = tuple(class_names[value] for value in distinct)
    labels = np.array([UNLABELED if value is None else number[value] for value in values], np.int64)
    return labels, names


def _has_decimals(values: Sequence[float]) -> bool:
    return any(isinstance(value, float) for value in values)


def _plain_values(values: Any) -> list[Any]:
    """Return values as plain Python: numbers of numpy and torch as numbers, missing ones as None."""
    if _is_array(values):
        values = _array(values).tolist()
    return [_plain_value(value) for value in values]


def _plain_value(value: Any) -> Any:
    if _is_array(value):
        value = _array(value).tolist()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, list | tuple | set | frozenset):
        return value
    is_missing = value is None or type(value).__name__ in ("NAType", "NaTType") or value != value
    return None if is_missing else value


def _is_array(data: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(data, np.ndarray) or (torch is not None and isinstance(data, torch.Tensor))


def _array(data: Any) -> Any:
    """Return an array as it is, and a tensor on the CPU: tensors have their channels first, so they stay tensors."""
    return data if isinstance(data, np.ndarray) else data.detach().cpu()


def _is_dataset(data: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(data, torch.utils.data.Dataset)


def _is_table(data: Any) -> bool:
    return type(data).__module__.split(".")[0] in ("pandas", "pyarrow", "polars") and hasattr(data, "columns")


def _column_names(table: Any) -> list[Any]:
    return list(getattr(table, "column_names", None) or table.columns)


def _column(table: Any, name: Any) -> list[Any]:
    column = table[name]
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)
