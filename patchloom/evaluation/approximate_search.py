"""Approximate nearest-neighbor search among tens of millions of unit vectors, with exact scores.

faiss groups the vectors into lists around centroids (IVF) and stores up to four bits per channel (RaBitQ: 212 bytes
for 384 channels). A query compares these codes in the lists nearest to it. The best candidates are then scored from the
stored float32 vectors as in `exact_search`, so scores and their order are exact, and the only possible error is a near
vector that was no candidate. `measure_recall` counts these. Where the lists that were not compared are too far away to
hold a nearer vector, the result is proven exact.

Letters: Q queries, N vectors, M candidates per query, C channels, L lists.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from patchloom.evaluation.exact_search import VectorStore, exact_nearest, product_error, rank
from patchloom_runtime.errors import UsageError

LEARNED_FROM = 39  # training vectors per list for k-means, as many as faiss recommends
ITERATIONS = 10  # of k-means
# Bits per channel of a stored vector, and the most bytes of all codes, which are in memory while they are written. With
# fewer bits more vectors have to be scored for the same recall, each of which may be a read from a disk; a fifth bit
# saves hardly any (benchmarks/LOG.md).
CODE_BITS, MOST_CODE_BYTES = (4, 2, 1), 4 << 30
QUERY_BITS = 8  # per channel of a query, for comparing it with codes
# A search of many queries at once enters each parallel loop once: on shared cores, waiting in it costs more than work.
QUERIES_AT_ONCE = 256
VECTORS_AT_ONCE = 1 << 14  # candidates that are scored at once: 24 MiB of 384 channels
PROVABLE = 2048  # vectors that may be scored for a proof
PROBES = (4, 8, 16, 32, 64, 128, 256, 512)
CANDIDATES = (20, 28, 35, 50, 70, 100, 140, 200, 280, 400, 560, 800, 1120, 1600, 2240, 3200)
# Codes that are compared in the time of scoring one candidate: 35 if it is in memory, 1,000 if it is on a disk.
CODES_PER_CANDIDATE = 200
WANTED_RECALL, RECALL_TOP, RECALL_QUERIES = 0.99, 10, 512
_NONE = torch.empty(0, dtype=torch.int64)


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


def code_bits(count: int, dim: int) -> int:
    """Return the bits per channel of the codes of so many vectors."""
    return next((bits for bits in CODE_BITS if count * dim * bits / 8 <= MOST_CODE_BYTES), CODE_BITS[-1])


def write_lists(vectors: VectorStore, codes: Path, radii: Path) -> None:
    """Write the lists of all vectors: the codes as a file of faiss, and the smallest cosine in each list as an array.

    The cosine is that between the centroid of a list and its farthest member.
    Needs memory for 39 vectors per list and for all codes: 2.4 GiB for 10 million vectors of 384 channels.
    """
    faiss = import_faiss()
    lists = max(1, min(round(2 * math.sqrt(len(vectors))), len(vectors) // LEARNED_FROM))
    sample = np.linspace(0, len(vectors) - 1, min(len(vectors), lists * LEARNED_FROM)).astype(np.int64)
    dim = next(iter(vectors)).shape[1]
    quantizer = faiss.IndexFlatIP(dim)
    bits = code_bits(len(vectors), dim)
    index = faiss.IndexIVFRaBitQ(quantizer, dim, lists, faiss.METRIC_INNER_PRODUCT, True, bits)
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
        self._error = product_error(centroids.shape[1])
        self._radii = (torch.from_numpy(least).double() - self._error).clamp(-1, 1).acos()  # (L,)
        invlists = self._index.invlists
        self._sizes = torch.tensor([invlists.list_size(at) for at in range(self._index.nlist)])

    def candidates(self, queries: Tensor, count: int, probes: int) -> Tensor:
        """Return the row numbers (Q, count) of the most similar codes in the `probes` nearest lists; −1 for none."""
        settings = self._faiss.IVFRaBitQSearchParameters()
        settings.nprobe, settings.qb = min(probes, self._index.nlist), QUERY_BITS
        _, rows = self._index.search(queries.numpy(), count, params=settings)
        return torch.from_numpy(rows)

    def mean_size(self) -> float:
        """Return the mean number of vectors per list."""
        return self._sizes.double().mean().item()

    def possible_rows(self, queries: Tensor, floors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows (P, M) of all lists that may hold a cosine of at least `floors` (Q,); −1 for none.

        Returns first which P queries these are (P,): those with few enough rows.
        """
        reach = (floors.double() - self._error).clamp(-1, 1).acos()
        # A list can only hold a vector within `reach` if its centroid is no farther than that and its radius.
        farthest = (reach[:, None] + self._radii).clamp(max=math.pi).cos() - self._error
        possible = (queries @ self._centroids.T >= farthest) & (self._sizes > 0)
        few = torch.nonzero((possible * self._sizes).sum(dim=1) <= PROVABLE)[:, 0]
        return few, pad_sequence([self._rows(lists) for lists in possible[few]] or [_NONE], True, -1)[: len(few)]

    def _rows(self, lists: Tensor) -> Tensor:
        """Return the rows of lists (L,) bool."""
        invlists = self._index.invlists
        chosen = torch.nonzero(lists)[:, 0].tolist()
        rows = [self._faiss.rev_swig_ptr(invlists.get_ids(at), int(self._sizes[at])).copy() for at in chosen]
        return torch.from_numpy(np.concatenate(rows)) if rows else _NONE


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
        later = self._nearest_later(queries, k)
        listed = self.candidates(queries, max(settings.candidates, 4 * k), settings.probes)
        scores, positions = self._rank(queries, torch.cat([listed, later], dim=1), k)
        few, rows = self.lists.possible_rows(queries, scores[:, -1])
        if len(few):
            possible = torch.cat([self._positions(rows), later[few], positions[few]], dim=1).sort(dim=1).values
            possible[:, 1:][possible[:, 1:] == possible[:, :-1]] = -1  # count none twice
            scores[few], positions[few] = self._rank(queries[few], possible, k)
        return Nearest(scores, positions, torch.zeros(len(queries), dtype=torch.bool).index_fill(0, few, True))

    def candidates(self, queries: Tensor, count: int, probes: int) -> Tensor:
        """Return the positions (Q, count) with the most similar codes in the `probes` nearest lists; −1 for none."""
        return self._positions(self.lists.candidates(queries, count, probes))

    def _rank(self, queries: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
        at_once = max(1, VECTORS_AT_ONCE // positions.shape[1])
        pairs = zip(queries.split(at_once), positions.split(at_once), strict=True)
        scores, ranked = zip(*(rank(self.vectors, some, of_some, k) for some, of_some in pairs), strict=True)
        return torch.cat(scores), torch.cat(ranked)

    def _nearest_later(self, queries: Tensor, k: int) -> Tensor:
        if self.later is None or not len(self.later):
            return _NONE.expand(len(queries), 0)
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
    """Return the quickest settings that reach `WANTED_RECALL` with half of some stored vectors, else the best ones.

    The recall that is stated is measured with the other half.
    A stored vector is its own nearest neighbor and easy to find, so it does not count.
    """
    sample = torch.linspace(0, len(stored.vectors) - 1, min(RECALL_QUERIES, len(stored.vectors))).long()
    queries, top = stored.vectors.rows(sample), RECALL_TOP + 1
    expected = _other_than(exact_nearest(stored.vectors, queries, top)[1], sample)
    probes, candidates = _quickest(stored, queries[::2], expected[::2])
    held_out = slice(len(sample) > 1, None, 2)
    tried = ListSettings(probes, candidates, 0.0, len(sample[held_out]))
    positions = _other_than(stored.nearest(queries[held_out], top, tried).positions, sample[held_out])
    return replace(tried, recall=measure_recall(positions, expected[held_out]))


def _quickest(stored: ListedVectors, queries: Tensor, expected: Tensor) -> tuple[int, int]:
    """Return the probes and candidates with the least work that reach `WANTED_RECALL`, else the highest recall."""
    most_recall, least_work = 0.0, math.inf
    best = PROBES[0], CANDIDATES[0]
    for probes in PROBES:
        codes = probes * stored.lists.mean_size()
        if codes >= least_work:
            break
        positions = stored.candidates(queries, CANDIDATES[-1], probes)
        for candidates in CANDIDATES:
            recall = min(measure_recall(positions[:, :candidates], expected), WANTED_RECALL)
            work = codes + CODES_PER_CANDIDATE * candidates
            if recall > most_recall or (recall == WANTED_RECALL and work < least_work):
                most_recall, best = recall, (probes, candidates)
                least_work = work if recall == WANTED_RECALL else math.inf
    return best


def _other_than(positions: Tensor, itself: Tensor) -> Tensor:
    """Return the positions (Q, k − 1) of each query with its own replaced by the last one."""
    is_itself = positions == itself[:, None]
    return torch.where(is_itself, positions[:, -1:], positions)[:, :-1]


def _unit_centroids(index: Any) -> np.ndarray:
    """Return the directions of the centroids (L, C)."""
    centroids = index.quantizer.reconstruct_n(0, index.nlist)
    return centroids / np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-12)
