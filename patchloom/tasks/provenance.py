"""What a run began with, so that other data or another start are noticed; those left out in `left_out.tsv`."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.data.sources.specs import join_specs
from patchloom.runs.locate import find_run
from patchloom.runs.provenance import PROVENANCE, Provenance, read_provenance
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from patchloom_runtime.printable import plural, printable

CLASSES_SHOWN = 3


class OtherRunError(UsageError):
    """A folder holds another run than the one to be trained: why, and what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


def starting_record(record: Provenance, data: Sequence[str], init: str | None) -> Provenance:
    """The record with the place of the data and the start of the weights, as the user named them."""
    named, weights = start_of(init)
    return replace(record, place=place_of(data), init=named, init_weights=weights)


def place_of(data: Sequence[str]) -> str:
    """Return the absolute paths of files and the names of other data, in one string."""
    places = []
    for part in data:
        path = os.path.expanduser(part)
        is_path = os.path.exists(path) or any(sign in part for sign in "*?[{")
        places.append(os.path.abspath(path) if is_path else part)
    return join_specs(places)


def start_of(init: str | None) -> tuple[str, str]:
    """What --init named, and a digest of its weights."""
    if not init:
        return "", ""
    folder = find_run(init)
    path = folder / "weights.safetensors" if folder else Path(init)
    try:
        with path.open("rb") as file:
            return init, hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"--init {init}: {path.name} cannot be read ({error.strerror})") from error


def default_folder(
    name: str, init: str | None, is_ours: Callable[[Provenance], bool], taken: Mapping[Path, str]
) -> tuple[Path, str]:
    """The first of runs/NAME, runs/NAME-2 … that is free or holds a run on these data; why not the very first.

    Of those that are `taken` it is known that they hold other runs, and why.
    """
    number, why = 1, ""
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        before = _before(folder)
        if folder in taken:
            why = why or taken[folder]
        elif init and folder.is_dir() and Path(init).is_dir() and folder.samefile(init):
            why = why or f"{folder} is what it starts from"
        elif before and not is_ours(before):
            why = why or f"{folder} holds a run on other data{f', {before.place}' if before.place else ''}"
        else:
            return folder, why
        number += 1


def refuse_other_data(folder: Path, record: Provenance) -> None:
    """A folder that holds a run on other data is an error that names both."""
    before = _before(folder)
    if before and not before.is_of(record):
        was = before.place or f"{before.train:,} + {before.val:,} pictures, {_some(before.classes)}"
        raise DataError(
            f"{folder} holds a run on other data: {was}; given {record.place}. Give another folder with --out"
        )


def refuse_other_start(folder: Path, record: Provenance) -> None:
    """A run that began from other weights cannot go on as if from these."""
    before = _before(folder)
    if before is None or before.init is None or before.init_weights == record.init_weights:
        return
    was, now = (f"--init {init}" if init else "random weights" for init in (before.init, record.init))
    changed = f"{was}, which has changed since" if was == now else f"{was}; given {now}"
    raise OtherRunError(f"{folder} began from {changed}", "start as before, or pass another folder with --out")


def refuse_fewer_options(folder: Path, record: Provenance) -> None:
    """Raise OtherRunError if the run began with options that this command does not have."""
    before = _before(folder)
    missing = sorted(set(before.options) - set(record.options)) if before else []
    if missing:
        raise OtherRunError(f"{folder} began with {', '.join(missing)} set", "repeat the command that began it")


def changes_since(folder: Path, record: Provenance) -> list[str]:
    """Notes on what changed since the run in `folder` began.

    Other classes are a DataError, since the outputs would mix them up. Other pictures are not: a file that is lost or
    went bad must not end a run.
    """
    try:
        before = read_provenance(folder)
    except CheckpointError:
        return [f"{folder / PROVENANCE}, the data of the run, cannot be read: not compared with the data"]
    if before is None:
        return []
    if before.classes != record.classes:
        raise DataError(
            f"{folder} was trained on {_some(before.classes)}, the data now have {_some(record.classes)}; "
            "restore the data, or give a new folder with --out"
        )
    if before.rows != record.rows:
        counts = f"{before.train:,} → {record.train:,} to train on, {before.val:,} → {record.val:,} to validate"
        return [f"the data changed since the run began ({counts}): it continues, but not exactly as it would have"]
    if before.contents != record.contents:
        return ["pictures were changed since the run began: it continues, but not exactly as it would have"]
    return []


def _before(folder: Path) -> Provenance | None:
    """What the run in `folder` began with; None where that cannot be told, which `changes_since` says."""
    try:
        return read_provenance(folder)
    except CheckpointError:
        return None


def _some(names: Sequence[str]) -> str:
    shown = printable(", ".join(names[:CLASSES_SHOWN]))
    return f"{plural(len(names), 'class')} ({shown}{', …' if len(names) > CLASSES_SHOWN else ''})"
