"""ClusterFit+: the clusters of a trained network's features as labels of a new one (thesis 2.4.2).

The new network is trained by cross-entropy on them; 1500 clusters for CIFAR-100, 15000 for ImageNet.

Letters: N images, C channels, K clusters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom_runtime.errors import UsageError

ROUNDS = 50
# Cosines in memory at once.
PART_NUMBERS = 1 << 26


@torch.no_grad()
def cluster_labels(vectors: Tensor, clusters: int, *, seed: int = 0, rounds: int = ROUNDS) -> Tensor:
    """(N, C) → (N,) int64 in 0…K−1: spherical k-means from K images drawn by `seed`, until nothing moves.

    A cluster that loses all images starts again at the image that fits its own centre worst, so all K are used.
    Repeatable on a CPU; a GPU adds up in any order.
    """
    if not 1 <= clusters <= len(vectors):
        raise UsageError(f"clusters is {clusters}, expected 1 to the {len(vectors)} images")
    unit = F.normalize(vectors.float())
    drawn = torch.randperm(len(unit), generator=torch.Generator().manual_seed(seed))[:clusters]
    labels, fit = nearest_centres(unit, unit[drawn.to(unit.device)])
    for _ in range(rounds):
        labels = _all_used(labels, fit, clusters)
        centres = F.normalize(torch.zeros_like(unit[:clusters]).index_add_(0, labels, unit))
        moved, fit = nearest_centres(unit, centres)
        if torch.equal(moved, labels):
            break
        labels = moved
    return _all_used(labels, fit, clusters)


def nearest_centres(unit: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (N, C) and centres (K, C) → number of the nearest centre and the cosine with it, (N,) each."""
    found = [(part @ centres.T).max(dim=1) for part in unit.split(max(1, PART_NUMBERS // len(centres)))]
    return torch.cat([part.indices for part in found]), torch.cat([part.values for part in found])


def _all_used(labels: Tensor, fit: Tensor, clusters: int) -> Tensor:
    """Give each empty cluster one image, worst fit first, of those whose cluster keeps another."""
    counts = labels.bincount(minlength=clusters)
    empty = torch.nonzero(counts == 0)[:, 0].tolist()
    if not empty:
        return labels
    labels, sizes = labels.clone(), counts.tolist()
    for image in fit.argsort(stable=True).tolist():
        if not empty:
            break
        own = int(labels[image])
        if sizes[own] > 1:
            sizes[own] -= 1
            labels[image] = empty.pop(0)
    return labels
