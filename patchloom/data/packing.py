"""`patchloom.pack`: a dataset as tar shards, in a folder or a bucket, which `train` reads back as the same dataset.

    train-000000.tar                 000000000.jpg 000000000.json 000000001.png …
    train-000000.tar.index.json      where each image is, for reading by range
    classes.txt                      class names in the order of class numbers
    shards.json                      all shards with size and checksum, written last

Images are stored as they are, in the order of the dataset, with their labels and names. The same data give the same
bytes. Nothing is replaced: shards that exist already are compared, so the same command resumes.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchloom.data.buckets.objects import put
from patchloom.data.buckets.remote_file import remote_file
from patchloom.data.datasets import Listing, Progress, Source
from patchloom.data.images.image_store import ImageStore
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.shard_index import FORMAT, MAX_LETTERS, ORIGINAL, SUFFIX, ShardSample, index_bytes
from patchloom.data.sources.shards import CLASSES, INDEX_OF_FOLDER
from patchloom.data.sources.source import find_source
from patchloom.data.sources.specs import Data, is_url
from patchloom.disk import atomic_write
from patchloom_runtime.errors import DataError, UsageError, at_least, with_near_options
from patchloom_runtime.images.decode import EXTENSIONS, MAX_FILE_BYTES, format_of
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import read_plain

_DIGITS_OF_SAMPLE, _DIGITS_OF_SHARD = 9, 6


@dataclass(frozen=True)
class PackedShard:
    """A shard that `pack` wrote, or that existed with the same content."""

    name: str
    samples: int
    bytes: int
    sha256: str
    written: bool


@dataclass(frozen=True)
class Packed:
    """The result of `pack`. There are no shards in a dry run."""

    out: str
    splits: dict[str, int]  # images
    classes: tuple[str, ...]
    shards: tuple[PackedShard, ...]
    notes: tuple[str, ...] = ()


@with_near_options
def pack(
    data: Data,
    *,
    out: str | os.PathLike[str],
    shard_size: int = 128,
    dry_run: bool = False,
    reading: Reading = AS_IT_IS,
    progress: Progress | None = None,
) -> Packed:
    """Write a dataset of images with classes as tar shards. The same command resumes.

    data        Folder, or any other data that `train` takes.
    out         Folder, or address in a bucket: s3://bucket/flowers.
    shard_size  Size in MiB from which the next shard begins. Each shard is made in memory.
    dry_run     Count images and classes; write nothing.
    reading     How to read the data (`patchloom.Reading`).
    progress    Called with the number of images done and their total.
    """
    at_least("shard_size", shard_size, 1)
    source = find_source(data, reading=reading)
    place = os.fspath(out) if is_url(out) else os.path.expanduser(out)
    classes = _classes(source)
    notes = source.notes
    if any(listing.levels for listing in source.listings.values()):
        notes += ("levels above the classes are not packed; pass --taxonomy where the shards are read",)
    counts = {split: len(listing) for split, listing in source.listings.items()}
    if dry_run:
        return Packed(place, counts, classes, (), notes)
    shards, done, total = [], 0, sum(counts.values())
    for split, listing in source.listings.items():
        for number, shard in enumerate(_shards(listing, classes, shard_size << 20)):
            name = f"{split}-{number:0{_DIGITS_OF_SHARD}d}.tar"
            shards.append(_write_shard(place, name, shard))
            done += len(shard.samples)
            if progress:
                progress(done, total)
    if classes:
        _store(place, CLASSES, "".join(f"{name}\n" for name in classes).encode())
    listed = {shard.name: {"bytes": shard.bytes, "sha256": shard.sha256, "samples": shard.samples} for shard in shards}
    _store(place, INDEX_OF_FOLDER, (json.dumps({"format": FORMAT, "shards": listed}, indent=1) + "\n").encode())
    return Packed(place, counts, classes, tuple(shards), notes)


def _classes(source: Source) -> tuple[str, ...]:
    """Return the classes of all splits, those of train first. Raise UsageError for data that shards cannot hold."""
    for listing in source.listings.values():
        images = listing.images
        if listing.learned is not None or images.mask_names or images.object_names or images.mask_ignore is not None:
            raise UsageError(
                f"{source.name}: has masks, boxes, several labels or numbers per image; `pack` writes images with one "
                "class each. Use parquet files for others (docs/data.md)"
            )
    names = dict.fromkeys(name for listing in source.listings.values() for name in listing.names)
    if broken := [name for name in names if name.splitlines() != [name]]:
        raise UsageError(f"{source.name}: the class {broken[0]!r} is not one line of text; rename it")
    return tuple(names)


@dataclass
class _Shard:
    """A tar in memory, and the places of its images."""

    content: io.BytesIO
    samples: list[ShardSample]


def _shards(listing: Listing, classes: tuple[str, ...], most_bytes: int) -> Iterator[_Shard]:
    """Yield the images of a split as shards that end with the first image behind `most_bytes`."""
    number_of = {name: number for number, name in enumerate(classes)}
    rows = iter(enumerate(zip(listing.rows.tolist(), listing.labels.tolist(), strict=True)))
    position = 0
    while position < len(listing):
        shard = _Shard(io.BytesIO(), [])
        with tarfile.open(fileobj=shard.content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for position, (row, label) in rows:
                name = listing.names[label] if label >= 0 else None
                number = None if name is None else number_of[name]
                shard.samples.append(_add(archive, position, listing.images, row, number, name))
                if archive.offset >= most_bytes:
                    break
        position += 1
        yield shard


def _add(
    archive: tarfile.TarFile, position: int, images: ImageStore, row: int, label: int | None, name: str | None
) -> ShardSample:
    """Add an image and its label to a shard."""
    data, where, original = _encoded(images, row), images.where(row), images.key(row)
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"{where}: {len(data):,} bytes, expected at most {MAX_FILE_BYTES:,}; skip it with --without")
    key, about = f"{position:0{_DIGITS_OF_SAMPLE}d}", {"label": label, "class": name}
    stored = original if len(original) <= MAX_LETTERS else None
    if stored is not None:
        about[ORIGINAL] = stored
    member = f"{key}{_extension(data, original, where)}"
    start = archive.offset + tarfile.BLOCKSIZE
    _add_file(archive, member, data)
    _add_file(archive, f"{key}.json", json.dumps(about).encode())
    return ShardSample(member, start, len(data), None if label is None else str(label), stored)


def _add_file(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)  # without time and owner: the same data give the same bytes
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _encoded(images: ImageStore, row: int) -> bytes:
    """Return the file of an image, or a PNG file of one that has none."""
    if (data := images.encoded(row)) is not None:
        return data
    content = io.BytesIO()
    images.read(row).save(content, "PNG")
    return content.getvalue()


def _extension(data: bytes, original: str, where: str) -> str:
    by_content = {"JPEG": ".jpg"}.get(name := format_of(data) or "", f".{name.lower()}")
    for extension in (by_content, os.path.splitext(original)[1].lower()):
        if extension in EXTENSIONS:
            return extension
    raise DataError(f"{where}: not an image that can be read; skip it with --without")


def _write_shard(place: str, name: str, shard: _Shard) -> PackedShard:
    data = shard.content.getvalue()
    sha256 = hashlib.sha256(data).hexdigest()
    # The index first: it has the checksum by which a shard that exists is recognized.
    _store(place, f"{name}{SUFFIX}", index_bytes(shard.samples, len(data), sha256))
    return PackedShard(name, len(shard.samples), len(data), sha256, _store(place, name, data, is_indexed=True))


def _store(place: str, name: str, data: bytes, *, is_indexed: bool = False) -> bool:
    """Write a file unless it exists. Return whether it was written. Raise UsageError if it exists with other content.

    The index of a shard in a bucket was compared, so of the shard itself only the size is.
    """
    if is_url(place):
        address = f"{place.rstrip('/')}/{name}"
        if put(address, data):
            return True
        existing = remote_file(address)
        same = existing.size == len(data) and (is_indexed or existing.read(0, existing.size) == data)
    else:
        path = Path(place, name)
        address = str(path)
        if not os.path.lexists(path):
            atomic_write(path, data)
            return True
        same = path.stat().st_size == len(data) and read_plain(path, len(data)) == data
    if not same:
        raise UsageError(f"{printable(address)} exists with other content and is not replaced; choose another --out")
    return False
