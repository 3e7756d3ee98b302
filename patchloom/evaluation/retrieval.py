"""Search by embeddings at every level of a taxonomy: on-the-fly classification and retrieval (thesis 2.3).

A query is a test image, the collection is train; an image is right where it has the query's label at the level.
Networks trained at one level are judged at all of them (tables 2.5, 2.6, 2.14).

name                      value, in percent
knn{k}_top1, …_top5       on-the-fly classification of eq. 2.6, as `evaluation.knn`, σ = 0.05
map                       mean average precision, ranked by cosine
map_conditioned           … by cosine + log(p/(1 − p)), p the kNN posterior of the image's coarse class (eq. 2.5, 2.6)
map_conditioned_all       … p from all of train rather than k neighbours (eq. 2.2)
map_conditioned_softmax   … p the softmax of the network's own classifier, where cross-entropy trained one (table 2.7)
map_oracle                … p from the query's true coarse class
map_queries               queries counted: those with a right image in the collection (a number, not percent)

Numbers of a coarser level end in its name: `map_coarse`. Average precision goes to the end of the list; images with
equal scores stay in the order of the set. A query without a right image is left out.

Letters: Q queries of a part, M of the set, N images of the collection, K coarse classes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.datasets import ClassTable
from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.knn import NEIGHBOURS, check_neighbours, knn, label_ranks, nearest
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.errors import nearest as closest

TEMPERATURE = 0.05
CANDIDATES = (10, 15, 20, 25, 30)  # neighbours among which the thesis chooses (2.4.3)
# The kNN posterior is often exactly 0 or 1. ±13.8 outweighs any cosine: the coarse class then comes first.
LEAST_PROBABILITY = 1e-6
PART_BYTES = 256 << 20


def average_precision(order: Tensor, right: Tensor) -> Tensor:
    """Images from first to last and which are right, (Q, N) each → (Q,) float64 in 0…1; NaN where none is right.

    Mean over the right images of the share of right ones down to each.
    """
    hits = right.gather(1, order).double()
    ranks = torch.arange(1, order.shape[1] + 1, device=order.device)
    return (hits.cumsum(dim=1) / ranks * hits).sum(dim=1) / hits.sum(dim=1)


def vote_weights(cosines: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Cosines (…, k) of neighbours → what the vote of each weighs, float64; they add up to 1 (equation 2.6)."""
    return (cosines.double() / temperature).softmax(dim=-1)


def knn_posterior(
    train: Tensor, test: Tensor, labels: Tensor, classes: int, *, k: int, temperature: float = TEMPERATURE
) -> Tensor:
    """(M, K) float64: share of the k nearest, weighted by exp(cos/σ), that each class has (equation 2.6).

    Unit vectors (N, D) and (M, D), labels (N,). New classes need no training: their images are rows of `train`.
    """
    check_neighbours([k], len(train))
    parts = []
    for cosines, positions in nearest(train, test, k):
        shares = vote_weights(cosines, temperature)
        parts.append(shares.new_zeros(len(shares), classes).scatter_add_(1, labels[positions], shares))
    return torch.cat(parts)


def memory_posterior(
    train: Tensor, test: Tensor, labels: Tensor, classes: int, *, temperature: float = TEMPERATURE
) -> Tensor:
    """As `knn_posterior`, with a vote of every image of train (equation 2.2): smoother, never quite 0 or 1."""
    members = F.one_hot(labels, classes).double()  # (N, K)
    rows = max(1, PART_BYTES // (8 * len(train)))
    parts = [((part @ train.T).double() / temperature).softmax(dim=1) @ members for part in test.split(rows)]
    return torch.cat(parts)


def log_odds(posterior: Tensor, least: float = LEAST_PROBABILITY) -> Tensor:
    """log(p/(1 − p)), the second term of equation 2.5, with p kept in least…1 − least."""
    return posterior.double().clamp(least, 1 - least).logit()


@torch.no_grad()
def choose_neighbours(
    train: Embeddings, *, classes: int, candidates: Sequence[int] = CANDIDATES, temperature: float = TEMPERATURE
) -> int:
    """The k with the best top-1 of train images by the other train images, the smallest of equals; val has no part.

    Where train has fewer images than any candidate, all others vote.
    """
    train = train.labeled("train")
    if len(train) < 2:
        raise DataError("One labelled image of train has no neighbours: k cannot be chosen.")
    possible = [k for k in sorted(candidates) if k < len(train)] or [len(train) - 1]
    unit = F.normalize(train.vectors)
    hits = dict.fromkeys(possible, 0)
    done = 0
    for cosines, positions in nearest(unit, unit, possible[-1] + 1):
        own = torch.arange(done, done + len(cosines), device=positions.device)[:, None]
        done += len(cosines)
        # The image itself goes last and is cut off; among many copies it may not be there, and the farthest is cut off.
        order = (positions == own).long().argsort(dim=1, stable=True)[:, :-1]
        voted, weights = train.labels[positions.gather(1, order)], (cosines.gather(1, order) / temperature).exp()
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
    """Level → mAP in percent and the queries it is the mean of; `labels` (N,) and (M,) of each level.

    One ranking serves all levels: by cosine, or, with (coarse labels (N,) of train, posterior (M, K) of the queries),
    by equation 2.5. A network trained by cross-entropy may give its softmax as the posterior.
    """
    unit_train, unit_test = F.normalize(train.vectors), F.normalize(test.vectors)
    rows = max(1, PART_BYTES // (8 * len(train)))
    found: dict[str, list[Tensor]] = {level: [] for level in labels}
    for queries in torch.arange(len(test), device=unit_test.device).split(rows):
        scores = (unit_test[queries] @ unit_train.T).double()
        if condition:
            coarse, posterior = condition
            scores += log_odds(posterior[queries])[:, coarse]
        order = scores.argsort(dim=1, descending=True, stable=True)
        for level, (of_train, of_test) in labels.items():
            found[level].append(average_precision(order, of_test[queries, None] == of_train))
    return {level: _mean_of(torch.cat(parts)) for level, parts in found.items()}


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
    k: Sequence[int] = NEIGHBOURS,
    temperature: float = TEMPERATURE,
    softmax: Tensor | None = None,
) -> Iterator[tuple[str, float]]:
    """Every number of this file at every level, finest first; conditioned ones where the trained level is coarser.

    `trained_level` is one of `classes.levels`, whose labels the network was trained with; None: the finest. The
    first of `k` gives the posterior of the conditioned ranking; `softmax` (M, K) is the classifier's, of the trained
    level's classes in their order.
    """
    softmax = None if softmax is None else softmax[test.labels >= 0]
    train, test = train.labeled("train"), test.labeled("val")
    check_neighbours(k, len(train))
    counts = _levels(classes)
    labels = {
        level: (at_level(train, classes, level).labels, at_level(test, classes, level).labels) for level in counts
    }
    ranked = {"map": mean_average_precision(train, test, labels, None)}
    if trained_level:
        posteriors = _conditions(train, test, classes, trained_level, k, temperature)
        finer = {level: labels[level] for level in counts if counts[level] > counts[trained_level]}
        posteriors |= {} if softmax is None else {"map_conditioned_softmax": softmax}
        for name, posterior in posteriors.items():
            ranked[name] = (
                mean_average_precision(train, test, finer, (labels[trained_level][0], posterior)) if finer else {}
            )
    for level, count in counts.items():
        own_train, own_test = at_level(train, classes, level), at_level(test, classes, level)
        end = f"_{level}" if level else ""
        for name, value in knn(own_train, own_test, classes=count, k=k, temperature=temperature):
            yield name + end, value
        yield f"map{end}", ranked["map"][level][0]
        yield f"map_queries{end}", float(ranked["map"][level][1])
        for name, by_level in ranked.items():
            if name != "map" and level in by_level:
                yield name + end, by_level[level][0]


def at_level(images: Embeddings, classes: ClassTable, level: str) -> Embeddings:
    """The same vectors with the labels of `level`; '' is the finest. All must have a label."""
    if not level:
        return images
    if level not in classes.levels:
        known = ", ".join(classes.levels) or "none"
        raise UsageError(f"The classes have no level {level!r}. Levels: {known}.{closest(level, list(classes.levels))}")
    coarse = torch.tensor(classes.levels[level][1], device=images.labels.device)
    return replace(images, labels=coarse[images.labels])


def _levels(classes: ClassTable) -> dict[str, int]:
    """Level → its number of classes; '' is the finest."""
    return {"": len(classes)} | {level: len(names) for level, (names, _) in classes.levels.items()}


def _conditions(
    train: Embeddings, test: Embeddings, classes: ClassTable, level: str, k: Sequence[int], temperature: float
) -> dict[str, Tensor]:
    """Number → the posterior (M, K) of the coarse classes that it is conditioned on."""
    labels, true = at_level(train, classes, level).labels, at_level(test, classes, level).labels
    unit_train, unit_test = F.normalize(train.vectors), F.normalize(test.vectors)
    given = (unit_train, unit_test, labels, len(classes.levels[level][0]))
    return {
        "map_conditioned": knn_posterior(*given, k=k[0], temperature=temperature),
        "map_conditioned_all": memory_posterior(*given, temperature=temperature),
        "map_oracle": F.one_hot(true, given[-1]),
    }
