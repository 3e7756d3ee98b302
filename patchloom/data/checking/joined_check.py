"""The join of a large check: one report from all scan parts, in bounded memory.

Every image has a position: train first, then val and test, each in the order of its parts. Three kinds of rows are
sorted on disk (`sorted_rows`): digests, to find equal images; hashes, once per choice of half of their parts, to find
near pairs; and these pairs, whose thumbnails are then read from the parts in order. The groups are those that `check`
finds in memory.

Problems are written to CSV files as they are found; the report holds the first of each kind. What grows with the data
is little: a bit per image, about a kilobyte per part, and 40 bytes per image that nearly equals another.
"""

import csv
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from patchloom.data.annotations.faults import NO_OBJECTS
from patchloom.data.checking.check_report import (
    DETAILED,
    MOST_GROUPS,
    MOST_LINES,
    MOST_MEMBERS,
    FirstItems,
    Group,
    GroupsOfCopies,
    JoinedReport,
    OddImage,
)
from patchloom.data.checking.duplicates import (
    CHOICES,
    COMPARED,
    keys_of,
    levels_of,
    may_be_similar,
    near_in_runs,
    roots_of,
    similar_colors,
    textured_hashes,
)
from patchloom.data.checking.oddities import STRIP_RATIO, TINY_SHARE, is_odd_mode, odd_kinds
from patchloom.data.checking.part_sources import PartSources, one_file
from patchloom.data.checking.scan_parts import ANIMATED, BARE, PART_FILE, ROTATED, ScanPart, StoredRows, file_of, key_of
from patchloom.data.checking.sorted_rows import RowFile, RowSorter
from patchloom.data.checking.survey import ImageLocation, Unreadable
from patchloom.data.datasets import Fault, Listing, Progress
from patchloom.data.labels.similar_names import BARE as NO_LABEL
from patchloom.data.labels.similar_names import look_alikes
from patchloom.data.splits import group_by_split
from patchloom.disk import atomic_file, atomic_write, disk_errors, locked, sync_file, temporary_path
from patchloom_runtime.errors import PatchloomError, ResourceError, UsageError
from patchloom_runtime.printable import plural, printable, table_cell

T = TypeVar("T")
SPLITS = ("train", "val", "test")
MOST_NOTES = 50
LISTS = ("unreadable", "odd", "faults", "duplicates", "near_duplicates")
SCRATCH_BYTES = 64  # per image: hashes, and one list that is being sorted
_OPEN_PARTS = 4
_OPEN_SHARDS = 4  # for the images of the page
_BLOCK = 1 << 16  # images, or rows of a group, that are looked up at once
_CHECK_OF_PAIRS = 1 << 17  # pairs whose thumbnails are compared at once


class CsvWriter(Protocol):
    """What `csv.writer` returns."""

    def writerow(self, row: Iterable[Any], /) -> Any: ...


class Segment(NamedTuple):
    """The images of one split in one part."""

    start: int  # position of the first
    part: int
    split: str
    first: int  # row in the part
    rows: int

    @property
    def positions(self) -> np.ndarray:
        """The positions of its images."""
        return np.arange(self.start, self.start + self.rows, dtype=np.uint64)


class _Collector(Generic[T]):
    """Keeps the first items of many and counts all."""

    def __init__(self, most: int) -> None:
        self._most, self._items, self.total = most, list[T](), 0

    def add(self, item: T) -> None:
        self.total += 1
        if len(self._items) < self._most:
            self._items.append(item)

    def result(self) -> FirstItems[T]:
        return FirstItems(self._items, self.total)


def _segments(counted: Sequence[tuple[str, dict[str, int]]], split_of: Mapping[str, str]) -> Iterator[Segment]:
    """Yield the segments of train, then those of val and test. `counted` has the split and the rows of each part."""
    start = 0
    for split in SPLITS:
        for part, (of_file, splits) in enumerate(counted):
            first = 0
            for name, rows in splits.items():
                if rows and (split_of.get(name) if name else of_file) == split:
                    yield Segment(start, part, split, first, rows)
                    start += rows
                first += rows


class PartTable:
    """The parts of a dataset in a folder, and the positions of their images."""

    def __init__(self, sources: PartSources, folder: Path) -> None:
        self.sources = sources
        self._keys: list[str] = []
        self._stored: list[StoredRows] = []
        self.task, self.kinds = "classify", set[str]()
        self.annotated: tuple[str, ...] = ()
        self.notes: dict[str, None] = {}
        counted: list[tuple[str, dict[str, int]]] = []
        counts: dict[tuple[str, str], Counter[str]] = {}
        missing: list[str] = []
        present = {name for name in os.listdir(folder) if PART_FILE.fullmatch(name)} if folder.is_dir() else set()
        for source in sources.listed():
            key = key_of(source)
            if file_of(key) not in present:
                missing.append(source.name)
                continue
            part = ScanPart(folder, key)
            header = part.header
            self._stored.append(part.stored)
            if not self._keys:
                self.task, self.annotated = header.task, header.annotated
            self._keys.append(key)
            counted.append((source.split, header.splits))
            self.kinds.add(header.kind)
            if len(self.notes) < MOST_NOTES:
                self.notes |= dict.fromkeys(header.notes)
            for name in header.splits:
                own = counts.setdefault((source.split, name), Counter())
                own.update(header.counts.get(name, {}))
                own.update(dict.fromkeys(header.empty_classes, 0))
        if missing:
            raise UsageError(
                f"{len(missing):,} of {len(missing) + len(self._keys):,} parts are not in {folder} yet, the first is "
                f"that of {printable(missing[0])}: wait for their --part, or run the same command without --join"
            )
        if unused := len(present) - len({*self._keys}):
            self.notes[f"{folder}: {plural(unused, 'part')} of other data, or of earlier content of these"] = None
        self.open = lru_cache(_OPEN_PARTS)(lambda part: ScanPart(folder, self._keys[part]))
        split_of = self._split_of(sorted({name for _, splits in counted for name in splits if name}))
        self.segments = list(_segments(counted, split_of))
        self._starts = np.array([segment.start for segment in self.segments], dtype=np.uint64)
        self.splits = Counter[str]()
        for segment in self.segments:
            self.splits[segment.split] += segment.rows
        self.counts: dict[str, Counter[str]] = {split: Counter() for split in self.splits}
        for (of_file, name), own in counts.items():
            if (split := split_of.get(name) if name else of_file) in self.counts:
                self.counts[split].update(own)

    def __len__(self) -> int:
        return len(self._keys)

    def _split_of(self, names: Sequence[str]) -> dict[str, str]:
        """Return the split that each name in a column `split` stands for."""
        groups = group_by_split(names)
        if groups.unused:
            self.notes[f"rows of other splits, not used: {', '.join(groups.unused)}"] = None
        return {name: split for split in SPLITS for name in getattr(groups, split)}

    def places(self, positions: np.ndarray) -> list[ImageLocation]:
        """Return the locations of images at sorted positions."""
        return [place for segment, rows in self._by_segment(positions) for place in self.places_in(segment, rows)]

    def places_in(self, segment: Segment, rows: np.ndarray) -> list[ImageLocation]:
        """Return the locations of some rows of a part, in the split of this segment."""
        stored = self._stored[segment.part]
        numbers = stored.mapped()["row"][rows].tolist() if self.sources.folder is None else [0] * len(rows)
        texts = zip(stored.texts(rows), numbers, strict=True)
        return [ImageLocation(name, segment.split, label, number) for (label, name), number in texts]

    def thumbnails(self, positions: np.ndarray) -> np.ndarray:
        """Return the thumbnails of images at sorted positions."""
        segments = self._by_segment(positions)
        return np.concatenate([self._stored[part].mapped()["thumbnail"][rows] for (_, part, *_), rows in segments])

    def _by_segment(self, positions: np.ndarray) -> Iterator[tuple[Segment, np.ndarray]]:
        numbers = np.searchsorted(self._starts, positions, side="right") - 1
        ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, len(numbers))
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            if start < end:
                segment = self.segments[int(numbers[start])]
                yield segment, (positions[start:end] - np.uint64(segment.start)).astype(np.int64) + segment.first


def join_parts(
    sources: PartSources, folder: Path, *, decoded: int = 0, progress: Progress | None = None
) -> JoinedReport:
    """Write the lists of all problems, and `check.json`, next to the parts of a check. Returns the report.

    sources   The shards or slices whose parts are all in `folder`.
    decoded   Number of images that were scanned for it just now.
    progress  Called with the number of steps done and their total.
    """
    table = PartTable(sources, folder)
    with locked(folder), _scratch_folder(folder, table.splits.total() * SCRATCH_BYTES) as scratch:
        report = _Join(table, folder, scratch, progress).report(decoded)
    values = json.dumps(report.to_dict(), indent=1) + "\n"
    atomic_write(folder / "check.json", values.encode("utf-8", "backslashreplace"))
    return report


@contextmanager
def _scratch_folder(folder: Path, needed: int) -> Iterator[Path]:
    """Yield a hidden folder that is removed at the end; the next join removes that of one that was killed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"joining needs about {needed / 1e9:,.1f} GB in {folder}, and {free / 1e9:,.1f} GB are free. Free some "
            "space, or copy the parts to a larger disk."
        )
    scratch = temporary_path(folder / "join")
    with disk_errors(folder):
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _csv_file(path: Path, *columns: str) -> Iterator[CsvWriter]:
    """Yield a writer of rows. The file exists once all of them are written."""
    with atomic_file(path) as temporary:
        with open(temporary, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            yield writer
        sync_file(temporary)


def _cells(place: ImageLocation) -> tuple[str, str, str]:
    return place.split, table_cell(place.label), table_cell(place.where)


class _Join:
    """The steps of a join, in the order in which `report` takes them."""

    def __init__(self, table: PartTable, folder: Path, scratch: Path, progress: Progress | None) -> None:
        self._table, self._folder, self._scratch = table, folder, scratch
        self._progress, self._done = progress, 0
        self._widths: Counter[int] = Counter()
        self._heights: Counter[int] = Counter()
        self._short_sides: Counter[int] = Counter()
        self._unreadable = _Collector[Unreadable](MOST_LINES)
        self._faults: dict[str, _Collector[Fault]] = {}
        self._unlabeled, self._first_unlabeled = 0, ""  # of train
        self._digests = RowSorter(scratch, 3, numbered=True)  # two halves of a digest, position
        self._hashes = RowFile(scratch / "hashes", 3)  # levels, position, hash
        self._repeated = np.zeros(table.splits.total() // 8 + 1, np.uint8)  # a bit per image that equals an earlier one

    def report(self, decoded: int) -> JoinedReport:
        """Take all steps and return the report."""
        table, lists = self._table, {name: self._folder / f"{name}.csv" for name in LISTS}
        self._read_parts(lists["unreadable"], lists["faults"])
        odd, kinds_of_odd = self._find_odd(lists["odd"])
        equal = self._write_groups(self._equal_images(), lists["duplicates"])
        similar = self._write_groups(self._similar_images(), lists["near_duplicates"])
        faults = {kind: collected.result() for kind, collected in self._faults.items()}
        return JoinedReport(
            name=table.sources.name,
            task=table.task,
            annotated=table.annotated,
            splits={split: table.splits[split] for split in SPLITS if table.splits[split] or split == "train"},
            classes=self._classes(),
            widths=_spread(self._widths),
            heights=_spread(self._heights),
            unreadable=self._unreadable.result(),
            odd=odd,
            duplicates=equal.groups,
            near_duplicates=similar.groups,
            faults=tuple(fault for first in faults.values() for fault in first),
            notes=(*table.sources.notes, *table.notes),
            decoded=decoded,
            listings={},
            equal=equal,
            similar=similar,
            kinds_of_odd=kinds_of_odd,
            kinds_of_faults=faults,
            folder=str(self._folder),
            lists={name: path.name for name, path in lists.items()},
            open_listing=_opener(table.sources),
        )

    def _step(self) -> None:
        self._done += 1
        if self._progress:
            self._progress(self._done, 2 * len(self._table.segments) + len(CHOICES) + 1)

    def _classes(self) -> dict[str, dict[str, int]]:
        """Return class → split → readable images. Masks, boxes and numbers have no classes."""
        table = self._table
        if not table.kinds & {"classes", "labels"}:
            return {}
        names = sorted({name for own in table.counts.values() for name in own} | table.sources.empty_classes)
        return {name: {split: own[name] for split, own in table.counts.items()} for name in names}

    def _read_parts(self, unreadable_file: Path, faults_file: Path) -> None:
        """Read and check every part: list its unreadable images and faults, collect its digests and hashes."""
        with (
            _csv_file(unreadable_file, "split", "label", "image", "reason") as unreadable,
            _csv_file(faults_file, "image", "kind", "detail") as faults,
        ):
            for segment in self._table.segments:
                part = self._table.open(segment.part)
                rows = part.rows()[segment.first : segment.first + segment.rows]
                for start in range(0, len(rows), _BLOCK):
                    self._collect(rows[start : start + _BLOCK], segment.positions[start : start + _BLOCK])
                self._list_unreadable(segment, unreadable)
                self._list_faults(segment, faults)
                self._note_unlabeled(segment, rows)
                self._step()
            for fault in self._faults_of_names():
                self._add_fault(fault, faults)

    def _collect(self, rows: np.ndarray, positions: np.ndarray) -> None:
        readable = rows["width"] > 0
        rows, positions = rows[readable], positions[readable]
        self._digests.add(np.column_stack([rows["digest"], positions]))
        textured, hashes = textured_hashes(rows["thumbnail"])
        self._hashes.add(np.column_stack([levels_of(rows["thumbnail"][textured]), positions[textured], hashes]))
        short = np.minimum(rows["width"], rows["height"])
        for counter, values in (
            (self._widths, rows["width"]),
            (self._heights, rows["height"]),
            (self._short_sides, short),
        ):
            numbers, counts = np.unique(values, return_counts=True)
            counter.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def _list_unreadable(self, segment: Segment, writer: CsvWriter) -> None:
        errors = self._table.open(segment.part).header.errors
        numbers = _within(segment, errors)
        for row, place in zip(numbers.tolist(), self._table.places_in(segment, numbers), strict=True):
            writer.writerow([*_cells(place), table_cell(errors[row])])
            self._unreadable.add(Unreadable(place, errors[row]))

    def _list_faults(self, segment: Segment, writer: CsvWriter) -> None:
        faults = self._table.open(segment.part).header.faults
        numbers = _within(segment, faults)
        for row, place in zip(numbers.tolist(), self._table.places_in(segment, numbers), strict=True):
            for fault in faults[row]:
                if fault.kind != NO_OBJECTS:
                    self._add_fault(Fault(place.where, fault.kind, fault.detail), writer)

    def _add_fault(self, fault: Fault, writer: CsvWriter) -> None:
        writer.writerow([table_cell(fault.where), fault.kind, table_cell(fault.detail)])
        self._faults.setdefault(fault.kind, _Collector(MOST_LINES)).add(fault)

    def _note_unlabeled(self, segment: Segment, rows: np.ndarray) -> None:
        bare = np.flatnonzero(rows["flags"] & BARE) if segment.split == "train" else np.zeros(0, np.int64)
        if len(bare) and not self._unlabeled:
            self._first_unlabeled = self._table.places_in(segment, bare[:1] + segment.first)[0].where
        self._unlabeled += len(bare)

    def _faults_of_names(self) -> Iterator[Fault]:
        """Yield classes that look the same, and missing labels, as for one dataset in memory."""
        table, train = self._table, dict(sorted(self._table.counts.get("train", {}).items()))
        yield from look_alikes(list(train), list(train.values()), table.sources.name)
        total = table.splits["train"]
        if "classes" in table.kinds and 0 < self._unlabeled < total:
            detail = f"{self._unlabeled:,} of {total:,} images, the first is {self._first_unlabeled}"
            yield Fault(table.sources.name, NO_LABEL, detail)

    def _find_odd(self, file: Path) -> tuple[FirstItems[OddImage], dict[tuple[str, str], int]]:
        """List the odd images; which are tiny is known only once all sizes are."""
        usual_side = _median(self._short_sides)
        first, kinds = _Collector[OddImage](MOST_LINES), Counter[tuple[str, str]]()
        with _csv_file(file, "split", "label", "image", "kind", "read_as") as writer:
            for segment in self._table.segments:
                for place, kind, read_as in self._odd_images(segment, usual_side):
                    writer.writerow([*_cells(place), kind, table_cell(read_as)])
                    first.add(OddImage(place, kind, read_as))
                    kinds[kind, "" if kind in DETAILED else read_as] += 1
                self._step()
        return first.result(), dict(kinds)

    def _odd_images(self, segment: Segment, usual_side: float) -> Iterator[tuple[ImageLocation, str, str]]:
        part = self._table.open(segment.part)
        rows, odd = part.stored.mapped(), _odd_rows(part, segment, usual_side)
        for start in range(0, len(odd), _BLOCK):
            some = odd[start : start + _BLOCK]
            for row, place in zip(some.tolist(), self._table.places_in(segment, some), strict=True):
                scan = part.scan(rows, row)
                no_objects = ((fault.kind, fault.detail) for fault in scan.faults if fault.kind == NO_OBJECTS)
                yield from ((place, *oddity) for oddity in (*odd_kinds(scan, usual_side), *no_objects))

    def _equal_images(self) -> Iterator[np.ndarray]:
        """Yield (position of the first, position) of equal images, group by group; the later ones are `_repeated`."""
        groups = RowSorter(self._scratch, 2)
        before, first, is_single = None, np.uint64(0), False  # the last digest, the first image that has it
        for block in self._digests.blocks():
            digests, positions = block[:, :2], block[:, 2]
            begins = np.ones(len(block), dtype=bool)
            begins[1:] = np.any(digests[1:] != digests[:-1], axis=1)
            begins[0] = before is None or bool(np.any(digests[0] != before))
            begun_at = np.maximum.accumulate(np.where(begins, np.arange(len(block)), -1))
            firsts = np.where(begun_at >= 0, positions[begun_at], first)
            follows_first = np.concatenate([[is_single], begins[:-1]]) & ~begins
            repeated = positions[~begins]
            groups.add(np.column_stack([firsts[~begins], repeated]))
            groups.add(np.column_stack([firsts[follows_first]] * 2))
            places, bits = (repeated >> np.uint64(3)).astype(np.int64), (repeated & np.uint64(7)).astype(np.uint8)
            np.bitwise_or.at(self._repeated, places, np.left_shift(np.uint8(1), bits))
            before, first, is_single = digests[-1].copy(), firsts[-1], bool(begins[-1])
        self._step()
        yield from groups.blocks()

    def _similar_images(self) -> Iterator[np.ndarray]:
        """Yield (position of the first, position) of nearly equal images, one of each group of equal ones."""
        pairs = self._pairs_of_hashes()
        near, members = RowFile(self._scratch / "near", 2), RowSorter(self._scratch, 1)
        for block in pairs.blocks():
            for start in range(0, len(block), _CHECK_OF_PAIRS):
                some = block[start : start + _CHECK_OF_PAIRS]
                wanted = np.unique(some)
                similar = some[similar_colors(self._table.thumbnails(wanted), np.searchsorted(wanted, some))]
                near.add(similar)
                members.add(similar.reshape(-1, 1))
        distinct = [np.unique(block) for block in members.blocks()]
        images = np.unique(np.concatenate([np.zeros(0, np.uint64), *distinct]))
        roots = roots_of(len(images), (np.searchsorted(images, block) for block in near.blocks(_BLOCK)))
        order = np.argsort(roots, kind="stable")
        for start in range(0, len(order), _BLOCK):
            some = order[start : start + _BLOCK]
            yield np.column_stack([images[roots[some]], images[some]])

    def _pairs_of_hashes(self) -> RowSorter:
        """Return the pairs of positions whose hashes are near, as `similar_pairs` finds them, and whose levels are."""
        distinct = RowFile(self._scratch / "distinct", 3)
        for block in self._hashes.blocks():
            places, bits = (block[:, 1] >> np.uint64(3)).astype(np.int64), (block[:, 1] & np.uint64(7)).astype(np.uint8)
            distinct.add(block[self._repeated[places] >> bits & 1 == 0])
        self._hashes.remove()
        pairs = RowSorter(self._scratch, 2)
        for choice in CHOICES:
            by_key = RowSorter(self._scratch, 4, by=3, numbered=True)
            for block in distinct.blocks():
                by_key.add(np.column_stack([keys_of(block[:, 2], choice), block]))
            held = np.zeros((0, 4), np.uint64)  # the last rows, with which the next ones are compared
            for block in by_key.blocks():
                rows = np.concatenate([held, block])
                for one, other in near_in_runs(rows[:, 3], choice):
                    likely = (other >= len(held)) & may_be_similar(rows[one, 1], rows[other, 1])
                    pairs.add(np.sort(np.column_stack([rows[one[likely], 2], rows[other[likely], 2]]), axis=1))
                held = rows[-COMPARED:].copy()
            self._step()
        distinct.remove()
        return pairs

    def _write_groups(self, blocks: Iterator[np.ndarray], file: Path) -> GroupsOfCopies:
        """List all groups, each image on a line, and return the first of each kind."""
        groups, conflicts = _Collector[Group](MOST_GROUPS), _Collector[Group](MOST_GROUPS)
        leaks: dict[str, _Collector[Group]] = {}
        with _csv_file(file, "group", "split", "label", "image") as writer:
            for number, (_, members) in enumerate(itertools.groupby(self._places(blocks), key=lambda pair: pair[0]), 1):
                held = _Collector[ImageLocation](MOST_MEMBERS)
                splits, labels = set[str](), set[str]()
                for _, place in members:
                    writer.writerow([number, *_cells(place)])
                    held.add(place)
                    splits.add(place.split)
                    if len(labels) < 2:
                        labels.add(place.label)
                group = held.result()
                groups.add(group)
                if len(splits) > 1:
                    kind = " and ".join(split for split in SPLITS if split in splits)
                    leaks.setdefault(kind, _Collector(MOST_GROUPS)).add(group)
                if len(labels) > 1:
                    conflicts.add(group)
        first_leaks = {kind: collected.result() for kind, collected in leaks.items()}
        return GroupsOfCopies(groups.result(), first_leaks, conflicts.result())

    def _places(self, blocks: Iterator[np.ndarray]) -> Iterator[tuple[int, ImageLocation]]:
        """Yield (number of a group, location) in the order of the rows."""
        for whole in blocks:
            for start in range(0, len(whole), _BLOCK):
                block = whole[start : start + _BLOCK]
                order = np.argsort(block[:, 1])
                places = self._table.places(block[order, 1])
                rank = np.argsort(order)
                yield from zip(block[:, 0].tolist(), (places[i] for i in rank.tolist()), strict=True)


def _within(segment: Segment, rows: Iterable[int]) -> np.ndarray:
    """Return those of the rows of a part that are in a segment, sorted."""
    inside = range(segment.first, segment.first + segment.rows)
    return np.array(sorted(row for row in rows if row in inside), dtype=np.int64)


def _odd_rows(part: ScanPart, segment: Segment, usual_side: float) -> np.ndarray:
    """Return the rows of a segment that may be odd, sorted."""
    rows, header = part.stored.mapped()[segment.first : segment.first + segment.rows], part.header
    width, height = rows["width"].astype(np.int64), rows["height"].astype(np.int64)
    short, long = np.minimum(width, height), np.maximum(width, height)
    odd_modes = np.array([is_odd_mode(mode) for mode in header.modes], dtype=bool)
    odd = (
        odd_modes[rows["mode"]]
        | (rows["flags"] & (ROTATED | ANIMATED) > 0)
        | (long >= STRIP_RATIO * short)
        | (short < TINY_SHARE * usual_side)
    )
    odd[_within(segment, header.faults) - segment.first] = True
    return np.flatnonzero(odd & (width > 0)) + segment.first


def _median(counts: Mapping[int, int]) -> float:
    """Return the median of numbers that are counted; 0 of none."""
    values = np.array(sorted(counts), dtype=np.int64)
    ends = np.cumsum([counts[value] for value in values.tolist()])
    if not len(values):
        return 0.0
    middle = [values[np.searchsorted(ends, rank, side="right")] for rank in ((ends[-1] - 1) // 2, ends[-1] // 2)]
    return float(sum(middle) / 2)


def _spread(counts: Mapping[int, int]) -> tuple[int, int, int] | None:
    return (min(counts), int(_median(counts)), max(counts)) if counts else None


def _opener(sources: PartSources) -> Callable[[ImageLocation], Listing | None]:
    """Return a function that opens the shard, or the file, of an image for the page; None if it is gone."""
    by_name = {str(source.file): source for source in sources.shards}
    opened = lru_cache(_OPEN_SHARDS)(lambda name: by_name[name].open().train)

    def open_listing(place: ImageLocation) -> Listing | None:
        try:
            if sources.folder is not None:
                return one_file(sources.folder, place.where)  # parts may come from anyone
            names = itertools.accumulate(place.where.split(", "), lambda start, more: f"{start}, {more}")
            name = next((name for name in names if name in by_name), None)
            listing = opened(name) if name else None
            return listing if listing and place.row < len(listing.images) else None
        except PatchloomError:
            return None

    return open_listing
