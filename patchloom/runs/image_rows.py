"""Files of a run that hold one row per image: columns of numbers as safetensors, and what they are about as JSON."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from patchloom.runs.checksums import read_checked, write_checked
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import check_shape, parse_json

R = TypeVar("R")


def write_columns(folder: Path, file: str, columns: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Write a file of a run folder, whole or not at all; `about` has the version of its `format`."""
    # One key: safetensors writes several in an order that changes from file to file.
    write_checked(folder, {file: save(dict(columns), {"patchloom": json.dumps(about)})})


def read_columns(
    folder: Path,
    file: str,
    shape: Mapping[str, Any],
    newest: int,
    most_bytes: int,
    make: Callable[[dict[str, np.ndarray], Any], R],
) -> R:
    """What `make` makes of the columns and of what they are about, which has this `shape`.

    A CheckpointError where the file is damaged, where `make` refuses it (ValueError), or where its format is newer.
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
