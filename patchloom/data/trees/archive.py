"""A zip or tar file as a `Tree`: read in place, nothing is unpacked.

The index (where each member lies) comes from the headers alone; a member is then read at its place, in any order and
from any process. Archives are untrusted: paths that leave them are refused, links are not followed, encrypted members
are named, and no member is unpacked beyond what `decode` would take. A folder that holds everything is passed over.
"""

import bz2
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchloom.data.datasets import ImageStore, Stamp, stamps_inside
from patchloom.data.sources.shards import TAR_FAULTS, open_tar, refuse_early_end
from patchloom.data.trees.tree import Tree
from patchloom_runtime.errors import DataError
from patchloom_runtime.folders import TreeEntry
from patchloom_runtime.images.decode import EXTENSIONS, MAX_FILE_BYTES, decode
from patchloom_runtime.printable import printable

_STORED, _DEFLATED, _BZIP2 = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2
_NO_CRC = -1
_LARGEST = np.iinfo(np.int64).max  # bytes that an index can say
_LOOKED_AT = 200  # members by which a tar is told to be of class folders or of WebDataset


class Member(NamedTuple):
    """A file in an archive."""

    start: int  # of its data in a tar, of its header in a zip
    packed: int  # bytes in the archive
    size: int  # bytes it says it has
    method: int  # of compression
    crc: int


class ArchiveFile:
    """One archive, and how a member of it is read; opened anew each time, so that processes do not share a position."""

    def __init__(self, file: Path, shown: str) -> None:
        self.file = file
        self.shown = shown
        self.zipped = file.suffix.lower() == ".zip" or _is_zip(file)

    def read(self, member: Member, where: str) -> bytes:
        """The member's bytes; a DataError where they are not those that its header promises."""
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
        data = _unpacked(packed, member, where)
        if len(data) != member.size or (member.crc != _NO_CRC and zlib.crc32(data) != member.crc):
            raise DataError(f"{where}: damaged archive (other bytes than its index promises)")
        return data


def _is_zip(file: Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except zipfile.BadZipFile:  # a damaged one, as whoever reads its index says
        return True


def _unpacked(packed: bytes, member: Member, where: str) -> bytes:
    """At most one byte more than the header promises, whatever the data would unpack to."""
    try:
        if member.method == _STORED:
            return packed
        if member.method == _DEFLATED:
            return zlib.decompressobj(-15).decompress(packed, member.size + 1)
        if member.method == _BZIP2:
            return bz2.BZ2Decompressor().decompress(packed, member.size + 1)
    except (zlib.error, OSError) as error:
        raise DataError(f"{where}: damaged archive ({error})") from error
    raise DataError(f"{where}: compressed by zip's method {member.method}; expected stored, deflated or bzip2")


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
        """The picture: decoded, upright, mode RGB."""
        return decode(self.encoded(index), self.where(index))

    def encoded(self, index: int) -> bytes:
        """The member's bytes."""
        return self._archive.read(Member(*self._members[index].tolist()), self.where(index))

    def where(self, index: int) -> str:
        """Archive and member."""
        return f"{self._archive.shown}, {printable(self._names[index])}"

    def key(self, index: int) -> str:
        """The path in the archive: that of the file, were it unpacked."""
        return self._paths[index]

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Member, and size and time of the archive."""
        return stamps_inside([self._archive.file], self.home, [(0, self._names[row]) for row in rows])


class ArchiveTree(Tree):
    """What lies in a zip or tar file; `shown` is what messages call it where the file itself is a copy."""

    def __init__(self, file: Path, shown: Path | None = None) -> None:
        shown = shown or file
        self.root = file
        self.where = printable(shown)
        self.name = printable(archive_stem(shown))
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
        """What is in a folder of the archive and not hidden, ordered by name."""
        return sorted(self._folders.get(folder.rstrip("/"), {}).values(), key=lambda entry: os.fsencode(entry.name))

    def is_file(self, path: str) -> bool:
        """Whether the archive has a file of this path."""
        return path in self._members

    def read(self, path: str) -> bytes:
        """The member's bytes."""
        return self._archive.read(self._members[path], f"{self.where}, {printable(path)}")

    def images(self, paths: Sequence[str]) -> ImageStore:
        """The members of these paths."""
        members = [self._members[path] for path in paths]
        return ArchiveImages(self._archive, paths, members, [self._names[path] for path in paths])

    def identity(self, folder: str) -> str:
        """The path itself: there are no links."""
        return folder


def archive_stem(file: Path) -> str:
    """The name without .zip, .tar, .tar.gz …"""
    stem = file.name
    for ending in (".gz", ".bz2", ".xz", ".tgz", ".tbz2", ".txz", ".tar", ".zip"):
        if stem.lower().endswith(ending) and len(stem) > len(ending):
            stem = stem[: -len(ending)]
    return stem


def holds_folders(file: Path) -> bool:
    """Whether a tar is of class folders or of a labels file, rather than WebDataset's pairs of image and label."""
    images, labels, folders = set(), set(), False
    with suppress(DataError):  # what is wrong with it is said by whoever reads all of it
        for member in _tar_members(file, printable(file), _LOOKED_AT):
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


Index = tuple[dict[str, Member], list[str]]  # files by name, and what is neither file nor folder


def _index_zip(file: Path, shown: str) -> Index:
    members: dict[str, Member] = {}
    others: list[str] = []
    locked: list[str] = []
    try:
        with zipfile.ZipFile(file) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError, struct.error) as error:
        raise DataError(f"{shown}: damaged zip ({error})") from error
    for info in infos:
        name = _safe(info.filename.replace("\\", "/"), shown)
        if name is None or info.is_dir():
            continue
        if name in members:
            raise DataError(f"{shown}, {printable(name)}: two members of this name; refused")
        if stat.S_ISLNK(info.external_attr >> 16):
            others.append(name)
            continue
        if max(info.header_offset, info.compress_size, info.file_size) > _LARGEST:
            raise DataError(f"{shown}, {printable(name)}: damaged zip (a member of more than {_LARGEST:,} bytes)")
        if info.flag_bits & 1:
            locked.append(name)
        members[name] = Member(info.header_offset, info.compress_size, info.file_size, info.compress_type, info.CRC)
    if locked:
        count = f"{len(locked):,} of {len(members):,} members are encrypted"
        raise DataError(f"{shown}: {count}, the first is {printable(locked[0])}; unpack it with its password")
    return members, others


def _index_tar(file: Path, shown: str) -> Index:
    members: dict[str, Member] = {}
    others: list[str] = []
    total = os.path.getsize(file)
    for member in _tar_members(file, shown):
        name = _safe(member.name, shown)
        if name is None or member.isdir():
            continue
        if not member.isreg() or member.sparse is not None:
            others.append(name)
            continue
        if member.offset_data + member.size > total:
            raise DataError(f"{shown}, {printable(name)}: the archive ends after {total:,} bytes (unfinished tar)")
        members[name] = Member(member.offset_data, member.size, member.size, _STORED, _NO_CRC)
    return members, [name for name in others if name not in members]


def _tar_members(file: Path, shown: str, limit: int | None = None) -> Iterator[tarfile.TarInfo]:
    try:
        with open_tar(file) as archive:
            for number, member in enumerate(archive):
                if limit is not None and number >= limit:
                    return
                yield member
            if limit is None:
                refuse_early_end(file, archive.offset)
    except TAR_FAULTS as error:
        raise DataError(f"{shown}: damaged or not a tar file ({error})") from error


def _safe(name: str, shown: str) -> str | None:
    """The member's path; None where it is hidden; a DataError where it leads out of the archive."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or (path.parts and path.parts[0].endswith(":")):
        raise DataError(f"{shown}, {printable(name)}: a path that leaves the archive; refused")
    hidden = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
    return None if hidden or not path.parts else str(path)


def _common_folder(names: Sequence[str]) -> str:
    """The folders that hold everything, with a slash at the end; '' for none."""
    common = ""
    while names:
        first = {name[len(common) :].partition("/")[:2] for name in names}
        if len(first) > 1 or not next(iter(first))[1]:
            break
        common += "".join(next(iter(first)))
    return common
