"""Opening parallel text for translation: the user's argument → `ParallelText`.

corpus/                  train.en, train.de, val.en.gz, test_2016.de …, or parquet files
pairs-en-de.tsv.gz       two fields per line; the name gives their languages
train.parquet            `translation` {de: …, en: …}, or columns named by their languages
numbers  numbers:fr-en   built in (`data/text/numbers.py`)

Everything is read once when it is opened, so that errors are found before any work: sides with different numbers of
lines, and bytes that are not UTF-8. Training pairs with an empty side are skipped and listed by line; pairs of val and
test are all kept, so that line n of a translation belongs to line n of the file. The text itself is not held in memory:
`Pairs` reads it again on each iteration and keeps a few bytes per pair.
"""

import hashlib
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from patchloom.data.images.image_store import file_state
from patchloom.data.text.numbers import find_numbers
from patchloom.data.text.sentences import SentenceSplit, find_sentences, is_train, not_utf8
from patchloom_runtime.errors import DataError, UsageError, nearest
from patchloom_runtime.printable import printable
from patchloom_runtime.text.vocabulary import clean

VAL_NAMES = ("val", "valid", "validation", "dev", "development")
# Held out if there is no val split: a tenth, but not much more than this many pairs.
MADE_VAL_FRACTION, MADE_VAL_PAIRS = 0.1, 2000
# train-00000-of-00002 is a part of train
_SHARD = re.compile(r"-\d+-of-\d+$")

Spec = str | os.PathLike[str]


@dataclass(frozen=True)
class LeftOut:
    """A pair that is skipped."""

    where: str  # file and line
    reason: str


@dataclass(frozen=True, eq=False)
class PairsPart:
    """Some rows of two sides of a split."""

    split: SentenceSplit
    sides: tuple[int, int]  # source and target
    rows: np.ndarray  # (pairs,) int64, increasing
    states: tuple[tuple[int, int] | None, ...] = field(repr=False)  # of the files when they were first read

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for side, now, then in zip(self.sides, _states(self.split, self.sides), self.states, strict=False):
            if now != then:
                raise DataError(f"{printable(self.split.files[side])} has changed since it was opened; start again")
        wanted = iter(self.rows.tolist())
        next_row = next(wanted, None)
        for row, texts in enumerate(self.split.read(self.sides)):
            if row == next_row:
                source, target = (_decoded(text) for text in texts)
                yield source, target
                next_row = next(wanted, None)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Cleaned sentence pairs (see `sentences.clean`) in the order of their files, read again on each iteration."""

    parts: tuple[PairsPart, ...]

    def __len__(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for part in self.parts:
            yield from part

    def where(self, index: int) -> str:
        """Return file and line of a pair's source."""
        for part in self.parts:
            if index < len(part.rows):
                return part.split.where(int(part.rows[index]), part.sides[0])
            index -= len(part.rows)
        raise IndexError(index)

    def sources(self) -> list[str]:
        return [source for source, _ in self]

    def targets(self) -> list[str]:
        return [target for _, target in self]

    def sample(self, at_most: int) -> Iterator[tuple[str, str]]:
        """Yield every n-th pair, `at_most` in total: enough of a large text to learn a vocabulary."""
        every = max(1, -(-len(self) // at_most))
        return (pair for number, pair in enumerate(self) if number % every == 0)


@dataclass(frozen=True, eq=False)
class ParallelText:
    """A parallel text in one direction."""

    name: str
    source: str  # languages
    target: str
    train: Pairs
    val: Pairs
    tests: dict[str, Pairs]
    left_out: tuple[LeftOut, ...]  # of train
    notes: tuple[str, ...]  # on automatic choices


def open_parallel(
    spec: Spec,
    *,
    source: str | None = None,
    target: str | None = None,
    val_fraction: float | None = None,
    seed: int = 0,
) -> ParallelText:
    """Open train, val and tests of a parallel text, from `source` to `target`.

    With two languages neither has to be named; the first file or column is the source. Without a val split,
    `val_fraction` of train is held out by a hash of (seed, source sentence), so equal sources stay on one side; by
    default a tenth, at most about 2,000 pairs.
    """
    name, splits, usual = _find(spec)
    train, val, tests = _roles(name, splits)
    source, target, notes = _direction(name, train, source, target, usual)
    scanned = [_scan(split, _sides(split, source, target), seed) for split in train]
    left_out = tuple(entry for part in scanned for entry in part.left_out())
    usable = [part.drop_empty() for part in scanned]
    if not sum(len(part.rows) for part, _ in usable):
        raise DataError(f"{name}: train has no pair without an empty side")
    others: dict[str, Pairs] = {}
    for split, parts in {**val, **tests}.items():
        if all({source, target} <= set(part.languages) for part in parts):
            others[split] = read_pairs(parts, source, target)
        else:
            notes.append(f"{split} has no {source}-{target}: not used")
    if val_splits := [split for split in val if split in others]:
        train_pairs, val_pairs = Pairs(tuple(part for part, _ in usable)), others.pop(val_splits[0])
    else:
        train_pairs, val_pairs = _held_out(name, usable, val_fraction)
        both = len(train_pairs) + len(val_pairs)
        notes.append(
            f"no val split: {len(val_pairs):,} of {both:,} pairs held out by a hash of the source (seed {seed})"
        )
    if not len(val_pairs):
        raise DataError(f"{name}: {val_splits[0]} has no lines. Remove its files to hold out pairs of train instead")
    return ParallelText(name, source, target, train_pairs, val_pairs, others, left_out, tuple(notes))


def read_pairs(splits: Sequence[SentenceSplit], source: str, target: str) -> Pairs:
    """Read all rows of splits that have both languages, in order, including empty ones."""
    return Pairs(tuple(_scan(split, _sides(split, source, target), seed=0).whole() for split in splits))


def open_splits(spec: Spec, source: str, target: str, split: str | None = None) -> dict[str, Pairs]:
    """Open whole splits for evaluation: the one called `split`, else all tests, else val.

    The only split of a text is used whatever its name. No line is skipped or held out.
    """
    name, splits, _ = _find(spec)
    named: dict[str, list[SentenceSplit]] = {}
    for part in splits:
        named.setdefault(_SHARD.sub("", part.name), []).append(part)
    if split is not None and split not in named:
        raise UsageError(f"{name} has no split {split}; there are {', '.join(named)}.{nearest(split, list(named))}")
    chosen = [split] if split else list(named)
    if len(chosen) > 1:
        _, val, tests = _roles(name, splits)
        chosen = list(tests or val)
    if not chosen:
        raise UsageError(f"{name} has neither a test nor a val split. Choose one with --split: {', '.join(named)}")
    for each in chosen:
        _direction(name, named[each], source, target, ())
    return {each: read_pairs(named[each], source, target) for each in chosen}


def holds_pairs(spec: Spec) -> bool:
    """Return whether `spec` is a parallel text, whatever is wrong with its lines."""
    try:
        return bool(_find(spec)[1])
    except (DataError, UsageError):
        return False


# Finding splits ---------------------------------------------------------------------------------------------------


def _find(spec: Spec) -> tuple[str, list[SentenceSplit], tuple[str, ...]]:
    """Return name, splits, and the default language pair of a built-in text."""
    text = os.fspath(spec)
    path = Path(os.path.expanduser(text))
    if not os.path.exists(path):
        kind, _, options = text.partition(":")
        if kind == "numbers":
            splits, pair = find_numbers(options)
            return "numbers (built in)", splits, pair
        raise UsageError(f"{printable(text)} is neither a path nor a built-in parallel text; built in is: numbers")
    name = printable(path.resolve().name)
    splits = find_sentences(path)
    if not splits:
        raise DataError(
            f"{name}: no sentence pairs found; expected files such as train.en and train.de (or .gz), a .tsv with two "
            "fields per line, or parquet with one column per language"
        )
    for split in splits:
        if doubled := {a for a in split.languages if a and split.languages.count(a) > 1}:
            raise DataError(f"{name}: {split.name}.{min(doubled)} exists twice, plain and as .gz. Remove one of them")
    return name, splits, ()


def _roles(
    name: str, splits: Sequence[SentenceSplit]
) -> tuple[list[SentenceSplit], dict[str, list[SentenceSplit]], dict[str, list[SentenceSplit]]]:
    """Return train, val and tests by name, with shards joined. A single split is train, whatever its name."""
    named: dict[str, list[SentenceSplit]] = {}
    for split in splits:
        named.setdefault(_SHARD.sub("", split.name), []).append(split)
    trains = [split for split in named if is_train(split)] or (list(named) if len(named) == 1 else [])
    if not trains:
        raise DataError(f"{name}: none of {', '.join(named)} is called train. Rename the training split")
    vals = [split for split in named if split not in trains and set(re.split(r"[^a-z]+", split)) & set(VAL_NAMES)]
    train = [part for split in trains for part in named[split]]
    val = {split: named[split] for split in vals[:1]}
    return train, val, {split: parts for split, parts in named.items() if split not in (*trains, *val)}


def _direction(
    name: str, train: Sequence[SentenceSplit], source: str | None, target: str | None, usual: Sequence[str]
) -> tuple[str, str, list[str]]:
    """Return source, target and a note if they were chosen here; `usual` is the pair of a built-in text."""
    if source and source == target:
        raise UsageError(f"From {source} to {target}: source and target must differ")
    if not any(train[0].languages):
        source, target = source or "source", target or "target"
        return source, target, [f"{name} does not name its languages: field 1 is used as {source}, field 2 as {target}"]
    there = [language for language in train[0].languages if all(language in split.languages for split in train)]
    requested = [language for language in (source, target) if language]
    pairs = ", ".join(f"{a}-{b}" for a, b in combinations(there, 2))
    if len(there) < 2:
        raise DataError(f"{name}: {', '.join(split.name for split in train)} do not have two languages in common")
    if unknown := [language for language in requested if language not in there]:
        hint = nearest(unknown[0], there)
        raise UsageError(f"{name} has no {'-'.join(requested)}; there are {pairs}, in either direction.{hint}")
    if source and target:
        return source, target, []
    choice = usual or there
    if len(choice) > 2:
        raise UsageError(
            f"{name} has more than one language pair: {pairs}. Choose the direction: "
            "--set text.source=… --set text.target=…"
        )
    source = source or next(language for language in choice if language != target)
    target = target or next(language for language in reversed(choice) if language != source)
    return source, target, [f"from {source} to {target}: {name} has these two languages"] if not usual else []


def _sides(split: SentenceSplit, source: str, target: str) -> tuple[int, int]:
    if not any(split.languages):
        return 0, 1
    return split.languages.index(source), split.languages.index(target)


# Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Scanned:
    split: SentenceSplit
    sides: tuple[int, int]
    states: tuple[tuple[int, int] | None, ...]
    hashes: np.ndarray  # (rows,) uint64 of the sources
    empty: dict[int, int]  # row → its first side that has no sentence

    def whole(self) -> PairsPart:
        return self._part(np.arange(len(self.hashes)))

    def drop_empty(self) -> tuple[PairsPart, np.ndarray]:
        """Return the non-empty rows with the hashes of their sources."""
        rows = np.setdiff1d(np.arange(len(self.hashes)), list(self.empty))
        return self._part(rows), self.hashes[rows]

    def left_out(self) -> list[LeftOut]:
        return [LeftOut(self.split.where(row, side), "empty sentence") for row, side in self.empty.items()]

    def _part(self, rows: np.ndarray) -> PairsPart:
        return PairsPart(self.split, self.sides, rows, self.states)


def _scan(split: SentenceSplit, sides: tuple[int, int], seed: int) -> _Scanned:
    """Read two sides once. Raise DataError if their line counts differ or their bytes are not UTF-8."""
    states = _states(split, sides)
    hashes = array("Q")
    empty: dict[int, int] = {}
    counts = [0, 0]
    for row, texts in enumerate(split.read(sides)):
        for number, (side, text) in enumerate(zip(sides, texts, strict=True)):
            counts[number] += text is not None
            try:
                sentence = _decoded(text)
            except UnicodeDecodeError as error:
                assert isinstance(text, bytes)
                raise DataError(
                    f"{split.where(row, side)}: not UTF-8, {not_utf8(text, error)}; "
                    "convert the file (iconv -t utf-8), or let `patchloom check` list all such lines"
                ) from error
            if not number:
                digest = hashlib.blake2b(f"{seed}\0{sentence}".encode(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest))
            if not sentence:
                empty.setdefault(row, side)
    if counts[0] != counts[1]:
        each = " and ".join(f"{split.sides[side]} {count:,}" for side, count in zip(sides, counts, strict=True))
        raise DataError(
            f"{split.name}: the sides differ in their number of lines, {each}; line n must belong to line n"
        )
    return _Scanned(split, sides, states, np.array(hashes, dtype=np.uint64), empty)


def _decoded(text: bytes | str | None) -> str:
    return clean(text.decode() if isinstance(text, bytes) else text or "")


def _states(split: SentenceSplit, sides: tuple[int, int]) -> tuple[tuple[int, int] | None, ...]:
    return tuple(file_state(split.files[side]) for side in sides) if split.files else ()


def _held_out(name: str, parts: Sequence[tuple[PairsPart, np.ndarray]], fraction: float | None) -> tuple[Pairs, Pairs]:
    """Split off the pairs whose sources have the lowest hashes; train and val get at least one source each."""
    every = np.concatenate([hashes for _, hashes in parts])
    distinct = np.unique(every)
    if len(distinct) < 2:
        raise DataError(f"{name}: {len(distinct)} different source sentences; train and val need one each")
    share = min(MADE_VAL_FRACTION, MADE_VAL_PAIRS / len(every)) if fraction is None else fraction
    if not 0 < share < 1:
        raise UsageError(f"The fraction for val is {share}, expected a number between 0 and 1")
    limit = np.clip(np.uint64(share * 2**64), distinct[0], distinct[-2])
    train, val = (
        Pairs(tuple(_only(part, chosen(hashes, limit)) for part, hashes in parts))
        for chosen in (np.greater, np.less_equal)
    )
    return train, val


def _only(part: PairsPart, chosen: np.ndarray) -> PairsPart:
    return PairsPart(part.split, part.sides, part.rows[chosen], part.states)
