"""Checks that a run folder is resumed with the data, initial weights and options that the run began with."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.data.sources.specs import is_url, join_specs
from patchloom.runs.locate import find_run
from patchloom.runs.provenance import PROVENANCE, Provenance, read_provenance
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from patchloom_runtime.printable import plural, printable

CLASSES_NAMED = 3


class OtherRunError(UsageError):
    """The folder holds another run than the one to train."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


def starting_record(record: Provenance, data: Sequence[str], init: str | None) -> Provenance:
    """Return the record with the data path and the initial weights as the user named them."""
    named, weights = start_of(init)
    return replace(record, place=place_of(data), init=named, init_weights=weights)


def place_of(data: Sequence[str]) -> str:
    """Return the absolute paths of files and the names of other data, in one string."""
    places = []
    for part in data:
        path = os.path.expanduser(part)
        is_path = os.path.exists(path) or (any(sign in part for sign in "*?[{") and not is_url(part))
        places.append(os.path.abspath(path) if is_path else str(part))
    return join_specs(places)


def start_of(init: str | None) -> tuple[str, str]:
    """Return --init and a digest of its weights."""
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
    """Return the first of runs/NAME, runs/NAME-2 … that is free or holds a run on these data; and why not runs/NAME.

    `taken` maps folders of other runs to the reason why they cannot be used.
    """
    number, why = 1, ""
    while True:
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        before = recorded(folder)
        if folder in taken:
            why = why or taken[folder]
        elif init and folder.is_dir() and Path(init).is_dir() and folder.samefile(init):
            why = why or f"{folder} is the run of --init"
        elif before and not is_ours(before):
            why = why or f"{folder} holds a run on other data{f', {before.place}' if before.place else ''}"
        else:
            return folder, why
        number += 1


def refuse_other_data(folder: Path, record: Provenance) -> None:
    """Raise DataError if the folder holds a run on other data."""
    before = recorded(folder)
    if before and not before.is_of(record):
        was = before.place or f"{before.train:,} + {before.val:,} images, {_some(before.classes)}"
        raise DataError(
            f"{folder} holds a run on other data: {was}; not {record.place}. Pass another folder with --out"
        )


def refuse_other_start(folder: Path, record: Provenance) -> None:
    """Raise OtherRunError if the run began from other weights."""
    before = recorded(folder)
    if before is None or before.init is None or before.init_weights == record.init_weights:
        return
    was, now = (f"--init {init}" if init else "random weights" for init in (before.init, record.init))
    changed = f"{was}, which has changed since" if was == now else f"{was}, not {now}"
    raise OtherRunError(f"{folder} began from {changed}", "start as before, or pass another folder with --out")


def refuse_other_corrections(folder: Path, record: Provenance) -> None:
    """Raise OtherRunError if the run began with other corrections of the labels."""
    before = recorded(folder)
    if before is None or before.corrections is None or before.corrections == record.corrections:
        return
    changed = (
        "has changed since"
        if before.corrections and record.corrections
        else "is missing"
        if before.corrections
        else "is new"
    )
    raise OtherRunError(
        f"{folder} began with other corrections of the labels: the file of --corrections {changed}",
        "restore it, or pass another folder with --out",
    )


def refuse_fewer_options(folder: Path, record: Provenance) -> None:
    """Raise OtherRunError if the run began with options that this command does not have."""
    before = recorded(folder)
    missing = sorted(set(before.options) - set(record.options)) if before else []
    if missing:
        raise OtherRunError(
            f"{folder} was started with {', '.join(missing)}, which this command lacks", "repeat the first command"
        )


def refuse_other_plugins(folder: Path, record: Provenance) -> None:
    """Raise OtherRunError if the run began with other parts of the user than this command has."""
    before = recorded(folder)
    if before is None or before.plugins == record.plugins:
        return
    kind = next(kind for kind in {**before.plugins, **record.plugins} if _part(before, kind) != _part(record, kind))
    was, now = _part(before, kind), _part(record, kind)
    name = was.partition(" ")[0]
    if not was:
        changed = f"without {kind} {now.partition(' ')[0]}"
    elif not now:
        changed = f"with {kind} {name}, which is not plugged in now"
    elif name == now.partition(" ")[0]:
        changed = f"with {kind} {name}, whose code or settings have changed since"
    else:
        changed = f"with {kind} {name}, not {now.partition(' ')[0]}"
    raise OtherRunError(f"{folder} began {changed}", "plug in what it began with, or pass another folder with --out")


def _part(record: Provenance, kind: str) -> str:
    return record.plugins.get(kind, "")


def changes_since(folder: Path, record: Provenance) -> list[str]:
    """Return notes on what changed since the run in `folder` began.

    Raises DataError for other classes, whose outputs would be mixed up. Other images are a note: a file that is lost
    or damaged must not end a run.
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
            "restore the data, or pass a new folder with --out"
        )
    if before.rows != record.rows:
        counts = f"{before.train:,} → {record.train:,} to train on, {before.val:,} → {record.val:,} to validate"
        return [f"the data changed since the run began ({counts}): it continues, but not exactly as it would have"]
    if before.contents != record.contents:
        return ["images were changed since the run began: it continues, but not exactly as it would have"]
    return []


def recorded(folder: Path) -> Provenance | None:
    """Return the record of the run in `folder`; None if it cannot be read, which `changes_since` notes."""
    try:
        return read_provenance(folder)
    except CheckpointError:
        return None


def _some(names: Sequence[str]) -> str:
    first = printable(", ".join(names[:CLASSES_NAMED]))
    return f"{plural(len(names), 'class')} ({first}{', …' if len(names) > CLASSES_NAMED else ''})"
