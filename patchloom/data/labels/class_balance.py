"""Numbers that follow from the images per class: how uneven a dataset is, and the remedies of a recipe's `balance`.

Letters: K classes, n_k training images of class k, N in all. A class without images (an empty cluster) counts as one
image, so that every number stays finite.
"""

from typing import Literal

import numpy as np

from patchloom.recipes.auto import IMBALANCED_FROM

# Sampling shares are proportional to n_k to this power.
SAMPLING_POWERS = {"none": 1.0, "sqrt": 0.5, "balanced": 0.0}


def class_counts(labels: np.ndarray, classes: int = 0) -> np.ndarray:
    """Return the images per class, (K,) int64; images without a label are ignored."""
    return np.bincount(labels[labels >= 0], minlength=classes)


def class_ratio(labels: np.ndarray) -> float:
    """Return the images of the largest class divided by those of the smallest that has any; 1 without labels."""
    counts = class_counts(labels)
    counts = counts[counts > 0]
    return float(counts.max() / counts.min()) if len(counts) else 1.0


def is_imbalanced(labels: np.ndarray) -> bool:
    """Return whether the largest class has at least ten times the images of the smallest."""
    return class_ratio(labels) >= IMBALANCED_FROM


def class_weights(counts: np.ndarray, kind: Literal["inverse", "effective"], beta: float) -> np.ndarray:
    """Return the loss weight of each class, (K,) float64, with a mean of 1 over the training images.

    inverse: 1/n_k, which makes N/(K·n_k). effective: the inverse of the effective number (1 − β^n)/(1 − β) of Cui et
    al. (arXiv 1901.05555, equation 2). They scale the weights to a sum of K; a mean of 1 over the images keeps the
    scale of the loss, so the learning rate keeps its meaning.
    """
    numbers = np.maximum(counts, 1).astype(np.float64)
    # 1 − β^n by expm1 and log1p: β close to 1 would lose all digits.
    effective = -np.expm1(numbers * np.log1p(beta - 1)) / (1 - beta) if kind == "effective" else numbers
    weights = 1 / effective
    return weights * numbers.sum() / (weights * numbers).sum()


def logit_adjustment(counts: np.ndarray, tau: float, loss: Literal["cross_entropy", "bce"]) -> np.ndarray:
    """Return what the loss adds to the logits, (K,) float64, with shares π_k = n_k/N.

    cross_entropy: τ·log π_k, the additive form of Menon et al. (arXiv 2007.07314, equation 10). bce: τ times the log
    odds of π_k minus those of 1/K, the balanced BCE of Xu et al. (arXiv 2212.02015).
    """
    shares = np.maximum(counts, 1) / np.maximum(counts, 1).sum()
    if loss == "cross_entropy":
        return tau * np.log(shares)
    return tau * (np.log(shares) - np.log1p(-shares) + np.log(len(shares) - 1))


def sampling_shares(counts: np.ndarray, sampling: str) -> np.ndarray:
    """Return the share of an epoch that each class gets, (K,) float64: n_k to a power; 0 for classes without images."""
    powers = np.where(counts > 0, np.maximum(counts, 1).astype(np.float64) ** SAMPLING_POWERS[sampling], 0)
    return powers / powers.sum()
