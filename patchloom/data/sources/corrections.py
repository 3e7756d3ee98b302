"""Corrections of labels: `train DATA --corrections FILE`. The data itself is never changed.

    path,action,label
    rose/12.jpg,relabel,tulip
    rose/31.jpg,drop,
    rose/40.jpg,keep,

A line has the key of an image within the dataset, or its path. `keep` says that an image was looked at and is right.
The page of `patchloom audit` writes such a file; it may also be written by hand, with or without the first line.
"""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from patchloom.data.datasets import Listing, Source, name_some
from patchloom.data.labels.similar_names import canonical
from patchloom.data.reading_options import PathText
from patchloom.data.targets import ImageTargets
from patchloom.disk import atomic_write
from patchloom_runtime.errors import DataError, UsageError, nearest, shortened
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import plural, printable, table_cell
from patchloom_runtime.untrusted import read_plain

HEAD = ["path", "action", "label"]
ACTIONS = ("keep", "relabel", "drop")
Action = Literal["keep", "relabel", "drop"]


@dataclass(frozen=True)
class Correction:
    """One line of a corrections file."""

    path: str  # key of the image within the dataset, or its path
    action: Action
    label: str = ""  # the new class, for relabel
    line: int = 0  # in the file, counted from 1


def read_corrections(file: Path) -> dict[str, Correction]:
    """Return the corrections in a file by path. Raise DataError with the line number if a line is wrong."""
    try:
        text = read_plain(file).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--corrections {printable(file)}: the file cannot be read ({reason})") from error
    corrections: dict[str, Correction] = {}
    for number, row in _rows(text, file):
        correction = _correction(row, number, file)
        if correction.path in corrections:
            first = corrections[correction.path].line
            raise _wrong(file, number, f"{correction.path!r} is in line {first} already; keep one of the two lines")
        corrections[correction.path] = correction
    return corrections


def write_corrections(file: Path, corrections: Iterable[Correction]) -> None:
    """Write a corrections file."""
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerows([HEAD, *([table_cell(one.path), one.action, table_cell(one.label)] for one in corrections)])
    atomic_write(file, lines.getvalue().encode("utf-8", "surrogateescape"))


def corrections_digest(file: PathText) -> str:
    """Return a digest of what a corrections file changes, or '' without a file. `keep` changes nothing."""
    if file is None:
        return ""
    read = read_corrections(Path(os.path.expanduser(file)))
    changes = sorted((one.path, one.action, one.label) for one in read.values() if one.action != "keep")
    return hashlib.sha256(json.dumps(changes).encode()).hexdigest()


def correct(source: Source, file: Path) -> Source:
    """Return the source with labels changed and images dropped as a file says, with a note on their numbers.

    Raises DataError with the line number for images and classes that the source does not have.
    """
    corrections = read_corrections(file)
    classes = {canonical(name): name for listing in source.listings.values() for name in listing.names}
    known = {form: name for plain, name in classes.items() for form in (plain, table_cell(plain))}
    has_numbers = source.train.targets is not None and source.train.targets.kind == "numbers"
    for one in corrections.values():
        if one.action == "relabel" and has_numbers:
            raise _wrong(
                file, one.line, f"{source.name} has numbers; a corrections file can drop an image, not change it"
            )
        if one.action == "relabel" and canonical(one.label) not in known:
            hint = nearest(one.label, list(classes)) or f" The classes are {name_some(sorted(classes))}"
            raise _wrong(file, one.line, f"{source.name} has no class {one.label!r}.{hint}")
    used: set[str] = set()
    changed = {split: _corrected(listing, corrections, known, used) for split, listing in source.listings.items()}
    for one in corrections.values():
        if one.path not in used and not source.is_part:  # a val or test folder by itself has only some images
            example = _names(source.train, 0)[0] if len(source.train) else ""
            raise _wrong(
                file, one.line, f"{source.name} has no image {one.path!r}; expected a name such as {example!r}"
            )
    counts = {action: sum(corrections[path].action == action for path in used) for action in ACTIONS}
    note = (
        f"{printable(file)}: {plural(counts['relabel'], 'label')} changed, {plural(counts['drop'], 'image')} dropped, "
        f"{counts['keep']:,} kept as they are"
    )
    val, test = changed.get("val"), changed.get("test")
    if source.test is not None and source.test is source.val:
        test = val
    return replace(source, train=changed["train"], val=val, test=test, notes=(*source.notes, note))


def _corrected(
    listing: Listing, corrections: Mapping[str, Correction], known: Mapping[str, str], used: set[str]
) -> Listing:
    """Return a corrected listing, and add the paths of its images to `used`. `known` maps plain names to classes."""
    labels, remaining = listing.labels.copy(), np.ones(len(listing), dtype=bool)
    names, targets = list(listing.names), listing.targets
    for position in range(len(listing)) if corrections else ():
        path = next((name for name in _names(listing, position) if name in corrections), None)
        if path is None:
            continue
        used.add(path)
        correction = corrections[path]
        if correction.action == "drop":
            remaining[position] = False
        elif correction.action == "relabel":
            name = known[canonical(correction.label)]
            own = next((one for one in names if canonical(one) == canonical(name)), name)
            names += [own] if own not in names else []
            labels[position] = names.index(own) if listing.is_classified else UNLABELED
            targets = targets and _with_only(targets, position, own)
    return replace(listing, labels=labels, names=tuple(names), targets=targets).subset(remaining)


def _with_only(targets: ImageTargets, position: int, label: str) -> ImageTargets:
    """Return labels of which only one applies to the image at a position."""
    named = targets.named(tuple(dict.fromkeys((*targets.names, label))))
    values = named.values.copy()
    values[position] = np.arange(len(named.names)) == named.names.index(label)
    return replace(named, values=values)


def listed_names(key: str, where: str) -> tuple[str, ...]:
    """Return the names under which a file may list an image: its key and path, each also as in a table."""
    return key, where, table_cell(key), table_cell(where)


def _names(listing: Listing, position: int) -> tuple[str, ...]:
    row = int(listing.rows[position])
    return listed_names(listing.images.key(row), listing.images.where(row))


def _rows(text: str, file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line that is not empty, without the head."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 1
    try:
        for row in reader:
            cells = [cell.strip() for cell in row]
            is_head = number == 1 and [cell.lower() for cell in cells] == HEAD
            if any(cells) and not is_head:
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as error:
        raise _wrong(file, number, f"it is not CSV ({error})") from error


def _correction(row: list[str], number: int, file: Path) -> Correction:
    path, action, label, *more = (*row, "", "")
    if not path or action not in ACTIONS or any(more):
        line = printable(",".join(row))
        raise _wrong(file, number, f"{line!r}, expected path,action,label with the action {', '.join(ACTIONS)}")
    if bool(label) != (action == "relabel"):
        wanted = "relabel needs a label" if action == "relabel" else f"{action} takes no label, got {label!r}"
        raise _wrong(file, number, wanted)
    return Correction(path, cast(Action, action), label, number)


def _wrong(file: Path, line: int, reason: str) -> DataError:
    return DataError(f"{printable(file)}, line {line}: {printable(shortened(reason))}")
