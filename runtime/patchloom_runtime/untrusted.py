"""Reading files from untrusted sources: only regular files of bounded size, and JSON values of a known shape."""

import ctypes
import errno
import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from io import FileIO
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin

from patchloom_runtime.errors import ResourceError

MOST_BYTES = 64 << 20  # of a file with settings, names or records
_MOST_DEPTH = 64
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # temporary shortages of the system
ADVICE = "Allow more open files with ulimit -n, or use fewer --workers, and run the command again."

# 0 on Windows, which lacks them. Without O_NONBLOCK, opening a pipe waits for a writer.
_NO_LINK, _NO_WAIT = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | _NO_LINK


def open_plain(path: str | os.PathLike[str], *, links: bool = True) -> FileIO:
    """Open a regular file for reading. Raises OSError for pipes, devices and folders, without waiting for them.

    Raises ResourceError if too many files are open. With `links=False`, raises OSError if the file or a folder above it
    is a symbolic link; the path must then be absolute, as `os.path.realpath` returns it.
    """
    name = os.fspath(path)
    if "\0" in name:
        raise OSError(errno.EINVAL, "its name contains a NUL character", name)
    try:
        descriptor = os.open(name, os.O_RDONLY | _NO_WAIT) if links else _open_without_links(name)
    except OSError as error:
        if error.errno in SCARCE:  # says nothing about the file
            raise ResourceError(f"{name} cannot be read now: {error.strerror}. {ADVICE}") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", name)
    return os.fdopen(descriptor, "rb", buffering=0)


def open_no_link(path: str | os.PathLike[str], flags: int, folder: int | None = None) -> int:
    """Open a file as `os.open` does, but raise OSError for a symbolic link, and do not wait for a pipe."""
    if not _NO_LINK and os.path.islink(path):
        raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path))
    return os.open(path, flags | _NO_LINK | _NO_WAIT, 0o666, dir_fd=folder)


def _open_without_links(path: str) -> int:
    """Open one folder after another, so that none can be replaced by a link in between."""
    if not _NO_LINK:  # Windows can do no more than compare
        if os.path.realpath(path) != path:
            raise OSError(errno.ELOOP, "it is behind a symbolic link", path)
        return os.open(path, os.O_RDONLY)
    *folders, name = path.removeprefix(os.sep).split(os.sep)
    folder = os.open(os.sep, _FOLDER)
    try:
        for each in folders:
            inner = os.open(each, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return open_no_link(name, os.O_RDONLY, folder)
    finally:
        os.close(folder)


def path_within(path: str, roots: Sequence[str]) -> str | None:
    """Return the real path of an untrusted path if it is one of `roots` or inside one, else None.

    A relative path is resolved against each root. Open the result with `links=False`.
    """
    try:
        folders = [os.path.realpath(root) for root in roots]
        for folder in folders:
            real = os.path.realpath(os.path.join(folder, path))
            if any(real == root or real.startswith(os.path.join(root, "")) for root in folders):
                return real
    except ValueError:  # a NUL character, or an unpaired surrogate
        pass
    return None


def read_plain(path: str | os.PathLike[str], most: int = MOST_BYTES, *, links: bool = True) -> bytes:
    """Read a regular file. Raises OSError as `open_plain` does, and if it has more than `most` bytes."""
    memory = memory_bytes()
    with open_plain(path, links=links) as file:
        size = os.fstat(file.fileno()).st_size
        if memory < size <= most:  # a sparse file can have any size
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, more than this machine's memory of {memory:,}", os.fspath(path)
            )
        data = file.read() if 0 < size <= most else b""
        while size == 0 and len(data) <= most and (more := file.read(1 << 16)):  # files of /proc have size 0
            data += more
    size = max(size, len(data))
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, expected at most {most:,}", os.fspath(path))
    return data


def memory_bytes(control_groups: str = "/sys/fs/cgroup") -> int:
    """Return the memory of this machine, or the limit of its control group (container) if that is lower."""
    limits = [installed_bytes()]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup versions 2 and 1
        try:
            with open(os.path.join(control_groups, name), encoding="ascii") as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(limits)


def installed_bytes() -> int:
    """Return the memory of this machine."""
    if sys.platform != "win32":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size and the load, then total bytes, free bytes, …
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)
    return int(status[1])


def parse_json(data: bytes | str, most: int = MOST_BYTES, **options: Any) -> Any:
    """Parse JSON. Raises ValueError with a one-line message. `options` are passed to json.loads."""
    if len(data) > most:
        raise ValueError(f"it has {len(data):,} characters, expected at most {most:,}")
    try:
        value = json.loads(data, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not text") from error
    if _depth_exceeds(value, _MOST_DEPTH):
        raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
    return value


def parse_number(text: str) -> float:
    """Parse a finite number in plain digits. Raises ValueError for what else `float` accepts: 1_0, ٣, nan."""
    if not text.isascii() or "_" in text or not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:60]!r} is not a plain number")
    return number


def own_sha256(values: Mapping[str, Any]) -> str:
    """Return the checksum of a JSON object that stores it as `own_sha256`: of all other fields."""
    others = {name: value for name, value in values.items() if name != "own_sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def check_shape(value: Any, shape: Any, where: str = "") -> None:
    """Raise ValueError if a value read from JSON does not have the expected shape.

    A shape is a type (`int`, `str`, `list[str]`, `dict[str, int]`, `int | None`), `Any`, or a dict of field → shape, in
    which a field that ends with a question mark is optional; further fields are ignored. An int is also a float, a bool
    is neither; floats are finite and integers have at most 64 bits.
    """
    if isinstance(shape, Mapping):
        _expect(isinstance(value, dict), value, "an object with fields", where)
        for name, inner in shape.items():
            field = name.removesuffix("?")
            if field in value:
                check_shape(value[field], inner, f"{where}.{field}" if where else field)
            elif field == name:
                raise ValueError(f"{where + ' has' if where else 'it has'} no field {field!r}")
        return
    if not _fits(value, shape):
        _expect(False, value, _named(shape), where)


def _expect(holds: bool, value: Any, expected: str, where: str) -> None:
    if not holds:
        text = json.dumps(value, default=str)
        text = text if len(text) <= 60 else text[:57] + "..."
        raise ValueError(f"{where or 'it'} is {text}, expected {expected}")


def _fits(value: Any, shape: Any) -> bool:
    if shape is Any:
        return True
    if isinstance(shape, UnionType):
        return any(_fits(value, one) for one in get_args(shape))
    if isinstance(shape, GenericAlias):
        inner = get_args(shape)[-1]
        if get_origin(shape) is dict:
            return isinstance(value, dict) and all(_fits(one, inner) for one in value.values())
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    if shape is None or shape is type(None):
        return value is None
    if shape in (int, float):
        # A float may be written as an integer in JSON, with any number of digits.
        is_one = type(value) is int or (shape is float and type(value) is float)
        return is_one and abs(value) < (math.inf if type(value) is float else 1 << 63)
    return type(value) is shape


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _named(shape: Any) -> str:
    if isinstance(shape, UnionType):
        return " or ".join(_named(one) for one in get_args(shape))
    if isinstance(shape, GenericAlias):
        inner = _named(get_args(shape)[-1])
        return f"a list, each {inner}" if get_origin(shape) is list else f"an object whose values are each {inner}"
    return "null" if shape is None or shape is type(None) else _NAMES.get(shape, str(shape))


def _depth_exceeds(value: Any, most: int) -> bool:
    level: Sequence[Any] = [value]
    for _ in range(most):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
