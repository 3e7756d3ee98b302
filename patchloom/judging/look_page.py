"""What a trained network saw in given pictures, in those it got most wrong, or in some of val, on one page."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from patchloom.data.pictures.given import pictures_in
from patchloom.errors import DataError, UsageError
from patchloom.inspection.look import Look, look
from patchloom.judging.run_parts import RunParts, read_run, val_of
from patchloom.models.network import Network
from patchloom.models.published import load_published
from patchloom.models.registry import create_model
from patchloom.pages.page import write_page
from patchloom.runs.config import Preprocessing
from patchloom.runs.named import found_run

OF_VAL, PICTURES = 24, 200  # shown at most of val, and of pictures that were given


class Subject(NamedTuple):
    """A network and how pictures are shown to it."""

    network: Network
    preprocessing: Preprocessing | None  # None: fitted to the network's own size
    labels: Sequence[str]  # none: classes are numbers


class Wanted(NamedTuple):
    """A picture to look at, not yet read."""

    name: str
    detail: str
    read: Callable[[], Image.Image]


class Named(NamedTuple):
    """A picture to look at."""

    name: str
    detail: str
    picture: Image.Image


@dataclass(frozen=True)
class LookPage:
    """The page, what was looked at, and what could not be."""

    path: Path
    looks: list[tuple[str, str, Look]]  # name, detail, what the network made of it
    notes: list[str]


def look_at(spec: str, paths: Sequence[str] = (), *, data: str | None = None, out: Path, top: int = 5) -> LookPage:
    """Draw the pictures at `paths`; without any, the mistakes the run was surest of, from its data or `data`.

    Of a run that names no classes (DINO, Grafit) pictures from all over its val split are drawn then.
    `spec` is the folder of a run, or NAME@FILE for a network with published weights.
    """
    notes: list[str] = []
    if paths:
        subject = open_subject(spec)
        files = [*pictures_in(paths)]
        if len(files) > PICTURES:
            notes.append(f"the first {PICTURES} of {len(files)} pictures are shown")
        wanted, did = [Wanted(one.name, "", one.read) for one in files[:PICTURES]], "saw"
    else:
        parts = _run(spec)
        subject = _subject_of(parts)
        wanted, did = _of_val(parts, data), "got most wrong" if parts.files.decides else "saw"
    shown = _readable(wanted, notes)
    found = look(subject.network, subject.preprocessing, [one.picture for one in shown], subject.labels, top=top)
    looks = [(one.name, one.detail, of) for one, of in zip(shown, found, strict=True)]
    title = f"What {Path(spec).name} {did}"
    write_page(
        out, "look.html.j2", title=title, notes=notes, looks=[of.card(name, detail) for name, detail, of in looks]
    )
    return LookPage(out, looks, notes)


def open_subject(spec: str) -> Subject:
    """A run's network, or one with published weights, whose classes are then numbers."""
    name, at, path = spec.partition("@")
    if at and not os.path.isdir(spec):
        return Subject(load_published(create_model(name), path).eval(), None, ())
    return _subject_of(_run(spec))


def _run(spec: str) -> RunParts:
    if (folder := found_run(spec)) is None:
        raise UsageError(f"{spec} is not the folder of a run; give one, or NAME@FILE for published weights")
    return read_run(folder)


def _subject_of(parts: RunParts) -> Subject:
    if parts.network is None:
        raise UsageError(f"{parts.folder} has no weights that can be read: {parts.notes[-1]}")
    return Subject(parts.network, parts.files.preprocessing, parts.files.labels)


def _of_val(parts: RunParts, data: str | None) -> list[Wanted]:
    """The run's surest mistakes, or pictures from all over its val split where it names no classes."""
    val = val_of(parts, data)
    if val is None:
        raise UsageError(f"{parts.folder} kept no decisions about pictures; give the pictures to look at")
    if parts.predictions is None:
        rows = [int(row) for row in np.linspace(0, len(val) - 1, min(OF_VAL, len(val)))]
        told = [(row, val.classes.names[label] if (label := val.labels[row]) >= 0 else "") for row in rows]
    else:
        labels, worst = parts.files.labels, parts.predictions.report.worst(OF_VAL)
        told = [(one.index, f"{labels[one.label]}, taken for {labels[one.prediction]}") for one in worst]
    if not told:
        raise UsageError(f"{parts.folder} made no mistake on its val split; give pictures to look at")
    return [Wanted(val.where(row), detail, partial(val.read, row)) for row, detail in told]


def _readable(wanted: Sequence[Wanted], notes: list[str]) -> list[Named]:
    """Those that can be read; the others are noted."""
    shown, errors = [], []
    for one in wanted:
        try:
            shown.append(Named(one.name, one.detail, one.read()))
        except DataError as error:
            errors.append(str(error))
    if not shown:
        raise DataError(f"none of {len(wanted)} pictures can be read; the first: {errors[0]}")
    notes += errors
    return shown
