"""WebDataset shards: tar files with an image and its label per sample.

    train-0000.tar      0001.jpg 0001.cls 0002.jpg 0002.json …
    classes.txt         optional, next to the shards: one class name per line, for labels that are numbers

The label is the text of `.cls` (a number or a name), or `label` in `.json`. The index is built from the headers alone;
images are then read at their offsets, in any order and from any process. Nothing is unpacked to disk.
"""

import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ImageStore, Stamp, common_folder, stamps_inside
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.splits import group_by_split, name_files
from patchloom.data.trees.archive import TAR_FAULTS, open_tar, refuse_early_end
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import EXTENSIONS, MAX_FILE_BYTES, decode, refuse_special
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.untrusted import check_shape, parse_json

_MAX_LABEL_BYTES = 1 << 20
_MAX_LABEL_LETTERS = 1_000


class ShardImages(ImageStore):
    """Images inside tar files, each located by shard, offset and size.

    `originals` are the paths that messages and keys name: those of `shards`, unless these are uncompressed copies.
    """

    def __init__(
        self, shards: Sequence[Path], places: np.ndarray, keys: Sequence[str], originals: Sequence[Path]
    ) -> None:
        self.shards = tuple(shards)
        self.home = common_folder(self.shards)
        self._places = places  # (images, 3) int64: shard, offset, size
        self._keys = tuple(keys)
        self._originals = tuple(originals)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """Read the bytes of the image."""
        shard, offset, size = (int(number) for number in self._places[index])
        try:
            with open(self.shards[shard], "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror})") from error

    def where(self, index: int) -> str:
        """Return the shard and the member."""
        return f"{self._originals[int(self._places[index, 0])]}, {self._keys[index]}"

    def key(self, index: int) -> str:
        """Return the name of the shard and the member."""
        return f"{self._originals[int(self._places[index, 0])].name}/{self._keys[index]}"

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the member and the `file_state` of its shard."""
        return stamps_inside(self.shards, self.home, [(int(self._places[row, 0]), self._keys[row]) for row in rows])


def open_shards(shards: Sequence[Path], name: str) -> Source:
    """Open a dataset of shards. File names determine the splits (…train…, …val… or …test…)."""
    by_name = name_files(shards)
    splits = group_by_split(list(by_name))
    notes = (f"not used: {', '.join(splits.unused)}",) if splits.unused else ()
    train, val, test = (
        _listing(files, files) if (files := [by_name[shard] for shard in names]) else None
        for names in (splits.train, splits.val, splits.test)
    )
    assert train is not None
    return Source(name, train, val, notes, test=test)


def open_shard_copy(copy: Path, original: Path, name: str) -> Source:
    """Open the uncompressed copy of one shard. Messages name the original."""
    return Source(name, _listing([copy], [original]))


def _listing(shards: Sequence[Path], originals: Sequence[Path]) -> Listing:
    places: list[tuple[int, int, int]] = []
    keys: list[str] = []
    classes: list[str | None] = []
    for number, (shard, original) in enumerate(zip(shards, originals, strict=True)):
        images, labels = _index(shard, str(original))
        for key, (member, offset, size) in images.items():
            places.append((number, offset, size))
            keys.append(member)
            classes.append(labels.get(key))
    if not places:
        raise DataError(f"{originals[0]}: no images inside; expected members like 0001.jpg with 0001.cls")
    names = _class_names(originals[0].parent, {label for label in classes if label is not None})
    number_of = {label: i for i, label in enumerate(names)}
    numbers = [UNLABELED if label is None else number_of[label] for label in classes]
    store = ShardImages(shards, np.array(places, dtype=np.int64), keys, originals)
    return Listing(store, np.arange(len(places)), np.array(numbers, dtype=np.int64), tuple(names.values()))


def _index(file: Path, shard: str) -> tuple[dict[str, tuple[str, int, int]], dict[str, str]]:
    """Return the images (name, offset, size) and the labels of a shard, by key."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str] = {}
    try:
        total = refuse_special(file, shard, "a tar file")
        with open_tar(file) as archive:
            for member in archive:
                if member.isdir():
                    continue
                where = f"{shard}, {member.name}"
                _check_member(member, total, where)
                path = PurePosixPath(member.name)
                stem, _, extension = path.name.partition(".")
                key = str(path.parent / stem)
                if f".{extension.lower()}" in EXTENSIONS:
                    if key in images or member.size > MAX_FILE_BYTES:
                        fault = "a second image of this key" if key in images else f"{member.size:,} bytes"
                        raise DataError(f"{where}: {fault}; expected one image of at most {MAX_FILE_BYTES:,} bytes")
                    images[key] = (member.name, member.offset_data, member.size)
                elif extension in ("cls", "json") and member.size <= _MAX_LABEL_BYTES:
                    content = archive.extractfile(member)
                    label = _label(content.read() if content else b"", extension, where)
                    if label is not None:
                        labels[key] = label
            refuse_early_end(file, archive.offset, shard)
    except TAR_FAULTS as error:
        plain = isinstance(error, tarfile.ReadError) and not images
        hint = "compressed or not a tar file; expected plain .tar" if plain else f"damaged tar ({error})"
        raise DataError(f"{shard}: {hint}") from error
    return images, labels


def _check_member(member: tarfile.TarInfo, total: int, where: str) -> None:
    """Raise DataError for paths that leave the archive, links, and members beyond the end of the file."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{where}: the path leaves the archive; refused")
    if not member.isreg() or member.sparse is not None:
        raise DataError(f"{where}: a link, device or sparse file; expected plain files")
    if member.offset_data + member.size > total:
        raise DataError(f"{where}: the shard ends after {total} bytes (unfinished tar)")


def _label(content: bytes, extension: str, where: str) -> str | None:
    try:
        value: Any = content.decode().strip()
        if extension == "json":
            value = parse_json(content, _MAX_LABEL_BYTES)
            value = value.get("label") if isinstance(value, dict) else value
            check_shape(value, str | float | bool | None, "label")
        label = None if value is None else str(value)
        if label is not None and len(label) > _MAX_LABEL_LETTERS:
            raise ValueError(f"it has {len(label):,} letters, expected at most {_MAX_LABEL_LETTERS:,}")
    except ValueError as error:
        raise DataError(f"{where}: cannot be read as a label ({error})") from error
    return label


def _class_names(folder: Path, labels: set[str]) -> dict[str, str]:
    """Return the class name of each label, in the order of class numbers."""
    if not all(label.isascii() and label.isdecimal() for label in labels):
        return {label: label for label in sorted(labels)}
    ordered = sorted(labels, key=int)
    file = folder / "classes.txt"
    names = names_by_line(file)
    if names is None:
        return {label: label for label in ordered}
    if ordered and int(ordered[-1]) >= len(names):
        raise UsageError(f"{file}: {len(names)} names, but the shards have label {ordered[-1]}")
    return {label: names[int(label)] for label in ordered}
