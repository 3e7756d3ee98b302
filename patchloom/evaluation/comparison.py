"""Which of two classifiers is better, judged on the same images, and how sure that is.

On 500 images an accuracy of 80 % is known to ±3.5 points; but two classifiers mostly err on the same images, so the
images on which exactly one of them is right tell more than two such intervals do.

name                            value
difference                      top-1 of the first less that of the second, in points
difference_low, difference_high bootstrap interval of it over test images, 95 %, seeded
only_first, only_second         images that one of them alone gets right
mcnemar_p                       exact two-sided McNemar test: how likely counts as uneven are between equal classifiers
significant                     1 where that stays below 5 % among all pairs compared (Holm), else 0
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from patchloom.evaluation.classification import ClassificationReport
from patchloom.evaluation.intervals import LEVEL
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


def compare(reports: Mapping[str, ClassificationReport], *, level: float = LEVEL, seed: int = 0) -> list[Comparison]:
    """All pairs of classifiers, each pair in the order given; name → what it decided about the same images."""
    pairs = list(combinations(reports, 2))
    counts = [_uneven(a, b, reports[a], reports[b]) for a, b in pairs]
    p_values = [mcnemar(*count) for count in counts]
    marks = holm(p_values, 1 - level)
    found = []
    for (a, b), (only_a, only_b), p, mark in zip(pairs, counts, p_values, marks, strict=True):
        images = len(reports[a].index)
        low, high = bootstrap_difference(only_a, only_b, images, level=level, seed=seed)
        found.append(Comparison(a, b, 100 * (only_a - only_b) / images, low, high, only_a, only_b, p, mark))
    return found


def _uneven(a: str, b: str, first: ClassificationReport, second: ClassificationReport) -> tuple[int, int]:
    """Images that only the first, and only the second gets right."""
    if not np.array_equal(first.index, second.index) or not np.array_equal(first.labels, second.labels):
        raise UsageError(
            f"{a} decided about {len(first.index)} images, {b} about {len(second.index)}, and they are not the same; "
            "evaluate both on the same data."
        )
    right, other = first.ranks == 0, second.ranks == 0
    return int(np.sum(right & ~other)), int(np.sum(other & ~right))


def bootstrap_difference(
    only_first: int, only_second: int, images: int, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the difference in top-1, in points, over test sets drawn from this one.

    Of a drawn set only the numbers of images of the three kinds matter, and these are multinomial: the same as
    drawing images one by one, without doing so.
    """
    shares = np.array([only_first, only_second, images - only_first - only_second]) / images
    drawn = np.random.default_rng(seed).multinomial(images, shares, size=resamples)
    differences = 100 * (drawn[:, 0] - drawn[:, 1]) / images
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p: a fair coin thrown for each uneven image falls at least as unevenly; 1 where there is none."""
    throws, fewer = only_first + only_second, min(only_first, only_second)
    ways, term = 0, 1
    for heads in range(fewer + 1):  # whole numbers: exact however many there are
        ways += term
        term = term * (throws - heads) // (heads + 1)
    return min(1.0, 2 * ways / 2**throws)


def holm(p_values: Sequence[float], error: float) -> list[bool]:
    """Which tests are significant when the chance of any false one is to stay below `error` (Holm 1979)."""
    significant = [False] * len(p_values)
    for passed, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > error / (len(p_values) - passed):
            break
        significant[i] = True
    return significant
