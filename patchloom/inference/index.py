"""`Index`: search a collection of images for those similar to a query image.

A collection is embedded once by a trained model and stored in a folder (`index_build`). `index_files` reads and writes
that folder, and `evaluation.exact_search` finds the nearest vectors.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchloom.data.buckets.mirror import Mirror
from patchloom.data.datasets import ImageSet
from patchloom.data.labels.taxonomy import FINEST, level_named
from patchloom.data.sources.labeled_files import list_labeled
from patchloom.data.sources.specs import is_url
from patchloom.inference.classifier import Classifier, load
from patchloom.inference.embedding import embed_files, embed_images
from patchloom.inference.index_files import FILE, IndexMetadata, StoredVectors, read_about
from patchloom.inference.neighbors import IndexNeighbors, check_model
from patchloom.inference.search import SearchResult, SearchSettings
from patchloom.options import renamed
from patchloom.report.notebook import first_names, html_card
from patchloom.runs.locate import holds, is_downloaded, is_on_hub
from patchloom_runtime.errors import DataError, UsageError, at_least, nearest, with_near_options
from patchloom_runtime.images.inputs import ImageLike, ImagesLike, is_single_image, items_of
from patchloom_runtime.printable import printable

Paths: TypeAlias = Sequence[str | os.PathLike[str]]
Names: TypeAlias = str | os.PathLike[str] | Paths | None


class SearchKeywords(TypedDict, total=False):
    """Options of `Index.search`, for its overloads."""

    top: int
    skip_self: bool
    exact: bool
    recall: int
    level: str | None
    label: Names
    folder: Names
    condition: str | None
    neighbors: int | None


class ListedFile(NamedTuple):
    """An image file and its label."""

    path: str  # absolute
    label: str  # '' for none


def is_index(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds an index."""
    return os.path.isfile(os.path.join(folder, FILE))


class Index:
    """An open index: its files, and the model that embeds queries."""

    def __init__(self, folder: Path, about: IndexMetadata, classifier: Classifier, images: Paths = ()) -> None:
        self.folder, self.about, self.classifier = folder, about, classifier
        self.images = tuple(os.path.realpath(path) for path in images)  # folders that hits may be shown from
        self._vectors = StoredVectors(folder, about)
        self._matching: tuple[tuple[object, ...], Tensor] | None = None  # the last filter and the files it leaves

    def __len__(self) -> int:
        return len(self.about)

    def __repr__(self) -> str:
        return f"Index({printable(str(self.folder))}: {', '.join(f'{value} {name}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        lists = self.about.lists
        search = "exact" if lists is None else f"approximate, recall {lists.settings.recall:.3f}"
        facts = [*self._facts(), ("model", printable(Path(self.about.model).name)), ("search", search)]
        notes = [f"labels: {first_names(list(self.labels))}"] if self.about.labels else []
        return html_card(printable(self.folder.name), facts=facts, notes=notes)

    def _facts(self) -> list[tuple[str, str]]:
        labels = [("labels", f"{len(self.labels):,}")] if self.about.labels else []
        return [("files", f"{len(self):,}"), *labels, ("dimensions", f"{self.about.dimension:,}")]

    @property
    def searched(self) -> int:
        """Number of files that the filters of the last search left."""
        return len(self) if self._matching is None else len(self._matching[1])

    @property
    def labels(self) -> dict[str, int]:
        """Number of files per label, at the level of the index."""
        return self.about.labels_at(self.about.level)

    @overload
    def search(self, images: Image.Image | bytes, **options: Unpack[SearchKeywords]) -> SearchResult: ...

    @overload
    def search(
        self, images: str | os.PathLike[str] | IO[bytes] | np.ndarray | Tensor, **options: Unpack[SearchKeywords]
    ) -> Any: ...

    @overload
    def search(
        self, images: ImageSet | Iterable[ImageLike], **options: Unpack[SearchKeywords]
    ) -> list[SearchResult]: ...

    @renamed(neighbours="neighbors")
    @with_near_options
    def search(
        self,
        images: ImagesLike,
        *,
        top: int = 10,
        skip_self: bool = False,
        exact: bool = False,
        recall: int = 0,
        level: str | None = None,
        label: Names = None,
        folder: Names = None,
        condition: str | None = None,
        neighbors: int | None = None,
    ) -> SearchResult | list[SearchResult]:
        """Return the `top` nearest files, nearest first: one result for one image, else a list.

        `images` are those of `Classifier.predict`. A query that is in the index finds itself, marked as such, unless
        `skip_self`. An unreadable file has a result with an `error`. `level` is the level of the labels (default: the
        index's). Files with equal scores are in the order of the index.

        `exact` compares with all files even if the index has lists for an approximate search. Approximate results state
        their `recall`, measured with files of the index when it was built, or with the first `recall` queries.

        `label` and `folder` search only the files of these classes (at `level`) in these folders, and compare with all
        of them.

        `condition` names a level: files of the class that the `neighbors` (20) nearest files vote for at that level
        come first (thesis, equation 2.5); 'family=felid' names the class instead.
        """
        at_least("top", top, 1)
        if not len(self):
            raise DataError(
                f"{self.folder} holds no files yet. Add some: patchloom index RUN IMAGES --out {self.folder}"
            )
        if neighbors is not None and condition is None:
            raise UsageError("neighbors is an option of a conditioned search; pass condition too, or drop it")
        labels_at = self.about.level if level is None else level_named(level, self.about.levels)
        among = self.matching(label, folder, labels_at)
        settings = SearchSettings(
            self._vectors, top, skip_self, exact, labels_at, images=self.images, recall=recall, among=among
        )
        if condition is not None:
            at, _, class_name = condition.partition("=")
            voters = IndexNeighbors(self._vectors, at, neighbors)
            settings = replace(settings, voters=voters, class_name=class_name)
        results: list[SearchResult] = []
        for are_files, items in groupby(items_of(images), lambda item: isinstance(item, str | os.PathLike)):
            results += (self._search_files if are_files else self._search_images)(list(items), settings)
        return results[0] if is_single_image(images) else results

    def matching(self, label: Names, folder: Names, level: str) -> Tensor | None:
        """Return the positions of the files with one of these labels at a level, in one of these folders; None for all.

        Raises UsageError for a label that no file has and folders without files.
        """
        labels, folders = _several(label), _several(folder)
        if not labels and not folders:
            self._matching = None
            return None
        known = self.about.labels_at(level)
        if unknown := [name for name in labels if name not in known]:
            raise UsageError(
                f"no file of {self.folder} has the label {unknown[0]!r} at level {level or FINEST}"
                f"{nearest(unknown[0], list(known))}"
            )
        places = [name.rstrip("/") if is_url(name) else os.path.abspath(name) for name in folders]
        inside = tuple(
            f"{place}{end}" for place in places for end in (os.sep, ", ")
        )  # an image in a shard: a.tar, 1.jpg
        key = (labels, inside, level)
        if self._matching is None or self._matching[0] != key:
            wanted = set(labels)
            positions = self._vectors.positions_of(
                lambda row: (
                    (not wanted or (row.label != "" and self.about.at(row.label, level) in wanted))
                    and (not inside or row.path.startswith(inside))
                )
            )
            self._matching = key, positions
        if not len(self._matching[1]):
            where = f" in {', '.join(folders)}" if folders else ""
            raise UsageError(f"{self.folder} has no file{where}{' with this label' * bool(labels)}; nothing to search")
        return self._matching[1]

    def _search_images(self, images: Sequence[Any], settings: SearchSettings) -> list[SearchResult]:
        vectors = embed_images(self.classifier, images)
        return settings.search(vectors, [""] * len(vectors))

    def _search_files(self, paths: Sequence[Any], settings: SearchSettings) -> list[SearchResult]:
        labels = tuple(self.about.labels_at(settings.level)) or self.classifier.labels
        files = _list_queries(map(os.fspath, paths), labels, self.classifier)
        batches = list(embed_files(self.classifier, [file.path for file in files]))
        readable = [path for batch in batches for path in batch.paths]
        vectors = [batch.vectors for batch in batches if batch.paths]
        results = {result.query: result for result in settings.search(torch.cat(vectors), readable)} if vectors else {}
        for batch in batches:
            results |= {path: SearchResult(path, [], error=error) for path, error in batch.unreadable.items()}
        return [
            replace(results[file.path], label=self._query_label(file, results[file.path], settings.level))
            for file in files
        ]

    def _query_label(self, file: ListedFile, result: SearchResult, level: str) -> str:
        """Return the label of the file in the index, else its class folder, else its folder's name if it is a label."""
        label = next((hit.label for hit in result.hits if hit.itself), "") or file.label
        folder = os.path.basename(os.path.dirname(file.path))
        name = os.fsencode(folder).decode("utf-8", "backslashreplace")  # as class folders are named
        at_level = self.about.at(name, level) if name in self.about.labels else name
        return label or (at_level if at_level in self.about.labels_at(level) else "")


@with_near_options
def open_index(
    folder: str | os.PathLike[str], *, model: str | None = None, device: str = "auto", images: Paths = ()
) -> Index:
    """Open the index in `folder`, which may be in a bucket; `model` is the path of its run, if that has moved.

    Images of hits are shown only if their files are in the folders `images`, because an index from somebody else can
    name any file of this machine.
    """
    if isinstance(images, str | os.PathLike):
        raise UsageError(f"images is {os.fspath(images)!r}, expected a list of folders")
    for path in images:
        if not os.path.exists(path):
            raise UsageError(f"{os.fspath(path)} (--images) does not exist; pass the folder of the images")
    name = os.fspath(folder)
    if is_url(name) and not holds(name, [FILE]):
        raise UsageError(f"{name} is not an index: it has no {FILE}")
    folder = Mirror(name).pull() if is_url(name) else Path(name)
    about = read_about(folder)
    source = model or about.model
    if model is None and (is_on_hub(source) or is_url(source)):
        where = "in a bucket" if is_url(source) else "a repository of the Hugging Face hub"
        raise UsageError(f"{name} was made by {source}, {where}. To download it, pass --model {source}")
    if model is None and not is_downloaded(source):
        raise UsageError(f"{folder} was made by {source}, which no longer exists. Pass its new path: --model RUN")
    classifier = load(source, device=device, trunk=about.trunk)
    check_model(about, classifier, folder, source)
    return Index(folder, about, classifier, images)


@with_near_options
def search(
    index: str | os.PathLike[str],
    queries: ImagesLike,
    *,
    top: int = 10,
    skip_self: bool = False,
    level: str | None = None,
    label: Names = None,
    folder: Names = None,
    condition: str | None = None,
    neighbors: int | None = None,
    images: Paths | None = None,
    model: str | None = None,
    device: str = "auto",
    exact: bool = False,
    recall: int = 0,
) -> SearchResult | list[SearchResult]:
    """Open an index and return the files most similar to each image: one result for one image, else a list.

    `Index.search` is quicker for several calls.

    index      Index folder made by `patchloom index`.
    queries    Image files or folders. Also images in memory.
    top        Files per query.
    skip_self  Leave out the query's own file.
    level      Level of the labels, fine for the finest. Default: the index's.
    label      Search only files with this label, at `level`. Several: any of them.
    folder     Search only files in this folder. Several: in any of them.
    condition  Rank files of the query's class at this level first: the predicted class, or LEVEL=CLASS.
    neighbors  Files that vote on the class of `condition`. Default: 20.
    images     Folders whose images the results may show.
    model      Run of the index, if it was moved.
    device     'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    exact      Compare with all files, also in an index for approximate search.
    recall     Measure the recall of an approximate search with this number of the queries.
    """
    opened: Any = open_index(index, model=model, device=device, images=images or ())  # one overload per kind of images
    return opened.search(
        queries,
        top=top,
        skip_self=skip_self,
        exact=exact,
        recall=recall,
        level=level,
        label=label,
        folder=folder,
        condition=condition,
        neighbors=neighbors,
    )


def _several(names: Names) -> tuple[str, ...]:
    if names is None:
        return ()
    return tuple(os.fspath(name) for name in ([names] if isinstance(names, str | os.PathLike) else names))


def _list_queries(paths: Iterable[str], labels: Sequence[str], classifier: Classifier) -> list[ListedFile]:
    """List image files, and those inside folders with their classes at the level that has most of `labels`."""
    files: dict[str, str] = {}
    for path in paths:
        labeled = [(path, "")]
        if os.path.isdir(path):
            listing = list_labeled(Path(path), labels, reading=classifier.reading_of(path))
            labeled = listing.at(listing.level)
        for file, label in labeled:
            absolute = os.path.abspath(file)
            files[absolute] = files.get(absolute) or label
    return [ListedFile(path, label) for path, label in files.items()]
