"""Files of a folder, written so that whoever reads them finds the old or the new one, whole; and what the disk refuses.

A folder may be a stranger's. So a temporary file has a name nobody can guess and is made, never opened where something
lies already; links are not followed. The name also says which process on which system made it: what killed writers left
is removed by the next one, and what a living process writes is not.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TextIO

from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError

# System, process, when it began, random digits; earlier versions had the last alone.
_LEFTOVER = re.compile(r"\..+?\.(?:([0-9a-f]{8})-([0-9]{1,9})-([0-9]{1,19})\.)?[0-9a-f]{16}\.tmp", re.DOTALL)
# Of a writer that is still at work, a file whose process cannot be looked up was changed since.
_UNNAMED_AFTER_S, _ELSEWHERE_AFTER_S = 600.0, 86_400.0
_ROOM_BYTES = 1 << 20  # a writer that failed has left less
_swept: set[str] = set()  # folders where this process has removed leftovers
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_EXCLUSIVE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder of the system's for what is removed at the end; a ResourceError names it where it is full."""
    place = Path(tempfile.gettempdir())
    # Once before the folder is removed, while what fills it is there.
    with disk_errors(place), tempfile.TemporaryDirectory() as folder, disk_errors(place):
        yield Path(folder)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Writing `path`: a full disk is a ResourceError, anything else the system refuses a UsageError."""
    full = f"There is no space left to write {path}. What was saved before is intact: free some space and run again."
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(full) from error
        if error.errno == errno.EIO:
            raise ResourceError(
                f"{path} cannot be written: the disk failed ({error.strerror}). What was saved before is intact: "
                "check the disk, or choose another folder."
            ) from error
        raise UsageError(
            f"{path} cannot be written: {error.strerror}. Choose a folder that you can write to."
        ) from error
    except Exception as error:
        # Libraries that write by themselves have errors of their own for it: torch, onnxruntime, faiss.
        if isinstance(error, PatchloomError) or not _is_full(path):
            raise
        raise ResourceError(full) from error


def _is_full(path: Path) -> bool:
    """Whether the file system of `path` has no room for as much as a small file."""
    existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
    space = os.statvfs(existing)
    return space.f_bavail * space.f_frsize < _ROOM_BYTES


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that whoever reads it, after whatever happens, finds the old or the new one, whole."""
    with atomic_file(path) as temporary:
        write_new(temporary, data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write a new file at, for those who need a stream or a path; it becomes `path` in the end."""
    temporary = temporary_path(path)
    with disk_errors(path):
        make_folder(path.parent)
        try:
            yield temporary
            os.replace(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def temporary_path(path: Path) -> Path:
    """A hidden name in the same folder that nobody can guess; the first one there removes what killed writers left."""
    folder = os.path.abspath(path.parent)
    if folder not in _swept:
        _swept.add(folder)
        with suppress(OSError):
            remove_leftovers(path.parent)
    process = os.getpid()
    owner = f"{_system()}-{process}-{_began(process) or 0}"
    # Of a long name only the beginning: with what is added it must still be a name the file system takes.
    return path.with_name(f".{path.name[:40]}.{owner}.{secrets.token_hex(8)}.tmp")


@cache
def _system() -> str:
    """Digits for this system since it started, and its numbering of processes; others may share the file system."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _began(process: int) -> int | None:
    """When a process began, in ticks; 0 if it has ended and nobody has asked how, None where that cannot be told."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state == b"Z" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def _is_running(process: int, began: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return _began(process) in (began, None)


def open_new(path: Path) -> FileIO:
    """A new file to write to; an OSError where anything lies there already, be it a link that leads nowhere."""
    return os.fdopen(os.open(path, os.O_WRONLY | _EXCLUSIVE, 0o666), "wb", buffering=0)


def write_new(path: Path, data: bytes) -> str:
    """Write a new file and sync it; returns the SHA-256."""
    with open_new(path) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, so that no power cut takes away what is synced in it."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # one that may be written to and not read
            sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Have everything below a folder on disk, whoever wrote it: before the folder is renamed to where it counts."""
    for path, _, names in os.walk(folder):
        for name in names:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left: plain files and folders with the names of `temporary_beside`.

    Those of this system go as soon as their process has ended, others once they are old.
    """
    with os.scandir(folder) as entries:
        names = [match for entry in entries if (match := _LEFTOVER.fullmatch(entry.name))]
    for name in names:
        path, (system, process, began) = folder / name[0], name.groups()
        with suppress(OSError):
            facts = os.lstat(path)
            is_file, is_folder = stat.S_ISREG(facts.st_mode), stat.S_ISDIR(facts.st_mode)
            if system == _system():
                is_left = not _is_running(int(process), int(began))
            else:
                age = time.time() - facts.st_mtime
                is_left = age > (_UNNAMED_AFTER_S if system is None and is_file else _ELSEWHERE_AFTER_S)
            if is_left and is_file:
                os.unlink(path)
            elif is_left and is_folder:
                shutil.rmtree(path)


def open_lock(path: Path) -> TextIO:
    """The file of a lock, made where there is none; an OSError where it is a link or no file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(descriptor, "r+", errors="replace")


@contextmanager
def one_at_a_time(path: Path, does: str) -> Iterator[None]:
    """Hold the lock at `path`; a process that has to wait for another says on stderr which one, and what it `does`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for process {file.read(32).strip() or '?'}, which {does}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def plain_name(name: object, where: Path) -> str:
    """A name that stands in a file of a folder: it must be one in that folder, whatever a stranger wrote there."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise CheckpointError(f"{where} is damaged: it names a file {name!r}, expected a plain name of its own folder.")
    return name


class Lock:
    """The `.lock` of a folder, held by this process until it is released or ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept_open: FileIO | None = None  # a file of the folder, closed with the lock
        self._file: FileIO | None = None
        self._folder_descriptor = -1

    def take(self) -> None:
        """Keep the folder for this process; a UsageError names the process that has it already."""
        path = self.folder / ".lock"
        with disk_errors(self.folder):
            make_folder(self.folder)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise UsageError(f"{path} is a link or no file; patchloom did not make it. Remove it.") from error
                raise
        # A worker process would keep the lock, for seconds, after the run itself was killed.
        os.register_at_fork(after_in_child=file.close)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise UsageError(f"{path} is no file; patchloom did not make it. Remove it.")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read(32).decode("ascii", "replace").strip() or "?"
            file.close()
            raise UsageError(
                f"{self.folder} is in use by process {holder}. Wait for it, stop it, or give another folder."
            ) from error
        try:
            with disk_errors(self.folder):
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), str(os.getpid()).encode())
                # Open, so that its number is not given to another folder while this one is remembered by it.
                descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                remove_leftovers(self.folder)
        except BaseException:
            file.close()
            raise
        self._let_go()
        self._file, self._folder_descriptor = file, descriptor

    def is_gone(self) -> bool:
        """Whether the folder was removed or renamed since; one in its place is another."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._folder_descriptor))
        except OSError:
            return True

    def release(self) -> None:
        """Let others have the folder."""
        self._let_go()
        if self.kept_open:
            self.kept_open.close()

    def _let_go(self) -> None:
        if self._file:
            self._file.close()
            os.close(self._folder_descriptor)
            self._file, self._folder_descriptor = None, -1


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Keep the folder for this run; a UsageError names the process that has it already."""
    lock = Lock(folder)
    lock.take()
    try:
        yield lock
    finally:
        lock.release()
