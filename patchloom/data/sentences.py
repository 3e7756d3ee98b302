"""Sentence pairs, and what is wrong with them: parallel files, tab-separated files, parquet columns.

    train.de, train.en, val.de.gz …   a line a sentence; more than two languages will do
    pairs.tsv, pairs.tsv.gz           the first two fields of a line
    train-0.parquet                   `translation` {de: …, en: …}, or columns of strings

A split is read once, from beginning to end, and eight bytes of each pair are kept.
"""

import gzip
import hashlib
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from patchloom.data.sets import Fault
from patchloom.data.splits import TRAIN_NAMES
from patchloom.errors import DataError

# Sides whose characters, with SHORT more on either, differ by this factor hardly say the same: found 2 of 29,000 in
# Multi30k (both '@@' for a sentence) and none of 169,813 in Tatoeba, whose most uneven true pair has 3.6.
MAX_RATIO, SHORT = 5.0, 5
# train.de, train.de.gz, newstest.zh-CN; but not notes.md beside notes.py
_PARALLEL = re.compile(r"(?P<stem>.+)\.(?P<language>(?!md|py|js|sh|gz)[a-z]{2}(?:[-_][A-Za-z]{2,4})?)(?:\.gz)?")

Sides = Sequence[bytes | str | None]  # None where a file has ended before the others


@dataclass(frozen=True)
class SentenceSplit:
    """The pairs of one split; `read` begins anew with every call."""

    name: str
    sides: tuple[str, ...]  # a file, or a column of one
    unit: str  # what a row of it is called: line or row
    read: Callable[[], Iterator[Sides]]

    def where(self, row: int, side: int = 0) -> str:
        """File and line."""
        return f"{self.sides[side]}, {self.unit} {row + (self.unit == 'line')}"


@dataclass(frozen=True)
class SentenceFindings:
    """What was found in all splits; a pair is known by the number of its split and its row."""

    counts: tuple[int, ...]  # pairs of each split
    faults: tuple[Fault, ...]
    uneven: tuple[tuple[int, int, str], ...]  # split, row, the lengths of its sides
    duplicates: tuple[tuple[tuple[int, int], ...], ...]


def find_sentences(path: Path) -> list[SentenceSplit]:
    """The splits of sentence pairs at `path`, train first; none where there is something else."""
    if path.is_dir():
        found = _parallel_files(path) or _parquet_files(sorted(path.glob("*.parquet")))
    elif path.name.endswith((".tsv", ".tsv.gz")) and path.is_file():
        found = (
            [] if _is_labels_file(path) else [SentenceSplit("train", (str(path),) * 2, "line", partial(_fields, path))]
        )
    else:
        found = _parquet_files([path]) if path.suffix == ".parquet" and path.is_file() else []
    return sorted(found, key=lambda split: (not is_train(split.name), split.name))


def is_train(name: str) -> bool:
    """Whether a split's name says so."""
    return bool(set(re.split(r"[^a-z]+", name.lower())) & set(TRAIN_NAMES))


def check_sentences(splits: Sequence[SentenceSplit]) -> SentenceFindings:
    """Lines without a partner, empty sides, bytes that are no UTF-8, sides of very uneven length, repeated pairs."""
    counts: list[int] = []
    faults: list[Fault] = []
    uneven: list[tuple[int, int, str]] = []
    digests = array("Q")
    for number, split in enumerate(splits):
        lines = [0] * len(split.sides)
        row = -1
        try:
            for row, sides in enumerate(split.read()):
                lines = [count + (side is not None) for count, side in zip(lines, sides, strict=True)]
                texts = [_text(side, split.where(row, i), faults) for i, side in enumerate(sides)]
                faults.extend(_empty(split, row, texts))
                if told := _uneven([len(text) for text in texts if text and text.strip()]):
                    uneven.append((number, row, told))
                pair = "\0".join(text or "" for text in texts).encode()
                digests.append(int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest()))
        except DataError as error:
            where, _, reason = str(error).partition(": ")
            faults.append(Fault(where, "cannot be read", reason))
        if len(set(lines)) > 1:
            told = ", ".join(f"{Path(side).name} {count:,}" for side, count in zip(split.sides, lines, strict=True))
            faults.append(Fault(split.sides[0], "line counts differ", told))
        counts.append(row + 1)
    return SentenceFindings(tuple(counts), tuple(faults), tuple(uneven), _repeated(digests, counts))


def _text(side: bytes | str | None, where: str, faults: list[Fault]) -> str | None:
    if not isinstance(side, bytes):
        return side
    try:
        return side.decode()
    except UnicodeDecodeError as error:
        faults.append(Fault(where, "not UTF-8", f"byte {error.start + 1} of the line is 0x{side[error.start]:02x}"))
        return None


def _empty(split: SentenceSplit, row: int, texts: Sequence[str | None]) -> Iterator[Fault]:
    for i, text in enumerate(texts):
        if text is not None and not text.strip():
            others = [other for other in texts if other and other.strip()]
            yield Fault(
                split.where(row, i), "empty sentence", f"beside {others[0][:60]!r}" if others else "on all sides"
            )


def _uneven(lengths: Sequence[int]) -> str:
    """The lengths, where they are absurd; '' otherwise."""
    if len(lengths) < 2 or max(lengths) + SHORT <= MAX_RATIO * (min(lengths) + SHORT):
        return ""
    return " and ".join(map(str, lengths)) + " characters"


def _repeated(digests: Sequence[int], counts: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Groups of equal pairs as (split, row), in order of the first."""
    values = np.array(digests, dtype=np.uint64)
    starts = np.cumsum([0, *counts])
    order = np.argsort(values, kind="stable")
    _, first, size = np.unique(values[order], return_index=True, return_counts=True)
    groups = sorted(order[a : a + n].tolist() for a, n in zip(first[size > 1], size[size > 1], strict=True))

    def place(position: int) -> tuple[int, int]:
        number = int(np.searchsorted(starts, position, side="right")) - 1
        return number, position - int(starts[number])

    return tuple(tuple(place(position) for position in group) for group in groups)


# Where they come from -------------------------------------------------------------------------------------------------


def _parallel_files(folder: Path) -> list[SentenceSplit]:
    by_stem: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        matched = _PARALLEL.fullmatch(path.name)
        if matched and path.is_file():
            by_stem.setdefault(matched["stem"], []).append(path)
    return [
        SentenceSplit(stem, tuple(map(str, files)), "line", partial(_side_by_side, files))
        for stem, files in by_stem.items()
        if len(files) > 1
    ]


def _parquet_files(files: Sequence[Path]) -> list[SentenceSplit]:
    found = []
    for file in files:
        if columns := _text_columns(file):
            sides = tuple(f"{file}, {column}" for column in columns)
            found.append(SentenceSplit(file.stem, sides, "row", partial(_columns, file, columns)))
    return found


def _text_columns(file: Path) -> list[str]:
    """Columns of sentences, as names or as fields of `translation`; none where the file holds images."""
    try:
        import pyarrow
        import pyarrow.parquet

        schema = pyarrow.parquet.read_schema(file)
    except (ImportError, OSError, ValueError):  # told by whoever opens it as images
        return []
    if {"image", "img"} & set(schema.names):
        return []
    if "translation" in schema.names and pyarrow.types.is_struct(schema.field("translation").type):
        return [f"translation.{part.name}" for part in schema.field("translation").type]
    texts = [f.name for f in schema if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)]
    return texts if len(texts) > 1 else []


def _columns(file: Path, columns: Sequence[str]) -> Iterator[Sides]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(columns=list(columns)):
            flat = [batch.column(0).field(c.partition(".")[2]) if "." in c else batch.column(c) for c in columns]
            for sides in zip(*(column.to_pylist() for column in flat), strict=True):
                yield ["" if side is None else side for side in sides]


def _side_by_side(files: Sequence[Path]) -> Iterator[Sides]:
    yield from zip_longest(*map(_lines, files))


def _fields(file: Path) -> Iterator[Sides]:
    for line in _lines(file):
        fields = line.split(b"\t")[:2]
        yield fields if len(fields) == 2 else [*fields, b""]


def _lines(file: Path) -> Iterator[bytes]:
    """Lines as bytes, ended by newlines alone: sentences may hold other separators of Unicode."""
    opened = gzip.open if file.suffix == ".gz" else open
    done = 0
    try:
        with opened(file, "rb") as lines:
            for line in lines:
                yield line.rstrip(b"\r\n")
                done += 1
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read after line {done:,} ({error})") from error


def _is_labels_file(file: Path) -> bool:
    """Whether it names pictures: its first line is path, label …"""
    first = next(_lines(file), b"").lower().split(b"\t")
    return first[0].strip(b"\xef\xbb\xbf ") in (b"path", b"file", b"filename", b"image")
