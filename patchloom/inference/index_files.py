"""The files of an index of images.

    index.json         format; the model, the checksum of its weights and its preprocessing; dimension; whether the
                       vectors are the trunk's; number of files per label, the levels above the labels, and the level
                       that is shown; whether a search is exact; the parts with their checksums
    part-00000.npy     (rows, dimension) float32 unit vectors
    part-00000.json    path, label, size in bytes and modification time of the file of each row
    faiss.index        beyond a million files: inverted lists of the vectors, made by faiss

A part never changes once it is written. `index.json` is replaced last and names the files that count: if a build is
interrupted, the index stays as it was, and files that are not named are overwritten. A file that changed or got another
label is stored again, and its old row is dropped in `index.json`; so are files that no longer exist, on request. No
file is a pickle.
"""

import hashlib
import io
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.disk import atomic_file, atomic_write, plain_name
from patchloom.evaluation.exact_search import write_faiss
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, open_plain, own_sha256, parse_json, read_plain

FORMAT = 2  # 1 had the labels of one level alone
FILE, FAISS = "index.json", "faiss.index"
_HEADER = 1 << 16  # bytes; upper bound of the header of an .npy file
_FORMAT = {"format": int, "own_sha256?": str}
_SHAPE = {
    "files": int,
    "exact": bool,
    "model": str,
    "weights_sha256": str,
    "preprocessing": dict,
    "dimension": int,
    "trunk?": bool,
    "labels?": dict[str, int],
    "level?": str,
    "levels?": dict[str, dict[str, str]],
    "parts": list[dict],
    "faiss_sha256?": str,
}
_PART = {"name": str, "rows": int, "vectors_sha256": str, "rows_sha256": str, "dropped": list[int]}
_ROW = {"path": str, "label": str, "size": int, "changed_ns": int}


class IndexRow(NamedTuple):
    """A file as it was when it was embedded."""

    path: str  # absolute
    label: str  # '' for none
    size: int  # bytes
    changed_ns: int


@dataclass(frozen=True)
class IndexPart:
    """Some rows of an index, in two files that never change."""

    name: str
    rows: int
    vectors_sha256: str
    rows_sha256: str
    dropped: tuple[int, ...] = ()  # rows whose files were embedded again or no longer exist

    def __len__(self) -> int:
        return self.rows - len(self.dropped)

    def valid_rows(self) -> np.ndarray:
        """Return the rows that are not dropped, (len,)."""
        return np.delete(np.arange(self.rows), self.dropped)


@dataclass(frozen=True)
class IndexMetadata:
    """The contents of `index.json`."""

    model: str  # run folder, or hub:user/name
    weights_sha256: str
    preprocessing: dict[str, Any]
    dimension: int
    trunk: bool = False  # whether the model's projector is dropped
    labels: dict[str, int] = field(default_factory=dict)  # label → number of files
    level: str = ""  # default level of the labels; '' for the labels themselves
    levels: dict[str, dict[str, str]] = field(default_factory=dict)  # level → {label: coarse label}
    parts: tuple[IndexPart, ...] = ()
    faiss_sha256: str = ""  # of faiss.index over all parts; '' for an exact search

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def exact(self) -> bool:
        """Whether a search compares the query with all files."""
        return not self.faiss_sha256

    def at(self, label: str, level: str) -> str:
        """Return a label at a level; a label that the level does not list keeps its name."""
        return self.levels[level].get(label, label) if level else label

    def labels_at(self, level: str) -> dict[str, int]:
        """Return the number of files per label at a level, sorted by name."""
        counts: dict[str, int] = {}
        for label, count in self.labels.items():
            at_level = self.at(label, level)
            counts[at_level] = counts.get(at_level, 0) + count
        return dict(sorted(counts.items()))


def write_about(folder: Path, about: IndexMetadata) -> None:
    """Replace `index.json`."""
    values = {"format": FORMAT, "files": len(about), "exact": about.exact} | asdict(about)
    values = json.loads(json.dumps(values))
    atomic_write(folder / FILE, (json.dumps(values | {"own_sha256": own_sha256(values)}, indent=1) + "\n").encode())


def read_about(folder: Path, *, accepted: bool = False) -> IndexMetadata:
    """Read `index.json`; raise UsageError if there is none and CheckpointError if it cannot be used.

    With `accepted`, its own checksum is not checked, since somebody changed it on purpose.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        raise UsageError(
            f"{folder} is not an index: it has no {FILE}. Make one: patchloom index RUN IMAGES --out {folder}"
        )
    try:
        values = parse_json(read_plain(path))
        check_shape(values, _FORMAT)
        checksum = values.get("own_sha256")  # earlier versions wrote none
        if checksum is not None and checksum != own_sha256(values) and not accepted:
            raise CheckpointError(
                f"{path} is damaged: its checksum does not match. Restore it, or build the index again; if it was "
                f"changed on purpose, accept the change: patchloom verify {shlex.quote(str(folder))} --accept"
            )
        values.pop("own_sha256", None)
        made_by = values.pop("format")
        if made_by > FORMAT:
            raise CheckpointError(
                f"{path} has format {made_by}, written by a newer patchloom; this one reads up to {FORMAT}. "
                "Update patchloom."
            )
        check_shape(values, _SHAPE)
        for part in values["parts"]:
            check_shape(part, _PART)
        parts = tuple(IndexPart(**part | {"dropped": tuple(part["dropped"])}) for part in values.pop("parts"))
        files, exact = values.pop("files"), values.pop("exact")
        about = IndexMetadata(**values, parts=parts)
        _check_counts(about, path, files, exact)
        return about
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:  # TypeError: an unknown field
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or build the index again.") from error


def _check_counts(about: IndexMetadata, path: Path, files: int, exact: bool) -> None:
    """Raise ValueError if counts contradict each other, so that positions would mean other files."""
    for part in about.parts:
        plain_name(part.name, path)
        if part.rows < 1:
            raise ValueError(f"{part.name} has {part.rows!r} rows")
        if len(set(part.dropped)) < len(part.dropped) or not all(0 <= at < part.rows for at in part.dropped):
            raise ValueError(f"{part.name} drops rows it does not have")
    if len({part.name for part in about.parts}) < len(about.parts):
        raise ValueError("it names a part twice")
    if files != len(about) or exact != about.exact:
        raise ValueError(f"it counts {files} files, its parts {len(about)}")
    if about.level and about.level not in about.levels:
        raise ValueError(f"its level is {about.level!r}, which is not one of its levels")
    if about.dimension < 1:
        raise ValueError(f"its vectors have {about.dimension!r} numbers")


def write_part(folder: Path, number: int, vectors: np.ndarray, rows: Sequence[IndexRow]) -> IndexPart:
    """Write both files of a part; they take effect once `index.json` names them."""
    name = f"part-{number:05d}"
    packed = io.BytesIO()
    np.save(packed, vectors, allow_pickle=False)
    listed = json.dumps(rows).encode()  # ASCII, so that names that are not UTF-8 survive
    atomic_write(folder / f"{name}.npy", packed.getvalue())
    atomic_write(folder / f"{name}.json", listed)
    return IndexPart(
        name, len(rows), hashlib.sha256(packed.getbuffer()).hexdigest(), hashlib.sha256(listed).hexdigest()
    )


class StoredVectors:
    """The vectors of an index for `evaluation.exact_search`, read part by part and verified by their checksums."""

    def __init__(self, folder: Path, about: IndexMetadata) -> None:
        self.folder, self.about = folder, about
        self._verified: set[str] = set()  # names of files whose checksums were compared

    def __len__(self) -> int:
        return len(self.about)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._vectors, filter(len, self.about.parts))

    def rows(self, positions: Tensor) -> Tensor:
        """Return the vectors (M, C) at positions (M,)."""
        vectors = torch.empty(len(positions), self.about.dimension)
        for part, chosen, inside in self._by_part(positions):
            vectors[chosen] = self._vectors(part)[inside]
        return vectors

    def row(self, part: IndexPart, number: int) -> Tensor:
        """Return a copy of the vector (C,) of one row of a part, dropped or not; a view would keep the file open."""
        return self.all_rows(part)[number].clone()

    def files(self, positions: Tensor) -> list[IndexRow]:
        """Return the files at positions (M,), reading only their parts."""
        files: dict[int, IndexRow] = {}
        for part, chosen, inside in self._by_part(positions):
            rows, valid = self.rows_of(part), part.valid_rows()
            files |= {int(i): rows[valid[at]] for i, at in zip(chosen.tolist(), inside.tolist(), strict=True)}
        return [files[i] for i in range(len(positions))]

    def labels(self) -> list[str]:
        """Return the label of every file, in order; '' for none."""
        labels: list[str] = []
        for part in self.about.parts:
            rows = self.rows_of(part)
            labels += [rows[at].label for at in part.valid_rows().tolist()]
        return labels

    def rows_of(self, part: IndexPart) -> list[IndexRow]:
        """Return all rows of a part, including dropped ones."""
        path = self.folder / f"{part.name}.json"
        self._compare(path, part.rows_sha256, MOST_BYTES)
        try:
            rows = parse_json(read_plain(path))
            check_shape(rows, list[list])
            for row in rows:
                check_shape(dict(zip(IndexRow._fields, row, strict=True)), _ROW)
        except OSError as error:
            raise self._unreadable(path, error) from error
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}. Build the index again.") from error
        self._refuse_unless(len(rows) == part.rows, path, f"{len(rows)} rows", f"{part.rows}")
        return [IndexRow(*row) for row in rows]

    def faiss_file(self) -> Path:
        """Return the path of `faiss.index` after comparing its checksum."""
        rows = sum(part.rows for part in self.about.parts)
        # Each row has a vector and its number, and there are fewer centroids than vectors.
        self._compare(self.folder / FAISS, self.about.faiss_sha256, 2 * rows * (self.about.dimension * 4 + 8) + _HEADER)
        return self.folder / FAISS

    @cached_property
    def _ends(self) -> Tensor:
        """Position after the last row of each part, (parts,)."""
        return torch.tensor([len(part) for part in self.about.parts]).cumsum(0)

    def _by_part(self, positions: Tensor) -> Iterator[tuple[IndexPart, Tensor, Tensor]]:
        """Yield each part that holds some of `positions`, the indices of these, and their rows in the part."""
        numbers = torch.searchsorted(self._ends, positions, right=True)
        for number in numbers.unique().tolist():
            part = self.about.parts[number]
            chosen = torch.nonzero(numbers == number)[:, 0]
            yield part, chosen, positions[chosen] - self._ends[number] + len(part)

    def _vectors(self, part: IndexPart) -> Tensor:
        vectors = self.all_rows(part)
        return vectors[torch.from_numpy(part.valid_rows())] if part.dropped else vectors

    def all_rows(self, part: IndexPart) -> Tensor:
        """Return the vectors (rows, C) of a part, including dropped ones."""
        path = self.folder / f"{part.name}.npy"
        self._compare(path, part.vectors_sha256, part.rows * self.about.dimension * 4 + _HEADER)
        # Copy-on-write, though nothing writes: torch warns of read-only memory.
        try:
            vectors = np.load(path, mmap_mode="c", allow_pickle=False)
        except Exception as error:  # the header of an .npy file is a Python literal, which may be anything
            raise CheckpointError(f"{path} is damaged: it is not a numpy array. Build the index again.") from error
        expected = (part.rows, self.about.dimension)
        is_right = isinstance(vectors, np.ndarray) and vectors.shape == expected and vectors.dtype == np.float32
        self._refuse_unless(is_right, path, f"{vectors.shape} {vectors.dtype}", f"{expected} float32")
        return torch.from_numpy(vectors)

    def _refuse_unless(self, is_right: bool, path: Path, actual: str, expected: str) -> None:
        if not is_right:
            raise CheckpointError(
                f"{path} has {actual}, {FILE} says {expected}. Restore {FILE}, or build the index again."
            )

    def _unreadable(self, path: Path, error: OSError) -> CheckpointError:
        return CheckpointError(f"{path} cannot be read: {error.strerror}. Build the index again.")

    def _compare(self, path: Path, sha256: str, most: int) -> None:
        """Raise CheckpointError if a file has another checksum, or more than `most` bytes (then it is not read)."""
        if path.name in self._verified:
            return
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                checksum = hashlib.file_digest(file, "sha256").hexdigest() if size <= most else ""
        except OSError as error:
            raise self._unreadable(path, error) from error
        self._refuse_unless(size <= most, path, f"{size:,} bytes", f"at most {most:,}")
        if checksum != sha256:
            raise CheckpointError(
                f"{path} is damaged: its checksum is not the one in {FILE}. Restore it, or build the index again."
            )
        self._verified.add(path.name)


def write_lists(folder: Path, about: IndexMetadata) -> IndexMetadata:
    """Write `faiss.index`; from then on, the index is searched by faiss."""
    with atomic_file(folder / FAISS) as temporary:
        write_faiss(StoredVectors(folder, about), temporary)
        with temporary.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    about = replace(about, faiss_sha256=sha256)
    write_about(folder, about)
    return about
