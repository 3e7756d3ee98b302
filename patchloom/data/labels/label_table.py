"""Parse a labels file: encoding, separator and header are inferred from the content.

The separator is the one with which a column names existing files; `finds` returns whether a cell does.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.decode import EXTENSIONS

SPACES = " "  # any run of spaces or tabs
_SEPARATORS = ("\t", ";", ",", "|", SPACES)
_NAMES = {"\t": "tab", SPACES: "spaces"}
_SAMPLED_ROWS = 64  # from which separator and paths are inferred
_MAX_MESSAGE_LETTERS = 120  # of a line
# Larger files are not tables of labels, or were made to take long.
MOST_LINES, MOST_LETTERS, MOST_COLUMNS = 10_000_000, 1 << 20, 1_000

PATH_NAMES = (
    "path", "file", "filename", "file_name", "filepath", "file_path", "fname", "image", "img", "image_name",
    "image_path", "image_file", "image_id", "img_name", "img_path", "img_id", "imagename", "imagepath", "imageid",
    "picture", "photo", "relative_path", "id",
)  # fmt: skip
LABEL_NAMES = (
    "label", "class", "category", "target", "species", "breed", "name", "label_name", "class_name", "category_name",
    "target_name", "classname", "labelname", "labels", "classes", "categories", "class_label", "tag", "tags", "y",
    "label_id", "class_id", "category_id", "classid", "labelid",
)  # fmt: skip
SPLIT_NAMES = ("split", "set", "subset", "partition", "data_set", "dataset_split")

Finds = Callable[[str], bool]


@dataclass(frozen=True)
class Table:
    """Rows of equal length. Columns of a file without header are called '1', '2' …"""

    title: str  # the file, for messages
    first_line: str
    columns: tuple[str, ...]
    headed: bool
    rows: list[list[str]]
    paths: int  # the column of the image paths
    separator: str
    encoding: str

    def column(self, number: int) -> list[str]:
        """Return all cells of a column."""
        return [row[number] for row in self.rows]

    def name(self, number: int) -> str:
        """Return the name of a column for messages."""
        return repr(self.columns[number]) if self.headed else self.columns[number]

    @property
    def separated_by(self) -> str:
        """The separator, for messages."""
        return _NAMES.get(self.separator, self.separator)


def parse_table(content: bytes, title: str, finds: Finds) -> Table:
    """Parse the bytes of a file. Raise DataError, with the line number, for a row of another length."""
    text, encoding = _decoded(content, title)
    lines = [(n, line) for n, line in _lines(text, title) if line.strip() and not line.startswith("#")]
    if not lines:
        raise DataError(f"{title}: is empty; expected lines of path,label")
    first_line = shortened(lines[0][1])
    readings = [
        _reading(lines if separator == SPACES else lines[:_SAMPLED_ROWS], separator, title, finds)
        for separator in _SEPARATORS
    ]
    usable = [reading for reading in readings if reading is not None]
    if not usable:
        raise UsageError(f"{title}: the first line is {first_line!r}; expected a path and a label, such as path,label")
    best = max(usable, key=lambda reading: (reading.matched, reading.named, reading.even))  # the first of equals
    if best.separator != SPACES:
        best = replace(best, rows=list(_cells(lines, best.separator, title)))
    return _table(best, title, first_line, encoding, finds)


def shortened(line: str) -> str:
    """Shorten a line for messages."""
    return line if len(line) <= _MAX_MESSAGE_LETTERS else f"{line[:_MAX_MESSAGE_LETTERS]}…"


def plain(name: str) -> str:
    """Return a column name in the form in which it is compared: 'Image Name (str)' → 'image_name'."""
    return re.sub(r"[^\w]+", "_", re.sub(r"\(.*?\)", "", name).strip().lower()).strip("_")


def says_split(value: str) -> bool:
    """Return whether a cell is the name of a split."""
    return value.strip().lower() in (*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES)


# Text -----------------------------------------------------------------------------------------------------------------


def _decoded(content: bytes, title: str) -> tuple[str, str]:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        try:
            return content.decode("utf-16"), "utf-16"
        except UnicodeDecodeError as error:
            raise DataError(f"{title}: is not text ({error.reason}); expected lines of path,label") from error
    try:
        return content.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        return content.decode("latin-1"), "latin-1"


def _lines(text: str, title: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines. `splitlines` would also split at form feeds and the like, which names may contain."""
    start = 0
    for number, end in enumerate(chain(re.finditer(r"\r\n|\n|\r", text), [None]), start=1):
        line = text[start : end.start() if end else len(text)]
        if len(line) > MOST_LETTERS or number > MOST_LINES:
            has = f"line {number} has {len(line):,} letters" if len(line) > MOST_LETTERS else "it has more lines"
            raise DataError(f"{title}: {has}; expected at most {MOST_LINES:,} lines of {MOST_LETTERS:,} letters")
        yield number, line
        start = end.end() if end else start


# Separators -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """The file, split by one separator."""

    separator: str
    rows: list[tuple[int, list[str]]]  # line number, cells
    width: int
    paths: int
    matched: float  # share of rows whose path is an existing file
    named: bool  # True if the first row has usual column names
    even: float  # share of rows with the usual length


def _reading(lines: Sequence[tuple[int, str]], separator: str, title: str, finds: Finds) -> _Reading | None:
    """Split the lines by a separator. Return None if there is only one column."""
    if not any(separator in line or (separator == SPACES and "\t" in line) for _, line in lines[:_SAMPLED_ROWS]):
        return None
    rows = list(_cells(lines, separator, title))
    sample = [row for _, row in rows[:_SAMPLED_ROWS]]
    width, times = Counter(map(len, sample)).most_common(1)[0]
    names = [plain(cell) for cell in sample[0][:MOST_COLUMNS]]
    named = any(name in PATH_NAMES for name in names) and len(names) > 1
    width = len(names) if named else width
    if not 2 <= width <= MOST_COLUMNS:
        return None
    whole = [row for row in sample[named:] if len(row) == width]
    hits = [sum(finds(row[i]) for row in whole) for i in range(width)]
    called = [len(names) == width and names[i] in PATH_NAMES for i in range(width)]
    image_like = [sum(names_image(row[i]) for row in whole) for i in range(width)]
    paths = max(range(width), key=lambda i: (bool(hits[i]) and called[i], hits[i], image_like[i], called[i], -i))
    return _Reading(separator, rows, width, paths, hits[paths] / max(len(whole), 1), named, times / len(sample))


def _cells(lines: Sequence[tuple[int, str]], separator: str, title: str) -> Iterator[tuple[int, list[str]]]:
    if separator == SPACES:
        uneven = len({len(line.split()) for _, line in lines}) > 1  # a label may have several words
        yield from ((number, line.split(maxsplit=1 if uneven else -1)) for number, line in lines)
        return
    numbers = [number for number, _ in lines]
    reader = csv.reader((f"{line}\n" for _, line in lines), delimiter=separator, skipinitialspace=True)
    try:
        before = 0
        for row in reader:
            yield numbers[min(before, len(numbers) - 1)], [cell.strip() for cell in row]
            before = reader.line_num  # a quoted cell may span several lines
    except csv.Error as error:
        raise DataError(f"{title} is not a table of labels ({error}); expected lines of path,label") from error


def _table(reading: _Reading, title: str, first_line: str, encoding: str, finds: Finds) -> Table:
    headed = _is_header(reading, finds)
    first = reading.rows[0][1]
    columns = tuple(first) if headed else tuple(str(i + 1) for i in range(reading.width))
    for number, row in reading.rows:
        if len(row) != reading.width:
            names = f" ({shortened(','.join(columns))})" if headed else ""
            raise DataError(f"{title}, line {number}: {len(row)} fields, expected {reading.width}{names}")
    rows = [row for _, row in reading.rows[headed:]]
    return Table(title, first_line, columns, headed, rows, reading.paths, reading.separator, encoding)


def _is_header(reading: _Reading, finds: Finds) -> bool:
    """Return whether the first row is a header: it does not name an image, and its cells do not occur below."""
    first = reading.rows[0][1]
    if len(first) != reading.width:
        return False
    path = first[reading.paths]
    if finds(path) or looks_like_a_file(path):
        return False
    names = [plain(cell) for cell in first]
    if any(name in (*PATH_NAMES, *LABEL_NAMES, *SPLIT_NAMES) for name in names):
        return True
    below = [row for _, row in reading.rows[1:] if len(row) == reading.width]
    repeated = any(first[i] == row[i] for row in below for i in range(reading.width))
    return reading.matched > 0.5 and not repeated


def looks_like_a_file(cell: str) -> bool:
    """Return whether a cell is a path or URL rather than a word."""
    below = "/" in cell or "\\" in cell
    return "://" in cell or names_image(cell) or (below and re.search(r"\.\w{2,5}$", cell) is not None)


def names_image(cell: str) -> bool:
    """Return whether a cell ends with the extension of an image file."""
    return cell.strip().lower().endswith(tuple(EXTENSIONS))
