"""Search in an index: settings, results, and the page that shows each query with its nearest files."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image
from torch import Tensor

from patchloom.data.labels.taxonomy import FINEST
from patchloom.evaluation.approximate_search import Nearest, measure_recall
from patchloom.evaluation.exact_search import Subset, exact_nearest
from patchloom.inference.index_files import StoredVectors
from patchloom.inference.neighbors import IndexNeighbors, SearchCondition
from patchloom.report.notebook import html_card
from patchloom.report.page import data_uri, write_page
from patchloom_runtime.errors import DataError
from patchloom_runtime.images.inputs import thumbnail_of
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import path_within

if TYPE_CHECKING:
    from patchloom.inference.index import Index

MAX_QUERIES = 200  # on the page
THUMBNAIL = 150  # pixels on the page; images have twice as many, for high-resolution screens


class SearchHit(NamedTuple):
    """A file of the index that is similar to a query."""

    path: str
    score: float  # cosine similarity, −1…1
    label: str  # '' for none
    itself: bool = False  # whether it is the query's own file
    conditioned: float | None = None  # the score it was ranked by, if the search was conditioned on a coarse class


@dataclass(frozen=True)
class SearchResult:
    """The nearest files of one query."""

    query: str  # path; '' for an image that is not a file
    hits: list[SearchHit]  # nearest first
    label: str = ""  # of the query, if known
    error: str = ""  # why the file cannot be read
    condition: SearchCondition | None = None  # the coarse classes the search was conditioned on
    level: str = FINEST  # of the labels
    images: tuple[str, ...] = ()  # folders that images of the hits may be read from
    # Share of the true nearest files that such searches return; None if this one is exact.
    recall: float | None = None

    def right(self, hit: SearchHit) -> bool | None:
        """Return whether both labels are the same; None if one is unknown."""
        return self.label == hit.label if self.label and hit.label else None

    def __repr__(self) -> str:
        if self.error:
            return f"SearchResult({printable(self.error)})"
        hits = [f"{printable(os.path.basename(hit.path))} {hit.score:.4f}" for hit in self.hits[:3]]
        more = f" and {len(self.hits) - 3} more" if len(self.hits) > 3 else ""
        return f"SearchResult({self._name()}: {', '.join(hits) or 'nothing'}{more})"

    def _repr_html_(self) -> str:
        notes = [note for note in (self.error, note_on_images([self])) if note]
        return html_card(f"Nearest to {self._name()}", queries=[] if self.error else [result_card(self)], notes=notes)

    def _name(self) -> str:
        return printable(os.path.basename(self.query)) or "the image"


@dataclass(frozen=True)
class SearchSettings:
    """How to search an index."""

    vectors: StoredVectors
    top: int
    skip_self: bool
    exact: bool
    level: str
    voters: IndexNeighbors | None = None  # for a search that is conditioned on a coarse class
    class_name: str = ""  # that class, if the user names it
    images: tuple[str, ...] = ()  # folders that images of the hits may be read from
    recall: int = 0  # queries to measure the recall with, by an exact search
    among: Tensor | None = None  # positions of the files that a filter leaves; None for all

    def search(self, queries: Tensor, paths: Sequence[str]) -> list[SearchResult]:
        """Return one result per query; `queries` are unit vectors (Q, C), `paths` their files ('' for none)."""
        count = self.top + self.skip_self
        conditions: Sequence[SearchCondition | None] = [None] * len(queries)
        recalls: Sequence[float | None] = [None] * len(queries)
        if self.voters is not None:
            conditions = known = self.voters.conditions(queries, paths, self.class_name)
            totals, scores, positions = self.voters.search(queries, known, count, self.among)
        elif self.exact or self.vectors.about.exact or self.among is not None:
            subset = Subset(self.vectors, self.among)
            totals, places = exact_nearest(subset, queries, count)
            scores, positions = totals, subset.of_all(places)
        else:
            nearest = self.vectors.nearest(queries, count)
            totals = scores = nearest.scores
            positions, recalls = nearest.positions, self._recalls(queries, nearest, count)
        files = iter(self.vectors.files(positions[positions >= 0]))
        results = []
        rows = zip(totals.tolist(), scores.tolist(), positions.tolist(), strict=True)
        for path, condition, recall, row in zip(paths, conditions, recalls, rows, strict=True):
            hits = []
            for total, score, position in zip(*row, strict=True):
                if position < 0:
                    continue
                file = next(files)
                label, itself = self.vectors.about.at(file.label, self.level), file.path == path
                if not (self.skip_self and itself):
                    hits.append(SearchHit(file.path, score, label, itself, None if condition is None else total))
            level = self.level or FINEST
            hits = hits[: self.top]
            results.append(SearchResult(path, hits, "", "", condition, level, self.images, recall))
        return results

    def _recalls(self, queries: Tensor, nearest: Nearest, count: int) -> list[float | None]:
        """Return the recall to state for each query; None for a result that is proven exact."""
        lists = self.vectors.about.lists
        assert lists is not None
        recall = lists.settings.recall
        if self.recall:
            expected = exact_nearest(self.vectors, queries[: self.recall], count)[1]
            recall = measure_recall(nearest.positions[: self.recall], expected)
        return [None if proven else recall for proven in nearest.proven.tolist()]


def method_in_words(index: "Index", results: Sequence[SearchResult]) -> str:
    """Describe how an index was searched, with the recall of an approximate search."""
    recalls = [result.recall for result in results if not result.error]
    lists = index.about.lists
    if lists is None or not any(recall is not None for recall in recalls):
        return "exact" if lists is None else "proven exact"
    recall = next(recall for recall in recalls if recall is not None)
    proven = f", {recalls.count(None):,} of {len(recalls):,} results proven exact" if None in recalls else ""
    return f"approximate, recall {recall:.3f}{proven}"


def write_search_page(path: Path, index: "Index", results: Sequence[SearchResult]) -> None:
    """Write the page of a search; a frame shows whether the labels of query and hit agree, if both are known."""
    readable = [result for result in results if not result.error]
    notes = [result.error for result in results if result.error]
    if len(readable) > MAX_QUERIES:
        notes.append(f"the first {MAX_QUERIES} of {len(readable):,} queries are shown")
    if note := note_on_images(readable):
        notes.append(note)
    facts = [
        ("files in the index", f"{len(index):,}"),
        ("model", Path(index.about.model).name),
        ("search", method_in_words(index, readable)),
    ]
    if counts := count_right(readable):
        facts.append(("nearest file has the query's label", f"{counts[0]:,} of {counts[1]:,}"))
    write_page(
        path,
        "search.html.j2",
        title=f"Search in {index.folder.name}",
        facts=facts,
        notes=notes,
        framed=counts is not None,
        queries=[result_card(result) for result in readable[:MAX_QUERIES]],
    )


def count_right(results: Sequence[SearchResult]) -> tuple[int, int] | None:
    """Return how many queries have the label of their nearest other file, and for how many both labels are known.

    Returns None if no pair of labels is known.
    """
    nearest = [
        result.right(hit)
        for result in results
        if (hit := next((hit for hit in result.hits if not hit.itself), None)) is not None
    ]
    known = [right for right in nearest if right is not None]
    return (sum(known), len(known)) if known else None


def note_on_images(results: Sequence[SearchResult]) -> str:
    """Return a note on hits whose images may not be shown, and how to allow them; '' if all may be shown."""
    hidden = sorted(
        {hit.path for result in results for hit in result.hits if path_within(hit.path, result.images) is None}
    )
    if not hidden:
        return ""
    return (
        f"{len(hidden):,} {'images are' if len(hidden) > 1 else 'image is'} not shown, such as {short(hidden[0])}: an "
        "index can name any file. Add --images FOLDER for each folder whose images may be shown, in Python "
        "open_index(…, images=[FOLDER])."
    )


def short(path: str) -> str:
    """Return the path relative to the current folder if it is inside, else the whole path."""
    here = os.path.join(os.getcwd(), "")
    return printable(path.removeprefix(here))


def result_card(result: SearchResult) -> dict[str, Any]:
    """Return a query and its hits with their images, as values of a template."""
    return {
        "name": short(result.query),
        "label": result.label,
        "picture": _thumbnail(result.query) if result.query else None,
        "hits": [_hit_card(result, hit) for hit in result.hits],
        "condition": result.condition.in_words() if result.condition else "",
    }


def _hit_card(result: SearchResult, hit: SearchHit) -> dict[str, Any]:
    return hit._asdict() | {
        "path": printable(hit.path),
        "name": printable(os.path.basename(hit.path)),
        "right": result.right(hit),
        "picture": _thumbnail(hit.path, result.images),
    }


def _thumbnail(path: str, roots: Sequence[str] | None = None) -> str:
    """Return a JPEG data URI; gray if the file is missing or outside the roots."""
    try:
        image = thumbnail_of(path, 2 * THUMBNAIL, roots)
    except DataError:
        image = Image.new("RGB", (THUMBNAIL, THUMBNAIL), "gray")
    return data_uri(image, "JPEG", quality=80)
