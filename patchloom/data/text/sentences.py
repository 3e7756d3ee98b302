"""Finding and checking sentence pairs: parallel files, tab-separated files, parquet columns.

    train.de, train.en, val.de.gz …   one line per sentence; more than two languages are possible
    pairs.tsv, pairs.tsv.gz           the first two fields of a line
    train-0.parquet                   `translation` {de: …, en: …}, or columns of strings

A split is read once, from beginning to end, and eight bytes per pair are kept.
"""

import gzip
import hashlib
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import Fault
from patchloom.data.labels.label_table import PATH_NAMES, names_image, plain
from patchloom.data.splits import TRAIN_NAMES
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.decode import refuse_special
from patchloom_runtime.printable import printable

# Sides whose lengths in characters, plus SHORT each, differ by this factor hardly mean the same: 2 of 29,000 pairs in
# Multi30k (both '@@' instead of a sentence) and none of 169,813 in Tatoeba, whose most uneven true pair has 3.6.
MAX_RATIO, SHORT = 5.0, 5
MOST_LINE_BYTES = 1 << 24  # the limit of the vocabulary's training
_FAULTS = (ArithmeticError, LookupError, NotImplementedError, OSError, TypeError, ValueError)  # pyarrow's
# train.de, train.de.gz, newstest.zh-CN; but not notes.md next to notes.py
_PARALLEL = re.compile(r"(?P<stem>.+)\.(?P<language>(?!md|py|js|sh|gz)[a-z]{2}(?:[-_][A-Za-z]{2,4})?)(?:\.gz)?")

# tatoeba-en-de.tsv.gz: its first field is English
_TSV_LANGUAGES = re.compile(r"(?:.*[^A-Za-z])?(?P<first>[a-z]{2})[-_](?P<second>[a-z]{2})\.tsv(?:\.gz)?")

Sides = Sequence[bytes | str | None]  # None if a file ends before the others


@dataclass(frozen=True)
class SentenceSplit:
    """The pairs of one split. `read` takes indices of sides and starts over with every call."""

    name: str
    sides: tuple[str, ...]  # a file, or a column of one
    unit: str  # of a row: line or row
    languages: tuple[str, ...]  # of the sides, "" if unknown
    files: tuple[Path, ...]  # of the sides
    read: Callable[[Sequence[int]], Iterator[Sides]]

    def where(self, row: int, side: int = 0) -> str:
        """Return file and line."""
        return f"{self.sides[side]}, {self.unit} {row + (self.unit == 'line')}"


@dataclass(frozen=True)
class SentenceFindings:
    """The faults of all splits; a pair is identified by the index of its split and its row."""

    counts: tuple[int, ...]  # pairs of each split
    faults: tuple[Fault, ...]
    uneven: tuple[tuple[int, int, str], ...]  # split, row, the lengths of its sides
    duplicates: tuple[tuple[tuple[int, int], ...], ...]


def find_sentences(path: Path) -> list[SentenceSplit]:
    """Return the splits of sentence pairs at `path`, train first; none if it contains something else."""
    if os.path.isdir(path):
        splits = _parallel_files(path) or _parquet_files(sorted(path.glob("*.parquet")))
    elif path.name.endswith((".tsv", ".tsv.gz")) and os.path.isfile(path):
        splits = [] if _is_labels_file(path) else [_tab_separated(path)]
    else:
        splits = _parquet_files([path]) if path.suffix == ".parquet" and os.path.isfile(path) else []
    return sorted(splits, key=lambda split: (not is_train(split.name), split.name))


def is_train(name: str) -> bool:
    """Return whether the name is that of a training split."""
    return bool(set(re.split(r"[^a-z]+", name.lower())) & set(TRAIN_NAMES))


def not_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    """Describe where a line stops being UTF-8."""
    return f"byte {error.start + 1} of the line is 0x{line[error.start]:02x}"


def check_sentences(splits: Sequence[SentenceSplit]) -> SentenceFindings:
    """Report lines without a partner, empty sides, non-UTF-8 bytes, sides of very uneven length, and repeated pairs."""
    counts: list[int] = []
    faults: list[Fault] = []
    uneven: list[tuple[int, int, str]] = []
    digests = array("Q")
    for number, split in enumerate(splits):
        lines = [0] * len(split.sides)
        row = -1
        try:
            for row, sides in enumerate(split.read(range(len(split.sides)))):
                lines = [count + (side is not None) for count, side in zip(lines, sides, strict=True)]
                texts = [_text(side, split.where(row, i), faults) for i, side in enumerate(sides)]
                faults.extend(_empty(split, row, texts))
                if lengths := _uneven([len(text) for text in texts if text and text.strip()]):
                    uneven.append((number, row, lengths))
                pair = "\0".join(text or "" for text in texts).encode()
                digests.append(int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest()))
        except DataError as error:
            where, _, reason = str(error).partition(": ")
            faults.append(Fault(where, "cannot be read", reason))
        if len(set(lines)) > 1:
            each = ", ".join(f"{Path(side).name} {count:,}" for side, count in zip(split.sides, lines, strict=True))
            faults.append(Fault(split.sides[0], "line counts differ", each))
        counts.append(row + 1)
    return SentenceFindings(tuple(counts), tuple(faults), tuple(uneven), _repeated(digests, counts))


def _text(side: bytes | str | None, where: str, faults: list[Fault]) -> str | None:
    if not isinstance(side, bytes):
        return side
    try:
        return side.decode()
    except UnicodeDecodeError as error:
        faults.append(Fault(where, "not UTF-8", not_utf8(side, error)))
        return None


def _empty(split: SentenceSplit, row: int, texts: Sequence[str | None]) -> Iterator[Fault]:
    for i, text in enumerate(texts):
        if text is not None and not text.strip():
            others = [other for other in texts if other and other.strip()]
            yield Fault(
                split.where(row, i), "empty sentence", f"opposite {others[0][:60]!r}" if others else "on all sides"
            )


def _uneven(lengths: Sequence[int]) -> str:
    """Return the lengths if they are implausible, else ""."""
    if len(lengths) < 2 or max(lengths) + SHORT <= MAX_RATIO * (min(lengths) + SHORT):
        return ""
    return " and ".join(map(str, lengths)) + " characters"


def _repeated(digests: Sequence[int], counts: Sequence[int]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return groups of equal pairs as (split, row), in the order of the first."""
    values = np.array(digests, dtype=np.uint64)
    starts = np.cumsum([0, *counts])
    order = np.argsort(values, kind="stable")
    _, first, size = np.unique(values[order], return_index=True, return_counts=True)
    groups = sorted(order[a : a + n].tolist() for a, n in zip(first[size > 1], size[size > 1], strict=True))

    def place(position: int) -> tuple[int, int]:
        number = int(np.searchsorted(starts, position, side="right")) - 1
        return number, position - int(starts[number])

    return tuple(tuple(place(position) for position in group) for group in groups)


# Sources --------------------------------------------------------------------------------------------------------------


def _parallel_files(folder: Path) -> list[SentenceSplit]:
    by_stem: dict[str, list[tuple[str, Path]]] = {}
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from error
    for name in names:
        matched = _PARALLEL.fullmatch(name)
        if matched and os.path.isfile(folder / name):
            by_stem.setdefault(matched["stem"], []).append((matched["language"], folder / name))
    return [parallel_split(stem, files) for stem, files in by_stem.items() if len(files) > 1]


def parallel_split(name: str, files: Sequence[tuple[str, Path]]) -> SentenceSplit:
    """Return a split of files with one line per sentence, each with its language."""
    languages, paths = zip(*files, strict=True)
    return SentenceSplit(name, tuple(map(str, paths)), "line", languages, paths, partial(_side_by_side, paths))


def _tab_separated(file: Path) -> SentenceSplit:
    match = _TSV_LANGUAGES.fullmatch(file.name)
    languages = (match["first"], match["second"]) if match else ("", "")
    return SentenceSplit("train", (str(file),) * 2, "line", languages, (file,) * 2, partial(_fields, file))


def _parquet_files(files: Sequence[Path]) -> list[SentenceSplit]:
    splits = []
    for file in files:
        if columns := _text_columns(file):
            sides = tuple(f"{file}, {'.'.join(column)}" for column in columns)
            languages = tuple(column[-1] for column in columns)
            read = partial(_columns, file, columns)
            splits.append(SentenceSplit(file.stem, sides, "row", languages, (file,) * len(columns), read))
    return splits


def _text_columns(file: Path) -> list[tuple[str, ...]]:
    """Return the columns of sentences, or the fields of `translation`; none if the file contains images."""
    if not os.path.isfile(file):
        return []
    try:
        import pyarrow
        import pyarrow.parquet

        schema = pyarrow.parquet.read_schema(file)
    except (ImportError, *_FAULTS):  # reported when it is opened as images
        return []
    if {"image", "img"} & set(schema.names):
        return []
    above: tuple[str, ...] = ()
    fields: Iterable[Any] = schema
    if schema.names.count("translation") == 1 and pyarrow.types.is_struct(schema.field("translation").type):
        above, fields = ("translation",), schema.field("translation").type
    texts = [f.name for f in fields if pyarrow.types.is_string(f.type) or pyarrow.types.is_large_string(f.type)]
    return [(*above, text) for text in texts] if len(set(texts)) == len(texts) > 1 else []


def _columns(file: Path, columns: Sequence[tuple[str, ...]], sides: Sequence[int]) -> Iterator[Sides]:
    import pyarrow.parquet

    columns = [columns[i] for i in sides]
    done = 0
    try:
        refuse_special(file, str(file), "a parquet file")
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(columns=[".".join(column) for column in columns]):
                flat = [batch.column(top).field(inner[0]) if inner else batch.column(top) for top, *inner in columns]
                for texts in zip(*(column.to_pylist() for column in flat), strict=True):
                    yield ["" if text is None else text for text in texts]
                    done += 1
    except _FAULTS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: cannot be read after row {done:,} ({reason})") from error


def _side_by_side(files: Sequence[Path], sides: Sequence[int]) -> Iterator[Sides]:
    yield from zip_longest(*(_lines(files[i]) for i in sides))


def _fields(file: Path, sides: Sequence[int]) -> Iterator[Sides]:
    for line in _lines(file):
        fields = line.split(b"\t")
        yield [fields[i] if i < len(fields) else b"" for i in sides]


def _lines(file: Path) -> Iterator[bytes]:
    """Yield lines as bytes, split at newlines only: sentences may contain other Unicode separators."""
    opened = gzip.open if file.suffix == ".gz" else open
    done = 0
    try:
        refuse_special(file, str(file), "a file of text")
        with opened(file, "rb") as lines:
            while line := lines.readline(MOST_LINE_BYTES + 1):
                if len(line) > MOST_LINE_BYTES:
                    raise DataError(f"{file}: line {done + 1:,} has more than {MOST_LINE_BYTES:,} bytes; cut it")
                yield line.rstrip(b"\r\n")
                done += 1
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read after line {done:,} ({error})") from error


def _is_labels_file(file: Path) -> bool:
    """Return whether it lists images: image files in its first lines, or a first column named like their paths."""
    first = [line.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\t") for line in islice(_lines(file), 2)]
    column = plain(first[0][0]) if first else ""
    return (column in PATH_NAMES and column != "id") or any(names_image(cell) for line in first for cell in line)
