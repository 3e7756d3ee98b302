"""Parse and format the files of a run: JSON of a known shape, and columns with one row per image.

Every reader raises CheckpointError if a file is missing, damaged or written by a newer version.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from patchloom.runs.checksums import read_checked, write_checked
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, parse_json, read_plain

FORMAT = 1
R = TypeVar("R")


def read_whole(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the contents of a file of 1 to `most` bytes."""
    try:
        data = read_plain(path, most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not data:
        raise CheckpointError(f"{path} is empty.")
    return data


def read_run_file(folder: Path, name: str) -> bytes:
    """Return the contents of a non-empty file that matches its checksum."""
    data = read_checked(folder, name)
    if not data:
        raise CheckpointError(f"{folder / name} is empty.")
    return data


def json_bytes(values: Any) -> bytes:
    """Return a value as indented JSON."""
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def parsed(data: bytes, path: Path, shape: Any) -> Any:
    """Parse the JSON of the file `path`, whose value must have a shape (`untrusted.check_shape`)."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error
    refuse_shape(value, shape, path)
    return value


def refuse_shape(value: Any, shape: Any, path: Path) -> None:
    """Raise CheckpointError if the value of the file `path` has another shape."""
    try:
        check_shape(value, shape)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def refuse_format(values: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a newer version wrote the file `path`."""
    version = values["format"]
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, written by a newer patchloom; this version reads up to {FORMAT}. "
            "Update patchloom."
        )


def write_columns(folder: Path, file: str, columns: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write arrays with one row per image as safetensors. `about` is stored in the header; its `format` is required."""
    # A single key, because safetensors writes several in an order that differs from file to file.
    write_checked(folder, {file: save(dict(columns), {"patchloom": json.dumps(about)})})


def read_columns(
    folder: Path,
    file: str,
    shape: Mapping[str, Any],
    newest: int,
    most_bytes: int,
    make: Callable[[dict[str, np.ndarray], Any], R],
) -> R:
    """Return `make(columns, about)` of a file that `write_columns` wrote.

    `about` must have this `shape`, and a format of at most `newest`. `make` raises ValueError if the columns are wrong.
    """
    path = folder / file
    try:
        data = read_checked(folder, file, most_bytes)
        columns = load(data)
        header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
        check_shape(header, {"__metadata__": {"patchloom": str}})
        about = parse_json(header["__metadata__"]["patchloom"])
        check_shape(about, shape)
        if about["format"] > newest:
            raise CheckpointError(f"{path} was written by a newer patchloom. Update patchloom.")
        return make(columns, about)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Evaluate the run on its data instead.") from error
