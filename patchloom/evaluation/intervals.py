"""Confidence intervals: Wilson's for shares, the bootstrap for any metric of a dataset."""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
ROUNDS = 1000  # of the bootstrap


def wilson(right: int, images: int, level: float = LEVEL) -> tuple[float, float]:
    """Return Wilson's confidence interval of an accuracy of `right` out of `images`, in percent.

    It stays within 0…100 and keeps its level near the ends, where the normal approximation fails: 20 of 20 is 84…100.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = right / images, z * z / images
    center = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / images + spread / (4 * images)) / (1 + spread)
    return 100 * max(0.0, center - half), 100 * min(1.0, center + half)


@lru_cache(maxsize=4)
def bootstrap_weights(images: int, rounds: int = ROUNDS) -> np.ndarray:
    """Return image weights (rounds, images): how often each image is drawn with replacement. Always the same draws."""
    rng = np.random.default_rng(0)
    return rng.multinomial(images, np.full(images, 1 / max(1, images)), rounds).astype(np.float64)


def bootstrap(
    score: Callable[[np.ndarray], float], images: int, *, rounds: int = 200, level: float = LEVEL
) -> tuple[float, float]:
    """Return the bootstrap interval of a metric; `score` takes image weights (images,)."""
    return central(np.array([score(drawn) for drawn in bootstrap_weights(images, rounds)]), level)


def central(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Return the central interval of resampled values, ignoring NaN."""
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
