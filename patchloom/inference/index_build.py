"""`index`: embed a collection of images into an index, or add images to one.

A file with the same size and modification time is not embedded again, so an interrupted build continues where it
stopped. New classes need no training.

Several machines can share the work: `part="3/8"` embeds the third of eight shares of the files into a folder of its
own, which depends on nothing but the run and the files, and `join` moves the finished shares into one index. Of shards,
each becomes a part of the index (`shard_parts`), and a share is every eighth of them.
"""

import os
import re
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from torch import Tensor

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.buckets.remote_file import AnyFile
from patchloom.data.datasets import Progress
from patchloom.data.images.image_store import ImageStore, file_state
from patchloom.data.labels.taxonomy import level_named
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.labeled_files import list_labeled, list_objects
from patchloom.data.sources.python_objects import PythonData
from patchloom.data.sources.source import list_shards
from patchloom.data.sources.specs import Data, is_url, split_specs
from patchloom.data.splits import level_of
from patchloom.disk import locked
from patchloom.evaluation.approximate_search import import_faiss
from patchloom.inference.classifier import Classifier, drop_projector, load
from patchloom.inference.embedding import EmbeddedFiles, embed_files, embed_images
from patchloom.inference.index import Index, ListedFile
from patchloom.inference.index_files import (
    FILE,
    IndexMetadata,
    IndexPart,
    StoredVectors,
    read_about,
    write_about,
    write_part,
    write_stored_lists,
)
from patchloom.inference.index_rows import IndexRow
from patchloom.inference.neighbors import check_model, index_preprocessing
from patchloom.inference.ray_engine import embed_on_ray
from patchloom.inference.row_table import PlacedRow, RowTable
from patchloom.inference.shard_parts import PART_FILE, ShardEmbedder, ShardJob, read_record, with_shards
from patchloom.options import part_of
from patchloom.runs.config import is_run
from patchloom.runs.weights import weights_digest
from patchloom_runtime.errors import DataError, UsageError, at_least, with_near_options
from patchloom_runtime.printable import printable

EXACT_UP_TO = 1_000_000  # files; two cores compare a query with that many in less than a second
OUTDATED = 0.1  # share of files that were added or removed since the lists were written, above which they are renewed
SHARE_FOLDER = re.compile(r"[1-9]\d*-of-[1-9]\d*")  # made by `part`, e.g. 3-of-8
# A part is written when it has this many files or is this old, so a killed build loses no more than that.
PART_FILES, PART_SECONDS = 4096, 60.0
Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class BuildSummary:
    """The result of a build."""

    index: Index
    embedded: int
    unchanged: int
    gone: int  # files that were removed from the index because they no longer exist
    unreadable: dict[str, str]  # path → error


@dataclass(frozen=True)
class IndexShare:
    """One of several shares of the files of an index."""

    number: int  # from 1
    count: int

    @property
    def folder(self) -> str:
        """Name of its folder in the index."""
        return f"{self.number}-of-{self.count}"

    def holds(self, path: str) -> bool:
        """Return whether a file is in this share, which depends on its path alone."""
        return zlib.crc32(os.fsencode(path)) % self.count == self.number - 1


@dataclass(frozen=True)
class Collection:
    """Image files with their finest labels, and the levels above these."""

    files: list[ListedFile]
    levels: dict[str, dict[str, str]]  # level → {label: coarse label}
    level: str  # the requested one, or that of the model's classes
    in_memory: dict[str, tuple[ImageStore, int]]  # images that are not files, by name


@with_near_options
def index(
    model: str,
    images: Data,
    *,
    out: str | os.PathLike[str],
    batch: int = 64,
    workers: int = 0,
    device: str = "auto",
    exact: bool = False,
    prune: bool = False,
    trunk: bool = False,
    reading: Reading = AS_IT_IS,
    level: str | None = None,
    part: str | None = None,
    join: bool = False,
    engine: Engine = "local",
    progress: Progress | None = None,
) -> BuildSummary:
    """Embed image files and the images of folders into the index `out`, which may already exist.

    Of tar shards and parquet files, also in a bucket, each becomes a part of its own (`shard_parts`). An image that
    Python code passes is named by a digest of the data and its position, and is embedded again if the data change.
    Beyond a million files, faiss makes the search fast and approximate (`approximate_search`).

    model     Run folder, resmlp_s12:in1k, or hub:user/name.
    images    Image files or folders, labeled as `train` reads them. Also a Dataset, arrays, a table or a list of
              (image, label).
    out       Index folder, or address in a bucket. New images are added if it exists.
    batch     Images per batch.
    workers   Processes that read images.
    device    'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    exact     Compare queries with all files. Default: approximate search beyond a million. No
              approximate search is built.
    prune     Drop files that are gone from these folders. Files of other folders stay: their disk may only be
              unmounted.
    trunk     Use the vectors before the projector of a run that has one.
    reading   How to read the data and its labels (`patchloom.Reading`).
    level     Label level of search results. Default: the run's. Higher levels are stored too.
    part      Embed one of several shares of the files, such as 3/8, for `join`. The files go into the folder 3-of-8 of
              `out`.
    join      Join the shares that were made with `part`. Files that none of them holds are then embedded.
    engine    ray embeds tar shards on a Ray cluster.
    progress  Called with the number of images done and their total; of shards, if the data are shards.
    """
    at_least("batch", batch, 1)
    at_least("workers", workers, 0)
    paths = split_specs(images)
    for path in paths:
        if not isinstance(path, PythonData) and not is_url(path) and not os.path.exists(path):
            raise UsageError(f"{path}: no such file or folder")
    share, shards = _share(part, join=join, prune=prune), shards_of(paths)
    if engine == "ray" and not shards:
        raise UsageError(f"--engine ray embeds tar shards or parquet files, and {paths[0]} is neither; pass --part")
    if shards:
        job = ShardJob(model, os.fspath(out), device, trunk, reading, batch, workers)
        return _index_shards(job, shards, share, level, exact=exact, prune=prune, engine=engine, progress=progress)
    bucket = Mirror(os.fspath(out)) if is_url(out) else None
    folder, classifier = bucket.folder if bucket else Path(out), load(model, device=device)
    collection = collect(paths, classifier, reading=reading, level=level)
    if share is not None:
        folder /= share.folder
        collection = replace(collection, files=[file for file in collection.files if share.holds(file.path)])
        exact = True  # the joined index gets lists, not its shares
    if trunk:
        drop_projector(classifier, model)
    if bucket:
        bucket.pull(lambda name: share is None or name.startswith(f"{share.folder}/"))
    with locked(folder), RowTable() as stored, RowTable() as expected:
        before = _open_or_create(folder, classifier, model, trunk=trunk)
        if join:
            before = _join_shares(folder, before, classifier)
        about = _with_levels(before, collection, level_requested=level is not None)
        if about != before:
            write_about(folder, about)
        build = _Build(folder, about, stored, expected)
        gone = build.drop_gone([os.path.abspath(path) for path in paths if os.path.isdir(path)]) if prune else 0
        missing = build.missing(collection)
        uses_faiss = not exact and len(build.about) + len(missing) > EXACT_UP_TO
        if uses_faiss:
            import_faiss()  # fails now if it is missing, not after hours of work
        unreadable = build.embed(classifier, missing, batch, workers, progress, collection.in_memory)
        about = _with_search(folder, build.about, uses_faiss=uses_faiss, exact=exact)
    if bucket:
        bucket.push(removable=_is_replaced)
    if not len(about):
        first = next(iter(unreadable.values()))
        raise DataError(f"none of {len(collection.files)} images can be read; the first: {first}")
    image_folders = [path for path in paths if not isinstance(path, PythonData)]
    opened, unchanged = Index(folder, about, classifier, image_folders), len(collection.files) - len(missing)
    return BuildSummary(opened, len(missing) - len(unreadable), unchanged, gone, unreadable)


def _index_shards(
    job: ShardJob,
    shards: Sequence[AnyFile],
    share: IndexShare | None,
    level: str | None,
    *,
    exact: bool,
    prune: bool,
    engine: Engine,
    progress: Progress | None,
) -> BuildSummary:
    """Make the missing parts of shards; join all parts unless this is the work of one machine of several."""
    embedder = ShardEmbedder(job)
    if embedder.bucket:
        embedder.bucket.pull(FILE.__eq__)
    if (embedder.folder / FILE).exists():  # fails now if it is of another model
        _open_or_create(embedder.folder, embedder.classifier, job.model, trunk=job.trunk)
    own = shards[share.number - 1 :: share.count] if share else shards
    missing = embedder.missing(own)
    if engine == "ray":
        made = embed_on_ray(job, missing, progress)
    else:
        made = []
        for shard in missing:
            made.append(embedder.embed(shard))
            if progress:
                progress(len(made), len(missing))
    embedded = sum(record.rows for record in made)
    unreadable = {path: error for record in made for path, error in record.unreadable.items()}
    about, gone = _empty(embedder.classifier, job.model, trunk=job.trunk), 0
    if share is None:
        before, about = _join_parts(embedder, shards, level, exact=exact, prune=prune)
        gone = max(0, before + embedded - len(about))
    else:
        about = replace(about, parts=tuple(record.indexed for record in made if record.rows))
    if not len(about) and unreadable:
        raise DataError(f"no image of {len(missing)} shards can be read; the first: {next(iter(unreadable.values()))}")
    unchanged = max(0, len(about) - embedded)
    return BuildSummary(Index(embedder.folder, about, embedder.classifier), embedded, unchanged, gone, unreadable)


def _join_parts(
    embedder: ShardEmbedder, shards: Sequence[AnyFile], level: str | None, *, exact: bool, prune: bool
) -> tuple[int, IndexMetadata]:
    """Write the index of the parts of shards. Returns the number of its images before, and its metadata."""
    folder, classifier, job = embedder.folder, embedder.classifier, embedder.job
    if embedder.bucket:
        embedder.bucket.pull()
    with locked(folder):
        before = _open_or_create(folder, classifier, job.model, trunk=job.trunk)
        records = [read_record(folder, embedder.key_of(shard)) for shard in shards]
        about = with_shards(before, records, folder, prune=prune)
        names = {"": list(about.labels)} | {name: coarse.values() for name, coarse in about.levels.items()}
        chosen = level_named(level, about.levels) if level else about.level or level_of(classifier.labels, names) or ""
        about = replace(about, level=chosen if chosen in about.levels else "")
        if about != before:
            write_about(folder, about)
        about = _with_search(folder, about, uses_faiss=not exact and len(about) > EXACT_UP_TO, exact=exact)
    if embedder.bucket:
        embedder.bucket.push(removable=_is_replaced)
    return len(before), about


def _is_replaced(name: str) -> bool:
    """Return whether a file of an index that is gone was replaced: a joined share, or earlier lists."""
    folder, _, file = name.rpartition("/")
    return bool(SHARE_FOLDER.fullmatch(folder)) or file.startswith("lists-")


def shards_of(paths: Sequence[str]) -> list[AnyFile]:
    """Return the tar shards or parquet files that the data consist of; none if they are image files."""
    listed = [[] if isinstance(path, PythonData) else list_shards(path) for path in paths]
    if any(listed) and not all(listed):
        files = next(path for path, shards in zip(paths, listed, strict=True) if not shards)
        raise UsageError(f"{printable(files)} has no shards, and other data have; build separate indexes")
    return [shard for shards in listed for shard in shards]


def collect(
    paths: Iterable[str], classifier: Classifier, *, reading: Reading = AS_IT_IS, level: str | None = None
) -> Collection:
    """List image files, and those inside folders with the classes that the model's training would read."""
    files: dict[str, str] = {}
    levels: dict[str, dict[str, str]] = {}
    first_level = ""
    in_memory: dict[str, tuple[ImageStore, int]] = {}
    for path in paths:
        if isinstance(path, PythonData):
            listing = list_objects(path, classifier.labels, reading=reading, level=level)
            in_memory |= listing.in_memory
        elif not os.path.isdir(path):
            absolute = os.path.abspath(path)
            files[absolute] = files.get(absolute, "")
            continue
        else:
            inside = classifier.reading_of(path, reading)
            listing = list_labeled(Path(path), classifier.labels, reading=inside, level=level)
        for file, label in listing.files:
            name = file if file in in_memory else os.path.abspath(file)
            files[name] = files.get(name) or label
        for name, coarse_labels in listing.levels.items():
            _add_level(levels.setdefault(name, {}), coarse_labels, name, path)
        first_level = first_level or listing.level
    return Collection([ListedFile(path, label) for path, label in files.items()], levels, first_level, in_memory)


def _add_level(known: dict[str, str], coarse_labels: Mapping[str, str], level: str, path: str) -> None:
    for label, coarse in coarse_labels.items():
        if known.setdefault(label, coarse) != coarse:
            raise DataError(
                f"{printable(path)}: {label!r} is in {coarse!r} at level {level!r}, and in {known[label]!r} in the "
                "folders before it; use one of the two, or build separate indexes"
            )


def _with_levels(about: IndexMetadata, collection: Collection, *, level_requested: bool) -> IndexMetadata:
    """Add the levels of a collection; they replace the coarse labels that the index has for the same labels."""
    levels = {name: dict(coarse_labels) for name, coarse_labels in about.levels.items()}
    for name, coarse_labels in collection.levels.items():
        levels.setdefault(name, {}).update(coarse_labels)
    level = collection.level if level_requested or not about.levels else about.level
    return replace(about, levels=levels, level=level)


def _with_search(folder: Path, about: IndexMetadata, *, uses_faiss: bool, exact: bool) -> IndexMetadata:
    """Write lists if they are needed and missing or outdated, or drop them if the search must be exact."""
    if exact and about.lists is not None:
        about = replace(about, lists=None)
        write_about(folder, about)
    if not uses_faiss:
        return about
    listed = about.parts[: about.lists.parts] if about.lists else ()
    unlisted, removed = len(about) - sum(map(len, listed)), sum(len(part.dropped) for part in listed)
    return write_stored_lists(folder, about) if unlisted + removed > OUTDATED * len(about) else about


def _open_or_create(folder: Path, classifier: Classifier, model: str, *, trunk: bool) -> IndexMetadata:
    """Read the existing index, or create an empty one; raise UsageError for a folder with other files."""
    if (folder / FILE).exists():
        about = read_about(folder)
        if about.trunk != trunk:
            was, now = ("with", "with it too") if about.trunk else ("without", "without it too")
            raise UsageError(f"{folder} was made {was} --trunk; add to it {now}, or build another index")
        check_model(about, classifier, folder, model)
        return about
    entries = [entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")]
    if others := sorted(name for name in entries if not (SHARE_FOLDER.fullmatch(name) or PART_FILE.fullmatch(name))):
        raise UsageError(f"{folder} contains other files ({others[0]}) and no {FILE}. Pass a new folder with --out.")
    about = _empty(classifier, model, trunk=trunk)
    write_about(folder, about)
    return about


def _empty(classifier: Classifier, model: str, *, trunk: bool) -> IndexMetadata:
    """Return the metadata of an index of a model without images."""
    source = os.path.abspath(model) if is_run(model) else model
    dimension = embed_images(classifier, [Image.new("RGB", classifier.preprocessing.image_size[::-1])]).shape[1]
    weights = weights_digest(dict(classifier.model.state_dict()))
    return IndexMetadata(source, weights, index_preprocessing(classifier), dimension, trunk)


def _part_name(number: int) -> str:
    return f"part-{number:05d}"


def _share(part: str | None, *, join: bool, prune: bool) -> IndexShare | None:
    if part is None:
        return None
    share = IndexShare(*part_of(part))
    if join or prune:
        raise UsageError("--part is the work of one machine: pass --join or --prune to a later command without it")
    return share


def _join_shares(folder: Path, about: IndexMetadata, classifier: Classifier) -> IndexMetadata:
    """Move the parts of all shares into the index, and remove the folders of the shares.

    A part that the index already has, because a join was interrupted, is not added twice.
    """
    shares = sorted(path for path in folder.iterdir() if SHARE_FOLDER.fullmatch(path.name))
    parts, known = list(about.parts), {(part.vectors_sha256, part.rows_sha256) for part in about.parts}
    labels = Counter(about.labels)
    levels = {name: dict(coarse_labels) for name, coarse_labels in about.levels.items()}
    for share in shares:
        with locked(share):
            shared = read_about(share)
            check_model(shared, classifier, share, shared.model)
            if shared.trunk != about.trunk:
                raise UsageError(f"{share} and {folder} differ in --trunk; build the share again")
            stored = StoredVectors(share, shared)
            for part in shared.parts:
                if (part.vectors_sha256, part.rows_sha256) in known:
                    continue
                rows = stored.rows_of(part)
                copied = write_part(folder, _part_name(len(parts)), stored.all_rows(part).numpy(), rows)
                parts.append(replace(copied, dropped=part.dropped))
                labels.update(rows[at].label for at in part.valid_rows().tolist() if rows[at].label)
            for name, coarse_labels in shared.levels.items():
                _add_level(levels.setdefault(name, {}), coarse_labels, name, str(share))
            about = replace(about, level=about.level or shared.level)
    about = replace(about, parts=tuple(parts), labels=dict(sorted(labels.items())), levels=levels)
    write_about(folder, about)
    for share in shares:
        shutil.rmtree(share)
    return about


class _Build:
    """A build in progress. Leaving its context writes what was embedded, even if the build is interrupted."""

    def __init__(self, folder: Path, about: IndexMetadata, stored: RowTable, expected: RowTable) -> None:
        self.about, self._folder = about, folder
        self._stored = stored  # the rows of the index that are not dropped
        self._expected = expected  # those that the missing files will have; they have no place yet
        vectors = StoredVectors(folder, about)
        for number, part in enumerate(about.parts):
            rows = vectors.rows_of(part)
            stored.add(PlacedRow(rows[at], number, at) for at in part.valid_rows().tolist())
        self._labels = Counter(about.labels)
        self._waiting: list[tuple[IndexRow, Tensor]] = []
        self._last_write = time.monotonic()

    def missing(self, collection: Collection) -> list[str]:
        """Return the files that are new or changed; a file with a new label only keeps its vector."""
        missing, vectors = [], StoredVectors(self._folder, self.about)
        for path, label in collection.files:
            before = self._stored.get(path)
            # Taken before the file is read: a file that changes meanwhile is embedded again by the next build.
            state = (0, 0) if path in collection.in_memory else file_state(path)  # a name in memory has a digest
            now = IndexRow(path, label or (before.row.label if before else ""), *(state or (0, 0)))
            if before is None or state != before.row[2:]:
                missing.append(path)
                self._expected.add([PlacedRow(now, 0, 0)])
            elif now != before.row:
                self._waiting.append((now, vectors.row(self.about.parts[before.part], before.at)))
                self._write_if_due()
        return missing

    def drop_gone(self, folders: Sequence[str]) -> int:
        """Drop the rows of files in these folders that no longer exist, and return their number."""
        inside = tuple(os.path.join(folder, "") for folder in folders)
        in_folders = (placed for placed in self._stored if placed.row.path.startswith(inside))
        gone = [placed for placed in in_folders if file_state(placed.row.path) is None]
        if gone:
            self._stored.remove(placed.row.path for placed in gone)
            parts = self._remove_rows(list(self.about.parts), sorted(gone, key=lambda placed: placed[1:]))
            self._replace_about(parts)
        return len(gone)

    def embed(
        self,
        classifier: Classifier,
        paths: Sequence[str],
        batch: int,
        workers: int,
        progress: Progress | None,
        in_memory: Mapping[str, tuple[ImageStore, int]],
    ) -> dict[str, str]:
        """Embed the files and write them in parts; return the unreadable ones with their errors."""
        unreadable: dict[str, str] = {}
        done = 0
        with self:
            for files in embed_files(classifier, paths, batch=batch, workers=workers, in_memory=in_memory):
                self._add(files)
                unreadable |= files.unreadable
                done += len(files.paths) + len(files.unreadable)
                if progress:
                    progress(done, len(paths))
        return unreadable

    def _add(self, files: EmbeddedFiles) -> None:
        for path, vector in zip(files.paths, files.vectors, strict=True):
            expected = self._expected.get(path)
            assert expected is not None  # all paths are those of `missing`
            self._waiting.append((expected.row, vector))
        self._write_if_due()

    def __enter__(self) -> "_Build":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def _write_if_due(self) -> None:
        if len(self._waiting) >= PART_FILES or time.monotonic() - self._last_write > PART_SECONDS:
            self._write()

    def _write(self) -> None:
        # Emptied first: if the build is interrupted in here, the part is lost rather than written twice.
        waiting, self._waiting, self._last_write = self._waiting, [], time.monotonic()
        if not waiting:
            return
        rows, number = [row for row, _ in waiting], len(self.about.parts)
        vectors = torch.stack([vector for _, vector in waiting]).numpy()
        parts = [*self.about.parts, write_part(self._folder, _part_name(number), vectors, rows)]
        parts = self._remove_rows(parts, [before for row in rows if (before := self._stored.get(row.path))])
        self._labels.update(row.label for row in rows if row.label)
        self._stored.add(PlacedRow(row, number, at) for at, row in enumerate(rows))
        self._replace_about(parts)

    def _remove_rows(self, parts: list[IndexPart], rows: Sequence[PlacedRow]) -> list[IndexPart]:
        """Return the parts with these rows dropped, and subtract the rows from the label counts."""
        dropped: dict[int, list[int]] = {}
        for row, number, at in rows:
            dropped.setdefault(number, []).append(at)
            self._labels.subtract([row.label] if row.label else [])
        for number, places in dropped.items():
            parts[number] = replace(parts[number], dropped=(*parts[number].dropped, *places))
        return parts

    def _replace_about(self, parts: Sequence[IndexPart]) -> None:
        labels = dict(sorted((+self._labels).items()))
        self.about = replace(self.about, parts=tuple(parts), labels=labels)
        write_about(self._folder, self.about)
