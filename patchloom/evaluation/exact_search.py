"""Exact nearest-neighbor search among unit vectors. `approximate_search` is for tens of millions of them.

The score of two vectors is their cosine, summed in float64 and rounded to float32, so it depends neither on the number
of queries nor on how the vectors are split into parts. Higher scores come first; of equal ones, the vector stored
first.

Letters: Q queries, N vectors, M candidates per query, C channels.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

SPARE = 16  # additional candidates: float32 products may order close ones differently
QUERIES_AT_ONCE, VECTORS_AT_ONCE = 1024, 4096
# Block size for the first pass, and the number of candidate blocks per query above which a full topk is faster.
BLOCK, MANY_BLOCKS = 64, 4


class VectorStore(Protocol):
    """Unit vectors in parts, none of which has to stay in memory."""

    def __len__(self) -> int:
        """Return N."""

    def __iter__(self) -> Iterator[Tensor]:
        """Yield parts (n, C) float32, in order."""

    def rows(self, positions: Tensor) -> Tensor:
        """Return the vectors (M, C) at positions (M,)."""


class Subset:
    """The vectors at some increasing positions of a store; all of them for None."""

    def __init__(self, vectors: VectorStore, positions: Tensor | None) -> None:
        self._vectors, self._positions = vectors, positions

    def __len__(self) -> int:
        return len(self._vectors if self._positions is None else self._positions)

    def __iter__(self) -> Iterator[Tensor]:
        start = 0
        for part in self._vectors:
            if self._positions is None:
                yield part
                continue
            first, end = torch.searchsorted(self._positions, torch.tensor([start, start + len(part)])).tolist()
            if end > first:
                yield part[self._positions[first:end] - start]
            start += len(part)

    def rows(self, positions: Tensor) -> Tensor:
        """Return the vectors (M, C) at positions (M,) of this subset."""
        return self._vectors.rows(self.of_all(positions))

    def of_all(self, positions: Tensor) -> Tensor:
        """Convert positions of this subset to positions of the whole store."""
        return positions if self._positions is None else self._positions[positions]


def conditioned_nearest(
    vectors: VectorStore, queries: Tensor, classes: Tensor, added: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, cosines and positions (Q, k) of the k best by cosine plus a query's bonus for the vector's class.

    `classes` (N,) are columns of `added` (Q, K) float64. All vectors are compared: the best may have any cosine.
    """
    parts = [
        _conditioned(vectors, some, classes, of_some, min(k, len(vectors)))
        for some, of_some in zip(queries.split(QUERIES_AT_ONCE), added.split(QUERIES_AT_ONCE), strict=True)
    ]
    scores, cosines, positions = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(cosines), torch.cat(positions)


def _conditioned(
    vectors: VectorStore, queries: Tensor, classes: Tensor, added: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    scores, cosines = added.new_empty(len(queries), 0), queries.new_empty(len(queries), 0)
    positions = torch.empty(len(queries), 0, dtype=torch.int64)
    start = 0
    for some in (some for part in vectors for some in part.split(VECTORS_AT_ONCE)):
        now = (queries.double() @ some.double().T).float()
        places = torch.arange(start, start + len(some))
        scores = torch.cat([scores, now.double() + added[:, classes[places]]], dim=1)
        cosines = torch.cat([cosines, now], dim=1)
        positions = torch.cat([positions, places.expand(len(queries), -1)], dim=1)
        # Stable: equal scores stay in the order of their positions.
        best = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        scores, cosines, positions = (each.gather(1, best) for each in (scores, cosines, positions))
        start += len(some)
    return scores, cosines, positions


def exact_nearest(vectors: VectorStore, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and positions (Q, k) of the nearest vectors for queries (Q, C), as if comparing with all."""
    k = min(k, len(vectors))
    parts = [_exact(vectors, some, k) for some in queries.split(QUERIES_AT_ONCE)]
    scores, positions = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(positions)


def _exact(vectors: VectorStore, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    cosines, positions = _candidates(vectors, queries, min(k + SPARE, len(vectors)))
    floor = cosines[:, k - 1] - 2 * product_error(queries.shape[1])  # nothing below is among the k best
    scores, ranked = rank(vectors, queries, positions, k)
    if cosines.shape[1] < len(vectors):
        for query in torch.nonzero(cosines[:, -1] >= floor)[:, 0].tolist():
            scores[query], ranked[query] = among_many(vectors, queries[query], float(floor[query]), k)
    return scores, ranked


def _candidates(vectors: VectorStore, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return float32 cosines, decreasing, and positions (Q, k)."""
    cosines = queries.new_full((len(queries), k), -math.inf)
    positions = torch.full((len(queries), k), -1)
    products = queries.new_empty(len(queries), VECTORS_AT_ONCE)
    start = 0
    for some in (some for part in vectors for some in part.split(VECTORS_AT_ONCE)):
        products[:, len(some) :] = -math.inf
        torch.mm(queries, some.T, out=products[:, : len(some)])
        better, places = _better(products, cosines[:, -1:], k)
        if better.shape[1]:
            cosines, chosen = torch.cat([cosines, better], dim=1).topk(k, dim=1)
            positions = torch.cat([positions, places + start], dim=1).gather(1, chosen)
        start += len(some)
    return cosines, positions


def _better(products: Tensor, bar: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the products (Q, n) above each query's bar (Q, 1), or at least the k best, and their positions.

    Rows are padded with −∞. Once the first parts have set the bar, few blocks reach it and only these are searched: a
    full topk takes half as long as the products.
    """
    blocks = products.view(len(products), products.shape[1] // BLOCK, BLOCK)
    query, block = (blocks.amax(dim=2) > bar).nonzero(as_tuple=True)
    if len(query) > MANY_BLOCKS * len(products):
        best = products.topk(min(k, products.shape[1]), dim=1)
        return best.values, best.indices
    if not len(query):
        return products[:, :0], block.view(len(products), 0)
    inside = blocks[query, block]
    row, column = (inside > bar[query]).nonzero(as_tuple=True)
    query, place = query[row], block[row] * BLOCK + column
    counts = query.bincount(minlength=len(products))
    slot = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
    shape = (len(products), int(counts.max()))
    better, places = products.new_full(shape, -math.inf), torch.zeros(shape, dtype=torch.int64)
    better[query, slot], places[query, slot] = inside[row, column], place
    return better, places


def product_error(channels: int) -> float:
    """Return an upper bound of the error of a float32 product of unit vectors (C,)."""
    return (channels + 8) * 2**-24


def rank(vectors: VectorStore, queries: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the k best of candidates (Q, M); position −1 means none and sorts last."""
    k = min(k, positions.shape[1])
    positions = positions.sort(dim=1).values
    shape = (*positions.shape, queries.shape[1])
    candidates = vectors.rows(positions.clamp(min=0).flatten()).view(shape)
    products = torch.bmm(candidates, queries[:, :, None])[:, :, 0].masked_fill(positions < 0, -math.inf)
    # Only those that may be among the k best are summed in float64, which takes longer than reading all.
    floor = products.topk(k, dim=1).values[:, -1:] - 2 * product_error(queries.shape[1])
    query, place = ((products >= floor) & (positions >= 0)).nonzero(as_tuple=True)
    scores = torch.full_like(products, -math.inf)
    scores[query, place] = (candidates[query, place].double() * queries[query].double()).sum(dim=1).float()
    # Stable: equal scores stay in the order of their positions.
    chosen = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, chosen), positions.gather(1, chosen)


def among_many(vectors: VectorStore, query: Tensor, floor: float, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of one query with more close vectors than candidates, e.g. many copies of one image."""
    scores, positions = query.new_empty(0), torch.empty(0, dtype=torch.int64)
    start = 0
    for part in vectors:
        near = torch.nonzero(part @ query >= floor)[:, 0]
        scores = torch.cat([scores, (part[near].double() @ query.double()).float()])
        positions = torch.cat([positions, near + start])
        best = scores.argsort(descending=True, stable=True)[:k]
        scores, positions = scores[best], positions[best]
        start += len(part)
    return scores, positions
