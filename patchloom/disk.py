"""Atomic writing, locks and disk errors. A reader finds the old file or the new one, always complete.

A folder may be writable by others. So a temporary file gets an unguessable name and is created, never opened if
something is there already; links are not followed. The name also tells which process on which system created it, so
that the next writer removes what killed writers left, but nothing that a running process writes.
"""

import errno
import hashlib
import os
import platform
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

from patchloom.machine import process_exists
from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError
from patchloom_runtime.untrusted import open_no_link

# System, process, its start time, random digits; earlier versions had only the last.
_LEFTOVER = re.compile(r"\..+?\.(?:([0-9a-f]{8})-([0-9]{1,9})-([0-9]{1,19})\.)?[0-9a-f]{16}\.tmp", re.DOTALL)
_PROCESS = re.compile(r"([0-9a-f]{8})-([0-9]{1,9})-([0-9]{1,19})")  # from `this_process`
# Age at which a leftover is removed whose process cannot be looked up: a running writer changes its file sooner.
_UNNAMED_AFTER_S, _ELSEWHERE_AFTER_S = 600.0, 86_400.0
_ROOM_BYTES = 1 << 20  # a disk with less space counts as full
_swept: set[str] = set()  # folders in which this process has removed leftovers
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_FOLDER = getattr(os, "O_DIRECTORY", None)  # None on Windows, which opens no folders
_ATTEMPTS, _PAUSE_S = 20, 0.1  # to rename a file that another program has open, on Windows
_IN_USE = (5, 32)  # Windows' error numbers for that
_HOLDER_AT = 1  # Windows lets no other process read the first byte of a lock file while it is locked


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
        in_use = getattr(error, "winerror", None) in _IN_USE
        advice = "Close the program that has it open, or choose" if in_use else "Choose"
        raise UsageError(
            f"{path} cannot be written: {error.strerror}. {advice} a folder that you can write to."
        ) from error
    except Exception as error:
        # torch, onnxruntime and faiss write files themselves and raise errors of their own.
        if isinstance(error, PatchloomError) or not _is_full(path):
            raise
        raise ResourceError(full) from error


def _is_full(path: Path) -> bool:
    """Return whether the file system of `path` has no room for a small file."""
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    return shutil.disk_usage(existing).free < _ROOM_BYTES


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
            rename(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder to `target`, which may be a file or an empty folder.

    Windows replaces no folder, and no file that a program such as a virus scanner has open: this waits up to two
    seconds for it.
    """
    if sys.platform == "win32" and source.is_dir() and target.is_dir():
        target.rmdir()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if sys.platform != "win32" or attempt == _ATTEMPTS:
                raise
            time.sleep(_PAUSE_S)


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
    parts = [platform.node()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text("ascii"), os.readlink("/proc/self/ns/pid")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def _start_time(process: int) -> int | None:
    """Return the start time of a process in ticks; 0 for a zombie, None if it cannot be determined."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state == b"Z" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return None


def _is_running(process: int, started: int) -> bool:
    return process_exists(process) and _start_time(process) in (started, None)


def open_new(path: Path) -> FileIO:
    """Create a file for writing. Raises OSError if anything is at `path` already, even a broken link."""
    return os.fdopen(open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", buffering=0)


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
            sync_file(Path(path, name))
        sync_folder(Path(path))


def sync_file(path: Path) -> None:
    """Wait until the contents of a file are on disk."""
    with open(path, "r+b" if sys.platform == "win32" else "rb") as file:  # Windows syncs no file that is read only
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder. Windows does so itself."""
    if _FOLDER is None:
        return
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


def open_lock(path: Path) -> FileIO:
    """Open or create a lock file. Raises OSError if it is a link or not a regular file."""
    descriptor = open_no_link(path, os.O_RDWR | os.O_CREAT)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return os.fdopen(descriptor, "r+b", buffering=0)


def hold_lock(file: FileIO, *, wait: bool) -> bool:
    """Lock an open file until it is closed or this process ends, and write the number of this process into it.

    Returns False if another process holds the lock, unless `wait` is set.
    """
    from filelock import lock_descriptor  # its import takes as long as that of all of this package's `--help`

    if not lock_descriptor(file.fileno(), blocking=wait):
        return False
    file.truncate(0)
    file.seek(0)
    file.write(f"{os.getpid():>{_HOLDER_AT + 10}}".encode())
    return True


def lock_holder(file: FileIO) -> str:
    """Return the number of the process that holds a lock file, or had it last; "?" if it is not known."""
    try:
        file.seek(_HOLDER_AT)
        return file.read(32).decode("ascii", "replace").strip() or "?"
    except OSError:
        return "?"


@contextmanager
def one_at_a_time(path: Path, does: str) -> Iterator[None]:
    """Hold the lock at `path`. While waiting, print on stderr which process holds it and what it `does`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        if not hold_lock(file, wait=False):
            print(f"waiting for process {lock_holder(file)}, which {does}", file=sys.stderr, flush=True)
            hold_lock(file, wait=True)
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
                file = open_lock(path)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EINVAL):
                    raise UsageError(
                        f"{path} is a link or not a file; patchloom did not create it. Remove it."
                    ) from error
                raise
            if hasattr(os, "register_at_fork"):
                # A worker process would hold the lock for seconds after the run was killed.
                os.register_at_fork(after_in_child=file.close)
            try:
                if not hold_lock(file, wait=False):
                    raise UsageError(
                        f"{self.folder} is in use by process {lock_holder(file)}. Wait for it, stop it, or use another "
                        "folder."
                    )
                # Held open, so that its inode number, by which it is recognized, is not reused.
                descriptor = -1 if _FOLDER is None else os.open(self.folder, os.O_RDONLY | _FOLDER)
                remove_leftovers(self.folder)
            except BaseException:
                file.close()
                raise
        self._let_go()
        self._file, self._folder_descriptor = file, descriptor

    def is_gone(self) -> bool:
        """Return whether the folder was removed or renamed since the lock was taken."""
        if _FOLDER is None:
            return False  # Windows refuses both while the lock file is open
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self._folder_descriptor))
        except OSError:
            return True

    def release(self) -> None:
        self._let_go()
        if self.open_file:
            self.open_file.close()

    def _let_go(self) -> None:
        if self._file:
            self._file.close()
            if self._folder_descriptor >= 0:
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
