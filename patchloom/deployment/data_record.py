"""`data.json` of a run's folder: which pictures it trains and validates on, and what it started from."""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from patchloom.checkpoint import read_run_files
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sets import PictureSet, Splits
from patchloom.data.source import find_source, split_source
from patchloom.data.survey import Survey
from patchloom.deployment.run_record import data_files
from patchloom.engine.checksums import read_checked
from patchloom.errors import CheckpointError
from patchloom.foreign import check_shape, parse_json

RECORD = "data.json"
_SHAPE = {
    "classes": list[str],
    "train": int,
    "val": int,
    "rows": str,
    "contents": str,
    "place?": str | None,
    "init?": str | None,
    "init_weights?": str,
}


@dataclass(frozen=True)
class DataRecord:
    """Which pictures a run trains and validates on, where they lie, and what its weights started from."""

    classes: tuple[str, ...]
    train: int  # pictures
    val: int
    rows: str  # digest of their names and classes, in order
    contents: str  # digest of their files; '' where there are none
    place: str | None = None  # absolute path or spec of the data; None where it was not kept
    init: str | None = None  # what --init named, '' for nothing; None where it was not kept
    init_weights: str = ""  # digest of them

    def is_of(self, other: "DataRecord") -> bool:
        """Whether both are of one set of data: at one place, or the same pictures where they have moved to."""
        same = (self.rows, self.contents) == (other.rows, other.contents)
        return same or (self.place is not None and self.place == other.place)


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
    if not os.path.lexists(file):
        return None
    try:
        values = parse_json(read_checked(folder, RECORD).decode("utf-8", "surrogateescape"))
        check_shape(values, _SHAPE)
        known = DataRecord.__dataclass_fields__
        values = {name: value for name, value in values.items() if name in known}  # a newer one may have more
        return DataRecord(**(values | {"classes": tuple(values["classes"])}))
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}. Restore it, or remove it.") from error


def held_out_of(folder: Path, data: str, given: Reading = AS_IT_IS) -> PictureSet | None:
    """The pictures of `data` that the run in `folder` did not train on, where patchloom made its val split.

    None where the data have a val split of their own, or are not, picture by picture, those of the run.
    """
    try:
        record, files = read_record(folder), read_run_files(folder)
    except CheckpointError:
        return None
    if record is None or not files.decides:
        return None
    source = find_source(data, reading=given.filled_from(data_files(folder, data)))
    known = source.train.levels.get(files.level or "", {})
    names = {known.get(name, name) for name in source.train.names}
    # Most other data are told apart before any picture is looked at.
    if source.val is not None or record.train + record.val > len(source.train) or not names >= {*record.classes}:
        return None
    splits = split_source(source, level=files.level)
    if record_of(splits).rows != record.rows:
        return None
    assert isinstance(splits.val, PictureSet)
    said = f"these are the data of the run: its {len(splits.val):,} held-out pictures are evaluated"
    return replace(splits.val, notes=(*source.notes, f"{said}; --split all for every picture"))
