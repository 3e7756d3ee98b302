"""Retrieval against slow versions of its equations, and on cases whose answer is known."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from patchloom.data.datasets import ClassTable
from patchloom.evaluation import retrieval as retrieval_module
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import knn
from patchloom.evaluation.retrieval import (
    at_level,
    average_precision,
    choose_neighbors,
    knn_posterior,
    log_odds,
    mean_average_precision,
    memory_posterior,
    retrieval,
)
from patchloom_runtime.errors import DataError, UsageError

# Four fine classes in two coarse ones.
CLASSES = ClassTable(("ant", "bee", "cat", "dog"), {"coarse": (("insect", "mammal"), (0, 0, 1, 1))})


def unit(*shape: int, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(values)


def images(vectors: Tensor, labels: list[int] | Tensor) -> Embeddings:
    return Embeddings(vectors, torch.as_tensor(labels), torch.arange(len(vectors)))


def random_sets(train: int = 40, test: int = 12) -> tuple[Embeddings, Embeddings]:
    return images(unit(train, 5), torch.arange(train) % 4), images(unit(test, 5, seed=1), torch.arange(test) % 4)


# Average precision ----------------------------------------------------------------------------------------------------


def slow_average_precision(scores: list[float], right: list[bool]) -> float:
    order = sorted(range(len(scores)), key=lambda place: -scores[place])  # sorted keeps the order of equals
    precisions, hits = [], 0
    for rank, place in enumerate(order, 1):
        if right[place]:
            hits += 1
            precisions.append(hits / rank)
    return sum(precisions) / len(precisions) if precisions else math.nan


def order_of(scores: Tensor) -> Tensor:
    return scores.argsort(dim=1, descending=True, stable=True)


def map_of(train: Embeddings, test: Embeddings, condition: tuple[Tensor, Tensor] | None = None) -> tuple[float, int]:
    return mean_average_precision(train, test, {"": (train.labels, test.labels)}, condition)[""]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=20))
def test_average_precision_is_its_definition(rows):
    """Few values, so that most are equal; half of them negative."""
    scores, right = ([row[column] for row in rows] for column in (0, 1))
    result = average_precision(order_of(torch.tensor([scores])), torch.tensor([right])).item()
    assert result == pytest.approx(slow_average_precision(scores, right), nan_ok=True)


def test_average_precision_by_hand():
    scores = torch.tensor([[-0.1, -0.5, -0.2, -0.9]])
    right = torch.tensor([[False, True, True, False]])
    assert average_precision(order_of(scores), right).item() == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert average_precision(order_of(torch.zeros(1, 4)), right).item() == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_a_query_without_a_right_image_is_left_out():
    train = images(torch.eye(3), [0, 1, 1])
    test = images(torch.tensor([[1.0, 0, 0], [0, 0, 1.0]]), [0, 3])
    assert map_of(train, test) == (100.0, 1)
    with pytest.raises(DataError):
        map_of(train, test.rows([1]))


def test_parts_change_nothing(monkeypatch):
    train, test = random_sets()
    whole = dict(retrieval(train, test, classes=CLASSES, trained_level="coarse", k=(5,)))
    monkeypatch.setattr(retrieval_module, "PART_BYTES", 5 * 8 * len(train))
    assert dict(retrieval(train, test, classes=CLASSES, trained_level="coarse", k=(5,))) == pytest.approx(whole)


# Conditioning ---------------------------------------------------------------------------------------------------------


def slow_posterior(train: Tensor, query: Tensor, labels: list[int], k: int, sigma: float) -> list[float]:
    cosines = [float(row @ query) for row in train]
    chosen = sorted(range(len(cosines)), key=lambda place: -cosines[place])[:k]
    votes = [sum(math.exp(cosines[j] / sigma) for j in chosen if labels[j] == y) for y in range(2)]
    return [vote / sum(votes) for vote in votes]


@pytest.mark.parametrize("k", [1, 7, 40])
def test_the_posterior_is_equation_2_6(k):
    train, test = random_sets()
    labels = (train.labels // 2).tolist()
    expected = [slow_posterior(train.vectors, query, labels, k, 0.05) for query in test.vectors]
    given = (train.vectors, test.vectors, torch.tensor(labels), 2)
    torch.testing.assert_close(knn_posterior(*given, k=k), torch.tensor(expected, dtype=torch.float64))
    if k == len(train):
        torch.testing.assert_close(memory_posterior(*given), torch.tensor(expected, dtype=torch.float64))


def test_log_odds_stay_finite():
    result = log_odds(torch.tensor([0.0, 0.5, 0.8, 1.0]))
    assert result.tolist() == pytest.approx([-13.8155, 0.0, math.log(4), 13.8155], abs=1e-4)


@pytest.mark.parametrize("k", [1, 9, None])
def test_the_conditioned_score_is_equation_2_5(k):
    train, test = random_sets()
    coarse = train.labels // 2
    expected = []
    for query, label in zip(test.vectors, test.labels.tolist(), strict=True):
        p = slow_posterior(train.vectors, query, coarse.tolist(), k or len(train), 0.05)
        p = [min(max(value, 1e-6), 1 - 1e-6) for value in p]
        scores = [
            float(row @ query) + math.log(p[y] / (1 - p[y]))
            for row, y in zip(train.vectors, coarse.tolist(), strict=True)
        ]
        expected.append(slow_average_precision(scores, (train.labels == label).tolist()))
    given = (train.vectors, test.vectors, coarse, 2)
    posterior = knn_posterior(*given, k=k) if k else memory_posterior(*given)
    result, queries = map_of(train, test, (coarse, posterior))
    assert result == pytest.approx(100 * sum(expected) / len(expected))
    assert queries == len(test)


def tempting() -> tuple[Embeddings, Embeddings]:
    """Queries whose own class lies half among a cloud of the other coarse class.

    In the plane, by angle: the query at 0°, ants at 2° and 40°, cats at 20° and 22°, dogs at 25°; bees far away.
    """
    angles = torch.tensor([2.0, 3.0, 40.0, 20.0, 22.0, 25.0, 90.0]).deg2rad()
    train = images(torch.stack([angles.cos(), angles.sin()], dim=1), [0, 0, 0, 2, 2, 3, 1])
    turned = torch.tensor([0.0, 1.0]).deg2rad()
    return train, images(torch.stack([turned.cos(), turned.sin()], dim=1), [0, 0])


def test_conditioning_raises_the_precision_and_an_oracle_more():
    train, test = tempting()
    # A third query lies among the cats: its neighbours mislead the prediction, not the oracle.
    misled = torch.tensor([[math.cos(0.37), math.sin(0.37)]])
    test = images(torch.cat([test.vectors, misled]), [0, 0, 0])
    result = dict(retrieval(train, test, classes=CLASSES, trained_level="coarse", k=(2,)))
    without_misled = dict(retrieval(train, test.rows([0, 1]), classes=CLASSES, trained_level="coarse", k=(2,)))
    assert without_misled["map"] == pytest.approx(100 * (1 + 1 + 3 / 6) / 3)
    assert without_misled["map_conditioned"] == pytest.approx(100.0)
    assert without_misled["map_oracle"] == pytest.approx(100.0)
    assert result["map_oracle"] == pytest.approx(100.0)
    assert result["map"] < result["map_conditioned"] < result["map_oracle"]


# Levels ---------------------------------------------------------------------------------------------------------------


def test_every_level_is_judged():
    train, test = random_sets()
    result = dict(retrieval(train, test, classes=CLASSES, trained_level="coarse", k=(5, 10)))
    assert [*result] == [
        "knn5_top1", "knn10_top1", "map", "map_queries", "map_conditioned", "map_conditioned_all", "map_oracle",
        "knn5_top1_coarse", "knn10_top1_coarse", "map_coarse", "map_queries_coarse",
    ]  # fmt: skip
    coarse = at_level(train, CLASSES, "coarse"), at_level(test, CLASSES, "coarse")
    assert result["map_coarse"] == map_of(*coarse)[0]
    assert result["knn5_top1_coarse"] == dict(knn(*coarse, classes=2, k=(5,), temperature=0.05))["knn5_top1"]
    assert "map_oracle" not in dict(retrieval(train, test, classes=CLASSES, k=(5,)))
    with pytest.raises(UsageError) as error:
        [*retrieval(train, test, classes=CLASSES, trained_level="family", k=(5,))]
    assert "family" in str(error.value)
    assert "coarse" in str(error.value)


def test_unlabeled_images_are_not_searched():
    train, test = random_sets()
    some = images(torch.cat([train.vectors, unit(3, 5, seed=7)]), torch.cat([train.labels, torch.full((3,), -1)]))
    expected = [*retrieval(train, test, classes=CLASSES, k=(5,))]
    assert [*retrieval(some, test, classes=CLASSES, k=(5,))] == expected


def test_new_classes_need_no_training():
    """GR-4: images of a class nobody knew are added, and queries of it are found."""
    train, _ = random_sets()
    away = torch.tensor([[10.0, 0, 0, 0, 0]], dtype=torch.float64)
    new = torch.nn.functional.normalize(unit(6, 5, seed=3) + away)
    joined, labels = torch.cat([train.vectors, new[:5]]), torch.cat([train.labels, torch.full((5,), 4)])
    assert knn_posterior(joined, new[5:], labels, 5, k=3)[0].argmax() == 4


# Choice of k ----------------------------------------------------------------------------------------------------------


def slow_leave_one_out(train: Embeddings, classes: int, k: int, sigma: float = 0.05) -> int:
    """Train images whose class has most votes among the k nearest others."""
    hits = 0
    for i, vector in enumerate(train.vectors):
        others = [j for j in range(len(train)) if j != i]
        near = sorted(others, key=lambda j, v=vector: -float(train.vectors[j] @ v))[:k]
        votes = [0.0] * classes
        for j in near:
            votes[int(train.labels[j])] += math.exp(float(train.vectors[j] @ vector) / sigma)
        hits += max(range(classes), key=lambda y: (votes[y], -y)) == int(train.labels[i])
    return hits


@pytest.mark.parametrize("seed", range(4))
def test_k_is_chosen_within_train_without_the_image_itself(seed):
    labels = torch.arange(36) % 3
    train = images(torch.nn.functional.normalize(unit(36, 4, seed=seed) + unit(3, 4, seed=9)[labels]), labels)
    hits = {k: slow_leave_one_out(train, 3, k) for k in (2, 5, 11, 30)}
    expected = min(k for k in hits if hits[k] == max(hits.values()))
    assert choose_neighbors(train, classes=3, candidates=(30, 5, 2, 11)) == expected


def test_k_of_copies_and_of_few_images():
    copies = images(torch.ones(6, 2), [0, 0, 0, 1, 1, 1])  # six equal images: the own one need not be found
    assert choose_neighbors(copies, classes=2, candidates=(1, 3)) in (1, 3)
    assert choose_neighbors(images(torch.eye(4), [0, 1, 0, 1]), classes=2) == 3
    with pytest.raises(DataError):
        choose_neighbors(images(torch.eye(1), [0]), classes=2)


def test_the_softmax_of_a_classifier_conditions_too():
    train, test = random_sets()
    softmax = torch.rand(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    result = dict(retrieval(train, test, classes=CLASSES, trained_level="coarse", k=(5,), softmax=softmax))
    expected, _ = map_of(train, test, (train.labels // 2, softmax))
    assert result["map_conditioned_softmax"] == pytest.approx(expected)
    assert "map_conditioned_softmax_coarse" not in result
    unlabeled = images(test.vectors, [-1, *test.labels.tolist()[1:]])
    fewer = dict(retrieval(train, unlabeled, classes=CLASSES, trained_level="coarse", k=(5,), softmax=softmax))
    expected, _ = map_of(train, test.rows(range(1, 12)), (train.labels // 2, softmax[1:]))
    assert fewer["map_conditioned_softmax"] == pytest.approx(expected)
