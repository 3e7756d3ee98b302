"""`checksums.json` of a folder: what patchloom wrote into its other files, so that a changed byte is noticed.

It has one or two SHA-256 of each file. Before a file is replaced, the new checksum is written beside that of the file
as it lies there: whenever a writer is killed, what lies there is one of the two. A folder without this file, or with
none for a file in it, is of an earlier version and is read as it is. `patchloom verify RUN --accept` takes files that
somebody changed on purpose, such as names in `labels.json`, for right.
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
_MOST_ANY = 1 << 32  # of a file that is about to be replaced

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


def write_checked(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files of a folder, each whole or not at all, in the order given, so that `read_checked` knows them."""
    known = _for_writing(folder)
    new = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    there = {name: _digest_of(folder / name) for name in files}
    if all(new[name] == there[name] and known.get(name) == [new[name]] for name in files):
        return
    wanted = dict(known)
    for name in files:
        before = there[name]
        # Of a damaged file nothing is remembered.
        is_good = before is not None and before != new[name] and (name not in known or before in known[name])
        wanted[name] = [new[name], *([before] if is_good and before else [])]
    _write(folder, wanted)
    for name, data in files.items():
        if new[name] != there[name]:
            atomic_write(folder / name, data)


def read_checked(folder: Path, name: str, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file of a folder, `most` of them; a CheckpointError where they are not those that were written."""
    path, before = folder / name, _read_before.get() or _ReadBefore()
    if path in before.files:
        return before.files[path]
    try:
        data = read_plain(path, most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if folder not in before.checksums:
        before.checksums[folder] = read_checksums(folder)
    known = before.checksums[folder].get(name)
    if known is not None and hashlib.sha256(data).hexdigest() not in known:
        raise CheckpointError(
            f"{path} is damaged: its checksum is not the one in {FILE}. Restore it; if it was changed on purpose, say "
            f"so: patchloom verify {shlex.quote(str(folder))} --accept"
        )
    before.files[path] = data
    return data


def read_checksums(folder: Path) -> Checksums:
    """File → the checksums it may have; nothing where the folder is of a version that kept none."""
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
        found = values["sha256"]
        if values["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer patchloom. Update patchloom.")
        if data != _packed(found):
            raise ValueError("its checksum is not its own")
        return {plain_name(name, path): digests for name, digests in found.items()}
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Restore it; or, if the other files are right, write it again: "
            f"patchloom verify {shlex.quote(str(folder))} --accept"
        ) from error


def accept(folder: Path, names: Iterable[str]) -> None:
    """Take the files as they are for right."""
    known = _for_writing(folder)
    found = {name: _digest_of(folder / name) for name in names}
    _write(folder, known | {name: [digest] for name, digest in found.items() if digest})


def _for_writing(folder: Path) -> Checksums:
    """What is known; where that is damaged it is forgotten, as the files are about to be written again."""
    try:
        return read_checksums(folder)
    except CheckpointError:
        return {}


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_plain(path, _MOST_ANY)).hexdigest()
    except OSError:
        return None


def _packed(checksums: Any) -> bytes:
    values: dict[str, Any] = {"format": FORMAT, "sha256": checksums}
    return (json.dumps(values | {"own_sha256": own_sha256(values)}, indent=1) + "\n").encode()


def _write(folder: Path, checksums: Checksums) -> None:
    atomic_write(folder / FILE, _packed(dict(sorted(checksums.items()))))
