"""Approximate nearest-neighbor search among tens of millions of unit vectors, with exact scores.

faiss groups the vectors into lists around centroids (IVF) and stores one bit per channel (RaBitQ: 56 bytes for 384
channels). A query compares these codes in the lists nearest to it. The best candidates are then scored from the stored
float32 vectors as in `exact_search`, so scores and their order are exact, and the only possible error is a near vector
that was no candidate. `measure_recall` counts these. Where the lists that were not compared are too far away to hold a
nearer vector, the result is proven exact.

Letters: Q queries, N vectors, M candidates per query, C channels, L lists.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from patchloom.evaluation.exact_search import VectorStore, exact_nearest, rank
from patchloom_runtime.errors import UsageError

LEARNED_FROM = 39  # training vectors per list for k-means, as many as faiss recommends
ITERATIONS = 10  # of k-means
QUERY_BITS = 8  # per channel of a query, for comparing it with codes
QUERIES_AT_ONCE = 64
PROVABLE = 2048  # vectors that may be scored for a proof
SLACK = 1e-4  # radians; more than the float32 error of an angle between a vector and a centroid
# Settings from fast to thorough; the first that reaches the wanted recall is used.
LADDER = ((16, 100), (32, 200), (64, 400), (128, 800), (256, 1600), (512, 3200))
WANTED_RECALL, RECALL_TOP, RECALL_QUERIES = 0.99, 10, 64


@dataclass(frozen=True)
class ListSettings:
    """How thoroughly the lists are searched, and the recall that this gives."""

    probes: int  # lists that a query is compared with
    candidates: int  # vectors that are scored exactly
    recall: float  # share of the true `RECALL_TOP` nearest vectors that are returned, over `queries`
    queries: int  # stored vectors that the recall was measured with


class Nearest(NamedTuple):
    """The nearest vectors of Q queries."""

    scores: Tensor  # (Q, k) float32, decreasing
    positions: Tensor  # (Q, k); −1 for none
    proven: Tensor  # (Q,) bool: no vector outside the candidates can be nearer


def import_faiss() -> Any:
    """Import faiss. Raise UsageError naming the extra if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise UsageError(
            "faiss, which searches more than a million images, is not installed. Install it with: "
            "pip install 'patchloom[faiss]', or compare with all images: --exact"
        ) from error
    return faiss


def write_lists(vectors: VectorStore, codes: Path, radii: Path) -> None:
    """Write the lists of all vectors: the codes as a file of faiss, and the smallest cosine in each list as an array.

    The cosine is that between the centroid of a list and its farthest member.
    Needs memory for 39 vectors per list and for all codes: 1.2 GiB for 10 million vectors of 384 channels.
    """
    faiss = import_faiss()
    lists = max(1, min(round(2 * math.sqrt(len(vectors))), len(vectors) // LEARNED_FROM))
    sample = np.linspace(0, len(vectors) - 1, min(len(vectors), lists * LEARNED_FROM)).astype(np.int64)
    dim = next(iter(vectors)).shape[1]
    quantizer = faiss.IndexFlatIP(dim)
    index = faiss.IndexIVFRaBitQ(quantizer, dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter = ITERATIONS
    index.train(vectors.rows(torch.from_numpy(sample)).numpy())
    centroids = _unit_centroids(index)
    least = np.ones(lists, np.float32)
    for part in vectors:
        members = part.numpy()
        _, nearest = quantizer.search(members, 1)
        assigned = nearest[:, 0].copy()
        np.minimum.at(least, assigned, np.einsum("nc,nc->n", members, centroids[assigned]))
        index.add_core(len(members), faiss.swig_ptr(members), None, faiss.swig_ptr(assigned))
    faiss.write_index(index, str(codes))
    with radii.open("wb") as file:
        np.save(file, least, allow_pickle=False)


class Lists:
    """Lists of vectors that were written by `write_lists`, open for searching."""

    def __init__(self, codes: Path, radii: Path) -> None:
        faiss = import_faiss()
        self._faiss, self._index = faiss, faiss.read_index(str(codes), faiss.IO_FLAG_MMAP)
        centroids = _unit_centroids(self._index)
        least = np.load(radii, allow_pickle=False)
        if least.shape != (len(centroids),) or least.dtype != np.float32:
            raise ValueError(f"{radii.name} does not belong to {codes.name}")
        self._centroids = torch.from_numpy(centroids)  # (L, C)
        self._radii = torch.from_numpy(least).double().clamp(-1, 1).acos() + SLACK  # (L,)
        invlists = self._index.invlists
        self._sizes = torch.tensor([invlists.list_size(at) for at in range(self._index.nlist)])

    def candidates(self, queries: Tensor, count: int, probes: int) -> Tensor:
        """Return the row numbers (Q, count) of the most similar codes in the `probes` nearest lists; −1 for none."""
        settings = self._faiss.IVFRaBitQSearchParameters()
        settings.nprobe, settings.qb = min(probes, self._index.nlist), QUERY_BITS
        _, rows = self._index.search(queries.numpy(), count, params=settings)
        return torch.from_numpy(rows)

    def possible_rows(self, query: Tensor, floor: float) -> Tensor | None:
        """Return the rows of all lists that may hold a cosine of at least `floor`, or None if these are too many."""
        angles = (self._centroids @ query).double().clamp(-1, 1).acos()
        closest = (angles - self._radii - SLACK).clamp(min=0)  # no member of the list is at a smaller angle
        possible = torch.nonzero((closest.cos() >= floor) & (self._sizes > 0))[:, 0].tolist()
        if int(self._sizes[possible].sum()) > PROVABLE:
            return None
        invlists = self._index.invlists
        rows = [self._faiss.rev_swig_ptr(invlists.get_ids(at), int(self._sizes[at])).copy() for at in possible]
        return torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ListedVectors:
    """Stored vectors whose first part is in lists. Removing or adding vectors does not change the lists."""

    vectors: VectorStore
    lists: Lists
    removed: Tensor  # rows of the lists that are no longer stored, increasing
    later: VectorStore | None = None  # the last of `vectors`, which are in no list

    def nearest(self, queries: Tensor, k: int, settings: ListSettings) -> Nearest:
        """Return the k nearest vectors of queries (Q, C) among the candidates, or of all where that can be proven."""
        k = min(k, len(self.vectors))
        parts = [self._nearest(some, k, settings) for some in queries.split(QUERIES_AT_ONCE)]
        return Nearest(*map(torch.cat, zip(*parts, strict=True)))

    def _nearest(self, queries: Tensor, k: int, settings: ListSettings) -> Nearest:
        count = max(settings.candidates, 4 * k)
        later = self._nearest_later(queries, k)
        listed = self._positions(self.lists.candidates(queries, count, settings.probes))
        scores, positions = rank(self.vectors, queries, torch.cat([listed, later], dim=1), k)
        proven = torch.zeros(len(queries), dtype=torch.bool)
        for at, query in enumerate(queries):
            rows = self.lists.possible_rows(query, float(scores[at, -1]))
            if rows is not None:
                possible = torch.cat([self._positions(rows), later[at], positions[at]]).unique()[None]
                one_score, one_position = rank(self.vectors, query[None], possible, k)
                scores[at, : one_score.shape[1]], positions[at, : one_position.shape[1]] = one_score, one_position
                proven[at] = True
        return Nearest(scores, positions, proven)

    def _nearest_later(self, queries: Tensor, k: int) -> Tensor:
        if self.later is None or not len(self.later):
            return torch.empty(len(queries), 0, dtype=torch.int64)
        return exact_nearest(self.later, queries, k)[1] + len(self.vectors) - len(self.later)

    def _positions(self, rows: Tensor) -> Tensor:
        """Return the positions of rows of the lists; −1 for those that were removed, and for −1."""
        before = torch.searchsorted(self.removed, rows)
        is_removed = torch.isin(rows, self.removed)
        return torch.where(is_removed | (rows < 0), -1, rows - before)


def measure_recall(results: Tensor, expected: Tensor) -> float:
    """Return the share of the expected positions (Q, k) that are among those of a search (Q, k)."""
    return (results[:, :, None] == expected[:, None, :]).any(dim=1).double().mean().item()


def choose_settings(stored: ListedVectors) -> ListSettings:
    """Return the quickest settings that reach `WANTED_RECALL`, measured with stored vectors, else the best ones.

    A stored vector is its own nearest neighbor and easy to find, so it does not count.
    """
    sample = torch.linspace(0, len(stored.vectors) - 1, min(RECALL_QUERIES, len(stored.vectors))).long()
    queries, top = stored.vectors.rows(sample), RECALL_TOP + 1
    expected = _other_than(exact_nearest(stored.vectors, queries, top)[1], sample)
    best = ListSettings(0, 0, -1.0, 0)
    for probes, candidates in LADDER:
        tried = ListSettings(probes, candidates, 0.0, len(queries))
        positions = _other_than(stored.nearest(queries, top, tried).positions, sample)
        recall = measure_recall(positions, expected)
        if recall > best.recall:
            best = ListSettings(probes, candidates, recall, len(queries))
        if recall >= WANTED_RECALL:
            break
    return best


def _other_than(positions: Tensor, itself: Tensor) -> Tensor:
    """Return the positions (Q, k − 1) of each query with its own replaced by the last one."""
    is_itself = positions == itself[:, None]
    return torch.where(is_itself, positions[:, -1:], positions)[:, :-1]


def _unit_centroids(index: Any) -> np.ndarray:
    """Return the directions of the centroids (L, C)."""
    centroids = index.quantizer.reconstruct_n(0, index.nlist)
    return centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
