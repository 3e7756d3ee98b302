"""Index parts of tar shards and parquet files, made by any number of machines.

    shard-train-000000-3f9a1c02.json       written last: the part of a shard, its checksums, and counts of labels
    part-train-000000-3f9a1c02-77b0e1.npy  vectors and rows, as in any part (`index_files`)
    part-train-000000-3f9a1c02-77b0e1.parquet

A part depends on its shard and the model alone. The first digest in its name is that of both, so any machine can make
any part, in any order, and one that exists is skipped. The second digest is that of its content: if two machines of
different kinds make a part at once, they do not write the same file. No machine lists the images of other shards.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.buckets.objects import ExistsError
from patchloom.data.buckets.remote_file import AnyFile, RemoteFile
from patchloom.data.images.image_store import ImageStore, file_state
from patchloom.data.labels.taxonomy import read_taxonomy
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import open_shard
from patchloom.data.sources.specs import is_url
from patchloom.disk import atomic_write, make_folder, plain_name
from patchloom.inference.classifier import drop_projector, load
from patchloom.inference.embedding import embed_files
from patchloom.inference.index_files import IndexMetadata, IndexPart, write_part
from patchloom.inference.index_rows import IndexRow, import_parquet
from patchloom.inference.neighbors import index_preprocessing
from patchloom.runs.weights import weights_digest
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.untrusted import check_shape, own_sha256, parse_json, read_plain

FORMAT = 2  # 1 had its rows in JSON
PART_FILE = re.compile(r"shard-.+-[0-9a-f]{16}\.json|part-.+-[0-9a-f]{16}-[0-9a-f]{8}\.(json|npy|parquet)")
_RECORD = re.compile(r"shard-(.+)\.json")
_SHAPE = {
    "format": int,
    "key": str,
    "part": str,
    "shard": str,
    "state": list[int],
    "rows": int,
    "vectors_sha256": str,
    "rows_sha256": str,
    "labels": dict[str, int],
    "levels": dict[str, dict[str, str]],
    "unreadable": dict[str, str],
    "parquet?": bool,
    "own_sha256": str,
}
_MAX_STEM = 64  # letters of a shard's name in the name of its part


@dataclass(frozen=True)
class ShardRecord:
    """The file that makes the part of a shard count."""

    key: str  # names the shard and the model
    part: str  # the name of the part
    shard: str
    state: tuple[int, int]  # of the shard: size, and a number that changes with it
    rows: int  # 0 if no image of it can be read: then there is no part
    vectors_sha256: str
    rows_sha256: str
    labels: dict[str, int]
    levels: dict[str, dict[str, str]]
    unreadable: dict[str, str]  # image → error
    parquet: bool = False  # whether the rows of the part are parquet instead of JSON

    @property
    def indexed(self) -> IndexPart:
        """The part, as `index.json` lists it."""
        return IndexPart(self.part, self.rows, self.vectors_sha256, self.rows_sha256, parquet=self.parquet)


@dataclass(frozen=True)
class ShardJob:
    """How to embed shards, for any machine."""

    model: str
    out: str  # folder, or address in a bucket
    device: str = "auto"
    trunk: bool = False
    reading: Reading = AS_IT_IS
    batch: int = 64
    workers: int = 0


class ShardEmbedder:
    """The open model of a job, and the folder of the parts that it makes."""

    def __init__(self, job: ShardJob) -> None:
        import_parquet("an index of shards")  # fails now, not after the first shard
        self.job = job
        self.bucket = Mirror(job.out) if is_url(job.out) else None
        self.folder = self.bucket.folder if self.bucket else Path(job.out)  # the copy of the bucket's
        self.classifier = load(job.model, device=job.device)
        if job.trunk:
            drop_projector(self.classifier, job.model)

    @cached_property
    def _model(self) -> str:
        """What a part depends on apart from its shard."""
        weights = weights_digest(dict(self.classifier.model.state_dict()))
        taxonomy = self.job.reading.taxonomy
        levels = read_taxonomy(Path(taxonomy)) if taxonomy is not None else {}
        return json.dumps([weights, index_preprocessing(self.classifier), self.job.trunk, self.job.batch, levels])

    def key_of(self, shard: AnyFile) -> str:
        """Return a name for a shard and the model, which no other shard or model has."""
        identity = f"{_address(shard)}\0{state_of(shard)}\0{self._model}".encode("utf-8", "surrogateescape")
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.splitext(shard.name)[0])[:_MAX_STEM]
        return f"{stem}-{hashlib.blake2b(identity, digest_size=8).hexdigest()}"

    def missing(self, shards: Sequence[AnyFile]) -> list[AnyFile]:
        """Return the shards whose parts no machine has made yet."""
        make_folder(self.folder)
        names = set(self.bucket.names() if self.bucket else os.listdir(self.folder))
        return [shard for shard in shards if record_name(self.key_of(shard)) not in names]

    def embed(self, shard: AnyFile) -> ShardRecord:
        """Make the part of a shard, and then its record."""
        key, source = self.key_of(shard), open_shard(shard, self.job.reading)
        in_memory: dict[str, tuple[ImageStore, int]] = {}
        labels: dict[str, str] = {}
        levels: dict[str, dict[str, str]] = {}
        for listing in source.listings.values():
            for row, number in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
                image = listing.images.where(row)
                in_memory[image] = listing.images, row
                labels[image] = "" if number == UNLABELED else listing.names[number]
            for level, coarse in listing.levels.items():
                present = set(labels.values())
                levels.setdefault(level, {}).update({own: coarse[own] for own in coarse if own in present})
        rows: list[IndexRow] = []
        vectors: list[torch.Tensor] = []
        unreadable: dict[str, str] = {}
        batch, workers = self.job.batch, self.job.workers
        for files in embed_files(self.classifier, list(in_memory), batch=batch, workers=workers, in_memory=in_memory):
            rows += [IndexRow(path, labels[path], 0, 0) for path in files.paths]
            vectors += [files.vectors] if files.paths else []
            unreadable |= files.unreadable
        part = IndexPart("", 0, "", "")
        if rows:
            part = write_part(self.folder, f"part-{key}", torch.cat(vectors).numpy(), rows, of_shard=True)
        counts = Counter(row.label for row in rows if row.label)
        record = ShardRecord(
            key,
            part.name,
            _address(shard),
            state_of(shard),
            part.rows,
            part.vectors_sha256,
            part.rows_sha256,
            dict(sorted(counts.items())),
            levels,
            unreadable,
            part.parquet,
        )
        values = json.loads(json.dumps({"format": FORMAT, **asdict(record)}))
        values["own_sha256"] = own_sha256(values)
        name = record_name(key)
        atomic_write(self.folder / name, (json.dumps(values, indent=1) + "\n").encode())
        if self.bucket:
            names = [f"{part.name}.npy", part.rows_file] if rows else []
            try:
                self.bucket.push(names=[*names, name], last=[name])
            except ExistsError:  # another machine was first, and its vectors differ in the last bits
                self.bucket.pull(name.__eq__)
        return read_record(self.folder, key)


def with_shards(
    about: IndexMetadata, records: Sequence[ShardRecord], folder: Path, *, prune: bool = False
) -> IndexMetadata:
    """Return the metadata of an index with the parts of these shards. Their earlier parts no longer count.

    With `prune`, nor do parts of other shards of the same folders.
    """
    parts, labels = list(about.parts), Counter(about.labels)
    current, shards = {record.part for record in records}, {record.shard for record in records}
    folders = {_folder_of(shard) for shard in shards}
    earlier = {record.part: record for record in _all_records(folder)}
    for number, part in enumerate(parts):
        if not len(part) or part.name in current or part.name not in earlier:
            continue
        shard = earlier[part.name].shard
        if shard in shards or (prune and _folder_of(shard) in folders):
            parts[number] = replace(part, dropped=tuple(range(part.rows)))
            labels.subtract(earlier[part.name].labels)
    places = {part.name: number for number, part in enumerate(parts)}
    levels = {name: dict(coarse) for name, coarse in about.levels.items()}
    for record in records:
        for level, coarse in record.levels.items():
            levels.setdefault(level, {}).update(coarse)
        if not record.rows or len(parts[places[record.part]] if record.part in places else ()):
            continue
        if record.part in places:  # an earlier content of the shard came back
            parts[places[record.part]] = record.indexed
        else:
            parts.append(record.indexed)
        labels.update(record.labels)
    return replace(about, parts=tuple(parts), labels=dict(sorted((+labels).items())), levels=levels)


def _all_records(folder: Path) -> Iterator[ShardRecord]:
    for name in sorted(os.listdir(folder)):
        if match := _RECORD.fullmatch(name):
            yield read_record(folder, match[1])


def read_record(folder: Path, key: str) -> ShardRecord:
    """Read the record of a shard. Raises CheckpointError if it is damaged."""
    path = folder / record_name(key)
    try:
        values = parse_json(read_plain(path))
        check_shape(values, _SHAPE)
        if values.pop("own_sha256") != own_sha256(values) or values["key"] != key:
            raise ValueError("its checksum or key does not match")
        if (made_by := values.pop("format")) > FORMAT:
            raise ValueError(f"it has format {made_by}, written by a newer patchloom; this one reads up to {FORMAT}")
        if values["rows"] < 0:
            raise ValueError(f"it has {values['rows']} rows")
        if values["rows"]:
            plain_name(values["part"], path)
        return ShardRecord(**values | {"state": tuple(values["state"])})
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Build the index again.") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Remove it and build the index again.") from error


def _folder_of(shard: str) -> str:
    return shard.replace(os.sep, "/").rpartition("/")[0]


def record_name(key: str) -> str:
    """Return the name of the file that makes the part of a shard count."""
    return f"shard-{key}.json"


def state_of(shard: AnyFile) -> tuple[int, int]:
    """Return the size of a shard and a number that changes with it."""
    return shard.state if isinstance(shard, RemoteFile) else file_state(shard) or (0, 0)


def _address(shard: AnyFile) -> str:
    return shard.url if isinstance(shard, RemoteFile) else os.path.abspath(shard)
