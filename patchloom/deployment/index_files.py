"""What an index of pictures leaves on disk.

    index.json         format; the model, its weights' checksum and its preprocessing; dimension; whether the vectors
                       are the trunk's; how many files of which labels; whether a search compares with all; the parts
                       with their checksums
    part-00000.npy     (rows, dimension) float32, unit vectors
    part-00000.json    path, label, bytes and time of the last change of each row's file
    faiss.index        beyond a million files: lists of near vectors, made by faiss

A part never changes once it is written. `index.json` is replaced last and names what counts: whatever interrupts a
build, the index before it stays as it was, and a file beside it that is not named is written over. A file that changed
or got another label is stored again, and its old row is dropped in `index.json`; so are files that are gone, where that
is asked for. There is no pickle anywhere.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.checkpoint import atomic_write
from patchloom.engine.disk import disk_errors
from patchloom.errors import CheckpointError, UsageError
from patchloom.evaluation.exact_search import write_faiss

FORMAT = 1
FILE, FAISS = "index.json", "faiss.index"


class Row(NamedTuple):
    """A file as it was embedded."""

    path: str  # absolute
    label: str  # '' for none
    size: int  # bytes
    changed_ns: int


@dataclass(frozen=True)
class Part:
    """Some rows, in two files that never change."""

    name: str
    rows: int
    vectors_sha256: str
    rows_sha256: str
    dropped: tuple[int, ...] = ()  # rows whose files were embedded again, or are gone

    def __len__(self) -> int:
        return self.rows - len(self.dropped)

    def kept(self) -> np.ndarray:
        """(len,) rows that count."""
        return np.delete(np.arange(self.rows), self.dropped)


@dataclass(frozen=True)
class About:
    """What stands in `index.json`."""

    model: str  # the folder of a run, or a repository of the hub
    weights_sha256: str
    preprocessing: dict[str, Any]
    dimension: int
    trunk: bool = False  # the model's projector is left out
    labels: dict[str, int] = field(default_factory=dict)  # how many files of each
    parts: tuple[Part, ...] = ()
    faiss_sha256: str = ""  # of faiss.index over all parts; '' where a search compares with all

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def exact(self) -> bool:
        """Whether a search compares with all."""
        return not self.faiss_sha256


def write_about(folder: Path, about: About) -> None:
    """Replace `index.json`."""
    counts = {"format": FORMAT, "files": len(about), "exact": about.exact}
    atomic_write(folder / FILE, (json.dumps(counts | asdict(about), indent=1) + "\n").encode())


def read_about(folder: Path) -> About:
    """What `write_about` wrote; a UsageError where there is no index, a CheckpointError where it cannot be used."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} is not an index: it has no {FILE}. Make one: patchloom index RUN IMAGES --out {folder}"
        )
    try:
        values = json.loads(path.read_bytes())
        made_by = values.pop("format")
        if made_by > FORMAT:
            raise CheckpointError(
                f"{path} has format {made_by}, written by a newer patchloom; this one reads up to {FORMAT}. "
                "Update patchloom."
            )
        parts = tuple(Part(**part | {"dropped": tuple(part["dropped"])}) for part in values.pop("parts"))
        del values["files"], values["exact"]
        return About(**values, parts=parts)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or build the index again.") from error


def write_part(folder: Path, number: int, vectors: np.ndarray, rows: Sequence[Row]) -> Part:
    """Write both files of a part; it counts once `index.json` names it."""
    name = f"part-{number:05d}"
    packed = io.BytesIO()
    np.save(packed, vectors, allow_pickle=False)
    named = json.dumps(rows).encode()  # ASCII: names that are not UTF-8 survive
    atomic_write(folder / f"{name}.npy", packed.getvalue())
    atomic_write(folder / f"{name}.json", named)
    return Part(name, len(rows), hashlib.sha256(packed.getbuffer()).hexdigest(), hashlib.sha256(named).hexdigest())


class StoredVectors:
    """The vectors of an index for `evaluation.exact_search`: read part by part, compared with their checksums."""

    def __init__(self, folder: Path, about: About) -> None:
        self.folder, self.about = folder, about
        self._whole: set[str] = set()  # files compared with their checksums already

    def __len__(self) -> int:
        return len(self.about)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._vectors, filter(len, self.about.parts))

    def rows(self, positions: Tensor) -> Tensor:
        """(M,) positions → (M, C)."""
        found = torch.empty(len(positions), self.about.dimension)
        for part, chosen, inside in self._by_part(positions):
            found[chosen] = self._vectors(part)[inside]
        return found

    def row(self, part: Part, number: int) -> Tensor:
        """(C,) of one row of a part, dropped or not; a copy, since a view would keep the file open."""
        return self._all_rows(part)[number].clone()

    def files(self, positions: Tensor) -> list[Row]:
        """The files at (M,) positions; only the parts they lie in are read."""
        found: dict[int, Row] = {}
        for part, chosen, inside in self._by_part(positions):
            rows, kept = self.rows_of(part), part.kept()
            found |= {int(i): rows[kept[at]] for i, at in zip(chosen.tolist(), inside.tolist(), strict=True)}
        return [found[i] for i in range(len(positions))]

    def rows_of(self, part: Part) -> list[Row]:
        """All rows of a part, the dropped ones too."""
        path = self.folder / f"{part.name}.json"
        self._compare(path, part.rows_sha256)
        return [Row(*row) for row in json.loads(path.read_bytes())]

    def faiss_file(self) -> Path:
        """The path of `faiss.index`, whole."""
        self._compare(self.folder / FAISS, self.about.faiss_sha256)
        return self.folder / FAISS

    @cached_property
    def _ends(self) -> Tensor:
        """(parts,) positions after the last row of each part."""
        return torch.tensor([len(part) for part in self.about.parts]).cumsum(0)

    def _by_part(self, positions: Tensor) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Each part that is asked for, which of `positions` lie in it, and where in it."""
        numbers = torch.searchsorted(self._ends, positions, right=True)
        for number in numbers.unique().tolist():
            part = self.about.parts[number]
            chosen = torch.nonzero(numbers == number)[:, 0]
            yield part, chosen, positions[chosen] - self._ends[number] + len(part)

    def _vectors(self, part: Part) -> Tensor:
        vectors = self._all_rows(part)
        return vectors[torch.from_numpy(part.kept())] if part.dropped else vectors

    def _all_rows(self, part: Part) -> Tensor:
        path = self.folder / f"{part.name}.npy"
        self._compare(path, part.vectors_sha256)
        # Copy on write, though nothing writes: torch warns of memory that cannot be written.
        return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))

    def _compare(self, path: Path, sha256: str) -> None:
        if path.name in self._whole:
            return
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}. Build the index again.") from error
        if found != sha256:
            raise CheckpointError(
                f"{path} is damaged: its checksum is not that of {FILE}. Restore it, or build the index again."
            )
        self._whole.add(path.name)


def write_lists(folder: Path, about: About) -> About:
    """Let faiss sort the vectors into lists; the index is searched by them from then on."""
    temporary = folder / f".{FAISS}.tmp"
    write_faiss(StoredVectors(folder, about), temporary)
    with disk_errors(folder / FAISS):
        with temporary.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        os.replace(temporary, folder / FAISS)
    about = replace(about, faiss_sha256=sha256)
    write_about(folder, about)
    return about
