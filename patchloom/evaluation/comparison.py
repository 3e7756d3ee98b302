"""Paired comparison of classifiers on the same images, with confidence intervals and tests.

On 500 images an accuracy of 80 % is known to ±3.5 points. Two classifiers mostly err on the same images, however, so
the images on which exactly one of them is right tell more than two such intervals.

name                            value
difference                      top-1 of the first minus that of the second, in points
difference_low, difference_high its seeded bootstrap interval over test images, 95 %
only_first, only_second         images that only one of them classifies correctly
mcnemar_p                       p-value of the exact two-sided McNemar test of equal accuracy
significant                     1 if that is below 5 % after Holm's correction for all pairs, else 0
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from patchloom.evaluation.classification import ClassificationReport
from patchloom.evaluation.intervals import LEVEL, central
from patchloom_runtime.errors import UsageError

RESAMPLES = 10_000


@dataclass(frozen=True)
class Comparison:
    """Two classifiers on the same images."""

    first: str
    second: str
    difference: float
    low: float
    high: float
    only_first: int
    only_second: int
    p_value: float
    significant: bool

    def __iter__(self) -> Iterator[tuple[str, float]]:
        yield "difference", self.difference
        yield "difference_low", self.low
        yield "difference_high", self.high
        yield "only_first", float(self.only_first)
        yield "only_second", float(self.only_second)
        yield "mcnemar_p", self.p_value
        yield "significant", float(self.significant)


def compare(reports: Mapping[str, ClassificationReport]) -> list[Comparison]:
    """Compare all pairs of classifiers, in the order of `reports` (name → report on the same images)."""
    pairs = list(combinations(reports, 2))
    counts = [_uneven(a, b, reports[a], reports[b]) for a, b in pairs]
    p_values = [mcnemar(*count) for count in counts]
    marks = holm(p_values, 1 - LEVEL)
    comparisons = []
    for (a, b), (only_a, only_b), p, mark in zip(pairs, counts, p_values, marks, strict=True):
        images = len(reports[a].index)
        low, high = bootstrap_difference(only_a, only_b, images)
        comparisons.append(Comparison(a, b, 100 * (only_a - only_b) / images, low, high, only_a, only_b, p, mark))
    return comparisons


def _uneven(a: str, b: str, first: ClassificationReport, second: ClassificationReport) -> tuple[int, int]:
    """Return the number of images that only the first, and only the second, classifies correctly."""
    if not np.array_equal(first.index, second.index) or not np.array_equal(first.labels, second.labels):
        raise UsageError(
            f"{a} was evaluated on {len(first.index)} images and {b} on {len(second.index)}, and they differ; "
            "evaluate both on the same data."
        )
    right, other = first.ranks == 0, second.ranks == 0
    return int(np.sum(right & ~other)), int(np.sum(other & ~right))


def bootstrap_difference(only_first: int, only_second: int, images: int, *, seed: int = 0) -> tuple[float, float]:
    """Return the percentile interval of the top-1 difference, in points, over resampled test sets.

    Only the numbers of images of the three kinds matter, and these are multinomial: sampling them is equivalent to
    sampling images one by one.
    """
    shares = np.array([only_first, only_second, images - only_first - only_second]) / images
    drawn = np.random.default_rng(seed).multinomial(images, shares, size=RESAMPLES)
    differences = 100 * (drawn[:, 0] - drawn[:, 1]) / images
    return central(differences)


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of the McNemar test; 1 if the classifiers never differ."""
    throws, fewer = only_first + only_second, min(only_first, only_second)
    ways, term = 0, 1
    for heads in range(fewer + 1):  # integers: exact for any count
        ways += term
        term = term * (throws - heads) // (heads + 1)
    return min(1.0, 2 * ways / 2**throws)


def holm(p_values: Sequence[float], error: float) -> list[bool]:
    """Return which tests are significant with a family-wise error rate below `error` (Holm 1979)."""
    significant = [False] * len(p_values)
    for passed, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > error / (len(p_values) - passed):
            break
        significant[i] = True
    return significant
