"""Training pictures that a list names and that are left out: `train A --without LIST`.

A list has a picture a line, by its name within the data set or by its path, up to the first tab; what follows says why.
`check A --against B` writes one, and the left_out.tsv of a run is one.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from patchloom.data.datasets import Listing, Source
from patchloom.disk import atomic_write
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import printable, table_cell
from patchloom_runtime.untrusted import read_plain

HEAD = "file"


def leave_out(source: Source, file: Path) -> Source:
    """The source without the training pictures that the list names, and a note on how many they are."""
    names = read_list(file)
    if source.is_part or not names:  # val or test by itself, of which a list says nothing
        return source
    kept = np.array([not _is_named(source.train, row, names) for row in source.train.rows.tolist()], dtype=bool)
    count = int(np.sum(~kept))
    if not count:
        raise DataError(
            f"{printable(file)} names none of the {len(kept):,} training pictures of {source.name}; "
            f"it has {printable(min(names))!r}, expected names such as {_some_name(source.train)!r}"
        )
    train = replace(source.train, rows=source.train.rows[kept], labels=source.train.labels[kept])
    others = f"; {len(names) - count:,} of its lines name none" if count < len(names) else ""
    said = f"{count:,} training picture{'s' * (count != 1)} left out by {printable(file)}{others}"
    return replace(source, train=train, notes=(*source.notes, said))


def read_list(file: Path) -> set[str]:
    """The names in a list."""
    try:
        lines = read_plain(file).decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise UsageError(f"--without {printable(file)}: the list cannot be read ({error.strerror})") from error
    names = {line.partition("\t")[0].strip() for line in lines} - {""}
    return names - ({HEAD} if lines and lines[0].partition("\t")[0] == HEAD else set())


def write_list(file: Path, images: Iterable[tuple[str, str]]) -> None:
    """Write a list of (name within the data set, why)."""
    lines = [f"{table_cell(name)}\t{table_cell(why)}\n" for name, why in images]
    atomic_write(file, "".join([f"{HEAD}\treason\n", *lines]).encode("utf-8", "surrogateescape"))


def _is_named(listing: Listing, row: int, names: set[str]) -> bool:
    images = listing.images
    return table_cell(images.key(row)) in names or table_cell(images.where(row)) in names


def _some_name(listing: Listing) -> str:
    return table_cell(listing.images.key(int(listing.rows[0]))) if len(listing) else ""
