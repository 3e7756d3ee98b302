"""The samples of a tar shard: where each image is, and its label.

The index is made from the headers of the tar. That of a shard in a bucket is made once and then cached, or it lies next
to the shard, as `patchloom pack` writes it: train-000000.tar.index.json. Like the shard, it may come from anyone: it
can only name bytes of its shard.
"""

import json
import tarfile
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from patchloom.data.buckets.cache import block_cache
from patchloom.data.buckets.remote_file import AnyFile, RemoteFile
from patchloom.data.trees.archive import TAR_FAULTS, open_tar, refuse_early_end
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import EXTENSIONS, MAX_FILE_BYTES, refuse_special
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, parse_json

SUFFIX = ".index.json"  # after the name of the shard
FORMAT = 1
ORIGINAL = "original_path"  # in the .json of a sample: its name in the dataset that was packed
_MAX_LABEL_BYTES = 1 << 20
MAX_LETTERS = 1_000  # of a label or a name
_SHAPE = {"format": int, "shard_bytes": int, "shard_sha256": str, "samples": list[list]}


class ShardSample(NamedTuple):
    """An image in a shard."""

    member: str
    offset: int
    size: int
    label: str | None
    original: str | None  # its name in the dataset that was packed


def index_of(shard: AnyFile, where: str) -> list[ShardSample]:
    """Return the samples of a shard, from the cache if it lies in a bucket."""
    if not isinstance(shard, RemoteFile):
        return read_headers(shard, where)
    cache, key = block_cache(), f"index {FORMAT}\0{shard.url}\0{shard.size}\0{shard.version}".encode()
    if (data := cache.get(key)) is not None:
        return parse_index(data, shard.size, where)
    samples = read_headers(shard, where)
    cache.put(key, index_bytes(samples, shard.size))
    return samples


def index_bytes(samples: Sequence[ShardSample], shard_bytes: int, shard_sha256: str = "") -> bytes:
    """Return the content of an index file."""
    value = {"format": FORMAT, "shard_bytes": shard_bytes, "shard_sha256": shard_sha256, "samples": list(samples)}
    return (json.dumps(value, separators=(",", ":")) + "\n").encode()


def parse_index(data: bytes, shard_bytes: int, where: str) -> list[ShardSample]:
    """Read an index file. Raise DataError if it is damaged, or not that of a shard of this size."""
    try:
        value = parse_json(data, MOST_BYTES)
        check_shape(value, _SHAPE)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']}, expected {FORMAT}; a newer patchloom may have written it")
        samples = [_sample(row, shard_bytes) for row in value["samples"]]
        if len({sample.member for sample in samples}) < len(samples):
            raise ValueError("two samples with one name")
    except ValueError as error:
        raise DataError(f"{where}: its index cannot be read ({error}); pack the data again") from error
    if value["shard_bytes"] != shard_bytes:
        raise DataError(
            f"{where}: has changed: {shard_bytes:,} bytes, and its index is of {value['shard_bytes']:,}; copy shard "
            "and index again"
        )
    return samples


def _sample(row: list[Any], shard_bytes: int) -> ShardSample:
    if list(map(type, row[:3])) != [str, int, int] or len(row) != 5:
        raise ValueError(f"a sample {str(row)[:60]}, expected name, offset, size, label and original name")
    sample = ShardSample(*row)
    check_shape(sample.label, str | None)
    check_shape(sample.original, str | None)
    if max(len(text or "") for text in (sample.member, sample.label, sample.original)) > MAX_LETTERS:
        raise ValueError(f"a name or label of more than {MAX_LETTERS:,} letters")
    if not 0 <= sample.offset <= sample.offset + sample.size <= shard_bytes or not 0 <= sample.size <= MAX_FILE_BYTES:
        raise ValueError(f"{printable(sample.member)} is outside of the shard, or too large")
    return sample


def read_headers(shard: AnyFile, where: str) -> list[ShardSample]:
    """Return the samples of a shard from its headers and labels, in the order of the images."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, tuple[str | None, str | None]] = {}
    try:
        total = shard.size if isinstance(shard, RemoteFile) else refuse_special(shard, where, "a tar file")
        with open_tar(shard) as archive:
            for member in archive:
                if member.isdir():
                    continue
                place = f"{where}, {member.name}"
                _check_member(member, total, where)
                path = PurePosixPath(member.name)
                stem, _, extension = path.name.partition(".")
                key = str(path.parent / stem)
                if f".{extension.lower()}" in EXTENSIONS:
                    if key in images or member.size > MAX_FILE_BYTES:
                        fault = "a second image of this key" if key in images else f"{member.size:,} bytes"
                        raise DataError(
                            f"{place}: {fault}; expected one image of at most {MAX_FILE_BYTES:,} bytes per key"
                        )
                    images[key] = (member.name, member.offset_data, member.size)
                elif extension in ("cls", "json") and member.size <= _MAX_LABEL_BYTES:
                    content = archive.extractfile(member)
                    label, original = _label(content.read() if content else b"", extension, place)
                    if label is not None or original is not None:
                        labels[key] = label, original
            refuse_early_end(shard, archive.offset, where)
    except TAR_FAULTS as error:
        plain = isinstance(error, tarfile.ReadError) and not images
        hint = "compressed or not a tar file; expected plain .tar" if plain else f"damaged tar ({error})"
        raise DataError(f"{where}: {hint}") from error
    return [ShardSample(*image, *labels.get(key, (None, None))) for key, image in images.items()]


def _check_member(member: tarfile.TarInfo, total: int, shard: str) -> None:
    """Raise DataError for paths that leave the archive, links, and members beyond the end of the file."""
    path, where = PurePosixPath(member.name), f"{shard}, {member.name}"
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"{where}: the path leaves the archive; refused")
    if not member.isreg() or member.sparse is not None:
        raise DataError(f"{where}: a link, device or sparse file; expected plain files")
    if member.offset_data + member.size > total:
        raise DataError(f"{where}: the shard ends after {total} bytes (unfinished tar)")


def _label(content: bytes, extension: str, where: str) -> tuple[str | None, str | None]:
    """Return the label in a .cls or .json file, and the original name of the image that `patchloom pack` adds."""
    original = None
    try:
        value: Any = content.decode().strip()
        if extension == "json":
            value = parse_json(content, _MAX_LABEL_BYTES)
            if isinstance(value, dict):
                named = value.get(ORIGINAL)
                original = named if isinstance(named, str) and len(named) <= MAX_LETTERS else None
                value = value.get("label")
            check_shape(value, str | float | bool | None, "label")
        label = None if value is None else str(value)
        if label is not None and len(label) > MAX_LETTERS:
            raise ValueError(f"it has {len(label):,} letters, expected at most {MAX_LETTERS:,}")
    except ValueError as error:
        raise DataError(f"{where}: cannot be read as a label ({error})") from error
    return label, original
