"""The search on a device returns what comparing with all vectors does."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation import device_search
from patchloom.evaluation.device_search import BLOCK, GROUP, DeviceVectors
from patchloom.evaluation.exact_search import exact_nearest
from tests.evaluation.test_exact_search import InMemory, brute_force, unit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(vectors: Tensor, queries: Tensor, k: int, part: int) -> None:
    scores, positions = DeviceVectors(InMemory(vectors, part), DEVICE).nearest(queries, k)
    expected_scores, expected = brute_force(vectors, queries, k)
    assert positions.tolist() == expected.tolist()
    assert scores.tolist() == expected_scores.tolist()


@pytest.mark.parametrize(("k", "part"), [(1, 7), (10, 100), (300, 64), (1000, 1000), (2000, 1000)])
def test_what_comparing_with_all_gives(k: int, part: int) -> None:
    check(unit(1000), unit(30, seed=1), min(k, 1000), part)


def test_several_groups_the_last_of_which_is_not_full() -> None:
    """The zeros behind the last vector must not count: here all products are negative."""
    vectors = unit(3 * GROUP + 100, 70)
    center = F.normalize(vectors.mean(dim=0), dim=0)
    vectors = F.normalize(vectors + center)
    queries = torch.cat([-center[None], unit(9, 70, seed=1)])
    assert (vectors @ queries[0]).max() < 0
    stored = InMemory(vectors, 5000)
    scores, positions = DeviceVectors(stored, DEVICE).nearest(queries, 10)
    expected_scores, expected = exact_nearest(stored, queries, 10)
    assert positions.tolist() == expected.tolist()
    assert scores.tolist() == expected_scores.tolist()


def test_copies_come_in_the_order_they_were_stored() -> None:
    vectors = unit(500)
    copies = torch.arange(3, 500, 5)
    vectors[copies] = vectors[3].clone()
    check(vectors, torch.cat([vectors[3:4], unit(5, seed=1)]), 10, 64)


@pytest.mark.parametrize(("blocks", "rows"), [(1024, 4096), (1024, 50), (2, 4096)])
def test_vectors_that_differ_less_than_their_copies(blocks: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are candidates; beyond a number of them the stored vectors are scanned."""
    monkeypatch.setattr(device_search, "MANY_BLOCKS", blocks)
    monkeypatch.setattr(device_search, "MANY_VECTORS", rows)
    vectors = F.normalize(unit(1, 256) + 1e-5 * unit(600, 256, seed=1))
    assert (vectors - vectors.half().float()).norm(dim=1).max() > (vectors - vectors[0]).norm(dim=1).max()
    check(vectors, vectors[:20], 10, 128)


def test_the_margin_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the distances of the copies, the best by float16 products are returned, which are others."""
    vectors = F.normalize(unit(1, 256) + 1e-4 * unit(5000, 256, seed=1))
    stored = InMemory(vectors, 1000)
    expected = exact_nearest(stored, vectors[:20], 10)[1]
    monkeypatch.setattr(device_search, "MANY_VECTORS", 10_000)
    assert torch.equal(DeviceVectors(stored, DEVICE).nearest(vectors[:20], 10)[1], expected)
    monkeypatch.setattr(
        device_search, "_floor", lambda scores, k, _: scores.topk(min(k, scores.shape[1])).values[:, -1:]
    )
    assert not torch.equal(DeviceVectors(stored, DEVICE).nearest(vectors[:20], 10)[1], expected)


def test_few_vectors_are_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random vectors are far enough apart that blocks and groups are passed over."""
    looked_at = []
    near = device_search._near
    monkeypatch.setattr(device_search, "_near", lambda *x: looked_at.append(near(*x).shape[1]) or near(*x))
    vectors = unit(20 * GROUP, 64)
    DeviceVectors(InMemory(vectors, 10_000), DEVICE).nearest(unit(4, 64, seed=1), 5)
    groups, blocks, rows = looked_at
    assert groups < 20
    assert blocks < 100 < 20 * GROUP // BLOCK
    assert rows < 20
