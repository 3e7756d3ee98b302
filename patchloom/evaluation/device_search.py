"""Exact nearest-neighbor search on a GPU: a float16 copy finds candidates, the stored float32 vectors rank them.

The results are those of `exact_search`. A product of float16 copies differs from that of the vectors by at most their
distances from the copies, which are measured, and the rounding of its sum. Every vector that may be among the k best
after that is ranked. Blocks of vectors, and groups of blocks, are passed over by their largest product.

Letters: Q queries, N vectors, C channels, M candidates per query.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation.exact_search import VectorStore, among_many, rank
from patchloom.layers import kernels

BLOCK, BLOCKS_PER_GROUP, CHANNELS = 64, 64, 64  # vectors per block; the copy is padded to whole groups and CHANNELS
GROUP = BLOCK * BLOCKS_PER_GROUP
QUERIES_AT_ONCE = 1024
MANY_BLOCKS, MANY_VECTORS = 1024, 4096  # candidates per query beyond which the stored vectors are scanned instead
ROWS_AT_ONCE, RANKED_AT_ONCE = 1 << 20, 1 << 17  # vectors gathered for a second look, and for ranking


def bytes_needed(count: int, dimension: int) -> int:
    """Return the device memory for a search in `count` vectors: the copy, and maxima for 1,024 queries."""
    groups, channels = -(-count // GROUP), -(-dimension // CHANNELS) * CHANNELS
    maxima = groups * BLOCKS_PER_GROUP * QUERIES_AT_ONCE * 4
    return groups * GROUP * channels * 2 + maxima + ROWS_AT_ONCE * channels * 6 + (1 << 30)


class DeviceVectors:
    """The vectors of a store, copied to a device in float16 for exact searches."""

    def __init__(self, vectors: VectorStore, device: torch.device) -> None:
        self._stored, self._device, count = vectors, device, len(vectors)
        self._copy, self._farthest = torch.empty(0, 0, dtype=torch.float16, device=device), 0.0
        start = 0
        for part in vectors:
            if not start:
                shape = (-(-count // GROUP) * GROUP, -(-part.shape[1] // CHANNELS) * CHANNELS)
                self._copy = torch.zeros(shape, dtype=torch.float16, device=device)
            part = part.to(device)
            copy = part.half()
            self._copy[start : start + len(part), : part.shape[1]] = copy
            self._farthest = max(self._farthest, float((part - copy.float()).norm(dim=1).max()))
            start += len(part)

    def nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and positions (Q, k) of the nearest vectors for queries (Q, C), as `exact_nearest` does."""
        k = min(k, len(self._stored))
        parts = [self._nearest(some, k) for some in queries.split(QUERIES_AT_ONCE)]
        scores, positions = zip(*parts, strict=True)
        return torch.cat(scores), torch.cat(positions)

    def maxima(self, halves: Tensor) -> Tensor:
        """Return the largest products (Q, blocks) of float16 queries (Q, padded C) with each block of the copy."""
        if kernels.usable(self._copy):
            from patchloom.layers.kernels.block_maxima import block_maxima  # needs Triton

            return block_maxima(halves, self._copy, len(self._stored))
        maxima = [halves.float() @ some.float().T for some in self._copy.split(GROUP)]
        maxima[-1][:, len(self._stored) - len(self._copy) + GROUP :] = -math.inf
        return torch.cat([some.view(len(halves), -1, BLOCK).amax(dim=2) for some in maxima], dim=1)

    def halves(self, queries: Tensor) -> Tensor:
        """Return queries (Q, C) in float16 on the device, padded like the copy."""
        return F.pad(queries.to(self._device).half(), (0, self._copy.shape[1] - queries.shape[1]))

    def _nearest(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        halves, dim = self.halves(queries), queries.shape[1]
        far = (queries.to(self._device) - halves[:, :dim].float()).norm(dim=1, keepdim=True)
        # Twice the largest error of a product. The last term bounds the rounding of a float32 sum, truncated or not.
        margin = 2 * (self._farthest + (1 + self._farthest) * far + (dim + 8) * 2**-22)
        groups = self.maxima(halves).view(len(queries), -1, BLOCKS_PER_GROUP)
        chosen = _near(groups.amax(dim=2), _floor(groups.amax(dim=2), k, margin))
        inside = groups.gather(1, chosen.clamp(min=0)[:, :, None].expand(-1, -1, BLOCKS_PER_GROUP))
        inside = inside.masked_fill((chosen < 0)[:, :, None], -math.inf).flatten(1)
        floor = _floor(inside, k, margin)
        places = _near(inside, floor)
        blocks = chosen.gather(1, places.clamp(min=0) // BLOCKS_PER_GROUP) * BLOCKS_PER_GROUP
        blocks = (blocks + places % BLOCKS_PER_GROUP).masked_fill(places < 0, -1)
        too_many = (blocks >= 0).sum(dim=1) > MANY_BLOCKS
        blocks = blocks[:, :MANY_BLOCKS]
        rows = max(1, ROWS_AT_ONCE // (blocks.shape[1] * BLOCK))
        parts = zip(halves.split(rows), blocks.split(rows), margin.split(rows), strict=True)
        candidates = [self._candidates(*part, k) for part in parts]
        width = max(part.shape[1] for part in candidates)
        positions = torch.cat([F.pad(part, (0, width - part.shape[1]), value=-1) for part in candidates])
        too_many |= (positions >= 0).sum(dim=1) > max(MANY_VECTORS, 2 * k)
        positions = positions.masked_fill(too_many[:, None], -1).cpu()
        scores, positions = self._rank(queries, positions, k)
        for query in torch.nonzero(too_many)[:, 0].tolist():
            scores[query], positions[query] = among_many(self._stored, queries[query], float(floor[query]), k)
        return scores, positions

    def _candidates(self, halves: Tensor, blocks: Tensor, margin: Tensor, k: int) -> Tensor:
        """Return the positions (Q, M) in blocks (Q, B) that may be among the k best; −1 for none."""
        rows = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=self._device)).flatten(1)
        valid = (blocks >= 0).repeat_interleave(BLOCK, dim=1) & (rows < len(self._stored))
        rows = rows.masked_fill(~valid, 0)
        products = torch.bmm(self._copy[rows].float(), halves.float()[:, :, None])[:, :, 0]
        products = products.masked_fill(~valid, -math.inf)
        places = _near(products, _floor(products, k, margin))
        return rows.gather(1, places.clamp(min=0)).masked_fill(places < 0, -1)

    def _rank(self, queries: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and positions of the k best of candidates (Q, M), by the stored vectors."""
        width = max(k, int((positions >= 0).sum(dim=1).max()))
        positions = F.pad(positions, (0, max(0, width - positions.shape[1])), value=-1)[:, :width]
        rows = max(1, RANKED_AT_ONCE // width)
        parts = [rank(self._stored, *part, k) for part in zip(queries.split(rows), positions.split(rows), strict=True)]
        scores, ranked = zip(*parts, strict=True)
        return torch.cat(scores), torch.cat(ranked)


def _floor(scores: Tensor, k: int, margin: Tensor) -> Tensor:
    """Return the k-th best of scores (Q, n) less the margin (Q, 1): what may be among the k best is no lower."""
    if k > scores.shape[1]:
        return torch.full_like(margin, -math.inf)
    return scores.topk(k, dim=1).values[:, -1:] - margin


def _near(scores: Tensor, floor: Tensor) -> Tensor:
    """Return the places (Q, M) of the scores (Q, n) that reach the floor (Q, 1), the best first; −1 for none."""
    near = (scores >= floor) & (scores > -math.inf)
    best = scores.topk(max(1, int(near.sum(dim=1).max())), dim=1)
    return best.indices.masked_fill(~near.gather(1, best.indices), -1)
