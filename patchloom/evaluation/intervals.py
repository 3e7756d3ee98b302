"""Confidence intervals: Wilson's for shares, Student's for means of a few runs, the bootstrap for any metric."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
ROUNDS = 1000  # of the bootstrap


def wilson(right: int, images: int) -> tuple[float, float]:
    """Return Wilson's confidence interval of an accuracy of `right` out of `images`, in percent.

    It stays within 0…100 and keeps its level near the ends, where the normal approximation fails: 20 of 20 is 84…100.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share, spread = right / images, z * z / images
    center = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / images + spread / (4 * images)) / (1 + spread)
    return 100 * max(0.0, center - half), 100 * min(1.0, center + half)


@lru_cache(maxsize=4)
def bootstrap_weights(images: int, rounds: int = ROUNDS) -> np.ndarray:
    """Return image weights (rounds, images): how often each image is drawn with replacement. Always the same draws."""
    rng = np.random.default_rng(0)
    return rng.multinomial(images, np.full(images, 1 / max(1, images)), rounds).astype(np.float64)


def bootstrap(score: Callable[[np.ndarray], float], images: int, *, rounds: int = 200) -> tuple[float, float]:
    """Return the bootstrap interval of a metric; `score` takes image weights (images,)."""
    return central(np.array([score(drawn) for drawn in bootstrap_weights(images, rounds)]))


def central(values: np.ndarray) -> tuple[float, float]:
    """Return the central interval of resampled values, ignoring NaN."""
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def student(values: Sequence[float]) -> tuple[float, float]:
    """Return Student's confidence interval of the mean of a few values, such as the scores of folds."""
    if len(values) < 2:
        raise ValueError(f"an interval of a mean needs two values or more, got {len(values)}")
    x = np.array(values, dtype=np.float64)
    half = _student_quantile((1 + LEVEL) / 2, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()) - half, float(x.mean()) + half


def _student_quantile(share: float, freedom: int) -> float:
    """Return the t below which a share (above 1/2) of Student's distribution lies."""
    # t = √freedom · tan φ turns the density into a cosine power: P(0 < T < t) = ∫ cos^(freedom − 1) / (2 ∫ over π/2).
    angles = np.linspace(0, math.pi / 2, 100_001)
    powers = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((powers[1:] + powers[:-1]) / 2)])
    angle = float(np.interp((share - 0.5) * 2 * area[-1], area, angles))
    return math.sqrt(freedom) * math.tan(angle)
