"""k-nearest-neighbour classification of embeddings, as DINO is evaluated (SS-2; arXiv 2104.14294, appendix F.1).

A test image takes the k train images with the highest cosine similarity s; each votes for its label with weight
exp(s/τ). Exact: all similarities are computed, some test images at a time.

name                     value
knn{k}_top1, knn{k}_top5 test images whose label is among the classes with most votes, in percent; top-5 is left out
                         where there are no more than 5 classes. A class without a vote is never right.

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

NEIGHBOURS = (20,)
TEMPERATURE = 0.07
# Of similarities at a time; products of fewer rows are slower.
PART_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class NeighbourReport:
    """How well neighbours tell the class."""

    classes: int
    ranks: dict[int, np.ndarray]  # k → (images,) classes with more votes than the label; `classes` without any vote

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for k, ranks in self.ranks.items():
            yield f"knn{k}_top1", 100 * float(np.mean(ranks < 1))
            if self.classes > 5:
                yield f"knn{k}_top5", 100 * float(np.mean(ranks < 5))


def nearest(train: Tensor, test: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Unit vectors (N, C) and (M, C) → cosines and positions (Q, k) of the nearest, part by part."""
    rows = max(1, min(len(test), PART_BYTES // (train.element_size() * len(train))))
    # One buffer for all parts: on a CPU fresh memory for each took a tenth of the product's time and more.
    buffer = test.new_empty(rows, len(train))
    for part in test.split(rows):
        found = torch.mm(part, train.T, out=buffer[: len(part)]).topk(k, dim=1)
        yield found.values, found.indices


def check_neighbours(k: Sequence[int], images: int) -> None:
    """A UsageError where not every k is a number of neighbours that `images` of train can give."""
    if not k or min(k) < 1 or max(k) > images:
        given = ", ".join(map(str, k)) or "none"
        raise UsageError(f"k is {given}, expected whole numbers from 1 to the {images} labelled images of train")


@torch.no_grad()
def knn(
    train: Embeddings,
    test: Embeddings,
    *,
    classes: int,
    k: Sequence[int] = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> NeighbourReport:
    """Classify `test` by its neighbours in `train`, for every k at once; labels are numbers below `classes`."""
    train, test = train.labeled("train"), test.labeled("val")
    check_neighbours(k, len(train))
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
    return NeighbourReport(classes, {number: torch.cat(parts).cpu().numpy() for number, parts in ranks.items()})


def label_ranks(voted: Tensor, weights: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Votes (Q, k), their weights and the labels (Q, 1) → (Q,) classes before the label; ties go to the lower one."""
    votes = weights.new_zeros(len(voted), classes).scatter_add_(1, voted, weights)
    of_label = votes.gather(1, labels)
    earlier = torch.arange(classes, device=votes.device) < labels
    before = ((votes > of_label) | ((votes == of_label) & earlier)).sum(dim=1)
    return torch.where(of_label[:, 0] > 0, before, classes)
