"""Linear separability of images that a network was trained to treat alike (thesis 2.2.1, table 2.1).

The images of each coarse class are split in two at random. A linear classifier of the 2K halves is fitted to frozen
features and its accuracy on those same images is averaged over several splits. Random labels cannot be learned, so the
metric measures how far the features spread the images.

name                                          value
separability_top1, …_std                      mean and standard deviation over the splits, in percent
separability_conditioned_top1, …_std          the same, with a half's probability within its coarse class multiplied by
                                              that of the class; if a coarse posterior is passed

Letters: N images, C channels, K coarse classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.probe import fit_logistic

SPLITS = 10
# Weak: there is nothing to generalize to, and it gives L-BFGS a problem with a minimum.
L2 = 1e-6


@dataclass(frozen=True)
class Separability:
    """Percentage of images assigned to their half, per split."""

    top1: tuple[float, ...]
    conditioned: tuple[float, ...]  # empty without a coarse posterior

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for name, values in (("separability", self.top1), ("separability_conditioned", self.conditioned)):
            if values:
                yield f"{name}_top1", float(np.mean(values))
                yield f"{name}_std", float(np.std(values, ddof=min(1, len(values) - 1)))


def random_halves(coarse: Tensor, seed: int) -> Tensor:
    """Convert labels (N,) of K classes to 2K: class c becomes 2c and 2c + 1, with half of its images each."""
    draw = np.random.default_rng(seed).permutation(len(coarse))
    labels = coarse.cpu().numpy()[draw]
    order = draw[np.argsort(labels, kind="stable")]  # positions by class, at random within each
    sizes = np.bincount(labels)
    within = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    halves = np.empty(len(order), np.int64)
    halves[order] = within % 2
    return 2 * coarse + torch.from_numpy(halves).to(coarse.device)


def conditioned(scores: Tensor, posterior: Tensor) -> Tensor:
    """Return p(half | its class) · p(class), (N, 2K), from scores (N, 2K) and the posterior (N, K)."""
    within = scores.unflatten(1, (-1, 2)).softmax(dim=2)  # (N, K, 2)
    return (within * posterior[:, :, None]).flatten(1)


@torch.no_grad()
def separability(
    images: Embeddings,
    *,
    classes: int,
    posterior: Tensor | None = None,
    splits: int = SPLITS,
    l2: float = L2,
    seed: int = 0,
) -> Separability:
    """Fit and evaluate on `images`, labeled with indices below `classes`, `splits` times.

    `posterior` (N, K) is the coarse classifier's output for each labeled image.
    """
    images = images.labeled("train")
    plain, with_class = [], []
    for split in range(splits):
        halves = random_halves(images.labels, seed + split)
        scores = fit_logistic(images.vectors, halves, 2 * classes, l2)(images.vectors)
        plain.append(_accuracy(scores, halves))
        if posterior is not None:
            with_class.append(_accuracy(conditioned(scores, posterior), halves))
    return Separability(tuple(plain), tuple(with_class))


def _accuracy(scores: Tensor, labels: Tensor) -> float:
    return 100 * float((scores.argmax(dim=1) == labels).double().mean())
