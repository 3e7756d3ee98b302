"""`data.json` of a run's folder: which pictures it trains and validates on."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from patchloom.data.sets import Splits
from patchloom.data.survey import Survey
from patchloom.errors import CheckpointError

RECORD = "data.json"


@dataclass(frozen=True)
class DataRecord:
    """Which pictures a run trains and validates on."""

    classes: tuple[str, ...]
    train: int  # pictures
    val: int
    rows: str  # digest of their names and classes, in order
    contents: str  # digest of their files; '' where there are none


def record_of(splits: Splits, seen: Survey | None = None) -> DataRecord:
    """The record of a run on `splits`, of which `seen` is the scan."""
    rows = hashlib.sha256()
    for pictures in (splits.train, splits.val):
        for i, label in enumerate(pictures.labels.tolist()):
            line = f"{pictures.key(i)}\0{'' if label < 0 else pictures.classes.names[label]}\n"
            rows.update(line.encode("utf-8", "surrogateescape"))
        rows.update(b"\0")
    of_files = b"".join(digest for split in ("train", "val") for digest in seen.digests(split)) if seen else b""
    contents = hashlib.sha256(of_files).hexdigest() if seen else ""
    return DataRecord(tuple(splits.classes.names), len(splits.train), len(splits.val), rows.hexdigest(), contents)


def read_record(folder: Path) -> DataRecord | None:
    """What the run in `folder` began with; None where it kept none, a CheckpointError where it is damaged."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_bytes())
        return DataRecord(**(values | {"classes": tuple(values["classes"])}))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
