"""How sure a number is that was measured on so many images: shares that are counted, and any score of a set."""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
ROUNDS = 1000  # of a bootstrap


def wilson(right: int, images: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's interval of a share, in percent: what accuracies are likely where `right` of `images` were.

    It stays within 0…100 and keeps its level near the ends, where the usual ± is wrong: 20 of 20 is 84…100.
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = right / images, z * z / images
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / images + spread / (4 * images)) / (1 + spread)
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)


@lru_cache(maxsize=4)
def bootstrap_weights(images: int, rounds: int = ROUNDS) -> np.ndarray:
    """(rounds, images): how often each image is drawn where as many are drawn anew; the same draws every time."""
    rng = np.random.default_rng(0)
    return rng.multinomial(images, np.full(images, 1 / max(1, images)), rounds).astype(np.float64)


def bootstrap(
    score: Callable[[np.ndarray], float], images: int, *, rounds: int = 200, level: float = LEVEL
) -> tuple[float, float]:
    """The interval of a score of a whole set: `score` is given how often each image was drawn, (images,)."""
    return central(np.array([score(drawn) for drawn in bootstrap_weights(images, rounds)]), level)


def central(values: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """What the middle `level` of resampled values lies between; NaN of none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
