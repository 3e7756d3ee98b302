"""Atomic writing, locks and disk errors. A reader finds the old file or the new one, always complete.

A folder may be writable by others. So a temporary file gets an unguessable name and is created, never opened if
something is there already; links are not followed. The name also tells which process on which system created it, so
that the next writer removes what killed writers left, but nothing that a running process writes.
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

# System, process, its start time, random digits; earlier versions had only the last.
_LEFTOVER = re.compile(r"\..+?\.(?:([0-9a-f]{8})-([0-9]{1,9})-([0-9]{1,19})\.)?[0-9a-f]{16}\.tmp", re.DOTALL)
_PROCESS = re.compile(r"([0-9a-f]{8})-([0-9]{1,9})-([0-9]{1,19})")  # from `this_process`
# Age at which a leftover is removed whose process cannot be looked up: a running writer changes its file sooner.
_UNNAMED_AFTER_S, _ELSEWHERE_AFTER_S = 600.0, 86_400.0
_ROOM_BYTES = 1 << 20  # a disk with less space counts as full
_swept: set[str] = set()  # folders in which this process has removed leftovers
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_EXCLUSIVE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a temporary folder that is removed at the end. Raises ResourceError with its path if it is full."""
    place = Path(tempfile.gettempdir())
    # The inner check runs before the folder is removed, while the disk is still full.
    with disk_errors(place), tempfile.TemporaryDirectory() as folder, disk_errors(place):
        yield Path(folder)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors while writing `path` into ResourceError (disk full or failing) or UsageError (anything else)."""
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
        # torch, onnxruntime and faiss write files themselves and raise errors of their own.
        if isinstance(error, PatchloomError) or not _is_full(path):
            raise
        raise ResourceError(full) from error


def _is_full(path: Path) -> bool:
    """Return whether the file system of `path` has no room for a small file."""
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    space = os.statvfs(existing)
    return space.f_bavail * space.f_frsize < _ROOM_BYTES


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash, readers find the old or the new one, complete."""
    with atomic_file(path) as temporary:
        write_new(temporary, data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to. It is renamed to `path` at the end."""
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
    """Return an unguessable hidden path in the same folder. The first call per folder removes leftovers."""
    folder = os.path.abspath(path.parent)
    if folder not in _swept:
        _swept.add(folder)
        with suppress(OSError):
            remove_leftovers(path.parent)
    # Shorten the name: with the suffix it must still be valid for the file system.
    return path.with_name(f".{path.name[:40]}.{this_process()}.{secrets.token_hex(8)}.tmp")


def this_process() -> str:
    """Return an id of this process that no other process has, also on other systems and after a restart."""
    process = os.getpid()
    return f"{_system()}-{process}-{_start_time(process) or 0}"


def process_is_running(process: str | int) -> bool | None:
    """Return whether a process is running, from `this_process` or its number; None if it is of another system."""
    if isinstance(process, int):
        return _is_running(process, _start_time(process) or 0) and _start_time(process) != 0
    match = _PROCESS.fullmatch(process)
    if match is None:
        return False
    return _is_running(int(match[2]), int(match[3])) if match[1] == _system() else None


@cache
def _system() -> str:
    """Return an id of this system since its start, and of its process namespace. Others may share the file system."""
    parts = [os.uname().nodename]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _start_time(process: int) -> int | None:
    """Return the start time of a process in ticks; 0 for a zombie, None if it cannot be determined."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state == b"Z" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def _is_running(process: int, started: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return _start_time(process) in (started, None)


def open_new(path: Path) -> FileIO:
    """Create a file for writing. Raises OSError if anything is at `path` already, even a broken link."""
    return os.fdopen(os.open(path, os.O_WRONLY | _EXCLUSIVE, 0o666), "wb", buffering=0)


def write_new(path: Path, data: bytes) -> str:
    """Write and sync a new file. Returns its SHA-256."""
    with open_new(path) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync them, so that synced files survive a power cut."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        with suppress(PermissionError):  # a parent that is writable but not readable
            sync_folder(folder.parent)


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder, before the folder is renamed to its final path."""
    for path, _, names in os.walk(folder):
        for name in names:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left: files and folders with names from `temporary_path`.

    Leftovers of this system are removed once their process has ended, others once they are old.
    """
    with os.scandir(folder) as entries:
        names = [match for entry in entries if (match := _LEFTOVER.fullmatch(entry.name))]
    for name in names:
        path, (system, process, started) = folder / name[0], name.groups()
        with suppress(OSError):
            facts = os.lstat(path)
            is_file, is_folder = stat.S_ISREG(facts.st_mode), stat.S_ISDIR(facts.st_mode)
            if system == _system():
                is_leftover = not _is_running(int(process), int(started))
            else:
                age = time.time() - facts.st_mtime
                is_leftover = age > (_UNNAMED_AFTER_S if system is None and is_file else _ELSEWHERE_AFTER_S)
            if is_leftover and is_file:
                os.unlink(path)
            elif is_leftover and is_folder:
                shutil.rmtree(path)


def open_lock(path: Path) -> TextIO:
    """Open or create a lock file. Raises OSError if it is a link or not a regular file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(descriptor, "r+", errors="replace")


@contextmanager
def one_at_a_time(path: Path, does: str) -> Iterator[None]:
    """Hold the lock at `path`. While waiting, print on stderr which process holds it and what it `does`."""
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
    """Return a file name read from untrusted data. Raises CheckpointError unless it is a plain name."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise CheckpointError(f"{where} is damaged: it names a file {name!r}, expected a plain name of its own folder.")
    return name


class Lock:
    """The `.lock` of a folder, held by this process until it is released or ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open_file: FileIO | None = None  # a file of the folder, closed with the lock
        self._file: FileIO | None = None
        self._folder_descriptor = -1

    def take(self) -> None:
        """Take the lock. Raises UsageError with the process that holds it."""
        path = self.folder / ".lock"
        with disk_errors(self.folder):
            make_folder(self.folder)
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise UsageError(
                        f"{path} is a link or not a file; patchloom did not create it. Remove it."
                    ) from error
                raise
        # A worker process would hold the lock for seconds after the run was killed.
        os.register_at_fork(after_in_child=file.close)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise UsageError(f"{path} is not a file; patchloom did not create it. Remove it.")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read(32).decode("ascii", "replace").strip() or "?"
            file.close()
            raise UsageError(
                f"{self.folder} is in use by process {holder}. Wait for it, stop it, or use another folder."
            ) from error
        try:
            with disk_errors(self.folder):
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), str(os.getpid()).encode())
                # Held open, so that its inode number, by which it is recognized, is not reused.
                descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                remove_leftovers(self.folder)
        except BaseException:
            file.close()
            raise
        self._let_go()
        self._file, self._folder_descriptor = file, descriptor

    def is_gone(self) -> bool:
        """Return whether the folder was removed or renamed since the lock was taken."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._folder_descriptor))
        except OSError:
            return True

    def release(self) -> None:
        """Release the lock."""
        self._let_go()
        if self.open_file:
            self.open_file.close()

    def _let_go(self) -> None:
        if self._file:
            self._file.close()
            os.close(self._folder_descriptor)
            self._file, self._folder_descriptor = None, -1


@contextmanager
def locked(folder: Path) -> Iterator[Lock]:
    """Hold the lock of a folder. Raises UsageError with the process that holds it."""
    lock = Lock(folder)
    lock.take()
    try:
        yield lock
    finally:
        lock.release()
