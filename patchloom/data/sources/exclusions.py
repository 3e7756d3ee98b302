"""Lists of training images to exclude: `train A --exclude LIST`.

    file	reason
    rose/12.jpg	also in test

A line has the key of an image within the dataset, or its path, up to the first tab. `check A --against B` writes such a
list, and so is the `left_out.tsv` of a run.
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
    """Return the source without the training images that the list names, with a note on their number."""
    names = read_list(file)
    if source.is_part or not names:  # a val or test folder by itself has no training images
        return source
    remaining = np.array([not _is_listed(source.train, row, names) for row in source.train.rows.tolist()], dtype=bool)
    count = int(np.sum(~remaining))
    if not count:
        raise DataError(
            f"{printable(file)} names none of the {len(remaining):,} training images of {source.name}; "
            f"it has {printable(min(names))!r}, expected names such as {_first_name(source.train)!r}"
        )
    train = source.train.subset(remaining)
    unmatched = f"; {len(names) - count:,} of its lines match none" if count < len(names) else ""
    note = f"{count:,} training image{'s' * (count != 1)} left out by {printable(file)}{unmatched}"
    return replace(source, train=train, notes=(*source.notes, note))


def read_list(file: Path) -> set[str]:
    """Read the names in a list."""
    try:
        lines = read_plain(file).decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise UsageError(f"--exclude {printable(file)}: the list cannot be read ({error.strerror})") from error
    names = {line.partition("\t")[0].strip() for line in lines} - {""}
    return names - ({HEAD} if lines and lines[0].partition("\t")[0] == HEAD else set())


def write_list(file: Path, images: Iterable[tuple[str, str]]) -> None:
    """Write a list of (key within the dataset, reason)."""
    lines = [f"{table_cell(name)}\t{table_cell(why)}\n" for name, why in images]
    atomic_write(file, "".join([f"{HEAD}\treason\n", *lines]).encode("utf-8", "surrogateescape"))


def _is_listed(listing: Listing, row: int, names: set[str]) -> bool:
    return table_cell(listing.images.key(row)) in names or table_cell(listing.images.where(row)) in names


def _first_name(listing: Listing) -> str:
    return table_cell(listing.images.key(int(listing.rows[0]))) if len(listing) else ""
