"""Files of a run as bytes and values: whole, of a known format and shape, or a CheckpointError."""

import json
from pathlib import Path
from typing import Any

from patchloom.runs.checksums import read_checked
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, parse_json, read_plain

FORMAT = 1


def json_bytes(values: Any) -> bytes:
    """The text form of a value."""
    return (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()


def read_whole(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file that is there and not empty."""
    try:
        data = read_plain(path, most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not data:
        raise CheckpointError(f"{path} is empty.")
    return data


def read_run_file(folder: Path, name: str) -> bytes:
    """The same, compared with its checksum."""
    data = read_checked(folder, name)
    if not data:
        raise CheckpointError(f"{folder / name} is empty.")
    return data


def parsed(data: bytes, path: Path, shape: Any) -> Any:
    """The value of some JSON, of a shape (`foreign.check_shape`)."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error
    refuse_shape(value, shape, path)
    return value


def refuse_shape(value: Any, shape: Any, path: Path) -> None:
    """A CheckpointError where a value is of another shape."""
    try:
        check_shape(value, shape)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error


def refuse_format(values: dict[str, Any], path: Path) -> None:
    """A CheckpointError where a later version wrote it."""
    found = values["format"]
    if found > FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, written by a newer patchloom; this one reads up to {FORMAT}. Update patchloom."
        )
