"""The nearest vectors: exactly those of comparing with all, in one order, whatever the parts and the queries."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation.exact_search import (
    SPARE,
    Subset,
    conditioned_nearest,
    exact_nearest,
)


class InMemory:
    def __init__(self, vectors: Tensor, part: int) -> None:
        self.vectors, self.part = vectors, part

    def __len__(self) -> int:
        return len(self.vectors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.vectors.split(self.part))

    def rows(self, positions: Tensor) -> Tensor:
        return self.vectors[positions]


def unit(count: int, dim: int = 24, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)))


def brute_force(vectors: Tensor, queries: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Every score, then every position ordered by (score falling, position rising), one query at a time."""
    scores = (queries.double() @ vectors.double().T).float().numpy()
    order = np.array([sorted(range(len(vectors)), key=lambda i, row=row: (-row[i], i))[:k] for row in scores])
    return np.take_along_axis(scores, order, 1), order


def check(vectors: Tensor, queries: Tensor, k: int, part: int) -> None:
    scores, positions = exact_nearest(InMemory(vectors, part), queries, k)
    expected_scores, expected = brute_force(vectors, queries, k)
    np.testing.assert_array_equal(positions.numpy(), expected)
    np.testing.assert_array_equal(scores.numpy(), expected_scores)


@pytest.mark.parametrize(("k", "part"), [(1, 7), (10, 100), (10, 1000), (300, 64), (1000, 1000)])
def test_what_comparing_with_all_gives(k: int, part: int) -> None:
    check(unit(1000), unit(30, seed=1), k, part)


@pytest.mark.parametrize("part", [7, 64, 200])
def test_some_of_the_vectors_are_searched_as_if_they_were_all(part: int) -> None:
    vectors, queries = unit(200), unit(5, seed=1)
    chosen = torch.tensor([0, 3, 4, *range(70, 90), 130, 199])
    some = Subset(InMemory(vectors, part), chosen)
    scores, positions = exact_nearest(some, queries, 10)
    expected_scores, expected = brute_force(vectors[chosen], queries, 10)
    np.testing.assert_array_equal(some.of_all(positions).numpy(), chosen.numpy()[expected])
    np.testing.assert_array_equal(scores.numpy(), expected_scores)


@pytest.mark.parametrize("part", [7, 64, 200])
def test_what_is_added_for_a_class_counts_as_the_cosine_does(part: int) -> None:
    vectors, queries = unit(200), unit(5, seed=1)
    vectors[152] = vectors[20]  # of one class too
    classes = torch.arange(200) % 3
    added = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores, cosines, positions = conditioned_nearest(InMemory(vectors, part), queries, classes, added, 60)
    whole = (queries.double() @ vectors.double().T).float()
    for query in range(5):
        totals = [float(whole[query, i]) + float(added[query, i % 3]) for i in range(200)]
        expected = sorted(range(200), key=lambda i, totals=totals: (-totals[i], i))[:60]
        assert positions[query].tolist() == expected
        assert scores[query].tolist() == [totals[i] for i in expected]
        assert cosines[query].tolist() == whole[query, expected].tolist()


def test_among_many_most_vectors_are_passed_over() -> None:
    """The first set a bar that few of the others are above, until the last ones, which are nearer than any before."""
    vectors, queries = unit(12_000), unit(20, seed=1)
    vectors[9000:] = F.normalize(vectors[9000:] + queries.mean(dim=0) * 30)
    check(vectors, queries, 10, 5000)
    check(vectors, queries, 10, 700)


def test_copies_come_in_the_order_they_were_stored() -> None:
    """More copies than spare candidates, spread over parts: which ones a top-k of products finds is chance."""
    vectors = unit(500)
    copies = torch.arange(3, 500, 5)
    vectors[copies] = vectors[3].clone()
    assert len(copies) > 10 + SPARE
    _, positions = exact_nearest(InMemory(vectors, 64), vectors[3:4], 10)
    assert positions[0].tolist() == copies[:10].tolist()
    check(vectors, torch.cat([vectors[3:4], unit(5, seed=1)]), 10, 64)


def test_vectors_that_hardly_differ() -> None:
    """Closer together than a product in float32 tells: features of a network that learned nothing."""
    vectors = F.normalize(unit(1, 256) + 1e-5 * unit(600, 256, seed=1))
    check(vectors, vectors[:20], 10, 128)


def test_fewer_than_asked_for() -> None:
    scores, positions = exact_nearest(InMemory(unit(3), 2), unit(2, seed=1), 10)
    assert scores.shape == positions.shape == (2, 3)
