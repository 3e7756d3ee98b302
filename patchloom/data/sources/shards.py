"""WebDataset shards: tar files with an image and its label per sample.

    train-0000.tar      0001.jpg 0001.cls 0002.jpg 0002.json …
    classes.txt         optional, next to the shards: one class name per line, for labels that are numbers

The label is the text of `.cls` (a number or a name), or `label` in `.json`. The index is built from the headers alone
(`shard_index`); images are then read at their offsets, in any order and from any process. Nothing is unpacked to disk.
Shards in a bucket are read by range, through a cache if all of them fit in it.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from patchloom.data.buckets.cache import block_cache
from patchloom.data.buckets.remote_file import AnyFile, RemoteFile, files_in_same_folders, read_cached, read_exactly
from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ImageStore, Stamp, common_folder, stamps_inside
from patchloom.data.labels.class_names import names_of_lines
from patchloom.data.sources.shard_index import SUFFIX, ShardSample, index_of, parse_index
from patchloom.data.splits import group_by_split, name_files
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import decode
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, parse_json, read_plain

INDEX_OF_FOLDER = "shards.json"  # written last by `patchloom pack`: the shards and their sizes
CLASSES = "classes.txt"
_FOLDER_SHAPE = {"format": int, "shards": dict[str, dict]}


class ShardImages(ImageStore):
    """Images inside tar files, each located by shard, offset and size.

    `originals` are the paths that messages and keys name: those of `shards`, unless these are uncompressed copies.
    """

    def __init__(
        self,
        shards: Sequence[AnyFile],
        places: np.ndarray,
        samples: Sequence[ShardSample],
        originals: Sequence[AnyFile],
    ) -> None:
        self.shards = tuple(shards)
        self.home = common_folder(self.shards)
        self._places = places  # (images, 3) int64: shard, offset, size
        self._members = tuple(sample.member for sample in samples)
        self._names = _original_names(samples)
        self._originals = tuple(originals)
        self._prefetched: dict[int, bytes] = {}
        self._fits_cache = True
        remote = [shard for shard in self.shards if isinstance(shard, RemoteFile)]
        if remote:  # not all read before training begins
            self.is_scanned = False
            self.fingerprint = " ".join(f"{shard.name} {shard.size} {shard.version}" for shard in remote)
            self._fits_cache = sum(shard.size for shard in remote) <= block_cache().limit

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """Read the bytes of the image."""
        if (data := self._prefetched.pop(index, None)) is not None:
            return data
        number, offset, size = (int(value) for value in self._places[index])
        shard = self.shards[number]
        if isinstance(shard, RemoteFile):
            return self._read_remote([(shard, offset, size)])[0]
        try:
            with open(shard, "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise DataError(f"{self.where(index)}: cannot be read ({error.strerror})") from error

    def prefetch(self, rows: Sequence[int]) -> None:
        """Read images of shards in buckets, all at once; they are decoded next."""
        wanted: dict[int, tuple[RemoteFile, int, int]] = {}
        for row in rows:
            number, offset, size = (int(value) for value in self._places[row])
            if isinstance(shard := self.shards[number], RemoteFile):
                wanted[row] = shard, offset, size
        self._prefetched = dict(zip(wanted, self._read_remote(list(wanted.values())), strict=True))

    def _read_remote(self, places: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
        return (read_cached if self._fits_cache else read_exactly)(places)

    def where(self, index: int) -> str:
        """Return the shard and the member."""
        return f"{self._originals[int(self._places[index, 0])]}, {self._members[index]}"

    def key(self, index: int) -> str:
        """Return the name in the dataset that was packed, or that of the shard and the member."""
        if self._names:
            return self._names[index]
        return f"{self._originals[int(self._places[index, 0])].name}/{self._members[index]}"

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the member and the `file_state` of its shard."""
        places = [(int(self._places[row, 0]), self._members[row]) for row in rows]
        return stamps_inside(self.shards, self.home, places)


def _original_names(samples: Sequence[ShardSample]) -> tuple[str, ...]:
    """Return the names of the samples in the dataset that was packed, or none unless each has one of its own."""
    names = tuple(sample.original for sample in samples if sample.original)
    return names if len(set(names)) == len(samples) else ()


def open_shards(shards: Sequence[AnyFile], name: str) -> Source:
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


def check_shard_folder(files: Sequence[AnyFile], where: str) -> None:
    """Raise DataError unless the shards among the files of a folder are those that its `shards.json` lists, if any."""
    by_name = {file.name: file for file in files}
    shards = {name for name in by_name if name.endswith(".tar")}
    if INDEX_OF_FOLDER not in by_name:
        if any(f"{name}{SUFFIX}" in by_name for name in shards):
            raise DataError(f"{where}: `patchloom pack` has not finished; run it again with the same options")
        return
    listed = by_name[INDEX_OF_FOLDER]
    content = _content(listed)
    try:
        value = parse_json(content)
        check_shape(value, _FOLDER_SHAPE)
        sizes = {name: about.get("bytes") for name, about in value["shards"].items()}
        check_shape(sizes, dict[str, int])
    except ValueError as error:
        raise DataError(f"{listed}: cannot be read ({error}); pack the data again") from error
    for name in sorted(sizes.keys() - shards):
        raise DataError(f"{where}: {printable(name)} is missing, and {listed.name} lists it; copy it there")
    for name in sorted(shards - sizes.keys()):
        raise DataError(
            f"{where}: {printable(name)} is not listed in {listed.name}; remove it, or name the files to read"
        )
    for name, size in sizes.items():
        if (now := _size(by_name[name])) != size:
            text = f"has changed: {now:,} bytes, and {listed.name} lists {size:,}"
            raise DataError(f"{where}: {printable(name)} {text}; copy it again")


def _listing(shards: Sequence[AnyFile], originals: Sequence[AnyFile]) -> Listing:
    places: list[tuple[int, int, int]] = []
    samples: list[ShardSample] = []
    for number, (shard, own) in enumerate(zip(shards, _indexes(shards, originals), strict=True)):
        places += [(number, sample.offset, sample.size) for sample in own]
        samples += own
        _refuse_folders_in_bucket(shard, own)
    if not samples:
        raise DataError(f"{originals[0]}: no images inside; expected members like 0001.jpg with 0001.cls")
    names = _class_names(originals[0], {sample.label for sample in samples if sample.label is not None})
    number_of = {label: i for i, label in enumerate(names)}
    numbers = [UNLABELED if sample.label is None else number_of[sample.label] for sample in samples]
    store = ShardImages(shards, np.array(places, dtype=np.int64), samples, originals)
    return Listing(store, np.arange(len(places)), np.array(numbers, dtype=np.int64), tuple(names.values()))


def _indexes(shards: Sequence[AnyFile], originals: Sequence[AnyFile]) -> Iterator[list[ShardSample]]:
    """Yield the samples of each shard, from the index next to it if it lies in a bucket and has one."""
    remote = [shard for shard in shards if isinstance(shard, RemoteFile)]
    indexes = files_in_same_folders(remote, [f"{shard.name}{SUFFIX}" for shard in remote])
    indexes = {url: file for url, file in indexes.items() if file.size <= MOST_BYTES}
    contents = dict(zip(indexes, read_cached([(file, 0, file.size) for file in indexes.values()]), strict=True))
    for shard, original in zip(shards, originals, strict=True):
        stored = contents.get(f"{shard.url}{SUFFIX}") if isinstance(shard, RemoteFile) else None
        if stored is not None and isinstance(shard, RemoteFile):
            yield parse_index(stored, shard.size, str(original))
        else:
            yield index_of(shard, str(original))


def _refuse_folders_in_bucket(shard: AnyFile, samples: Sequence[ShardSample]) -> None:
    """Raise DataError for class folders in a tar in a bucket, which would be read as images without labels."""
    if isinstance(shard, RemoteFile) and samples and all("/" in s.member and s.label is None for s in samples):
        raise DataError(f"{shard}: a tar of folders; a bucket holds shards, which `patchloom pack FOLDER` writes")


def _class_names(shard: AnyFile, labels: set[str]) -> dict[str, str]:
    """Return the class name of each label, in the order of class numbers."""
    if not all(label.isascii() and label.isdecimal() for label in labels):
        return {label: label for label in sorted(labels)}
    ordered = sorted(labels, key=int)
    if isinstance(shard, RemoteFile):
        file: AnyFile | None = next(iter(files_in_same_folders([shard], [CLASSES]).values()), None)
    else:
        file = path if os.path.lexists(path := shard.parent / CLASSES) else None
    if file is None:
        return {label: label for label in ordered}
    names = names_of_lines(_content(file), str(file))
    if ordered and int(ordered[-1]) >= len(names):
        raise UsageError(f"{file}: {len(names)} names, but the shards have label {ordered[-1]}")
    return {label: names[int(label)] for label in ordered}


def _content(file: AnyFile) -> bytes:
    try:
        if not isinstance(file, RemoteFile):
            return read_plain(file)
        if file.size <= MOST_BYTES:
            return file.read(0, file.size)
        raise DataError(f"{file}: {file.size:,} bytes, expected at most {MOST_BYTES:,}")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def _size(file: AnyFile) -> int:
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size
