"""A folder of a bucket and its copy on this machine: runs, indexes and artifacts are written there and uploaded.

    ~/.cache/patchloom/folders/3f9a…/flowers.index      or in $XDG_CACHE_HOME
    ~/.cache/patchloom/folders/3f9a…/objects.json       size and version of each object that the copy knows

`pull` downloads what differs, `push` uploads what changed. Objects are removed only where the caller says so.

An object that the copy does not know is created and never replaced: if two machines write one folder, the second gets
an error with the name instead of a mixture. (Files above 64 MiB, which take several requests, are not protected; the
files that make them count are.) Files that make others count, such as the manifest of a checkpoint, are uploaded after
them. Hidden files stay on this machine.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from patchloom.data.buckets.objects import ExistsError, ObjectFacts, delete, list_tree, put_version
from patchloom.data.buckets.remote_file import RemoteFile, read_exactly, remote_file
from patchloom.disk import (
    atomic_write,
    disk_errors,
    make_folder,
    one_at_a_time,
    open_new,
    plain_name,
    rename,
    temporary_path,
)
from patchloom_runtime.errors import UsageError
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

LAST = ("manifest.json", "checksums.json", "index.json", "artifact.json")  # each makes the files before it count
_KNOWN = "objects.json"
_KNOWN_SHAPE = {"size": int, "version": str, "changed_ns": int}
_SPAN_BYTES, _SPANS = 4 << 20, 8  # read at once of an object
_CREATED_BYTES = 64 << 20  # up to which an object is created in one request, which fails if it exists


class _Known(NamedTuple):
    """An object and its copy, when they were last equal."""

    size: int
    version: str
    changed_ns: int  # modification time of the copy


class Mirror:
    """A local copy of a folder in a bucket."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if self.url.startswith("http"):
            raise UsageError(
                f"{printable(url)}: a web server has no folders to write or list; use s3://, gs:// or az://"
            )
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._home = Path(cache, "patchloom", "folders", hashlib.blake2b(self.url.encode(), digest_size=10).hexdigest())
        self.folder = self._home / plain_name(self.url.rpartition("/")[2], Path(self.url))

    def names(self) -> list[str]:
        """Return the names of the objects in the bucket, relative to the folder."""
        return [facts.url[len(self.url) + 1 :] for facts in list_tree(self.url)]

    def pull(self, wanted: Callable[[str], bool] = lambda _: True) -> Path:
        """Make the copies of the wanted objects equal to these, and return the folder.

        A copy that this machine changed and did not upload yet stays, unless its object changed too.
        """
        with self._one_at_a_time(), disk_errors(self.folder):
            make_folder(self.folder)
            known = self._read_known()
            present = {name: facts for facts in list_tree(self.url) if (name := self._name(facts)) and wanted(name)}
            for name in [name for name in known if wanted(name) and name not in present]:
                if self._is_unchanged(name, known.pop(name)):
                    (self.folder / name).unlink(missing_ok=True)
            for name, facts in present.items():
                if name in known and known[name].version == facts.version and (self.folder / name).exists():
                    continue
                known[name] = self._download(name, facts)
                self._write_known(known)
            self._write_known(known)
        return self.folder

    def push(
        self,
        *,
        names: Sequence[str] | None = None,
        last: Sequence[str] = LAST,
        removable: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Upload the files that changed (of `names`, if given). Then remove removable objects whose copies are gone."""
        with self._one_at_a_time(), disk_errors(self.folder):
            known = self._read_known()
            files = sorted(self._files()) if names is None else list(names)
            for name in sorted(files, key=lambda name: _place(name, last)):
                with suppress(FileNotFoundError):  # removed meanwhile, such as an old checkpoint
                    if name not in known or not self._is_unchanged(name, known[name]):
                        known[name] = self._upload(name, known.get(name))
                        self._write_known(known)
            gone = filter(removable, known.keys() - set(files)) if names is None and files else ()
            for name in sorted(gone, key=lambda name: _place(name, last), reverse=True):
                delete(f"{self.url}/{name}")
                del known[name]
                self._write_known(known)

    def _one_at_a_time(self) -> AbstractContextManager[None]:
        with disk_errors(self._home):
            make_folder(self._home)
        return one_at_a_time(self._home / ".lock", f"copies {printable(self.url)}")

    def _name(self, facts: ObjectFacts) -> str:
        """Return the name of an object below the folder, "" for a hidden one. Raises CheckpointError for odd names."""
        name = facts.url[len(self.url) + 1 :]
        if any(part.startswith(".") and part.strip(".") for part in name.split("/")):
            return ""
        for part in name.split("/"):
            plain_name(part, Path(self.url))
        return name

    def _files(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in files:
                if not file.startswith("."):
                    yield Path(folder, file).relative_to(self.folder).as_posix()

    def _is_unchanged(self, name: str, known: _Known) -> bool:
        try:
            status = (self.folder / name).stat()
        except (OSError, ValueError):  # ValueError: a name that no file has
            return False
        return (status.st_size, status.st_mtime_ns) == (known.size, known.changed_ns)

    def _download(self, name: str, facts: ObjectFacts) -> _Known:
        file, target = RemoteFile(*facts), self.folder / name
        make_folder(target.parent)
        temporary = temporary_path(target)
        with open_new(temporary) as out:
            for start in range(0, file.size, _SPAN_BYTES * _SPANS):
                end = min(file.size, start + _SPAN_BYTES * _SPANS)
                spans = [(file, at, min(_SPAN_BYTES, end - at)) for at in range(start, end, _SPAN_BYTES)]
                for data in read_exactly(spans):
                    out.write(data)
        rename(temporary, target)
        return _Known(file.size, file.version, target.stat().st_mtime_ns)

    def _upload(self, name: str, known: _Known | None) -> _Known:
        path, url = self.folder / name, f"{self.url}/{name}"
        status = path.stat()
        is_small = status.st_size <= _CREATED_BYTES
        content = path.read_bytes() if is_small else path
        try:
            version = put_version(url, content, create=known is None and is_small)
        except ExistsError:
            existing = remote_file(url)
            if existing.size != status.st_size or existing.read(0, existing.size) != content:
                raise ExistsError(
                    f"{printable(url)} exists with other content and is not replaced: another machine writes this "
                    "folder, or it holds something else. Choose another --out."
                ) from None
            version = existing.version
        return _Known(status.st_size, version, status.st_mtime_ns)

    def _read_known(self) -> dict[str, _Known]:
        try:
            values = parse_json(read_plain(self._home / _KNOWN))
            check_shape(values, dict[str, list])
            for name, value in values.items():
                check_shape(dict(zip(_Known._fields, value, strict=True)), _KNOWN_SHAPE)
                if PurePath(name).anchor or ".." in PurePath(name).parts:
                    raise ValueError(f"{name!r} is not in the folder")
            return {name: _Known(*value) for name, value in values.items()}
        except (OSError, ValueError):
            return {}  # all is compared again

    def _write_known(self, known: dict[str, _Known]) -> None:
        atomic_write(self._home / _KNOWN, json.dumps(known).encode())


def _place(name: str, last: Sequence[str]) -> tuple[int, str]:
    """Return where a name stands in the order of uploading."""
    base = name.rpartition("/")[2]
    return (last.index(base) + 1 if base in last else 0), name
