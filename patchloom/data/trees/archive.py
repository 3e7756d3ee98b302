"""A zip or tar file as a `Tree`, read in place.

The index of members comes from the headers alone. Members are then read at their offsets, in any order and from any
process. Archives are untrusted: paths that leave the archive and encrypted members are errors, links are not followed,
and no member is decompressed beyond the limits of `decode`. If one folder contains everything, it counts as the root.
"""

import bz2
import io
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from PIL import Image

from patchloom.data.buckets.remote_file import AnyFile, open_any
from patchloom.data.images.image_store import ImageStore, Stamp, stamps_inside
from patchloom.data.trees.tree import Tree
from patchloom_runtime.errors import DataError
from patchloom_runtime.folders import TreeEntry
from patchloom_runtime.images.decode import EXTENSIONS, MAX_FILE_BYTES, decode
from patchloom_runtime.printable import printable

_STORED, _DEFLATED, _BZIP2 = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2
_NO_CRC = -1
_MAX_MEMBER_BYTES = np.iinfo(np.int64).max  # that the index can hold
_SAMPLED_MEMBERS = 200  # that decide whether a tar contains class folders or WebDataset samples
_MAX_READ_BYTES = 2 << 20  # at once, from a tar: a label, or a long name and other headers in whole blocks
# The errors that `tarfile` raises for damaged headers.
TAR_FAULTS = (tarfile.TarError, OSError, ValueError, ArithmeticError, LookupError, RecursionError)


class Member(NamedTuple):
    """Location of a file in an archive."""

    start: int  # offset of the data in a tar, of the header in a zip
    packed: int  # bytes in the archive
    size: int  # bytes according to the header
    method: int  # compression method
    crc: int


class ArchiveFile:
    """Reader of one archive. Each read opens the file, so that processes do not share a position."""

    def __init__(self, file: Path, where: str) -> None:
        self.file = file
        self.where = where
        self.zipped = file.suffix.lower() == ".zip" or _is_zip(file)

    def read(self, member: Member, where: str) -> bytes:
        """Read the bytes of a member. Raise DataError if they do not match its header."""
        if member.size > MAX_FILE_BYTES:
            raise DataError(f"{where}: {member.size:,} bytes, more than the limit of {MAX_FILE_BYTES:,}")
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(member.start)
                if self.zipped:
                    header = file.read(30)
                    if len(header) < 30 or header[:4] != b"PK\x03\x04":
                        raise DataError(f"{where}: damaged zip (no header where the index says)")
                    file.seek(sum(struct.unpack("<HH", header[26:30])), os.SEEK_CUR)
                packed = file.read(min(member.packed, MAX_FILE_BYTES))
        except OSError as error:
            raise DataError(f"{where}: cannot be read ({error.strerror})") from error
        data = _decompress(packed, member, where)
        if len(data) != member.size or (member.crc != _NO_CRC and zlib.crc32(data) != member.crc):
            raise DataError(f"{where}: damaged archive (the bytes do not match its index)")
        return data


def _is_zip(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # damaged: reading the index reports it
        return True


def _decompress(packed: bytes, member: Member, where: str) -> bytes:
    """Return at most one byte more than the size in the header, so that a bomb cannot fill the memory."""
    try:
        if member.method == _STORED:
            return packed
        if member.method == _DEFLATED:
            return zlib.decompressobj(-15).decompress(packed, member.size + 1)
        if member.method == _BZIP2:
            return bz2.BZ2Decompressor().decompress(packed, member.size + 1)
    except (zlib.error, OSError) as error:
        raise DataError(f"{where}: damaged archive ({error})") from error
    raise DataError(f"{where}: compressed with zip method {member.method}; expected stored, deflated or bzip2")


class ArchiveImages(ImageStore):
    """Image files inside one archive."""

    def __init__(self, archive: ArchiveFile, paths: Sequence[str], members: Sequence[Member], names: Sequence[str]):
        self._archive = archive
        self.home = os.path.dirname(os.path.abspath(archive.file))
        self._paths = tuple(paths)
        self._names = tuple(names)
        self._members = np.array(members, dtype=np.int64).reshape(-1, len(Member._fields))

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> Image.Image:
        """Decode the image: upright, mode RGB."""
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """Read the bytes of the member."""
        return self._archive.read(Member(*self._members[index].tolist()), self.where(index))

    def where(self, index: int) -> str:
        """Return the archive and the member."""
        return f"{self._archive.where}, {printable(self._names[index])}"

    def key(self, index: int) -> str:
        """Return the path in the archive, which is the path of the file after unpacking."""
        return self._paths[index]

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Return the member and the `file_state` of the archive."""
        return stamps_inside([self._archive.file], self.home, [(0, self._names[row]) for row in rows])


class ArchiveTree(Tree):
    """The content of a zip or tar file. If `file` is a copy, `original` is the file that messages name."""

    def __init__(self, file: Path, original: Path | None = None) -> None:
        original = original or file
        self.root = file
        self.where = printable(original)
        self.name = printable(archive_stem(original))
        self._archive = ArchiveFile(file, self.where)
        members, others = (_index_zip if self._archive.zipped else _index_tar)(file, self.where)
        common = _common_folder([*members, *others])
        self._names = {name.removeprefix(common): name for name in members}
        self._members = {path: members[name] for path, name in self._names.items()}
        self._folders: dict[str, dict[str, TreeEntry]] = {"": {}}
        for path in self._members:
            self._add(path, "file")
        for name in others:
            self._add(name.removeprefix(common), "other")

    def _add(self, path: str, kind: str) -> None:
        folder = ""
        *above, last = path.split("/")
        for part in above:
            self._folders[folder][part] = TreeEntry(part, "folder")
            folder = f"{folder}/{part}" if folder else part
            self._folders.setdefault(folder, {})
        self._folders[folder][last] = TreeEntry(last, "file" if kind == "file" else "other")

    def entries(self, folder: str) -> list[TreeEntry]:
        """Return the visible entries of a folder, ordered by name."""
        return sorted(self._folders.get(folder.rstrip("/"), {}).values(), key=lambda entry: os.fsencode(entry.name))

    def is_file(self, path: str) -> bool:
        """Return whether `path` is a file of the archive."""
        return path in self._members

    def read(self, path: str) -> bytes:
        """Read the bytes of a member."""
        return self._archive.read(self._members[path], f"{self.where}, {printable(path)}")

    def images(self, paths: Sequence[str]) -> ImageStore:
        """Return a store of the members at `paths`."""
        members = [self._members[path] for path in paths]
        return ArchiveImages(self._archive, paths, members, [self._names[path] for path in paths])

    def identity(self, folder: str) -> str:
        """Return the path: links are not followed."""
        return folder


def archive_stem(file: Path) -> str:
    """Return the file name without .zip, .tar, .tar.gz …"""
    stem = file.name
    for ending in (".gz", ".bz2", ".xz", ".tgz", ".tbz2", ".txz", ".tar", ".zip"):
        if stem.lower().endswith(ending) and len(stem) > len(ending):
            stem = stem[: -len(ending)]
    return stem


def holds_folders(file: Path) -> bool:
    """Return whether a tar contains class folders or a labels file, rather than WebDataset pairs of image and label."""
    images, labels, folders = set(), set(), False
    with suppress(DataError):  # reading all of it will report the damage
        for member in _tar_members(file, printable(file), _SAMPLED_MEMBERS):
            path = PurePosixPath(member.name)
            stem, _, extension = path.name.partition(".")
            key = str(path.parent / stem)
            if path.suffix.lower() in EXTENSIONS:
                images.add(key)
                folders |= len(path.parts) > 1
            elif extension in ("cls", "json"):
                labels.add(key)
            elif path.suffix.lower() in (".csv", ".tsv"):
                folders = True
    return folders and not images & labels


# Indices --------------------------------------------------------------------------------------------------------------


Index = tuple[dict[str, Member], list[str]]  # files by name, and the names of entries that are neither file nor folder


def _index_zip(file: Path, where: str) -> Index:
    members: dict[str, Member] = {}
    others: list[str] = []
    encrypted: list[str] = []
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError, struct.error) as error:
        raise DataError(f"{where}: damaged zip ({error})") from error
    for info in infos:
        name = _safe(info.filename.replace("\\", "/"), where)
        if name is None or info.is_dir():
            continue
        if name in members:
            raise DataError(f"{where}, {printable(name)}: two members have this name; refused")
        if stat.S_ISLNK(info.external_attr >> 16):
            others.append(name)
            continue
        if max(info.header_offset, info.compress_size, info.file_size) > _MAX_MEMBER_BYTES:
            raise DataError(
                f"{where}, {printable(name)}: damaged zip (a member of more than {_MAX_MEMBER_BYTES:,} bytes)"
            )
        if info.flag_bits & 1:
            encrypted.append(name)
        members[name] = Member(info.header_offset, info.compress_size, info.file_size, info.compress_type, info.CRC)
    if encrypted:
        count = f"{len(encrypted):,} of {len(members):,} members are encrypted"
        raise DataError(f"{where}: {count}, the first is {printable(encrypted[0])}; unpack it with its password")
    return members, others


def _index_tar(file: Path, where: str) -> Index:
    members: dict[str, Member] = {}
    others: list[str] = []
    total = os.path.getsize(file)
    for member in _tar_members(file, where):
        name = _safe(member.name, where)
        if name is None or member.isdir():
            continue
        if not member.isreg() or member.sparse is not None:
            others.append(name)
            continue
        if member.offset_data + member.size > total:
            raise DataError(f"{where}, {printable(name)}: the archive ends after {total:,} bytes (unfinished tar)")
        members[name] = Member(member.offset_data, member.size, member.size, _STORED, _NO_CRC)
    return members, [name for name in others if name not in members]


class _TarBytes:
    """The bytes of a tar. Headers that declare more bytes than a name or label needs are errors."""

    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self.seek, self.tell = content.seek, content.tell

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes, expected at most {_MAX_READ_BYTES:,}")
        return self._content.read(size) or b""


@contextmanager
def open_tar(file: AnyFile) -> Iterator[tarfile.TarFile]:
    """Open an uncompressed tar to read its headers and small members."""
    # tarfile only reads, seeks and tells.
    with open_any(file) as content, tarfile.open(fileobj=cast(BinaryIO, _TarBytes(content)), mode="r:") as archive:
        yield archive


def refuse_early_end(file: AnyFile, end: int, where: str) -> None:
    """Raise DataError unless the two blocks of zeros that end a tar are at `end`.

    `tarfile` takes a damaged header for the end of the archive. `where` names the archive in messages.
    """
    with io.BufferedReader(open_any(file)) as content:  # type: ignore[type-var]
        content.seek(end)
        last = content.read(2 * tarfile.BLOCKSIZE)
        if last == bytes(2 * tarfile.BLOCKSIZE):
            return
        if not any(last):
            raise DataError(f"{where}: ends after {end + len(last):,} bytes without a tar's last blocks; it is cut off")
        behind = list(_members_behind(content, end + tarfile.BLOCKSIZE))
    lost = f"; {len(behind):,} members behind it are lost, the first is {printable(behind[0])}" if behind else ""
    raise DataError(f"{where}: the header at byte {end:,} is damaged{lost}. Copy or pack the shard again")


def _members_behind(content: BinaryIO, start: int) -> Iterator[str]:
    """Yield the names in all intact headers from `start` on; the checksum tells headers from other content."""
    content.seek(start)
    while len(block := content.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
        with suppress(tarfile.HeaderError):
            yield tarfile.TarInfo.frombuf(block, "utf-8", "backslashreplace").name


def _tar_members(file: Path, where: str, limit: int | None = None) -> Iterator[tarfile.TarInfo]:
    try:
        with open_tar(file) as archive:
            for number, member in enumerate(archive):
                if limit is not None and number >= limit:
                    return
                yield member
            if limit is None:
                refuse_early_end(file, archive.offset, where)
    except TAR_FAULTS as error:
        raise DataError(f"{where}: damaged or not a tar file ({error})") from error


def _safe(name: str, where: str) -> str | None:
    """Return the path of a member, or None if it is hidden. Raise DataError if it leads out of the archive."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and path.parts[0].endswith(":")):
        raise DataError(f"{where}, {printable(name)}: the path leaves the archive; refused")
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return None if hidden or not path.parts else str(path)


def _common_folder(names: Sequence[str]) -> str:
    """Return the folders that contain everything, with a slash at the end, or '' if there are none."""
    common = ""
    while names:
        first = {name[len(common) :].partition("/")[:2] for name in names}
        if len(first) > 1 or not next(iter(first))[1]:
            break
        common += "".join(next(iter(first)))
    return common
