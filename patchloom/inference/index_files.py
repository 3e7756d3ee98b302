"""The files of an index of images.

    index.json         format; the model, the checksum of its weights and its preprocessing; dimension; whether the
                       vectors are the trunk's; number of files per label, the levels above the labels, and the level
                       that is shown; whether a search is exact; the parts with their checksums
    part-00000.npy     (rows, dimension) float32 unit vectors
    part-00000.json    path, label, size in bytes and modification time of the file of each row (`index_rows`)
    part-train-000000-….npy, .parquet  the same for the images of a shard (`shard_parts`)
    lists-00000.faiss  beyond a million files: codes of the vectors of the first parts, in lists (`approximate_search`)
    lists-00000.npy    the smallest cosine between the centroid of each list and its members

A part never changes once it is written. `index.json` is replaced last and names the files that count: if a build is
interrupted, the index stays as it was, and files that are not named are overwritten. A file that changed or got another
label is stored again, and its old row is dropped in `index.json`; so are files that no longer exist, on request. Lists
stay valid: dropped rows are skipped, and parts that were added later are compared exactly. No file is a pickle.
"""

import hashlib
import io
import json
import mmap
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.disk import atomic_file, atomic_write, plain_name
from patchloom.evaluation.approximate_search import (
    ListedVectors,
    Lists,
    ListSettings,
    Nearest,
    choose_settings,
    write_lists,
)
from patchloom.evaluation.exact_search import exact_nearest
from patchloom.inference.index_rows import IndexRow, encode_rows, import_parquet, read_rows
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import MOST_BYTES, check_shape, open_plain, own_sha256, parse_json, read_plain

FORMAT = 4  # 1 had the labels of one level alone, 2 lists of whole vectors, 3 all rows in JSON
FILE = "index.json"
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
    "lists?": dict | None,
}
_PART = {
    "name": str,
    "rows": int,
    "vectors_sha256": str,
    "rows_sha256": str,
    "dropped": list[int],
    "parquet?": bool,
}
_LISTS = {"name": str, "sha256": str, "radii_sha256": str, "parts": int, "settings": dict}
_LIST_SETTINGS = {"probes": int, "candidates": int, "recall": float, "queries": int}


@dataclass(frozen=True)
class IndexPart:
    """Some rows of an index, in two files that never change."""

    name: str
    rows: int
    vectors_sha256: str
    rows_sha256: str
    dropped: tuple[int, ...] = ()  # rows whose files were embedded again or no longer exist
    parquet: bool = False  # whether the rows are parquet instead of JSON

    @property
    def rows_file(self) -> str:
        """Name of the file of its rows."""
        return f"{self.name}.{'parquet' if self.parquet else 'json'}"

    def __len__(self) -> int:
        return self.rows - len(self.dropped)

    def valid_rows(self) -> np.ndarray:
        """Return the rows that are not dropped, (len,)."""
        return np.delete(np.arange(self.rows), self.dropped)


@dataclass(frozen=True)
class StoredLists:
    """The files of `approximate_search` that an index uses."""

    name: str  # without the suffixes .faiss and .npy
    sha256: str  # of the codes
    radii_sha256: str
    parts: int  # the first parts of the index, whose rows are in the lists
    settings: ListSettings


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
    lists: StoredLists | None = None  # None for an exact search

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def exact(self) -> bool:
        """Whether a search compares the query with all files."""
        return self.lists is None

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
        if made_by < 3 and values.pop("faiss_sha256", ""):
            values["exact"] = True  # until the next build writes lists of codes
        check_shape(values, _SHAPE)
        for part in values["parts"]:
            check_shape(part, _PART)
        parts = tuple(IndexPart(**part | {"dropped": tuple(part["dropped"])}) for part in values.pop("parts"))
        files, exact = values.pop("files"), values.pop("exact")
        lists = _read_lists(values.pop("lists", None))
        about = IndexMetadata(**values, parts=parts, lists=lists)
        _check_counts(about, path, files, exact)
        return about
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:  # TypeError: an unknown field
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or build the index again.") from error


def _read_lists(values: dict[str, Any] | None) -> StoredLists | None:
    if values is None:
        return None
    check_shape(values, _LISTS)
    check_shape(values["settings"], _LIST_SETTINGS)
    settings = ListSettings(**values.pop("settings"))
    if settings.probes < 1 or settings.candidates < 1 or not 0 <= settings.recall <= 1:
        raise ValueError(f"its lists are searched with {settings}")
    return StoredLists(**values, settings=settings)


def list_files(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of the codes and of the radii of lists."""
    return folder / f"{name}.faiss", folder / f"{name}.npy"


def _check_counts(about: IndexMetadata, path: Path, files: int, exact: bool) -> None:
    """Raise ValueError if counts contradict each other, so that positions would mean other files."""
    for part in about.parts:
        plain_name(part.name, path)
        if part.rows < 1:
            raise ValueError(f"{part.name} has {part.rows!r} rows")
        if len(set(part.dropped)) < len(part.dropped) or not all(0 <= at < part.rows for at in part.dropped):
            raise ValueError(f"{part.name} lists dropped rows that are not in it, or one twice")
    if len({part.name for part in about.parts}) < len(about.parts):
        raise ValueError("it names a part twice")
    if files != len(about) or exact != about.exact:
        raise ValueError(f"it counts {files} files, its parts {len(about)}")
    if about.level and about.level not in about.levels:
        raise ValueError(f"its level is {about.level!r}, which is not one of its levels")
    if about.lists is not None:
        plain_name(about.lists.name, path)
        if not 0 < about.lists.parts <= len(about.parts):
            raise ValueError(f"its lists have {about.lists.parts} parts")
    if about.dimension < 1:
        raise ValueError(f"its vectors have {about.dimension!r} numbers")


def write_part(
    folder: Path, name: str, vectors: np.ndarray, rows: Sequence[IndexRow], *, of_shard: bool = False
) -> IndexPart:
    """Write both files of a part; they take effect once `index.json` names them.

    A digest of the content is added to the name of a part of a shard: if machines of different kinds make it at once,
    their files, which may differ in the last bits, do not replace each other.
    """
    packed = io.BytesIO()
    np.save(packed, vectors, allow_pickle=False)
    listed = encode_rows(rows, parquet=of_shard)
    if of_shard:
        digest = hashlib.blake2b(packed.getbuffer(), digest_size=4)
        digest.update(listed)
        name += f"-{digest.hexdigest()}"
    sha256, rows_sha256 = (hashlib.sha256(data).hexdigest() for data in (packed.getbuffer(), listed))
    part = IndexPart(name, len(rows), sha256, rows_sha256, parquet=of_shard)
    atomic_write(folder / f"{name}.npy", packed.getvalue())
    atomic_write(folder / part.rows_file, listed)
    return part


class StoredVectors:
    """The vectors of an index for `evaluation.exact_search`, read part by part and verified by their checksums."""

    def __init__(self, folder: Path, about: IndexMetadata) -> None:
        if any(part.parquet for part in about.parts):
            import_parquet(str(folder))  # fails now, not in the first request to a server
        self.folder, self.about = folder, about
        self._verified: set[str] = set()  # names of files whose checksums were compared
        self._mapped: dict[str, np.ndarray] = {}  # part → its vectors, in the file

    def __len__(self) -> int:
        return len(self.about)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._vectors, filter(len, self.about.parts))

    def rows(self, positions: Tensor) -> Tensor:
        """Return the vectors (M, C) at positions (M,)."""
        # By numpy, which takes a third of the time: it asks for huge pages, and its threads do not wait for each other.
        vectors = np.empty((len(positions), self.about.dimension), np.float32)
        for part, chosen, inside in self._by_part(positions):
            rows = part.valid_rows()[inside.numpy()] if part.dropped else inside.numpy()
            vectors[chosen.numpy()] = self._opened(part, few=True)[rows]
        return torch.from_numpy(vectors)

    def row(self, part: IndexPart, number: int) -> Tensor:
        """Return a copy of the vector (C,) of one row of a part, dropped or not; a view would keep the file open."""
        return self.all_rows(part)[number].clone()

    def files(self, positions: Tensor) -> list[IndexRow]:
        """Return the files at positions (M,), reading only their parts, of shards only their groups of rows."""
        files: dict[int, IndexRow] = {}
        for part, chosen, inside in self._by_part(positions):
            rows = self._read_rows(part, part.valid_rows()[inside.numpy()])
            files |= dict(zip(chosen.tolist(), rows, strict=True))
        return [files[i] for i in range(len(positions))]

    def positions_of(self, wanted: Callable[[IndexRow], bool]) -> Tensor:
        """Return the positions of the wanted files, increasing."""
        positions: list[int] = []
        start = 0
        for part in self.about.parts:
            rows = self.rows_of(part)
            positions += [start + place for place, at in enumerate(part.valid_rows().tolist()) if wanted(rows[at])]
            start += len(part)
        return torch.tensor(positions, dtype=torch.int64)

    def labels(self) -> list[str]:
        """Return the label of every file, in order; '' for none."""
        labels: list[str] = []
        for part in self.about.parts:
            rows = self.rows_of(part)
            labels += [rows[at].label for at in part.valid_rows().tolist()]
        return labels

    def rows_of(self, part: IndexPart) -> list[IndexRow]:
        """Return all rows of a part, including dropped ones."""
        return self._read_rows(part)

    def _read_rows(self, part: IndexPart, wanted: np.ndarray | None = None) -> list[IndexRow]:
        path = self.folder / part.rows_file
        self._compare(path, part.rows_sha256, MOST_BYTES)
        try:
            return read_rows(path, part.rows, wanted)
        except OSError as error:
            raise self._unreadable(path, error) from error
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged or does not belong to this {FILE}: {error}. Restore it, or build the index again."
            ) from error

    def compare_lists(self, lists: StoredLists) -> None:
        """Raise CheckpointError if the files of the lists have other checksums."""
        codes, radii = list_files(self.folder, lists.name)
        rows = sum(part.rows for part in self.about.parts[: lists.parts])
        # Each row has a code, shorter than its vector, and its number; there are fewer centroids than vectors.
        self._compare(codes, lists.sha256, 2 * rows * (self.about.dimension * 4 + 8) + _HEADER)
        self._compare(radii, lists.radii_sha256, 4 * rows + _HEADER)

    def nearest(self, queries: Tensor, k: int) -> Nearest:
        """Return the k nearest vectors of queries (Q, C), by the lists of the index if it has some."""
        if self.about.lists is None:
            scores, positions = exact_nearest(self, queries, k)
            return Nearest(scores, positions, torch.ones(len(queries), dtype=torch.bool))
        return self._listed.nearest(queries, k, self.about.lists.settings)

    @cached_property
    def _listed(self) -> ListedVectors:
        lists = self.about.lists
        assert lists is not None
        self.compare_lists(lists)
        try:
            opened = Lists(*list_files(self.folder, lists.name))
        except (ValueError, RuntimeError) as error:  # RuntimeError: of faiss
            raise CheckpointError(
                f"{self.folder / lists.name}.faiss is damaged: {error}. Build the index again."
            ) from error
        return self.with_lists(opened, lists.parts)

    def with_lists(self, lists: Lists, parts: int) -> ListedVectors:
        """Return these vectors with lists of the first `parts` parts."""
        listed, later = self.about.parts[:parts], self.about.parts[parts:]
        starts = np.cumsum([0, *(part.rows for part in listed)])
        removed = [start + at for start, part in zip(starts, listed, strict=False) for at in sorted(part.dropped)]
        tail = StoredVectors(self.folder, replace(self.about, parts=later)) if later else None
        return ListedVectors(self, lists, torch.tensor(removed, dtype=torch.int64), tail)

    @cached_property
    def _ends(self) -> Tensor:
        """Position after the last row of each part, (parts,)."""
        return torch.tensor([len(part) for part in self.about.parts]).cumsum(0)

    def _by_part(self, positions: Tensor) -> Iterator[tuple[IndexPart, Tensor, Tensor]]:
        """Yield each part that holds some of `positions`, the indices of these, and their rows in the part, sorted."""
        positions, order = positions.sort(stable=True)
        present, counts = torch.searchsorted(self._ends, positions, right=True).unique_consecutive(return_counts=True)
        groups = zip(present.tolist(), order.split(counts.tolist()), positions.split(counts.tolist()), strict=True)
        for number, chosen, places in groups:
            part = self.about.parts[number]
            yield part, chosen, places - self._ends[number] + len(part)

    def _vectors(self, part: IndexPart) -> Tensor:
        vectors = self.all_rows(part)
        return vectors[torch.from_numpy(part.valid_rows())] if part.dropped else vectors

    def all_rows(self, part: IndexPart) -> Tensor:
        """Return the vectors (rows, C) of a part, including dropped ones."""
        return torch.from_numpy(self._opened(part, few=False))

    def _opened(self, part: IndexPart, *, few: bool) -> np.ndarray:
        """Return the vectors of a part to read all or a few of them, without what is around these on the disk."""
        if part.name not in self._mapped:
            self._mapped[part.name] = self._map(part)
        vectors = self._mapped[part.name]
        if isinstance(vectors.base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):  # not on Windows
            vectors.base.madvise(mmap.MADV_RANDOM if few else mmap.MADV_NORMAL)
        return vectors

    def _map(self, part: IndexPart) -> np.ndarray:
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
        return vectors

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


def write_stored_lists(folder: Path, about: IndexMetadata) -> IndexMetadata:
    """Write lists of all vectors and choose how they are searched; from then on, searches are approximate."""
    every_row = replace(about, parts=tuple(replace(part, dropped=()) for part in about.parts), lists=None)
    # Under a new name, because searches use the previous lists until index.json names these.
    name = f"lists-{int(about.lists.name.rpartition('-')[2]) + 1 if about.lists else 0:05d}"
    paths = list_files(folder, name)
    with atomic_file(paths[0]) as codes, atomic_file(paths[1]) as radii:
        write_lists(StoredVectors(folder, every_row), codes, radii)
        sha256, radii_sha256 = _synced_digest(codes), _synced_digest(radii)
    settings = choose_settings(StoredVectors(folder, about).with_lists(Lists(*paths), len(about.parts)))
    before, lists = about.lists, StoredLists(name, sha256, radii_sha256, len(about.parts), settings)
    about = replace(about, lists=lists)
    write_about(folder, about)
    for path in list_files(folder, before.name) if before else ():
        path.unlink(missing_ok=True)
    return about


def _synced_digest(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
