"""Plain copies of compressed tar files.

A compressed tar can only be read from its start, so it is decompressed once into the user's cache folder:
$XDG_CACHE_HOME/patchloom/archives or ~/.cache/patchloom/archives. The copy is used until the archive changes. Its
members are not unpacked to files.
"""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patchloom.data.images.image_store import file_state
from patchloom.disk import hold_lock, open_lock, rename
from patchloom_runtime.errors import DataError, ResourceError
from patchloom_runtime.printable import printable

SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
_OPENERS: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_CHUNK = 1 << 20
_MIN_FREE_BYTES = 1 << 30  # of disk, which stay free
_MAX_RATIO = 100  # images hardly compress; an archive that expands more is a decompression bomb
_ALWAYS_ALLOWED_BYTES = 1 << 28  # are decompressed whatever the ratio


def is_compressed(file: Path) -> bool:
    """Return whether the file starts with the signature of gzip, bzip2 or xz."""
    return _opener(file) is not None


def plain_tar(file: Path) -> tuple[Path, str]:
    """Return the path of an uncompressed copy of a tar, and a note that names it."""
    state = file_state(file)
    opener = _opener(file)
    if state is None or opener is None:
        raise DataError(f"{printable(file)}: cannot be read, or is not compressed with gzip, bzip2 or xz")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "patchloom", "archives")
    known_by = hashlib.blake2b(os.fsencode(os.path.realpath(file)), digest_size=12).hexdigest()
    target = cache / f"{known_by}-{state[0]}-{state[1]}.tar"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open_lock(cache / f"{known_by}.lock") as lock:
            hold_lock(lock, wait=True)  # one process decompresses, the others wait and use its copy
            if not target.is_file():
                for older in cache.glob(f"{known_by}-*"):
                    older.unlink()
                _unpack(file, opener, target)
    except OSError as error:
        reason = error.strerror or error
        raise ResourceError(f"{printable(file)} cannot be decompressed into {printable(cache)} ({reason})") from error
    size = target.stat().st_size
    why = "a compressed tar does not allow random access"
    return target, f"{printable(file.name)}: {why}; using an uncompressed copy ({_human(size)}): {printable(target)}"


def _opener(file: Path) -> Callable[..., Any] | None:
    try:
        with open(file, "rb") as start:
            first = start.read(8)
    except OSError:
        return None
    return next((opener for signature, opener in _OPENERS.items() if first.startswith(signature)), None)


def _unpack(file: Path, opener: Callable[..., Any], target: Path) -> None:
    packed = file.stat().st_size
    limit = max(_MAX_RATIO * packed, _ALWAYS_ALLOWED_BYTES)
    partial = target.with_suffix(".partial")
    try:
        with opener(file, "rb") as source, open(partial, "wb") as copy:
            done = 0
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > limit:
                    raise DataError(
                        f"{printable(file)}: {_human(packed)} expand to more than {_human(limit)}; "
                        "refused as a decompression bomb"
                    )
                if shutil.disk_usage(target.parent).free < _MIN_FREE_BYTES:
                    raise ResourceError(
                        f"{printable(file)}: no room to decompress it in {printable(target.parent)} "
                        f"({_human(done)} so far); free some space, or unpack it yourself"
                    )
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())  # the copy is not checked again
        rename(partial, target)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{printable(file)}: damaged archive ({error})") from error
    finally:
        partial.unlink(missing_ok=True)


def _human(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
