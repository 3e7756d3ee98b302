"""k-nearest-neighbor classification of embeddings, as in DINO's evaluation (SS-2; arXiv 2104.14294, appendix F.1).

A test image takes the k train images with the highest cosine similarity s; each votes for its label with weight
exp(s/τ). The search is exact: all similarities are computed, some test images at a time.

name                     value
knn{k}_top1, knn{k}_top5 test images whose label is among the classes with most votes, in percent; top-5 is omitted
                         for at most 5 classes. A class without a vote is never right.

Letters: Q test images of a part, N train images, C channels, K classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.evaluation.embeddings import Embeddings
from patchloom_runtime.errors import UsageError

NEIGHBORS = (20,)
TEMPERATURE = 0.07
# Memory for similarities; products of fewer rows are slower.
PART_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class NeighborReport:
    """Accuracy of the nearest-neighbor classifier."""

    classes: int
    ranks: dict[int, np.ndarray]  # k → (images,) number of classes with more votes than the label; `classes` if no vote

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for k, ranks in self.ranks.items():
            yield f"knn{k}_top1", 100 * float(np.mean(ranks < 1))
            if self.classes > 5:
                yield f"knn{k}_top5", 100 * float(np.mean(ranks < 5))


def nearest(train: Tensor, test: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield cosines and positions (Q, k) of the nearest, part by part, for unit vectors (N, C) and (M, C)."""
    rows = max(1, min(len(test), PART_BYTES // (train.element_size() * len(train))))
    # One buffer for all parts: on a CPU, allocating it per part took a tenth of the product's time and more.
    buffer = test.new_empty(rows, len(train))
    for part in test.split(rows):
        best = torch.mm(part, train.T, out=buffer[: len(part)]).topk(k, dim=1)
        yield best.values, best.indices


def check_neighbors(k: Sequence[int], images: int) -> None:
    """Raise UsageError unless every k is between 1 and `images`, the labeled images of train."""
    if not k or min(k) < 1 or max(k) > images:
        values = ", ".join(map(str, k)) or "none"
        raise UsageError(f"k is {values}, expected whole numbers from 1 to {images}, the labeled images of train")


@torch.no_grad()
def knn(
    train: Embeddings,
    test: Embeddings,
    *,
    classes: int,
    k: Sequence[int] = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> NeighborReport:
    """Classify `test` by its neighbors in `train`, for every k at once; labels are indices below `classes`."""
    train, test = train.labeled("train"), test.labeled("val")
    check_neighbors(k, len(train))
    unit_train, unit_test = F.normalize(train.vectors), F.normalize(test.vectors)
    ranks: dict[int, list[Tensor]] = {number: [] for number in k}
    done = 0
    for cosines, positions in nearest(unit_train, unit_test, max(k)):
        voted = train.labels[positions]  # (Q, max k)
        weights = (cosines / temperature).exp()
        labels = test.labels[done : done + len(cosines), None]
        done += len(cosines)
        for number, parts in ranks.items():
            parts.append(label_ranks(voted[:, :number], weights[:, :number], labels, classes))
    return NeighborReport(classes, {number: torch.cat(parts).cpu().numpy() for number, parts in ranks.items()})


def label_ranks(voted: Tensor, weights: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the label's rank (Q,) from votes (Q, k), their weights and labels (Q, 1); ties go to the lower class."""
    votes = weights.new_zeros(len(voted), classes).scatter_add_(1, voted, weights)
    label_votes = votes.gather(1, labels)
    earlier = torch.arange(classes, device=votes.device) < labels
    before = ((votes > label_votes) | ((votes == label_votes) & earlier)).sum(dim=1)
    return torch.where(label_votes[:, 0] > 0, before, classes)
