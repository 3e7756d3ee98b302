"""What a user passes as data: one path, name or pattern, or several of them, as a list or in one string.

Python code may pass objects as well; `as_spec` gives them a name (`python_objects`).
"""

import glob
import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from patchloom_runtime.errors import UsageError, nearest
from patchloom_runtime.printable import printable

Spec = str | os.PathLike[str]


class PythonObjects(Protocol):
    """Python objects as data: a Dataset, an array, a table, a dict of splits."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


Data: TypeAlias = Spec | Sequence[Any] | PythonObjects  # what functions accept; see `python_objects` for the forms
SCHEMES = ("s3", "gs", "az", "https", "http")  # of data in buckets
MAX_NAMES = 100_000  # that a pattern with braces may expand to


def as_spec(data: Data) -> str:
    """Return one path or name as text, and Python objects as a `PythonData`, which is text that carries them."""
    return join_specs(split_specs(data))


def is_objects(data: Any) -> bool:
    """Return whether data are Python objects rather than a path, a name or a list of them."""
    several = data if isinstance(data, list | tuple) else [data]
    return not all(isinstance(one, str | os.PathLike) for one in several)


def is_url(spec: object) -> bool:
    """Return whether a spec names an object or a folder in a bucket."""
    scheme, separator, _ = str(spec).partition("://")
    return bool(separator) and scheme in SCHEMES


def split_specs(spec: Data) -> list[str]:
    """Return the files and folders in a list or in one string, quoted as for a shell: 'cats/ dogs/'.

    An existing path is one spec. A string is split only if all of its parts exist. Python objects are one spec.
    """
    if is_objects(spec):
        from patchloom.data.sources.python_objects import PythonData  # a command needs no numpy here

        return [PythonData(spec)]
    if isinstance(spec, list | tuple):
        if not spec:
            raise UsageError("no data; pass a folder, a file or the name of a dataset")
        return [os.fspath(one) for one in spec]
    whole = os.fspath(spec)  # type: ignore[arg-type]
    if " " not in whole or os.path.exists(os.path.expanduser(whole)):
        return [whole]
    try:
        parts = shlex.split(whole)
    except ValueError:
        return [whole]
    return parts if all(is_url(part) or os.path.exists(os.path.expanduser(part)) for part in parts) else [whole]


def join_specs(specs: Sequence[Spec]) -> str:
    """Join several files and folders to the string that `split_specs` takes apart. A single one is not quoted."""
    paths = [os.fspath(spec) for spec in specs]
    return shlex.join(paths) if len(paths) > 1 else paths[0]


def matching_paths(pattern: str) -> list[str]:
    """Return the files and folders that a pattern with *, ?, [] or {} matches; none for any other string."""
    if not any(letter in pattern for letter in "*?[{"):
        return []
    return [path for name in expand_braces(pattern) for path in sorted(glob.glob(name))]


def expand_braces(pattern: str) -> list[str]:
    """Expand a-{000..003}.tar to a-000.tar … a-003.tar, and {x,y} likewise."""
    parts = re.split(r"\{([^{}]+)\}", pattern)
    choices: list[Sequence[str]] = []
    for i, part in enumerate(parts):
        span = re.fullmatch(r"(\d+)\.\.(\d+)", part)
        if i % 2 == 0:
            choices.append([part])
        elif span:
            first, last = span.groups()
            numbers = range(int(first), int(last) + 1)
            _refuse_many(pattern, len(numbers))
            choices.append([f"{n:0{len(first)}d}" for n in numbers])
        else:
            choices.append(part.split(","))
    _refuse_many(pattern, math.prod(map(len, choices)))
    return ["".join(chosen) for chosen in product(*choices)]


def _refuse_many(pattern: str, names: int) -> None:
    if names > MAX_NAMES:
        raise UsageError(f"{printable(pattern)} stands for {names:,} files or more; expected at most {MAX_NAMES:,}")


def nearest_path(spec: str, names: Sequence[str]) -> str:
    """Suggest a similar entry of the last folder that exists, or one of the known `names`."""
    path = Path(os.path.expanduser(spec))
    while not os.path.isdir(path.parent):
        path = path.parent
    known = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        known = [printable(entry.name) for entry in entries]
    if os.sep not in spec:
        known += names
    return nearest(printable(path.name), known)
