"""Pictures found by pictures: a collection embedded once by a trained model, kept in a folder, searched ever after.

A collection grows by the same call with more images; new classes need no training. Nothing that is unchanged, by size
and time, is embedded again, so a build that was stopped goes on where it was. What lies on disk is in `index_files`,
which of the vectors are nearest in `evaluation.exact_search`.
"""

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.datasets import ImageSet, Progress, file_state
from patchloom.data.labels.taxonomy import level_named
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.labeled_files import list_labeled
from patchloom.disk import locked
from patchloom.evaluation.exact_search import import_faiss
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.file_embeddings import EmbeddedFiles, embed_files, embed_images
from patchloom.inference.index_files import (
    FILE,
    IndexMetadata,
    IndexPart,
    IndexRow,
    StoredVectors,
    read_about,
    write_about,
    write_lists,
    write_part,
)
from patchloom.inference.neighbors import IndexNeighbors, check_model, neighbors_of_view
from patchloom.inference.search import SearchResult, SearchSettings
from patchloom.report.notebook import first_names, piece
from patchloom.runs.config import is_run
from patchloom.runs.locate import is_here, is_on_hub
from patchloom.runs.weights import weights_digest
from patchloom_runtime.errors import DataError, UsageError, at_least, with_near_options
from patchloom_runtime.images.inputs import ImageLike, ImagesLike, is_single_image, items_of
from patchloom_runtime.printable import printable

EXACT_UP_TO = 1_000_000  # files; two cores compare a query with as many in less than a second
# A part is written when it has this many files, or is this old: a killed build loses no more.
PART_FILES, PART_SECONDS = 4096, 60.0


Paths: TypeAlias = Sequence[str | os.PathLike[str]]


class ListedFile(NamedTuple):
    """An image file of a collection."""

    path: str  # absolute
    label: str  # its class folder; '' for none


@dataclass(frozen=True)
class BuildSummary:
    """How a build went."""

    index: "Index"
    embedded: int
    unchanged: int
    gone: int  # dropped, since they are no longer there
    unreadable: dict[str, str]  # path → what is wrong


class Index:
    """An index that is open: its files, and the model that embeds what is searched for."""

    def __init__(self, folder: Path, about: IndexMetadata, classifier: Classifier, images: Paths = ()) -> None:
        self.folder, self.about, self.classifier = folder, about, classifier
        self.images = tuple(os.path.realpath(path) for path in images)  # folders that hits may be shown from
        self._vectors = StoredVectors(folder, about)

    def __len__(self) -> int:
        return len(self.about)

    def __repr__(self) -> str:
        return f"Index({printable(str(self.folder))}: {', '.join(f'{value} {name}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        model = [("made by", printable(Path(self.about.model).name)), ("search", self._how())]
        labels = f"labels: {first_names(list(self.labels))}" if self.about.labels else ""
        return piece(printable(self.folder.name), facts=[*self._facts(), *model], notes=[labels] if labels else [])

    def _facts(self) -> list[tuple[str, str]]:
        labels = [("labels", f"{len(self.labels):,}")] if self.about.labels else []
        return [("files", f"{len(self):,}"), *labels, ("numbers each", f"{self.about.dimension:,}")]

    def _how(self) -> str:
        return "exact" if self.about.exact else "by faiss, approximate"

    @property
    def labels(self) -> dict[str, int]:
        """How many files of each label, at the index's own level."""
        return self.about.labels_at(self.about.level)

    @overload
    def search(
        self,
        pictures: Image.Image | bytes,
        *,
        top: int = 10,
        skip_self: bool = False,
        exact: bool = False,
        level: str | None = None,
        condition: str | None = None,
        neighbours: int | None = None,
    ) -> SearchResult: ...

    @overload
    def search(
        self,
        pictures: str | os.PathLike[str] | IO[bytes] | np.ndarray | Tensor,
        *,
        top: int = 10,
        skip_self: bool = False,
        exact: bool = False,
        level: str | None = None,
        condition: str | None = None,
        neighbours: int | None = None,
    ) -> Any: ...

    @overload
    def search(
        self,
        pictures: ImageSet | Iterable[ImageLike],
        *,
        top: int = 10,
        skip_self: bool = False,
        exact: bool = False,
        level: str | None = None,
        condition: str | None = None,
        neighbours: int | None = None,
    ) -> list[SearchResult]: ...

    @with_near_options
    def search(
        self,
        pictures: ImagesLike,
        *,
        top: int = 10,
        skip_self: bool = False,
        exact: bool = False,
        level: str | None = None,
        condition: str | None = None,
        neighbours: int | None = None,
    ) -> SearchResult | list[SearchResult]:
        """The `top` nearest files, nearest first, of equals the older one: for one picture, or a list for many.

        Pictures are what `Classifier.predict` takes. A query that is in the index finds itself, marked, or not with
        `skip_self`. A file that cannot be read is an answer with `error`. `exact` compares with all where faiss would
        search. `level` is that of the labels shown, where not the index's own.

        `condition` names a level: the files of the class there that the `neighbours` nearest (20) vote for come first
        (thesis, equation 2.5); 'family=felid' says the class instead.
        """
        at_least("top", top, 1)
        if not len(self):
            raise DataError(
                f"{self.folder} holds no files yet. Add some: patchloom index RUN IMAGES --out {self.folder}"
            )
        if neighbours is not None and condition is None:
            raise UsageError(
                "neighbours vote for the class a search is conditioned on; give condition, or leave it out"
            )
        asked = SearchSettings(self._vectors, top, skip_self, exact, self._level(level), images=self.images)
        if condition is not None:
            at, _, given = condition.partition("=")
            asked = replace(asked, voters=IndexNeighbors(self._vectors, at, neighbours), given=given)
        one, found = is_single_image(pictures), []
        for are_files, some in groupby(items_of(pictures), lambda given: isinstance(given, str | os.PathLike)):
            found += (self._of_files if are_files else self._of_pictures)(list(some), asked)
        return found[0] if one else found

    def _level(self, level: str | None) -> str:
        return self.about.level if level is None else level_named(level, self.about.levels)

    def _of_files(self, paths: Sequence[Any], asked: SearchSettings) -> list[SearchResult]:
        labels = tuple(self.about.labels_at(asked.level)) or self.classifier.labels
        files = _labeled_like(map(os.fspath, paths), labels, self.classifier)
        embedded = list(embed_files(self.classifier, [file.path for file in files]))
        readable = [path for some in embedded for path in some.paths]
        vectors = [some.vectors for some in embedded if some.paths]
        found = asked.find(torch.cat(vectors), readable) if vectors else []
        answers = {one.query: one for one in found}
        for some in embedded:
            answers |= {path: SearchResult(path, [], error=fault) for path, fault in some.unreadable.items()}
        return [replace(answers[file.path], label=self._label(file, answers[file.path], asked.level)) for file in files]

    def _label(self, file: ListedFile, found: SearchResult, level: str) -> str:
        """Of the file itself in the index, else its class folder, else its folder's name where that is a label."""
        own = next((hit.label for hit in found.hits if hit.itself), "") or file.label
        folder = os.path.basename(os.path.dirname(file.path))
        name = os.fsencode(folder).decode("utf-8", "backslashreplace")  # as class folders are named
        named = self.about.at(name, level) if name in self.about.labels else name
        return own or (named if named in self.about.labels_at(level) else "")

    def _of_pictures(self, pictures: Sequence[Any], asked: SearchSettings) -> list[SearchResult]:
        vectors = embed_images(self.classifier, pictures)
        return asked.find(vectors, [""] * len(vectors))


@with_near_options
def open_index(
    folder: str | os.PathLike[str], *, model: str | None = None, device: str = "auto", images: Paths = ()
) -> Index:
    """The index in `folder`; `model` says where its run lies now, if it was moved.

    Hits are shown as pictures only if their files are in the folders `images`: an index from somebody else can name any
    file of this machine.
    """
    if isinstance(images, str | os.PathLike):
        raise UsageError(f"images is {os.fspath(images)!r}, expected a list of folders")
    for path in images:
        if not os.path.exists(path):
            raise UsageError(f"{os.fspath(path)}, which --images names, does not exist; give the folder of the images")
    about = read_about(Path(folder))
    source = model or about.model
    if model is None and is_on_hub(source):
        raise UsageError(
            f"{folder} was made by {source}, a repository of the Hugging Face hub, which is asked only where you say "
            f"so: --model {source}"
        )
    if model is None and not is_here(source):
        raise UsageError(f"{folder} was made by {source}, which is no longer there. Say where it is: --model RUN")
    classifier = load(source, device=device, trunk=about.trunk)
    check_model(about, classifier, Path(folder), source)
    return Index(Path(folder), about, classifier, images)


@with_near_options
def index(
    model: str,
    images: Paths,
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
    progress: Progress | None = None,
) -> BuildSummary:
    """Embed image files, and those of folders, into the index `out`, which may be there already.

    Files in folders get the labels that training would read, as `reading` says, with the levels above them; they are
    shown at `level`, or at the level the model was trained at. Beyond a million files faiss makes the search quick and
    no longer exact; `exact` refuses that. `prune` drops files of the folders given here that are no longer there;
    others stay, since a disk that is not mounted is not one that was emptied. `trunk` leaves the model's projector out
    and compares by what it was given.
    """
    folder = Path(out)
    for name, value, least in (("batch", batch, 1), ("workers", workers, 0)):
        at_least(name, value, least)
    for path in images:
        if not os.path.exists(path):
            raise UsageError(f"{os.fspath(path)}: no such file or folder")
    classifier = load(model, device=device)
    collected = collect([os.fspath(path) for path in images], classifier, reading=reading, level=level)
    files = collected.files
    if trunk:
        if classifier.model.config.projector == "none":
            raise UsageError(f"{model} has no projector: its vectors are the trunk's already; leave --trunk out")
        classifier.model.drop_projector()
    with locked(folder):
        begun = _begin(folder, classifier, model, trunk=trunk)
        about = _leveled(begun, collected, asked=level is not None)
        if about != begun:
            write_about(folder, about)
        build = _Build(folder, about)
        gone = build.drop_gone([os.path.abspath(path) for path in images if os.path.isdir(path)]) if prune else 0
        missing = build.missing(files)
        by_faiss = not exact and len(build.about) + len(missing) > EXACT_UP_TO
        if by_faiss:
            import_faiss()  # before hours of work
        unreadable: dict[str, str] = {}
        done = 0
        with build:
            for some in embed_files(classifier, missing, batch=batch, workers=workers):
                build.add(some)
                unreadable |= some.unreadable
                done += len(some.paths) + len(some.unreadable)
                if progress:
                    progress(done, len(missing))
        about = build.about
        if by_faiss and about.exact:
            about = write_lists(folder, about)
        elif exact and not about.exact:
            about = replace(about, faiss_sha256="")
            write_about(folder, about)
    if not len(about):
        first = next(iter(unreadable.values()))
        raise DataError(f"none of {len(files)} pictures can be read; the first: {first}")
    built = Index(folder, about, classifier, images)
    return BuildSummary(built, len(missing) - len(unreadable), len(files) - len(missing), gone, unreadable)


@dataclass(frozen=True)
class Collection:
    """Image files with the finest labels there are, and the levels above these."""

    files: list[ListedFile]
    levels: dict[str, dict[str, str]]
    level: str  # asked for, or that of the model's classes


def collect(
    paths: Iterable[str], classifier: Classifier, *, reading: Reading = AS_IT_IS, level: str | None = None
) -> Collection:
    """Image files, and those inside folders with their classes as the model's training would read them, each once."""
    found: dict[str, str] = {}
    levels: dict[str, dict[str, str]] = {}
    chosen = ""
    for path in paths:
        if not os.path.isdir(path):
            own = os.path.abspath(path)
            found[own] = found.get(own, "")
            continue
        as_trained = classifier.reading_of(path, reading)
        inside = list_labeled(Path(path), classifier.labels, reading=as_trained, level=level)
        for file, label in inside.files:
            own = os.path.abspath(file)
            found[own] = found.get(own) or label
        for name, of in inside.levels.items():
            _add_level(levels.setdefault(name, {}), of, name, path)
        chosen = chosen or inside.level
    return Collection([ListedFile(path, label) for path, label in found.items()], levels, chosen)


def _add_level(known: dict[str, str], of: Mapping[str, str], level: str, path: str) -> None:
    for label, coarse in of.items():
        if known.setdefault(label, coarse) != coarse:
            raise DataError(
                f"{printable(path)}: {label!r} is in {coarse!r} at level {level!r}, and in {known[label]!r} in the "
                "folders before it; expected one, or an index for each"
            )


def _labeled_like(paths: Iterable[str], labels: Sequence[str], classifier: Classifier) -> list[ListedFile]:
    """Image files, and those inside folders with their classes at the level that has most of `labels`, each once."""
    found: dict[str, str] = {}
    for path in paths:
        inside = [(path, "")]
        if os.path.isdir(path):
            listed = list_labeled(Path(path), labels, reading=classifier.reading_of(path))
            inside = listed.at(listed.level)
        for file, label in inside:
            own = os.path.abspath(file)
            found[own] = found.get(own) or label
    return [ListedFile(path, label) for path, label in found.items()]


def _leveled(about: IndexMetadata, found: Collection, *, asked: bool) -> IndexMetadata:
    """With the levels of what is added, which replace what was said of the same labels before."""
    levels = {name: dict(of) for name, of in about.levels.items()}
    for name, of in found.levels.items():
        levels.setdefault(name, {}).update(of)
    return replace(about, levels=levels, level=found.level if asked or not about.levels else about.level)


def _begin(folder: Path, classifier: Classifier, model: str, *, trunk: bool) -> IndexMetadata:
    """What is there already; a folder of other things is refused."""
    if (folder / FILE).exists():
        about = read_about(folder)
        if about.trunk != trunk:
            was, now = ("with", "with it too") if about.trunk else ("without", "without it too")
            raise UsageError(f"{folder} was made {was} --trunk; add to it {now}, or build another index")
        check_model(about, classifier, folder, model)
        return about
    if others := sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith(".")):
        raise UsageError(f"{folder} holds other things ({others[0]}) and no {FILE}. Give a new folder with --out.")
    source = os.path.abspath(model) if is_run(model) else model
    dimension = embed_images(classifier, [Image.new("RGB", classifier.preprocessing.image_size[::-1])]).shape[1]
    about = IndexMetadata(
        source, weights_digest(dict(classifier.model.state_dict())), neighbors_of_view(classifier), dimension, trunk
    )
    write_about(folder, about)
    return about


class _Build:
    """Parts in the making. Leaving it writes what was embedded, also when the build is told to stop."""

    def __init__(self, folder: Path, about: IndexMetadata) -> None:
        self.about, self._folder = about, folder
        self._stored: dict[str, tuple[int, int, IndexRow]] = {}  # path → part, row in it, what is known of the file
        stored = StoredVectors(folder, about)
        for number, part in enumerate(about.parts):
            rows = stored.rows_of(part)
            self._stored |= {rows[at].path: (number, at, rows[at]) for at in part.kept().tolist()}
        self._labels = Counter(about.labels)
        self._expected: dict[str, IndexRow] = {}
        self._waiting: list[tuple[IndexRow, Tensor]] = []
        self._since = time.monotonic()

    def missing(self, files: Sequence[ListedFile]) -> list[str]:
        """Files that are not in the index as they are now; one that only got another label keeps its vector."""
        found, vectors = [], StoredVectors(self._folder, self.about)
        for path, label in files:
            part, at, before = self._stored.get(path, (0, 0, None))
            state = file_state(path)
            # Of the time before it is read: a file that changes meanwhile is embedded again the next time.
            now = IndexRow(path, label or (before.label if before else ""), *(state or (0, 0)))
            if before is None or state != (before.size, before.changed_ns):
                found.append(path)
                self._expected[path] = now
            elif now != before:
                self._waiting.append((now, vectors.row(self.about.parts[part], at)))
        return found

    def drop_gone(self, folders: Sequence[str]) -> int:
        """Drop the rows of files that were in these folders, all at once; how many there were."""
        inside = tuple(os.path.join(folder, "") for folder in folders)
        gone = [path for path in self._stored if path.startswith(inside) and file_state(path) is None]
        if gone:
            parts = self._without(list(self.about.parts), [self._stored.pop(path) for path in gone])
            self._replace_about(parts)
        return len(gone)

    def add(self, some: EmbeddedFiles) -> None:
        """Keep the vectors, and write a part when it is time."""
        self._waiting += [(self._expected[path], vector) for path, vector in zip(some.paths, some.vectors, strict=True)]
        if len(self._waiting) >= PART_FILES or time.monotonic() - self._since > PART_SECONDS:
            self._write()

    def __enter__(self) -> "_Build":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def _write(self) -> None:
        # Taken out first: told to stop in here, the part is lost rather than written twice.
        waiting, self._waiting, self._since = self._waiting, [], time.monotonic()
        if not waiting:
            return
        rows, number = [row for row, _ in waiting], len(self.about.parts)
        vectors = torch.stack([vector for _, vector in waiting]).numpy()
        parts = [*self.about.parts, write_part(self._folder, number, vectors, rows)]
        parts = self._without(parts, [self._stored[row.path] for row in rows if row.path in self._stored])
        self._labels.update(row.label for row in rows if row.label)
        self._stored |= {row.path: (number, at, row) for at, row in enumerate(rows)}
        self._replace_about(parts)

    def _without(self, parts: list[IndexPart], rows: Sequence[tuple[int, int, IndexRow]]) -> list[IndexPart]:
        """The parts with these rows dropped, and no longer counted among the labels."""
        dropped: dict[int, list[int]] = {}
        for number, at, row in rows:
            dropped.setdefault(number, []).append(at)
            self._labels.subtract([row.label] if row.label else [])
        for number, places in dropped.items():
            parts[number] = replace(parts[number], dropped=(*parts[number].dropped, *places))
        return parts

    def _replace_about(self, parts: Sequence[IndexPart]) -> None:
        labels = dict(sorted((+self._labels).items()))
        self.about = replace(self.about, parts=tuple(parts), labels=labels, faiss_sha256="")
        write_about(self._folder, self.about)
