"""WebDataset shards: tar files whose members come in groups, `0001.jpg` with `0001.cls` or `0001.json`.

Only headers are read to build the index (where each image lies); pictures are then read at their offset, in
any order and from any process. The label is the text of `.cls` (a number or a name), or `label` in `.json`;
a file `classes.txt` beside the shards, a name a line, names the numbers. Nothing is unpacked to disk.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from patchloom.data.datasets import ImageStore, Listing, Source, Stamp, common_folder, stamps_inside
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.splits import group_by_split, name_files
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import EXTENSIONS, MAX_FILE_BYTES, decode, refuse_special
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.untrusted import check_shape, parse_json

_MAX_LABEL_BYTES = 1 << 20
_MAX_LABEL_LETTERS = 1_000
_MAX_READ_BYTES = 2 * _MAX_LABEL_BYTES  # at once: a label, or a long name and other headers in whole blocks
# What `tarfile` raises for headers of any content.
TAR_FAULTS = (tarfile.TarError, OSError, ValueError, ArithmeticError, LookupError, RecursionError)


class ShardImages(ImageStore):
    """Images inside tar files, each known by shard, offset and size."""

    def __init__(self, shards: Sequence[Path], places: np.ndarray, keys: Sequence[str]) -> None:
        self.shards = tuple(shards)
        self.home = common_folder(self.shards)
        self._places = places  # (images, 3) int64: shard, offset, size
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB."""
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """The image's bytes."""
        shard, offset, size = (int(number) for number in self._places[index])
        try:
            with open(self.shards[shard], "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror})") from error

    def where(self, index: int) -> str:
        """Shard and member."""
        return f"{self.shards[int(self._places[index, 0])]}, {self._keys[index]}"

    def key(self, index: int) -> str:
        """Shard's name and member."""
        return f"{self.shards[int(self._places[index, 0])].name}/{self._keys[index]}"

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Member, and size and time of its shard."""
        return stamps_inside(self.shards, self.home, [(int(self._places[row, 0]), self._keys[row]) for row in rows])


def open_shards(shards: Sequence[Path], name: str) -> Source:
    """The data set in `shards`, its splits told by the file names (…train…, …val… or …test…)."""
    by_name = name_files(shards)
    said = group_by_split(list(by_name))
    notes = (f"not used: {', '.join(said.unused)}",) if said.unused else ()
    val, test = (_listing([by_name[shard] for shard in of]) if of else None for of in (said.val, said.test))
    return Source(name, _listing([by_name[shard] for shard in said.train]), val, notes, test=test)


def _listing(shards: Sequence[Path]) -> Listing:
    places: list[tuple[int, int, int]] = []
    keys: list[str] = []
    classes: list[str | None] = []
    for number, shard in enumerate(shards):
        images, labels = _index(shard)
        for key, (member, offset, size) in images.items():
            places.append((number, offset, size))
            keys.append(member)
            classes.append(labels.get(key))
    if not places:
        raise DataError(f"{shards[0]}: no images inside; expected members like 0001.jpg with 0001.cls")
    names = _class_names(shards[0].parent, {label for label in classes if label is not None})
    number_of = {label: i for i, label in enumerate(names)}
    numbers = [UNLABELED if label is None else number_of[label] for label in classes]
    store = ShardImages(shards, np.array(places, dtype=np.int64), keys)
    return Listing(store, np.arange(len(places)), np.array(numbers, dtype=np.int64), tuple(names.values()))


def _index(shard: Path) -> tuple[dict[str, tuple[str, int, int]], dict[str, str]]:
    """Images (name, offset, size) and labels, by key; links and paths that escape are refused."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str] = {}
    try:
        total = refuse_special(shard, str(shard), "a tar file")
        with open_tar(shard) as archive:
            for member in archive:
                where = f"{shard}, {member.name}"
                if member.isdir():
                    continue
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise DataError(f"{where}: a path that leaves the archive; refused")
                if not member.isreg() or member.sparse is not None:
                    raise DataError(f"{where}: a link, device or sparse file; expected plain files")
                if member.offset_data + member.size > total:
                    raise DataError(f"{where}: the shard ends after {total} bytes (unfinished tar)")
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
            refuse_early_end(shard, archive.offset)
    except TAR_FAULTS as error:
        plain = isinstance(error, tarfile.ReadError) and not images
        hint = "compressed or not a tar file; expected plain .tar" if plain else f"damaged tar ({error})"
        raise DataError(f"{shard}: {hint}") from error
    return images, labels


class _TarBytes(io.FileIO):
    """The bytes of a tar; a header that declares more than a name or label needs is refused, not read."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes, expected at most {_MAX_READ_BYTES:,}")
        return super().read(size) or b""


@contextmanager
def open_tar(file: Path) -> Iterator[tarfile.TarFile]:
    """Open an uncompressed tar to look through its members."""
    with _TarBytes(file) as content, tarfile.open(fileobj=content, mode="r:") as archive:
        yield archive


def refuse_early_end(shard: Path, end: int) -> None:
    """An error unless the tar's two blocks of zeros stand at `end`: `tarfile` takes a damaged header for the end."""
    with open(shard, "rb") as file:
        file.seek(end)
        found = file.read(2 * tarfile.BLOCKSIZE)
        if found == bytes(2 * tarfile.BLOCKSIZE):
            return
        if not any(found):
            raise DataError(
                f"{shard}: ends after {end + len(found):,} bytes without a tar's last blocks; it was cut short"
            )
        behind = list(_members_behind(file, end + tarfile.BLOCKSIZE))
    lost = f"; {len(behind):,} members behind it are lost, the first is {behind[0]}" if behind else ""
    raise DataError(f"{shard}: the header at byte {end:,} is damaged{lost}. Copy or pack the shard again")


def _members_behind(file: BinaryIO, start: int) -> Iterator[str]:
    """Names in the headers from `start` on, wherever one is whole: content never passes for one, by its checksum."""
    file.seek(start)
    while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
        with suppress(tarfile.HeaderError):
            yield tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace").name


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
    """Label as stored → class name, in the order of class numbers."""
    if not all(label.isascii() and label.isdecimal() for label in labels):
        return {label: label for label in sorted(labels)}
    ordered = sorted(labels, key=int)
    listed = folder / "classes.txt"
    names = names_by_line(listed)
    if names is None:
        return {label: label for label in ordered}
    if ordered and int(ordered[-1]) >= len(names):
        raise UsageError(f"{listed}: {len(names)} names, but the shards have label {ordered[-1]}")
    return {label: names[int(label)] for label in ordered}
