"""Predictions of a trained network on given images, on those it got most wrong, or on some of val, on one page."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from patchloom.models.network import Network
from patchloom.models.pretrained.published import load_published
from patchloom.models.registry import create_model
from patchloom.report.page import write_page
from patchloom.report.pictures.look import ImageLook, look
from patchloom.runs.config import Preprocessing
from patchloom.runs.locate import find_run
from patchloom.tasks.classification.exported import open_exported_classifier
from patchloom.tasks.images.run_contents import RunParts, read_run, val_of
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import DataError, UsageError, at_least
from patchloom_runtime.images.inputs import iterate_images
from patchloom_runtime.printable import plural

COUNT = 24  # images shown at most
FileT = TypeVar("FileT")


class LookSubject(NamedTuple):
    """A network and how pictures are shown to it."""

    network: Network
    preprocessing: Preprocessing | None  # None: fitted to the network's own size
    labels: Sequence[str]  # none: classes are numbers


class LookRequest(NamedTuple):
    """A picture to look at, not yet read."""

    name: str
    truth: str  # its true class, '' where it is not known
    read: Callable[[], Image.Image]


class NamedImage(NamedTuple):
    """A picture to look at."""

    name: str
    truth: str
    picture: Image.Image


@dataclass(frozen=True)
class LookPage:
    """The page, what was looked at, and what could not be."""

    path: Path
    looks: list[tuple[str, str, ImageLook]]  # name, detail, what the network made of it
    notes: list[str]


def look_at(
    spec: str, paths: Sequence[str] = (), *, data: str | None = None, out: Path, top: int = 5, count: int = COUNT
) -> LookPage:
    """Draw predictions on the images at `paths`, at most `count` of them, chosen across their classes.

    Without paths: the run's mistakes with the highest confidence, from its data or `data`; of a run that names no
    classes (DINO, Grafit) images from all over its val split. A file's true class is the nearest folder above it that
    is called like a class. `spec` is the folder of a run, or NAME@FILE for a network with published weights.
    """
    at_least("count", count, 1)
    notes: list[str] = []
    name = Path(spec).name
    if is_artifact(spec):
        return _look_at_exported(Path(spec), paths, out, top, count)
    if paths:
        subject = open_subject(spec)
        wanted = chosen_files(paths, subject.labels, count, notes)
        title = f"Predictions of {name} on {plural(len(wanted), 'image')}"
    else:
        parts = _run(spec)
        subject = _subject_of(parts)
        wanted = _of_val(parts, data, count)
        title = f"Mistakes of {name}, highest confidence first" if parts.files.decides else f"Val images seen by {name}"
    shown = _readable(wanted, notes)
    pictures, truths = [one.picture for one in shown], [one.truth for one in shown]
    looked = look(subject.network, subject.preprocessing, pictures, subject.labels, top=top, truths=truths)
    write_look_page(out, title, notes, [of.card(one.name) for one, of in zip(shown, looked, strict=True)])
    return LookPage(out, [(one.name, "", of) for one, of in zip(shown, looked, strict=True)], notes)


def _look_at_exported(folder: Path, paths: Sequence[str], out: Path, top: int, count: int) -> LookPage:
    """Predictions of an artifact, beside the truth; maps need the network, which a graph is not."""
    if not paths:
        raise UsageError(f"{folder} is an artifact and keeps no val predictions: patchloom look {folder} IMAGE…")
    classifier = open_exported_classifier(folder)
    notes = ["an artifact has no maps of where the network looks; the run that it was exported from has"]
    shown = _readable(chosen_files(paths, classifier.labels, count, notes), notes)
    transform = classifier.transform()
    answers = classifier.predict([one.picture for one in shown], top=top)
    looks = [
        (one.name, "", ImageLook(Image.fromarray(transform(one.picture)), answer, [], one.truth))
        for one, answer in zip(shown, answers, strict=True)
    ]
    title = f"Predictions of {folder.name} on {plural(len(looks), 'image')}"
    write_look_page(out, title, notes, [of.card(name) for name, _, of in looks])
    return LookPage(out, looks, notes)


def write_look_page(out: Path, title: str, notes: Sequence[str], cards: Sequence[dict[str, Any]]) -> None:
    """Write the page, with how many of the predictions are right where the truth is known."""
    judged = [card["right"] for card in cards if card["right"] is not None]
    told = f"{sum(judged)} of {len(judged)} predictions are right." if judged else ""
    write_page(out, "look.html.j2", title=title, summary=told, notes=notes, looks=cards)


def chosen_files(paths: Sequence[str], labels: Sequence[str], count: int, notes: list[str]) -> list[LookRequest]:
    """Image files, at most `count`, in turn from every class, or from every folder; with their true classes."""
    known = frozenset(labels)
    files = [LookRequest(one.name, true_class(one.name, known), one.read) for one in iterate_images(paths)]
    chosen = across(files, [one.truth or os.path.dirname(one.name) for one in files], count)
    if len(chosen) < len(files):
        classes = len({one.truth for one in files if one.truth})
        of = f" across {plural(classes, 'class')}" if classes > 1 else ""
        notes.append(f"{len(chosen)} of {len(files):,} images are shown, chosen{of}; --count shows more")
    return chosen


def true_class(path: str, labels: Collection[str]) -> str:
    """The nearest folder above a file that is called like a class, nested classes by their folders; '' without one."""
    folders = PurePath(path).parts[:-1]
    for end in range(len(folders), 0, -1):
        for start in range(end - 1, -1, -1):
            if (name := "/".join(folders[start:end])) in labels:
                return name
    return ""


def across(items: Sequence[FileT], groups: Sequence[str], count: int) -> list[FileT]:
    """At most `count` items in their order, in turn from every group, from all over each of them."""
    if len(items) <= count:
        return list(items)
    members: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    names = list(members)
    if len(names) > count:
        names = [names[i * len(names) // count] for i in range(count)]
    shares = {name: min(len(members[name]), count // len(names)) for name in names}
    while sum(shares.values()) < count:  # what small groups leave goes to the others
        for name in names:
            shares[name] += shares[name] < len(members[name]) and sum(shares.values()) < count
        if all(shares[name] == len(members[name]) for name in names):
            break
    places = [members[name][i * len(members[name]) // share] for name, share in shares.items() for i in range(share)]
    return [items[place] for place in sorted(places)]


def open_subject(spec: str) -> LookSubject:
    """A run's network, or one with published weights, whose classes are then numbers."""
    name, at, path = spec.partition("@")
    if at and not os.path.isdir(spec):
        return LookSubject(load_published(create_model(name), path).eval(), None, ())
    return _subject_of(_run(spec))


def _run(spec: str) -> RunParts:
    if (folder := find_run(spec)) is None:
        raise UsageError(f"{spec} is not the folder of a run; give one, or NAME@FILE for published weights")
    return read_run(folder)


def _subject_of(parts: RunParts) -> LookSubject:
    if parts.network is None:
        raise UsageError(f"{parts.folder} has no weights that can be read: {parts.notes[-1]}")
    return LookSubject(parts.network, parts.files.preprocessing, parts.files.labels)


def _of_val(parts: RunParts, data: str | None, count: int) -> list[LookRequest]:
    """The run's surest mistakes, or pictures from all over its val split where it names no classes."""
    val = val_of(parts, data)
    if val is None:
        raise UsageError(f"{parts.folder} kept no predictions; pass the images to look at")
    if parts.predictions is None:
        rows = [int(row) for row in np.linspace(0, len(val) - 1, min(count, len(val)))]
        chosen = [(row, val.classes.names[label] if (label := val.labels[row]) >= 0 else "") for row in rows]
    else:
        worst = parts.predictions.report.worst(count)
        chosen = [(one.index, parts.files.labels[one.label]) for one in worst]
    if not chosen:
        raise UsageError(f"{parts.folder} made no mistake on its val split; pass images to look at")
    return [LookRequest(val.where(row), truth, partial(val.read, row)) for row, truth in chosen]


def _readable(wanted: Sequence[LookRequest], notes: list[str]) -> list[NamedImage]:
    """Those that can be read; the others are noted."""
    shown, errors = [], []
    for one in wanted:
        try:
            shown.append(NamedImage(one.name, one.truth, one.read()))
        except DataError as error:
            errors.append(str(error))
    if not shown:
        raise DataError(f"none of the {plural(len(wanted), 'image')} can be read; the first: {errors[0]}")
    notes += errors
    return shown
