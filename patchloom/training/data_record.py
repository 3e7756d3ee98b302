"""The pictures of a run in `data.json`, so that going on with others is noticed; those left out in `left_out.tsv`."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from patchloom.checkpoint import atomic_write
from patchloom.deployment.data_record import RECORD, DataRecord, read_record
from patchloom.errors import CheckpointError, DataError

LEFT_OUT = "left_out.tsv"
CLASSES_SHOWN = 3


def changes_since(folder: Path, record: DataRecord) -> list[str]:
    """Notes on what changed since the run in `folder` began.

    Other classes are a DataError, since the outputs would mix them up. Other pictures are not: a file that is lost or
    went bad must not end a run.
    """
    try:
        before = read_record(folder)
    except CheckpointError:
        return [f"{folder / RECORD}, which says what the run began with, cannot be read: not compared with the data"]
    if before is None:
        return []
    if before.classes != record.classes:
        raise DataError(
            f"{folder} was trained on {_some(before.classes)}, the data now have {_some(record.classes)}; "
            "restore the data, or give a new folder with --out"
        )
    if before.rows != record.rows:
        counts = f"{before.train:,} → {record.train:,} to train on, {before.val:,} → {record.val:,} to validate"
        return [f"the data changed since the run began ({counts}): it goes on, not exactly as without that"]
    if before.contents != record.contents:
        return ["pictures were changed since the run began: it goes on, not exactly as without that"]
    return []


def write_record(folder: Path, record: DataRecord) -> None:
    """Keep what the run begins with."""
    if not (folder / RECORD).exists():
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n"
        atomic_write(folder / RECORD, text.encode("utf-8", "surrogateescape"))


def write_left_out(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """The files (name, reason) that cannot be read, a line each; no list where there is none."""
    lines = [f"{name}\t{reason}\n" for name, reason in files]
    if lines:
        atomic_write(folder / LEFT_OUT, "".join(["file\treason\n", *lines]).encode("utf-8", "surrogateescape"))
    else:
        (folder / LEFT_OUT).unlink(missing_ok=True)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:CLASSES_SHOWN])
    return f"{len(names)} classes ({shown}{', …' if len(names) > CLASSES_SHOWN else ''})"
