"""`data.json` and `left_out.tsv`: what a run trains and validates on, what it started from, what was of no use."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from patchloom.data.checking.survey import Survey
from patchloom.data.datasets import Splits
from patchloom.disk import atomic_write
from patchloom.runs.checksums import read_checked, write_checked
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.printable import table_cell
from patchloom_runtime.untrusted import check_shape, parse_json

RECORD = "data.json"
LEFT_OUT = "left_out.tsv"
_SHAPE = {
    "classes": list[str],
    "train": int,
    "val": int,
    "rows": str,
    "contents": str,
    "place?": str | None,
    "init?": str | None,
    "init_weights?": str,
    "options?": list[str],
}


@dataclass(frozen=True)
class Provenance:
    """Which pictures a run trains and validates on, where they lie, and what its weights started from.

    Of a run with a recipe.train_share they are those that the share was taken of.
    """

    classes: tuple[str, ...]
    train: int  # pictures
    val: int
    rows: str  # digest of their names and classes, in order
    contents: str  # digest of their files; '' where there are none
    place: str | None = None  # absolute path or spec of the data; None where it was not kept
    init: str | None = None  # what --init named, '' for nothing; None where it was not kept
    init_weights: str = ""  # digest of them
    options: tuple[str, ...] = ()  # recipe fields that the command set

    def is_of(self, other: "Provenance") -> bool:
        """Whether both are of one set of data: at one place, or the same pictures where they have moved to."""
        same = (self.rows, self.contents) == (other.rows, other.contents)
        return same or (self.place is not None and self.place == other.place)


def provenance_of(splits: Splits, seen: Survey | None = None) -> Provenance:
    """The record of a run on `splits`, of which `seen` is the scan."""
    rows = hashlib.sha256()
    for pictures in (splits.train, splits.val):
        for i, label in enumerate(pictures.labels.tolist()):
            line = f"{pictures.key(i)}\0{'' if label < 0 else pictures.classes.names[label]}\n"
            rows.update(line.encode("utf-8", "surrogateescape"))
        rows.update(b"\0")
    of_files = b"".join(digest for split in ("train", "val") for digest in seen.digests(split)) if seen else b""
    contents = hashlib.sha256(of_files).hexdigest() if seen else ""
    return Provenance(tuple(splits.classes.names), len(splits.train), len(splits.val), rows.hexdigest(), contents)


def read_provenance(folder: Path) -> Provenance | None:
    """What the run in `folder` began with; None where it kept none, a CheckpointError where it is damaged."""
    file = folder / RECORD
    if not os.path.lexists(file):
        return None
    try:
        values = parse_json(read_checked(folder, RECORD).decode("utf-8", "surrogateescape"))
        check_shape(values, _SHAPE)
        known = Provenance.__dataclass_fields__
        values = {name: value for name, value in values.items() if name in known}  # a newer one may have more
        lists = {name: tuple(values.get(name, ())) for name in ("classes", "options")}
        return Provenance(**(values | lists))
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}. Restore it, or remove it.") from error


def write_provenance(folder: Path, record: Provenance) -> None:
    """Keep what the run begins with."""
    if not (folder / RECORD).exists():
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n"
        write_checked(folder, {RECORD: text.encode("utf-8", "surrogateescape")})


def write_left_out(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """The files (name, reason) that cannot be read, a line each; no list where there is none."""
    lines = [f"{table_cell(name)}\t{table_cell(reason)}\n" for name, reason in files]
    if lines:
        atomic_write(folder / LEFT_OUT, "".join(["file\treason\n", *lines]).encode("utf-8", "surrogateescape"))
    else:
        (folder / LEFT_OUT).unlink(missing_ok=True)
