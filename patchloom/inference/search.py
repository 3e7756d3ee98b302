"""A search in an index: what is asked, and what was found for each query."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from patchloom.data.labels.taxonomy import FINEST
from patchloom.evaluation.exact_search import exact_nearest, faiss_nearest
from patchloom.inference.index_files import StoredVectors
from patchloom.inference.neighbors import IndexNeighbors, SearchCondition
from patchloom.report.notebook import piece
from patchloom_runtime.printable import printable


class SearchHit(NamedTuple):
    """A file of the index that is like a query."""

    path: str
    score: float  # cosine, −1…1
    label: str  # '' for none
    itself: bool = False  # the query's own file
    conditioned: float | None = None  # what it was ranked by, where the search was conditioned on a coarse class


@dataclass(frozen=True)
class SearchResult:
    """What a search found for one query."""

    query: str  # the file; '' for a picture that has none
    hits: list[SearchHit]  # nearest first
    label: str = ""  # of the query, where it is known
    error: str = ""  # why the file cannot be read
    condition: SearchCondition | None = None  # the coarse class it was conditioned on
    level: str = FINEST  # of the labels
    images: tuple[str, ...] = ()  # folders that pictures of the hits may be read from

    def right(self, hit: SearchHit) -> bool | None:
        """Whether the labels are the same; None where one is not known."""
        return self.label == hit.label if self.label and hit.label else None

    def __repr__(self) -> str:
        if self.error:
            return f"Found({printable(self.error)})"
        hits = [f"{printable(os.path.basename(hit.path))} {hit.score:.4f}" for hit in self.hits[:3]]
        more = f" and {len(self.hits) - 3} more" if len(self.hits) > 3 else ""
        return f"Found({self._name()}: {', '.join(hits) or 'nothing'}{more})"

    def _repr_html_(self) -> str:
        from patchloom.inference.search_page import note_on_images, result_card  # which build on this module

        notes = [note for note in (self.error, note_on_images([self])) if note]
        return piece(f"Most like {self._name()}", queries=[] if self.error else [result_card(self)], notes=notes)

    def _name(self) -> str:
        return printable(os.path.basename(self.query)) or "the picture"


@dataclass(frozen=True)
class SearchSettings:
    """A search, but for its queries."""

    vectors: StoredVectors
    top: int
    skip_self: bool
    exact: bool
    level: str
    voters: IndexNeighbors | None = None  # where it is conditioned on a coarse class
    given: str = ""  # that class, where the user says it
    images: tuple[str, ...] = ()  # folders that pictures of the hits may be read from

    def find(self, queries: Tensor, paths: Sequence[str]) -> list[SearchResult]:
        """Unit vectors (Q, C) and their files, '' for none."""
        about, wanted = self.vectors.about, self.top + self.skip_self
        conditions: Sequence[SearchCondition | None] = [None] * len(queries)
        if self.voters is not None:
            known = self.voters.conditions(queries, paths, self.given)
            totals, scores, positions = self.voters.search(queries, known, wanted)
            conditions = known
        elif self.exact or about.exact:
            scores, positions = exact_nearest(self.vectors, queries, wanted)
            totals = scores
        else:
            scores, positions = faiss_nearest(self.vectors.faiss_file(), self.vectors, queries, wanted)
            totals = scores
        files = iter(self.vectors.files(positions[positions >= 0]))
        found = []
        rows = zip(totals.tolist(), scores.tolist(), positions.tolist(), strict=True)
        for path, condition, row in zip(paths, conditions, rows, strict=True):
            near = [(total, score, next(files)) for total, score, place in zip(*row, strict=True) if place >= 0]
            hits = [
                SearchHit(
                    file.path,
                    score,
                    about.at(file.label, self.level),
                    file.path == path,
                    None if condition is None else total,
                )
                for total, score, file in near
            ]
            hits = [hit for hit in hits if not (self.skip_self and hit.itself)][: self.top]
            found.append(SearchResult(path, hits, condition=condition, level=self.level or FINEST, images=self.images))
        return found
