"""Compressed tars, which can only be read from the start: unpacked once, as a plain tar, into the user's cache folder.

The copy lies in $XDG_CACHE_HOME/patchloom/archives or ~/.cache/patchloom/archives, outside the data, and is used until
size or time of the archive change. Nothing inside is unpacked to files.
"""

import bz2
import fcntl
import gzip
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchloom.data.datasets import file_state
from patchloom.disk import open_lock
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.printable import printable

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_CHUNK = 1 << 20
_KEPT_FREE = 1 << 30  # bytes of disk that are left alone
_MAX_RATIO = 100  # images hardly shrink; what grows more is a bomb
_SMALL = 1 << 28  # bytes that are unpacked whatever the ratio


def is_compressed(file: Path) -> bool:
    """Whether the first bytes are those of gzip, bzip2 or xz."""
    return _opener(file) is not None


def plain_tar(file: Path) -> tuple[Path, str]:
    """An uncompressed copy of a tar, and a note on where it lies."""
    state = file_state(file)
    opener = _opener(file)
    if state is None or opener is None:
        raise DataError(f"{printable(file)}: cannot be read, or not compressed by gzip, bzip2 or xz")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "patchloom", "archives")
    known_by = hashlib.blake2b(os.fsencode(os.path.realpath(file)), digest_size=12).hexdigest()
    target = cache / f"{known_by}-{state[0]}-{state[1]}.tar"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open_lock(cache / f"{known_by}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one unpacks, the others find what it made
            if not target.is_file():
                for older in cache.glob(f"{known_by}-*"):
                    older.unlink()
                _unpack(file, opener, target)
    except OSError as error:
        reason = error.strerror or error
        raise ResourceError(f"{printable(file)} cannot be unpacked into {printable(cache)} ({reason})") from error
    size = target.stat().st_size
    why = "a compressed tar cannot be read in any order"
    return target, f"{printable(file.name)}: {why}, so a plain copy is kept ({_human(size)}): {printable(target)}"


def _opener(file: Path) -> Callable[..., Any] | None:
    try:
        with open(file, "rb") as start:
            first = start.read(8)
    except OSError:
        return None
    return next((opener for signature, opener in _OPENERS.items() if first.startswith(signature)), None)


def _unpack(file: Path, opener: Callable[..., Any], target: Path) -> None:
    packed = file.stat().st_size
    limit = max(_MAX_RATIO * packed, _SMALL)
    partial = target.with_suffix(".partial")
    try:
        with opener(file, "rb") as source, open(partial, "wb") as copy:
            done = 0
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > limit:
                    raise DataError(
                        f"{printable(file)}: {_human(packed)} unpack to more than {_human(limit)}; refused as a bomb"
                    )
                if shutil.disk_usage(target.parent).free < _KEPT_FREE:
                    raise ResourceError(
                        f"{printable(file)}: no room to unpack it in {printable(target.parent)} "
                        f"({_human(done)} so far); free some, or unpack it yourself"
                    )
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())  # nobody looks again whether the copy is whole
        os.replace(partial, target)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{printable(file)}: damaged archive ({error})") from error
    finally:
        partial.unlink(missing_ok=True)


def _human(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
