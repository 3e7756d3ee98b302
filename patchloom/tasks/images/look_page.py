"""The page of `patchloom look`: predictions with maps on images, on the worst mistakes, or on some val images."""

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
from patchloom.report.page import data_uri, write_page
from patchloom.report.pictures.look import ImageLook, head_sheet, looks, network_inputs
from patchloom.runs.calibration import RunCalibration
from patchloom.runs.config import Preprocessing
from patchloom.runs.locate import find_run
from patchloom.tasks.classification.exported import open_exported_classifier
from patchloom.tasks.images.run_contents import RunContents, read_run, val_images
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import DataError, UsageError, at_least
from patchloom_runtime.images.inputs import iterate_images
from patchloom_runtime.printable import plural

COUNT = 24  # images at most
FileT = TypeVar("FileT")


class LookSubject(NamedTuple):
    """A network with its preprocessing and class names."""

    network: Network
    preprocessing: Preprocessing | None  # None: resize to the network's size
    labels: Sequence[str]  # empty: classes are numbers
    calibration: RunCalibration | None = None


class LookRequest(NamedTuple):
    """An image to look at, not read yet."""

    name: str
    truth: str  # true class, '' if unknown
    read: Callable[[], Image.Image]


class NamedImage(NamedTuple):
    """An image to look at."""

    name: str
    truth: str
    image: Image.Image


@dataclass(frozen=True)
class LookPage:
    """The page, its images, and notes on images that could not be read."""

    path: Path
    looks: list[tuple[str, str, ImageLook]]  # name, detail, result
    notes: list[str]


def look_at(
    spec: str, paths: Sequence[str] = (), *, data: str | None = None, out: Path, top: int = 5, count: int = COUNT
) -> LookPage:
    """Write predictions on the images at `paths`, at most `count` of them, chosen across their classes.

    Without paths, the images are the run's mistakes with the highest confidence, from its data or `data`; for a run
    without a classifier (DINO, Grafit), images from all over its val split. The true class of a file is the nearest
    folder above it that has the name of a class. `spec` is a run folder, or NAME@FILE for published weights.
    """
    at_least("count", count, 1)
    notes: list[str] = []
    name = Path(spec).name
    if is_artifact(spec):
        return _look_at_exported(Path(spec), paths, out, top, count)
    if paths:
        subject = open_subject(spec)
        requests = chosen_files(paths, subject.labels, count, notes)
        title = f"Predictions of {name} on {plural(len(requests), 'image')}"
    else:
        contents = _read_run(spec)
        subject = _subject_of(contents)
        requests = _val_requests(contents, data, count)
        decides = contents.files.decides
        title = f"Mistakes of {name}, highest confidence first" if decides else f"Val images of {name}"
    named_images = readable(requests, notes)
    images, truths = [one.image for one in named_images], [one.truth for one in named_images]
    inputs = network_inputs(subject.network, subject.preprocessing, images, subject.calibration)
    results = looks(inputs, subject.labels, top=top, truths=truths)
    named = [(one.name, "", result) for one, result in zip(named_images, results, strict=True)]
    heads = head_sheet(inputs) if inputs.network.has_class_attention else None
    write_look_page(out, title, notes, [result.card(name) for name, _, result in named], heads)
    return LookPage(out, named, notes)


def _look_at_exported(folder: Path, paths: Sequence[str], out: Path, top: int, count: int) -> LookPage:
    """Write the predictions of an artifact; it has no maps, which need the network."""
    if not paths:
        raise UsageError(
            f"{folder} is an artifact without val predictions; pass images: patchloom look {folder} IMAGE…"
        )
    classifier = open_exported_classifier(folder)
    notes = ["an artifact has no attention maps; use the run that it was exported from"]
    named_images = readable(chosen_files(paths, classifier.labels, count, notes), notes)
    transform = classifier.transform()
    predictions = classifier.predict([one.image for one in named_images], top=top)
    named = [
        (one.name, "", ImageLook(Image.fromarray(transform(one.image)), scores, [], one.truth, scores.abstained))
        for one, scores in zip(named_images, predictions, strict=True)
    ]
    title = f"Predictions of {folder.name} on {plural(len(named), 'image')}"
    write_look_page(out, title, notes, [result.card(name) for name, _, result in named])
    return LookPage(out, named, notes)


def write_look_page(
    out: Path,
    title: str,
    notes: Sequence[str],
    cards: Sequence[dict[str, Any]],
    heads: Image.Image | None = None,
) -> None:
    """Write the page: images, the number of right predictions where classes are known, and attention by head."""
    known = [card["right"] for card in cards if card["right"] is not None]
    summary = f"{sum(known)} of {len(known)} predictions are right." if known else ""
    sheet = data_uri(heads) if heads else None
    write_page(out, "look.html.j2", title=title, summary=summary, notes=notes, looks=cards, heads=sheet)


def chosen_files(paths: Sequence[str], labels: Sequence[str], count: int, notes: list[str]) -> list[LookRequest]:
    """Choose at most `count` image files, in turn from every class or folder, with their true classes."""
    known = frozenset(labels)
    files = [LookRequest(one.name, true_class(one.name, known), one.read) for one in iterate_images(paths)]
    chosen = across(files, [one.truth or os.path.dirname(one.name) for one in files], count)
    if len(chosen) < len(files):
        classes = len({one.truth for one in files if one.truth})
        across_classes = f" across {plural(classes, 'class')}" if classes > 1 else ""
        notes.append(f"{len(chosen)} of {len(files):,} images are shown, chosen{across_classes}; --count shows more")
    return chosen


def true_class(path: str, labels: Collection[str]) -> str:
    """Return the nearest folder above a file that has the name of a (possibly nested) class; '' if there is none."""
    folders = PurePath(path).parts[:-1]
    for end in range(len(folders), 0, -1):
        for start in range(end - 1, -1, -1):
            if (name := "/".join(folders[start:end])) in labels:
                return name
    return ""


def across(items: Sequence[FileT], groups: Sequence[str], count: int) -> list[FileT]:
    """Choose at most `count` items, in turn from every group and spread over each group, in their order."""
    if len(items) <= count:
        return list(items)
    members: dict[str, list[int]] = {}
    for place, group in enumerate(groups):
        members.setdefault(group, []).append(place)
    names = list(members)
    if len(names) > count:
        names = [names[i * len(names) // count] for i in range(count)]
    shares = {name: min(len(members[name]), count // len(names)) for name in names}
    while sum(shares.values()) < count:  # small groups leave their share to the others
        for name in names:
            shares[name] += shares[name] < len(members[name]) and sum(shares.values()) < count
        if all(shares[name] == len(members[name]) for name in names):
            break
    places = [members[name][i * len(members[name]) // share] for name, share in shares.items() for i in range(share)]
    return [items[place] for place in sorted(places)]


def open_subject(spec: str) -> LookSubject:
    """Open a run's network, or a network with published weights, whose classes are numbers."""
    name, at, path = spec.partition("@")
    if at and not os.path.isdir(spec):
        return LookSubject(load_published(create_model(name), path).eval(), None, ())
    return _subject_of(_read_run(spec))


def _read_run(spec: str) -> RunContents:
    if (folder := find_run(spec)) is None:
        raise UsageError(f"{spec} is not a run folder; pass one, or NAME@FILE for published weights")
    return read_run(folder)


def _subject_of(contents: RunContents) -> LookSubject:
    if contents.network is None:
        raise UsageError(f"{contents.folder} has no weights that can be read: {contents.notes[-1]}")
    return LookSubject(contents.network, contents.files.preprocessing, contents.files.labels, contents.calibration)


def _val_requests(contents: RunContents, data: str | None, count: int) -> list[LookRequest]:
    """Return the run's most confident mistakes, or images from all over val for a run without a classifier."""
    val = val_images(contents, data)
    if val is None:
        raise UsageError(f"{contents.folder} has no stored predictions; pass the images to look at")
    if contents.predictions is None:
        rows = [int(row) for row in np.linspace(0, len(val) - 1, min(count, len(val)))]
        chosen = [(row, val.classes.names[label] if (label := val.labels[row]) >= 0 else "") for row in rows]
    else:
        worst = contents.predictions.report.worst(count)
        chosen = [(mistake.index, contents.files.labels[mistake.label]) for mistake in worst]
    if not chosen:
        raise UsageError(f"{contents.folder} made no mistake on its val split; pass images to look at")
    return [LookRequest(val.where(row), truth, partial(val.read, row)) for row, truth in chosen]


def readable(requests: Sequence[LookRequest], notes: list[str]) -> list[NamedImage]:
    """Read the images; add a note for each unreadable one."""
    images, errors = [], []
    for request in requests:
        try:
            images.append(NamedImage(request.name, request.truth, request.read()))
        except DataError as error:
            errors.append(str(error))
    if not images:
        raise DataError(f"none of the {plural(len(requests), 'image')} can be read; the first: {errors[0]}")
    notes += errors
    return images
