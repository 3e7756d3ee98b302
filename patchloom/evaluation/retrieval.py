"""Search by embeddings at every level of a taxonomy: on-the-fly classification and retrieval (thesis 2.3).

Queries are test images and the collection is train; an image is relevant if it has the query's label at the level.
Networks trained at one level are evaluated at all of them (tables 2.5, 2.6, 2.14).

name                      value, in percent
knn{k}_top1, …_top5       on-the-fly classification of eq. 2.6, as `evaluation.knn`, σ = 0.05
map                       mean average precision, ranked by cosine
map_conditioned           … by cosine + log(p/(1 − p)), p the kNN posterior of the image's coarse class (eq. 2.5, 2.6)
map_conditioned_all       … p from all of train rather than k neighbors (eq. 2.2)
map_conditioned_softmax   … p the softmax of the network's own classifier, for cross-entropy training (table 2.7)
map_oracle                … p from the query's true coarse class
map_queries               number of queries with a relevant image in the collection (not percent)

Names at a coarser level end in the level: `map_coarse`. Average precision covers the whole ranking; images with equal
scores stay in the order of the dataset. Queries without a relevant image are ignored.

Letters: Q queries of a part, M of the dataset, N images of the collection, K coarse classes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.datasets import ClassTable
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import NEIGHBORS, check_neighbors, knn, label_ranks, nearest
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.errors import nearest as closest

TEMPERATURE = 0.05
CANDIDATES = (10, 15, 20, 25, 30)  # numbers of neighbors that the thesis selects from (2.4.3)
# The kNN posterior is often exactly 0 or 1. ±13.8 outweighs any cosine: the coarse class then comes first.
LEAST_PROBABILITY = 1e-6
PART_BYTES = 256 << 20


def average_precision(order: Tensor, right: Tensor) -> Tensor:
    """Return AP (Q,) in 0…1 from rankings `order` and relevance `right`, (Q, N) each; NaN without relevant images.

    AP is the mean, over the relevant images, of the precision down to each of them.
    """
    hits = right.gather(1, order).double()
    ranks = torch.arange(1, order.shape[1] + 1, device=order.device)
    return (hits.cumsum(dim=1) / ranks * hits).sum(dim=1) / hits.sum(dim=1)


def vote_weights(cosines: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return the vote weights (…, k) of neighbors from their cosines, float64, summing to 1 (equation 2.6)."""
    return (cosines.double() / temperature).softmax(dim=-1)


def knn_posterior(
    train: Tensor, test: Tensor, labels: Tensor, classes: int, *, k: int, temperature: float = TEMPERATURE
) -> Tensor:
    """Return class shares (M, K) float64 of the k nearest, weighted by exp(cos/σ) (equation 2.6).

    Takes unit vectors (N, D) and (M, D), and labels (N,). New classes need no training: their images are rows of
    `train`.
    """
    check_neighbors([k], len(train))
    parts = []
    for cosines, positions in nearest(train, test, k):
        shares = vote_weights(cosines, temperature)
        parts.append(shares.new_zeros(len(shares), classes).scatter_add_(1, labels[positions], shares))
    return torch.cat(parts)


def memory_posterior(
    train: Tensor, test: Tensor, labels: Tensor, classes: int, *, temperature: float = TEMPERATURE
) -> Tensor:
    """Return the posterior from votes of all train images (equation 2.2): smoother, never quite 0 or 1."""
    members = F.one_hot(labels, classes).double()  # (N, K)
    rows = max(1, PART_BYTES // (8 * len(train)))
    parts = [((part @ train.T).double() / temperature).softmax(dim=1) @ members for part in test.split(rows)]
    return torch.cat(parts)


def log_odds(posterior: Tensor) -> Tensor:
    """Return log(p/(1 − p)), the second term of equation 2.5, with p not quite 0 or 1."""
    return posterior.double().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY).logit()


@torch.no_grad()
def choose_neighbors(train: Embeddings, *, classes: int, candidates: Sequence[int] = CANDIDATES) -> int:
    """Return the k with the best leave-one-out top-1 on train, the smallest of equal ones. Val is not used.

    If train has fewer images than every candidate, all others vote.
    """
    train = train.labeled("train")
    if len(train) < 2:
        raise DataError("Train has a single labeled image, hence no neighbors: k cannot be chosen.")
    possible = [k for k in sorted(candidates) if k < len(train)] or [len(train) - 1]
    unit = F.normalize(train.vectors)
    hits = dict.fromkeys(possible, 0)
    done = 0
    for cosines, positions in nearest(unit, unit, possible[-1] + 1):
        own = torch.arange(done, done + len(cosines), device=positions.device)[:, None]
        done += len(cosines)
        # The image itself is moved to the end and cut off; among many copies it may be absent, then the farthest is.
        order = (positions == own).long().argsort(dim=1, stable=True)[:, :-1]
        voted, weights = train.labels[positions.gather(1, order)], (cosines.gather(1, order) / TEMPERATURE).exp()
        for k in possible:
            hits[k] += int((label_ranks(voted[:, :k], weights[:, :k], train.labels[own], classes) < 1).sum())
    return max(possible, key=lambda k: hits[k])


@torch.no_grad()
def mean_average_precision(
    train: Embeddings,
    test: Embeddings,
    labels: Mapping[str, tuple[Tensor, Tensor]],
    condition: tuple[Tensor, Tensor] | None = None,
) -> dict[str, tuple[float, int]]:
    """Return level → (mAP in percent, number of queries); `labels` are (N,) and (M,) per level.

    One ranking serves all levels: by cosine or, with `condition` = (coarse labels (N,) of train, posterior (M, K) of
    the queries), by equation 2.5. The posterior may be the softmax of a network trained with cross-entropy.
    """
    unit_train, unit_test = F.normalize(train.vectors), F.normalize(test.vectors)
    rows = max(1, PART_BYTES // (8 * len(train)))
    precisions: dict[str, list[Tensor]] = {level: [] for level in labels}
    for queries in torch.arange(len(test), device=unit_test.device).split(rows):
        scores = (unit_test[queries] @ unit_train.T).double()
        if condition:
            coarse, posterior = condition
            scores += log_odds(posterior[queries])[:, coarse]
        order = scores.argsort(dim=1, descending=True, stable=True)
        for level, (train_labels, test_labels) in labels.items():
            precisions[level].append(average_precision(order, test_labels[queries, None] == train_labels))
    return {level: _mean_of(torch.cat(parts)) for level, parts in precisions.items()}


def _mean_of(precisions: Tensor) -> tuple[float, int]:
    counted = precisions[~precisions.isnan()]
    if not len(counted):
        raise DataError("No test image has a train image of its class, so nothing can be retrieved.")
    return 100 * float(counted.mean()), len(counted)


@torch.no_grad()
def retrieval(
    train: Embeddings,
    test: Embeddings,
    *,
    classes: ClassTable,
    trained_level: str | None = None,
    k: Sequence[int] = NEIGHBORS,
    softmax: Tensor | None = None,
) -> Iterator[tuple[str, float]]:
    """Yield every metric of this module at every level, finest first; conditioned ones if trained at a coarser level.

    `trained_level` is one of `classes.levels`; None means the finest. The first of `k` defines the posterior of the
    conditioned ranking. `softmax` (M, K) is the classifier's output for the classes of the trained level.
    """
    softmax = None if softmax is None else softmax[test.labels >= 0]
    train, test = train.labeled("train"), test.labeled("val")
    check_neighbors(k, len(train))
    counts = _levels(classes)
    labels = {
        level: (at_level(train, classes, level).labels, at_level(test, classes, level).labels) for level in counts
    }
    ranked = {"map": mean_average_precision(train, test, labels, None)}
    if trained_level:
        posteriors = _conditions(train, test, classes, trained_level, k)
        finer = {level: labels[level] for level in counts if counts[level] > counts[trained_level]}
        posteriors |= {} if softmax is None else {"map_conditioned_softmax": softmax}
        for name, posterior in posteriors.items():
            ranked[name] = (
                mean_average_precision(train, test, finer, (labels[trained_level][0], posterior)) if finer else {}
            )
    for level, count in counts.items():
        own_train, own_test = at_level(train, classes, level), at_level(test, classes, level)
        suffix = f"_{level}" if level else ""
        for name, value in knn(own_train, own_test, classes=count, k=k, temperature=TEMPERATURE):
            yield name + suffix, value
        yield f"map{suffix}", ranked["map"][level][0]
        yield f"map_queries{suffix}", float(ranked["map"][level][1])
        for name, by_level in ranked.items():
            if name != "map" and level in by_level:
                yield name + suffix, by_level[level][0]


def at_level(images: Embeddings, classes: ClassTable, level: str) -> Embeddings:
    """Return the same vectors with the labels of `level`; "" is the finest. All must be labeled."""
    if not level:
        return images
    if level not in classes.levels:
        known = ", ".join(classes.levels) or "none"
        raise UsageError(f"The classes have no level {level!r}. Levels: {known}.{closest(level, list(classes.levels))}")
    coarse = torch.tensor(classes.levels[level][1], device=images.labels.device)
    return replace(images, labels=coarse[images.labels])


def _levels(classes: ClassTable) -> dict[str, int]:
    """Return level → number of classes; "" is the finest."""
    return {"": len(classes)} | {level: len(names) for level, (names, _) in classes.levels.items()}


def _conditions(
    train: Embeddings, test: Embeddings, classes: ClassTable, level: str, k: Sequence[int]
) -> dict[str, Tensor]:
    """Return metric name → posterior (M, K) of the coarse classes that it is conditioned on."""
    labels, true = at_level(train, classes, level).labels, at_level(test, classes, level).labels
    unit_train, unit_test = F.normalize(train.vectors), F.normalize(test.vectors)
    inputs = (unit_train, unit_test, labels, len(classes.levels[level][0]))
    return {
        "map_conditioned": knn_posterior(*inputs, k=k[0]),
        "map_conditioned_all": memory_posterior(*inputs),
        "map_oracle": F.one_hot(true, inputs[-1]),
    }
