"""Approximate search against exact search: scores, removed and added vectors, proofs and the stated recall."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation import approximate_search
from patchloom.evaluation.approximate_search import (
    ListedVectors,
    Lists,
    ListSettings,
    choose_settings,
    import_faiss,
    measure_recall,
    write_lists,
)
from patchloom.evaluation.exact_search import exact_nearest
from patchloom_runtime.errors import UsageError
from tests.evaluation.test_exact_search import InMemory, unit

THOROUGH = ListSettings(probes=512, candidates=400, recall=1.0, queries=1)
NONE = torch.empty(0, dtype=torch.int64)


def clustered(centers: int, members: int, spread: float) -> Tensor:
    return F.normalize(unit(centers).repeat_interleave(members, dim=0) + spread * unit(centers * members, seed=1))


def lists_of(vectors: Tensor, folder: Path) -> Lists:
    pytest.importorskip("faiss")
    write_lists(InMemory(vectors, 512), folder / "codes", folder / "radii")
    return Lists(folder / "codes", folder / "radii")


def test_faiss_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UsageError, match=r"pip install 'patchloom\[faiss\]'"):
        import_faiss()


def test_scores_are_exact_and_most_neighbors_are_returned(tmp_path: Path) -> None:
    vectors = clustered(300, 10, 0.05)
    stored = InMemory(vectors, 512)
    listed = ListedVectors(stored, lists_of(vectors, tmp_path), NONE)
    scores, positions, _ = listed.nearest(vectors[:200], 10, THOROUGH)
    expected_scores, expected = exact_nearest(stored, vectors[:200], 10)
    assert measure_recall(positions, expected) > 0.95
    torch.testing.assert_close(scores[positions == expected], expected_scores[positions == expected], rtol=0, atol=0)


def test_removed_vectors_are_not_returned_and_later_ones_are(tmp_path: Path) -> None:
    vectors, later = clustered(100, 10, 0.3), unit(50, seed=5)
    lists = lists_of(vectors, tmp_path)
    removed = torch.tensor([0, 5, 17, 500, 999])
    remaining = np.delete(np.arange(len(vectors)), removed.numpy())
    everything = torch.cat([vectors[torch.from_numpy(remaining)], later])
    stored = InMemory(everything, 64)
    listed = ListedVectors(stored, lists, removed, InMemory(later, 16))
    queries = torch.cat([vectors[[0, 5, 17]], later[:5], unit(20, seed=7)])
    everything_is_compared = ListSettings(probes=10**6, candidates=1000, recall=1.0, queries=1)
    scores, positions, _ = listed.nearest(queries, 10, everything_is_compared)
    expected_scores, expected = exact_nearest(stored, queries, 10)
    assert torch.equal(positions, expected)
    assert torch.equal(scores, expected_scores)


def test_proven_results_are_those_of_an_exact_search(tmp_path: Path) -> None:
    """Tight clusters that are far apart: all but the nearest lists can be excluded, whatever the candidates were."""
    vectors = clustered(40, 40, 0.02)
    stored = InMemory(vectors, 512)
    listed = ListedVectors(stored, lists_of(vectors, tmp_path), NONE)
    queries = torch.cat([vectors[::100], unit(30, seed=9)])
    careless = ListSettings(probes=1, candidates=1, recall=0.0, queries=1)
    scores, positions, proven = listed.nearest(queries, 10, careless)
    expected_scores, expected = exact_nearest(stored, queries, 10)
    assert proven[:16].all()
    assert torch.equal(positions[proven], expected[proven])
    assert torch.equal(scores[proven], expected_scores[proven])


def test_no_proof_where_vectors_are_everywhere(tmp_path: Path) -> None:
    vectors = unit(6000)
    listed = ListedVectors(InMemory(vectors, 512), lists_of(vectors, tmp_path), NONE)
    assert not listed.nearest(unit(20, seed=3), 10, THOROUGH).proven.any()


def test_settings_are_the_quickest_that_reach_the_recall(tmp_path: Path) -> None:
    tight, scattered = clustered(300, 20, 0.05), unit(6000)
    (tmp_path / "tight").mkdir()
    (tmp_path / "scattered").mkdir()
    easy = choose_settings(ListedVectors(InMemory(tight, 512), lists_of(tight, tmp_path / "tight"), NONE))
    hard = choose_settings(ListedVectors(InMemory(scattered, 512), lists_of(scattered, tmp_path / "scattered"), NONE))
    assert easy.recall >= 0.99
    assert hard.recall >= 0.99
    assert easy.probes < hard.probes


def test_stated_recall_is_that_of_vectors_the_settings_were_not_chosen_with(tmp_path: Path, monkeypatch) -> None:
    vectors = torch.stack([clustered(300, 10, 0.05), unit(3000, seed=3)], dim=1).flatten(0, 1)
    monkeypatch.setattr(approximate_search, "RECALL_QUERIES", len(vectors))
    stored = InMemory(vectors, 512)
    listed = ListedVectors(stored, lists_of(vectors, tmp_path), NONE)
    settings = choose_settings(listed)
    scattered = torch.arange(1, len(vectors), 2)
    positions = listed.nearest(vectors[scattered], 11, settings).positions
    expected = exact_nearest(stored, vectors[scattered], 11)[1]
    assert settings.queries == len(scattered)
    assert settings.recall == pytest.approx(measure_recall(positions[:, 1:], expected[:, 1:]))
    assert settings.recall < 0.9


def test_recall_counts_positions_in_any_order() -> None:
    expected = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert measure_recall(torch.tensor([[4, 3, 9, -1], [8, 7, 6, 5]]), expected) == pytest.approx(6 / 8)
