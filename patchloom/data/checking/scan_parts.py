"""Scan parts: the scans of all images of one shard, or of one slice of a folder, in one file that never changes.

    scan-train-000000-3f9a1c0277b0e1a4.part
        one line of JSON   what the part is of, its splits, class counts, errors and faults, and checksums
        rows               one `ROW` per image
        texts              label and name of each image, one after another; without the start that all names share

A part depends on its source and on LAYOUT alone, and its name is a digest of both. So any machine can make any part, in
any order, and one that exists is skipped. Rows are grouped by split: the names in a column `split`, or '' if the name
of the shard says it. Parts may come from another machine: what they contain is checked before it is used.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from patchloom.data.annotations.faults import AnnotationFault
from patchloom.data.checking.duplicates import THUMBNAIL_BYTES
from patchloom.data.checking.part_sources import PartSource
from patchloom.data.checking.scan import scan_image
from patchloom.data.checking.scan_cache import ImageScan
from patchloom.data.datasets import Listing, Source
from patchloom.data.labels.unlabeled import task_and_annotations
from patchloom.data.sources.parquet import ParquetImages, splits_of_rows
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import check_shape, memory_bytes, open_plain, own_sha256, parse_json

LAYOUT = 1  # version of the files, and of the code that computes their content
PART_FILE = re.compile(r"scan-.+-[0-9a-f]{16}\.part")
ROW = np.dtype(
    [
        ("thumbnail", "u1", THUMBNAIL_BYTES),
        ("digest", "<u8", 2),  # of the pixels
        ("width", "<u4"),  # of the upright image; 0 if it cannot be read
        ("height", "<u4"),
        ("row", "<u4"),  # in the store of the shard
        ("text_end", "<u4"),  # of label and name; they begin where those of the image before end
        ("mode", "u1"),  # in `modes`
        ("flags", "u1"),
    ]
)
ROTATED, ANIMATED, BARE = 1, 2, 4  # flags; a bare image has no label
_AT_ONCE = 1 << 16  # bytes that are read of a header
_MAX_STEM = 64  # letters of the name of a shard in that of its part
_SHAPE = {
    "layout": int,
    "key": str,
    "rows": int,
    "text_bytes": int,
    "prefix": str,
    "splits": dict[str, int],
    "kind": str,
    "counts": dict[str, dict[str, int]],
    "empty_classes": list[str],
    "task": str,
    "annotated": list[str],
    "notes": list[str],
    "modes": list[str],
    "errors": dict[str, str],
    "faults": dict[str, list[list]],
    "content_sha256": str,
    "own_sha256": str,
}


@dataclass(frozen=True)
class PartHeader:
    """The first line of a part."""

    key: str
    rows: int
    text_bytes: int
    prefix: str  # of all names
    splits: dict[str, int]  # split as the source names it → rows
    kind: str  # of labels: "classes", "labels", "numbers", or '' for none
    counts: dict[str, dict[str, int]]  # split → class → readable images
    empty_classes: tuple[str, ...]  # of the source, without an image in it
    task: str
    annotated: tuple[str, ...]
    notes: tuple[str, ...]
    modes: tuple[str, ...]
    errors: dict[int, str]  # row → why it cannot be read
    faults: dict[int, tuple[AnnotationFault, ...]]
    content_sha256: str = ""  # of rows and texts


def key_of(source: PartSource) -> str:
    """Return a name for a shard or slice and this layout, which no other has."""
    identity = f"{source.identity}\0{LAYOUT}".encode("utf-8", "surrogateescape")
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", source.name)[:_MAX_STEM]
    return f"{stem}-{hashlib.blake2b(identity, digest_size=8).hexdigest()}"


def file_of(key: str) -> str:
    """Return the name of the file of a part."""
    return f"scan-{key}.part"


def scan_source(source: PartSource) -> tuple[PartHeader, bytes]:
    """Scan the images of a shard or slice. Returns the header and the content of its part."""
    key, opened = key_of(source), source.open()
    scans: list[ImageScan] = []
    modes: dict[str, int] = {}
    rows, labels, names, splits, counts = [], [], [], {}, {}
    for split, listing in _listings(opened).items():
        first = len(scans)
        for position, row in enumerate(listing.rows.tolist()):
            scan = scan_image(listing.images, row, digest_of_pixels=True)
            scans.append(scan)
            labels.append(", ".join(listing.labels_of(position)))
            names.append(listing.images.where(row))
            rows.append(_row(scan, row, modes.setdefault(scan.mode, len(modes)), is_bare=not labels[-1]))
        splits[split] = len(scans) - first
        readable = listing.subset(np.array([not scan.error for scan in scans[first:]], dtype=bool))
        counted = zip(readable.names, readable.counts.tolist(), strict=True) if _kind(opened) else ()
        counts[split] = {name: count for name, count in counted if count}
    task, annotated = task_and_annotations(opened)
    present = {name for own in counts.values() for name in own}
    known = [name for listing in opened.listings.values() for name in listing.names]
    header = PartHeader(
        key=key,
        rows=len(rows),
        text_bytes=0,
        prefix=_common_start(names),
        splits=splits,
        kind=_kind(opened),
        counts=counts,
        empty_classes=tuple(dict.fromkeys(name for name in known if name not in present)),
        task=task,
        annotated=annotated,
        notes=tuple(opened.notes),
        modes=tuple(modes),
        errors={number: scan.error for number, scan in enumerate(scans) if scan.error},
        faults={number: scan.faults for number, scan in enumerate(scans) if scan.faults},
    )
    return header, part_content(header, np.array(rows, ROW), labels, names)


def part_content(header: PartHeader, rows: np.ndarray, labels: Sequence[str], names: Sequence[str]) -> bytes:
    """Return the content of a part. Lengths and checksums in the header, and the ends of texts, are filled in."""
    texts = [
        f"{label}\0{name[len(header.prefix) :]}".encode("utf-8", "replace")
        for label, name in zip(labels, names, strict=True)
    ]
    rows["text_end"] = np.cumsum([len(text) for text in texts], dtype=np.int64)
    content = rows.tobytes() + b"".join(texts)
    text_bytes = len(content) - rows.nbytes
    whole = replace(header, text_bytes=text_bytes, content_sha256=hashlib.sha256(content).hexdigest())
    values = json.loads(json.dumps({"layout": LAYOUT, **asdict(whole)}))
    values["faults"] = {row: [[fault.kind, fault.detail] for fault in own] for row, own in whole.faults.items()}
    values["own_sha256"] = own_sha256(json.loads(json.dumps(values)))
    return json.dumps(values).encode() + b"\n" + content


def _listings(source: Source) -> dict[str, Listing]:
    """Return listings by split, as a column names it; '' if there is none."""
    images = source.train.images
    if not (isinstance(images, ParquetImages) and "split" in images.columns):
        return {"": source.train}
    listings: dict[str, Listing] = {}
    names = splits_of_rows(images)
    for listing in source.listings.values():
        own = np.array([names[row] for row in listing.rows.tolist()], dtype=object)
        listings |= {name: listing.subset(own == name) for name in dict.fromkeys(own.tolist())}
    return listings


def _common_start(names: list[str]) -> str:
    first, last = min(names, default=""), max(names, default="")
    same = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return first[:same] if same is not None else min(first, last, key=len)


def _kind(source: Source) -> str:
    listings = source.listings.values()
    if any(listing.is_classified for listing in listings):
        return "classes"
    learned = next((listing.learned for listing in listings if listing.learned), None)
    return learned.kind if learned else ""


def _row(scan: ImageScan, row: int, mode: int, *, is_bare: bool) -> tuple[Any, ...]:
    flags = ROTATED * scan.rotated | ANIMATED * scan.animated | BARE * is_bare
    thumbnail = np.frombuffer(scan.thumbnail.ljust(THUMBNAIL_BYTES, b"\0"), np.uint8)
    digest = np.frombuffer(scan.digest.ljust(16, b"\0"), "<u8")
    return thumbnail, digest, scan.width, scan.height, row, 0, mode, flags


class StoredRows(NamedTuple):
    """Where the rows of a part are on the disk. `ScanPart.rows` has checked them before they are read from here."""

    path: Path
    start: int  # of the rows in the file
    images: int
    prefix: str

    def mapped(self) -> np.ndarray:
        """Return all rows, mapped from the disk."""
        with _damage(self.path):
            return np.memmap(self.path, ROW, "r", self.start, (self.images,)) if self.images else np.zeros(0, ROW)

    def texts(self, rows: np.ndarray) -> list[tuple[str, str]]:
        """Return label and name of some of the images, as messages print them."""
        ends, texts = self.mapped()["text_end"], []
        first = self.start + self.images * ROW.itemsize
        with _damage(self.path), open_plain(self.path) as file:
            for row in rows.tolist():
                begin = int(ends[row - 1]) if row else 0
                file.seek(first + begin)
                data = file.read(max(0, int(ends[row]) - begin))
                label, _, name = data.decode("utf-8", "replace").partition("\0")
                texts.append((label, self.prefix + name))
        return texts


class ScanPart:
    """A part on disk. Opening it reads the header alone; `rows` reads and checks everything."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / file_of(key)
        with _damage(self.path), open_plain(self.path) as file:
            self._bytes = os.fstat(file.fileno()).st_size
            if self._bytes > memory_bytes():
                raise ValueError(f"it has {self._bytes:,} bytes, more than the memory of this machine")
            line = _first_line(file)
            self.header = _header(parse_json(line, most=self._bytes), key)
            self.stored = StoredRows(self.path, len(line), self.header.rows, self.header.prefix)
            if len(line) + self.header.rows * ROW.itemsize + self.header.text_bytes != self._bytes:
                raise ValueError(f"it has {self._bytes:,} bytes, and its header says otherwise")

    def rows(self) -> np.ndarray:
        """Read all rows. Raises CheckpointError unless they are what was written, and fit the header."""
        with _damage(self.path), open_plain(self.path) as file:
            file.seek(self.stored.start)
            content = file.read(self._bytes - self.stored.start)
            while len(content) < self._bytes - self.stored.start and (more := file.read()):
                content += more
            if hashlib.sha256(content).hexdigest() != self.header.content_sha256:
                raise ValueError("its checksum does not match")
            rows = np.frombuffer(content, ROW, count=self.header.rows)
            self._check(rows)
        return rows

    def _check(self, rows: np.ndarray) -> None:
        header = self.header
        unreadable = np.flatnonzero((rows["width"] == 0) | (rows["height"] == 0))
        ends = np.concatenate([[0], rows["text_end"].astype(np.int64)])
        fits = (
            unreadable.tolist() == sorted(header.errors)
            and not np.any(rows["mode"] >= len(header.modes))
            and not np.any(np.diff(ends) < 0)
            and ends[-1] == header.text_bytes
        )
        if not fits:
            raise ValueError("its rows do not fit its header")

    def scan(self, rows: np.ndarray, row: int) -> ImageScan:
        """Return the scan of one row, without digest and thumbnail. `rows` are all rows of the part."""
        one, header = rows[row], self.header
        if row in header.errors:
            return ImageScan(error=header.errors[row])
        flags, sides = int(one["flags"]), (int(one["width"]), int(one["height"]))
        mode, faults = header.modes[int(one["mode"])], header.faults.get(row, ())
        return ImageScan("", mode, *sides, bool(flags & ROTATED), bool(flags & ANIMATED), faults=faults)


def _first_line(file: FileIO) -> bytes:
    """Return the first line of a file, with its end."""
    data = bytearray()
    while more := file.read(_AT_ONCE):
        data += more
        if (end := data.find(b"\n", len(data) - len(more))) >= 0:
            return bytes(data[: end + 1])
    raise ValueError("its header is cut off")


def _header(values: Any, key: str) -> PartHeader:
    """Return the header of a part from its parsed first line. Raises ValueError if it is damaged or of another key."""
    check_shape(values, _SHAPE)
    if values.pop("own_sha256") != own_sha256(values):
        raise ValueError("the checksum of its header does not match")
    if (values.pop("layout"), values["key"]) != (LAYOUT, key):
        raise ValueError("it is of another source or layout than its name says")
    errors = {int(row): text for row, text in values.pop("errors").items()}
    faults = {
        int(row): tuple(AnnotationFault(str(kind), str(detail)) for kind, detail in own)
        for row, own in values.pop("faults").items()
    }
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    header = PartHeader(**values | lists | {"errors": errors, "faults": faults})
    numbers = [header.rows, header.text_bytes, *header.splits.values()]
    numbers += [count for own in header.counts.values() for count in own.values()]
    fits = (
        min(numbers) >= 0
        and sum(header.splits.values()) == header.rows
        and header.counts.keys() <= header.splits.keys()
        and all(0 <= row < header.rows for row in (*errors, *faults))
        and "" not in errors.values()
    )
    if not fits:
        raise ValueError("the fields of its header do not agree")
    return header


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn the errors of a damaged part into a CheckpointError that names it."""
    advice = "Remove it and run the same command without --join, which makes it again."
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {advice}") from error
    except (ValueError, TypeError, LookupError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. {advice}") from error
