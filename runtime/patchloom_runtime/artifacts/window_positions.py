"""Where windows lie on the sides of a picture: a stride apart, the last ones shifted back inside."""

from collections.abc import Iterator
from itertools import pairwise


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin on a side of `length`: a stride apart, the last shifted back to end where the side does."""
    count = max(0, -(-(length - window) // stride)) + 1
    return sorted({max(0, min(i * stride, length - window)) for i in range(count)})


def stretches(begins: list[int], window: int, at_once: int) -> Iterator[slice]:
    """Stretches of a side in which the same windows lie, each of `at_once` places at most."""
    edges = sorted({edge for begin in begins for edge in (begin, begin + window)})
    for start, stop in pairwise(edges):
        for first in range(start, stop, at_once):
            yield slice(first, min(stop, first + at_once))
