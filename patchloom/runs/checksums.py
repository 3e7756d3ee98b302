"""`checksums.json`: the SHA-256 of the other files of a folder, so that a changed byte is noticed.

A file has one or two checksums. Before a file is replaced, its new checksum is stored next to the current one, so that
the file on disk matches one of the two whenever the writer is killed. Files without a checksum, as in folders of
earlier versions, are not checked. `patchloom verify RUN --accept` updates the checksums of files that were edited on
purpose, such as the class names in `labels.json`.
"""

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchloom.disk import atomic_write, plain_name
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, own_sha256, parse_json, read_plain

FILE = "checksums.json"
FORMAT = 1
_MOST_OWN = 1 << 20  # bytes of checksums.json; a folder has a handful of files
_MOST_ANY = 1 << 32  # bytes of a file that is about to be replaced

Checksums = dict[str, list[str]]


@dataclass(frozen=True)
class _ReadBefore:
    files: dict[Path, bytes] = field(default_factory=dict)
    checksums: dict[Path, Checksums] = field(default_factory=dict)


_read_before: ContextVar[_ReadBefore | None] = ContextVar("read_before", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Read every checked file once while open: `read_checked` returns the same bytes again."""
    token = _read_before.set(_read_before.get() or _ReadBefore())
    try:
        yield
    finally:
        _read_before.reset(token)


def read_checked(folder: Path, name: str, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a file of at most `most` bytes. Raise CheckpointError if it is damaged or missing."""
    path, before = folder / name, _read_before.get() or _ReadBefore()
    if path in before.files:
        return before.files[path]
    try:
        data = read_plain(path, most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    digest = hashlib.sha256(data).hexdigest()
    if folder not in before.checksums or digest not in before.checksums[folder].get(name, [digest]):
        before.checksums[folder] = read_checksums(folder)  # again, in case the file was replaced since
    if digest not in before.checksums[folder].get(name, [digest]):
        raise CheckpointError(
            f"{path} is damaged: its checksum is not the one in {FILE}. Restore it. If it was changed on purpose, "
            f"accept the change: patchloom verify {shlex.quote(str(folder))} --accept"
        )
    before.files[path] = data
    return data


def write_checked(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files and their checksums. Each file is written atomically, in the order of the mapping."""
    known = _checksums_or_none(folder)
    new = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    current = {name: _file_digest(folder / name) for name in files}
    if all(new[name] == current[name] and known.get(name) == [new[name]] for name in files):
        return
    updated = dict(known)
    for name in files:
        before = current[name]
        # The checksum of a damaged file is not stored.
        is_good = before is not None and before != new[name] and (name not in known or before in known[name])
        updated[name] = [new[name], *([before] if is_good and before else [])]
    _write(folder, updated)
    for name, data in files.items():
        if new[name] != current[name]:
            atomic_write(folder / name, data)


def read_checksums(folder: Path) -> Checksums:
    """Return the valid checksums of each file, or an empty dict if the folder has no `checksums.json`."""
    path = folder / FILE
    try:
        data = read_plain(path, _MOST_OWN)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        values = parse_json(data)
        check_shape(values, {"format": int, "sha256": dict[str, list[str]]})
        checksums = values["sha256"]
        if values["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer patchloom. Update patchloom.")
        if data != _to_json(checksums):
            raise ValueError("its checksum is not its own")
        return {plain_name(name, path): digests for name, digests in checksums.items()}
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Restore it. If the other files are intact, write it again: "
            f"patchloom verify {shlex.quote(str(folder))} --accept"
        ) from error


def accept(folder: Path, names: Iterable[str]) -> None:
    """Store the current checksums of files as the valid ones."""
    known = _checksums_or_none(folder)
    current = {name: _file_digest(folder / name) for name in names}
    _write(folder, known | {name: [digest] for name, digest in current.items() if digest})


def _checksums_or_none(folder: Path) -> Checksums:
    """Return the checksums, or none if they are damaged: the caller is about to write them again."""
    try:
        return read_checksums(folder)
    except CheckpointError:
        return {}


def _file_digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_plain(path, _MOST_ANY)).hexdigest()
    except OSError:
        return None


def _to_json(checksums: Any) -> bytes:
    values: dict[str, Any] = {"format": FORMAT, "sha256": checksums}
    return (json.dumps(values | {"own_sha256": own_sha256(values)}, indent=1) + "\n").encode()


def _write(folder: Path, checksums: Checksums) -> None:
    atomic_write(folder / FILE, _to_json(dict(sorted(checksums.items()))))
