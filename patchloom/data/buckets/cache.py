"""Cache of what was read from buckets: blocks of objects, in the user's cache folder, bounded in total size.

    ~/.cache/patchloom/buckets/3f/9ac…    or in $XDG_CACHE_HOME; PATCHLOOM_CACHE_GIB sets the bound, 0 for no cache

A file has a checksum and then the block. A damaged file counts as absent, so files are not synced, only renamed into
place. The least recently used blocks are removed. Every process writes and removes on its own: what another process
removed meanwhile is read from the bucket again.
"""

import hashlib
import os
import shutil
import sys
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from patchloom.disk import make_folder, open_new, rename, temporary_path
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import read_plain

LIMIT = "PATCHLOOM_CACHE_GIB"
_MOST_BYTES = 64 << 30  # by default, if that is less than half of the disk's free space
_FREE_BYTES = 1 << 30  # that others need: no block is written to a disk with less
_EVERY = 32  # blocks are counted and removed each time this share of the bound was written
_REMOVED_TO = 0.9  # of the bound
_CRC_BYTES = 4


class BlockCache:
    """Blocks by key, in one folder of at most about `limit` bytes."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._uncounted = limit  # bytes written since blocks were counted: the first write counts them
        self._is_writable = limit > 0

    def get(self, key: bytes) -> bytes | None:
        """Return a block, or None if it is absent or damaged."""
        path = self._path(key)
        try:
            data = read_plain(path)
            os.utime(path)  # used just now
        except OSError:
            return None
        if _checksum(key, data[_CRC_BYTES:]) != data[:_CRC_BYTES]:
            with suppress(OSError):
                path.unlink()
            return None
        return data[_CRC_BYTES:]

    def put(self, key: bytes, data: bytes) -> None:
        """Store a block. If that is impossible, say so once and store no more."""
        if not self._is_writable:
            return
        path = self._path(key)
        try:
            make_folder(path.parent)
            self._make_room(len(data))
            temporary = temporary_path(path)
            try:
                with open_new(temporary) as file:
                    if file.write(_checksum(key, data) + data) != _CRC_BYTES + len(data):
                        raise OSError("the disk is full")
                rename(temporary, path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            self._is_writable = False
            reason = f"{printable(self.folder)} cannot be written ({error.strerror or error})"
            print(f"note: {reason}; what is read from buckets is not cached", file=sys.stderr)

    def _make_room(self, size: int) -> None:
        """Remove blocks if many were written. Raise OSError if the disk is full all the same."""
        self._uncounted += size
        if self._uncounted * _EVERY < self.limit:
            return
        self._uncounted = 0
        blocks = []
        for path in self.folder.glob("*/*"):
            with suppress(OSError):
                status = path.stat()
                blocks.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in blocks)
        if total > self.limit * _REMOVED_TO:
            for _, size, path in sorted(blocks):
                if total <= self.limit * _REMOVED_TO:
                    break
                with suppress(OSError):
                    path.unlink()
                total -= size
        if shutil.disk_usage(self.folder).free < _FREE_BYTES:
            raise OSError(f"less than {_FREE_BYTES >> 30} GiB of the disk is free")

    def _path(self, key: bytes) -> Path:
        name = hashlib.blake2b(key, digest_size=20).hexdigest()
        return self.folder / name[:2] / name[2:]


def _checksum(key: bytes, data: bytes) -> bytes:
    return zlib.crc32(data, zlib.crc32(key)).to_bytes(_CRC_BYTES, "big")


def block_cache() -> BlockCache:
    """Return the cache of this user, with the bound of the environment."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return _cache_in(Path(home, "patchloom", "buckets"), os.environ.get(LIMIT, ""))


@cache
def _cache_in(folder: Path, limit: str) -> BlockCache:
    try:
        gib = float(limit) if limit else None
    except ValueError:
        gib = -1.0
    if gib is not None and not 0 <= gib < 1 << 30:
        raise UsageError(f"{LIMIT} is {limit!r}; expected a size in GiB, or 0 for no cache")
    existing = next(one for one in (folder, *folder.parents) if one.is_dir())
    own_choice = min(_MOST_BYTES, shutil.disk_usage(existing).free // 2)
    return BlockCache(folder, own_choice if gib is None else int(gib * (1 << 30)))
