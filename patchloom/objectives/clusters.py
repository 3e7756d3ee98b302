"""ClusterFit+: clusters of a trained network's features as labels for a new network (thesis 2.4.2).

The new network is trained on them with cross-entropy: 1500 clusters for CIFAR-100, 15000 for ImageNet.

Letters: N images, C channels, K clusters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom_runtime.errors import UsageError

ROUNDS = 50
# Cosines held in memory at once.
PART_NUMBERS = 1 << 26


@torch.no_grad()
def cluster_labels(vectors: Tensor, clusters: int, *, seed: int = 0) -> Tensor:
    """Assign (N, C) vectors to clusters 0…K−1 by spherical k-means, started at K random images, until convergence.

    A cluster that loses all images restarts at the image that fits its own center worst, so all K are used.
    The result is reproducible on a CPU; a GPU adds in any order.
    """
    if not 1 <= clusters <= len(vectors):
        raise UsageError(f"clusters is {clusters}, expected 1 to {len(vectors)}, the number of images")
    unit = F.normalize(vectors.float())
    drawn = torch.randperm(len(unit), generator=torch.Generator().manual_seed(seed))[:clusters]
    labels, fit = nearest_centers(unit, unit[drawn.to(unit.device)])
    for _ in range(ROUNDS):
        labels = _all_used(labels, fit, clusters)
        centers = F.normalize(torch.zeros_like(unit[:clusters]).index_add_(0, labels, unit))
        moved, fit = nearest_centers(unit, centers)
        if torch.equal(moved, labels):
            break
        labels = moved
    return _all_used(labels, fit, clusters)


def nearest_centers(unit: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the nearest center and the cosine with it, (N,) each, for unit vectors (N, C) and (K, C)."""
    best = [(part @ centers.T).max(dim=1) for part in unit.split(max(1, PART_NUMBERS // len(centers)))]
    return torch.cat([part.indices for part in best]), torch.cat([part.values for part in best])


def _all_used(labels: Tensor, fit: Tensor, clusters: int) -> Tensor:
    """Give each empty cluster one image, worst fit first, taken from clusters with more than one."""
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
