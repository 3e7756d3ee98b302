"""Distances between feature vectors: images far from all others, and unlabeled images worth labeling.

Letters: N images, C channels. Vectors are compared by cosine distance, 1 − cosine.
"""

import numpy as np

NEIGHBORS = 10
ROWS_AT_ONCE = 1024


def neighbor_distances(vectors: np.ndarray) -> np.ndarray:
    """Return the mean distance of each of the vectors (N, C) to its nearest others, divided by the median: (N,)."""
    unit = _unit(vectors)
    neighbors = min(NEIGHBORS, len(unit) - 1)
    if neighbors < 1:
        return np.ones(len(unit), np.float32)
    means = []
    for start in range(0, len(unit), ROWS_AT_ONCE):
        distances = 1 - unit[start : start + ROWS_AT_ONCE] @ unit.T  # (rows, N)
        rows = np.arange(len(distances))
        distances[rows, start + rows] = np.inf  # itself
        means.append(np.partition(distances, neighbors - 1, axis=1)[:, :neighbors].mean(axis=1))
    mean = np.maximum(np.concatenate(means), 0)
    return (mean / max(float(np.median(mean)), 1e-6)).astype(np.float32)


def entropies(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy of each row of (N, K), as a share of the largest possible, log K."""
    p = probabilities.astype(np.float64)
    nats = -np.sum(p * np.log(np.clip(p, 1e-12, None)), axis=1)
    return nats / np.log(max(2, p.shape[1]))


def uncertain_and_diverse(uncertainty: np.ndarray, vectors: np.ndarray, count: int) -> list[int]:
    """Return positions of `count` images, best first: uncertain, and unlike those chosen before.

    The first is the most uncertain one. Each following one has the largest product of uncertainty (N,) and distance to
    the nearest chosen vector.
    """
    unit, count = _unit(vectors), min(count, len(vectors))
    distances = np.ones(len(unit))
    chosen: list[int] = []
    remaining = np.ones(len(unit), dtype=bool)
    while len(chosen) < count:
        gain = np.where(remaining, np.asarray(uncertainty, dtype=np.float64) * distances, -1.0)
        best = int(np.argmax(gain))
        chosen.append(best)
        remaining[best] = False
        distances = np.minimum(distances, np.maximum(1 - unit @ unit[best], 0))
    return chosen


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)
