"""The pictures of a run in `data.json`, so that resuming on others is noticed; those left out in `left_out.tsv`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from patchloom.checkpoint import atomic_write
from patchloom.data.sets import PictureSet, Splits
from patchloom.data.survey import Survey, Unreadable, name_unreadable
from patchloom.errors import CheckpointError, DataError

RECORD, LEFT_OUT = "data.json", "left_out.tsv"


@dataclass(frozen=True)
class DataRecord:
    """Which pictures a run trains and validates on."""

    train: int  # pictures
    val: int
    rows: str  # digest of their names and classes, in order
    contents: str  # digest of their files; '' where there are none


def record_of(splits: Splits, seen: Survey | None) -> DataRecord:
    """The record of a run on `splits`, of which `seen` is the scan."""
    rows = hashlib.sha256()
    for pictures in (splits.train, splits.val):
        assert isinstance(pictures, PictureSet)
        for i, label in enumerate(pictures.labels.tolist()):
            line = f"{pictures.key(i)}\0{'' if label < 0 else pictures.classes.names[label]}\n"
            rows.update(line.encode("utf-8", "surrogateescape"))
        rows.update(b"\0")
    contents = hashlib.sha256(b"".join(sight.digest for sight in seen.sights)).hexdigest() if seen else ""
    return DataRecord(len(splits.train), len(splits.val), rows.hexdigest(), contents)


def check_same_data(folder: Path, record: DataRecord, left_out: Sequence[Unreadable]) -> str | None:
    """A note where pictures of the run in `folder` have changed; an error where they are others than it began with."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        before = DataRecord(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); remove it to go on with the data as they are") from error
    if before.rows != record.rows:
        counts = [
            f"{old:,} → {new:,} to {use}"
            for use, old, new in (("train on", before.train, record.train), ("validate", before.val, record.val))
            if old != new
        ]
        how = ", ".join(counts) or "as many, but other names or classes"
        unread = f"; {name_unreadable(left_out)}" if left_out else ""
        raise DataError(
            f"the data changed since {folder} began (pictures: {how}{unread}), and a resumed run must see the same "
            f"ones; put them back, or give a new folder with --out (with --init {folder} to start from its weights)"
        )
    if before.contents != record.contents:
        return f"pictures were changed since {folder} began; it goes on, but not exactly as an unbroken run"
    return None


def write_record(folder: Path, record: DataRecord, left_out: Sequence[Unreadable]) -> None:
    """Keep the record of the beginning, and the list as it is now."""
    if not (folder / RECORD).exists():
        atomic_write(folder / RECORD, json.dumps(asdict(record), indent=2).encode())
    if left_out:
        lines = [f"{bad.place.where}\t{bad.reason}\n" for bad in left_out]
        atomic_write(folder / LEFT_OUT, "".join(["file\treason\n", *lines]).encode())
    else:
        (folder / LEFT_OUT).unlink(missing_ok=True)
