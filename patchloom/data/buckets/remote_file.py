"""Files in buckets that are read like local ones: `RemoteFile` stands for a `Path`, and `open_any` opens both."""

import hashlib
import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from patchloom.data.buckets.cache import block_cache
from patchloom.data.buckets.objects import MissingError, NoListingError, Span, list_folder, read_spans, stat
from patchloom_runtime.printable import printable

_BLOCK_BYTES = 1 << 19  # read and cached at once: a few images
_BLOCKS_PER_REQUEST = 2  # that are neighbors; requests run at once
_MOST_AHEAD = 16  # blocks that are read ahead of a reader that goes through a file


@dataclass(frozen=True, order=True)
class RemoteFile:
    """An object in a bucket, at the version that it had when it was opened."""

    url: str
    size: int
    version: str

    def __str__(self) -> str:
        return printable(self.url)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemoteFolder":
        """The folder of the object."""
        return RemoteFolder(self.url.rpartition("/")[0])

    @property
    def state(self) -> tuple[int, int]:
        """Size and a number that changes with the version, as `image_store.file_state` returns them."""
        return self.size, int.from_bytes(hashlib.blake2b(self.version.encode(), digest_size=7).digest(), "big")

    @property
    def stands_at(self) -> str:
        """A path that stands for the object in the names of caches; nothing is there."""
        return f"/{self.url}"

    def read(self, start: int, size: int) -> bytes:
        """Return a range of the object, from the cache where it is there."""
        return read_cached([(self, start, size)])[0]


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in a bucket."""

    url: str

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rstrip("/").rpartition("/")[2]

    def files(self) -> list[RemoteFile]:
        """Return the objects directly in the folder."""
        return [RemoteFile(*facts) for facts in list_folder(self.url)]


AnyFile = Path | RemoteFile  # a local file or one in a bucket


def remote_file(url: str) -> RemoteFile:
    """Return the object at an address. Raises UsageError if there is none."""
    return RemoteFile(*stat(url))


def files_in_same_folders(files: Sequence[RemoteFile], names: Sequence[str]) -> dict[str, RemoteFile]:
    """Return those of `names` that exist in the folders of `files`, by address. One list per folder, if it has one."""
    present: dict[str, RemoteFile] = {}
    for folder in dict.fromkeys(file.parent for file in files):
        wanted = {f"{folder.url}/{name}" for name in names}
        try:
            present |= {file.url: file for file in folder.files() if file.url in wanted}
        except NoListingError:
            for url in sorted(wanted):
                with suppress(MissingError):
                    present[url] = remote_file(url)
    return present


class _RemoteReader(io.RawIOBase):
    """A `RemoteFile`, open for reading. It holds the blocks at its position in memory."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._position = 0
        self._start, self._held = 0, b""
        self._ahead = 1  # blocks to read at the next position outside of the held ones

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        size = min(len(buffer), max(0, self._file.size - self._position))
        within = self._position - self._start
        if not 0 <= within <= within + size <= len(self._held):
            goes_on = self._start <= self._position <= self._start + len(self._held)
            self._ahead = min(2 * self._ahead, _MOST_AHEAD) if goes_on else 1
            first = self._position // _BLOCK_BYTES * _BLOCK_BYTES
            last = min(self._file.size, max(first + self._ahead * _BLOCK_BYTES, self._position + size))
            self._start, self._held = first, self._file.read(first, last - first)
            within = self._position - first
        buffer[:size] = self._held[within : within + size]
        self._position += size
        return size


def open_any(file: AnyFile) -> BinaryIO:
    """Open a file for reading, without a buffer."""
    return _RemoteReader(file) if isinstance(file, RemoteFile) else open(file, "rb", buffering=0)  # type: ignore[return-value]


def read_cached(places: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    """Return ranges (file, offset, size). Blocks that are not in the cache are read at once per file, and cached."""
    cache = block_cache()
    wanted = {
        (file, number): cache.get(_key(file, number))
        for file, start, size in places
        for number in range(start // _BLOCK_BYTES, -(-(start + size) // _BLOCK_BYTES))
    }
    runs = _joined(sorted(block for block, data in wanted.items() if data is None))
    for (file, first, last), data in zip(runs, _fetched(runs), strict=True):
        for number in range(first, last):
            block = data[(number - first) * _BLOCK_BYTES :][:_BLOCK_BYTES]
            wanted[file, number] = block
            cache.put(_key(file, number), block)
    return [_cut(wanted, *place) for place in places]


def read_exactly(places: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    """Return ranges (file, offset, size) without the cache: for data that it could hold only a part of."""
    return read_spans([Span(*_facts(file), start, start + size) for file, start, size in places])


def _facts(file: RemoteFile) -> tuple[str, int, str]:
    return file.url, file.size, file.version


def _fetched(runs: Sequence[tuple[RemoteFile, int, int]]) -> list[bytes]:
    return read_spans(
        [Span(*_facts(file), first * _BLOCK_BYTES, min(last * _BLOCK_BYTES, file.size)) for file, first, last in runs]
    )


def _key(file: RemoteFile, number: int) -> bytes:
    return f"{file.url}\0{file.size}\0{file.version}\0{number * _BLOCK_BYTES}".encode("utf-8", "surrogatepass")


def _joined(blocks: Sequence[tuple[RemoteFile, int]]) -> list[tuple[RemoteFile, int, int]]:
    """Return runs (file, first, behind the last) of neighboring blocks, each of a bounded size."""
    runs: list[tuple[RemoteFile, int, int]] = []
    for file, number in blocks:
        if runs and runs[-1][0] == file and runs[-1][2] == number and number - runs[-1][1] < _BLOCKS_PER_REQUEST:
            runs[-1] = file, runs[-1][1], number + 1
        else:
            runs.append((file, number, number + 1))
    return runs


def _cut(blocks: dict[tuple[RemoteFile, int], bytes | None], file: RemoteFile, start: int, size: int) -> bytes:
    first, last = start // _BLOCK_BYTES, -(-(start + size) // _BLOCK_BYTES)
    data = b"".join(blocks[file, number] or b"" for number in range(first, last))
    return data[start - first * _BLOCK_BYTES :][:size]
