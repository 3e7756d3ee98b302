"""Pictures of embeddings: the energy of principal components, and t-SNE (thesis 2.2 and figure 2.5).

Letters: N images, C channels. The t-SNE is the exact algorithm of van der Maaten and Hinton (2008) with N² distances,
which suffices for a few thousand images and saves a dependency.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from markupsafe import Markup
from torch import Tensor

from patchloom.report.charts import LINE_COLORS, Point, Series, line_chart, scatter_chart
from patchloom.report.pictures.sheets import numbers
from patchloom_runtime.errors import UsageError

LEAST_IMAGES = 10  # fewer have no neighborhoods to show
EXAGGERATED = 0.25  # share of the iterations with early exaggeration
EXAGGERATION = 12.0
MOMENTA = (0.5, 0.8)  # during and after early exaggeration


def pca_energy(vectors: Tensor) -> np.ndarray:
    """Return the share of the variance of vectors (N, C) in the first 1, 2, … principal components, (min(N−1, C),)."""
    values = numbers(vectors, "the embeddings")
    if len(values) < 2:
        raise UsageError(f"principal components need at least two vectors, got {len(values)}")
    singular = np.linalg.svd(values - values.mean(axis=0), compute_uv=False)[: min(len(values) - 1, values.shape[1])]
    energy = np.cumsum(np.square(singular))
    return energy / (energy[-1] or 1.0)


def pca_energy_chart(spaces: dict[str, Tensor]) -> Markup:
    """Draw figure 2.1: percent of the variance over components, one line per named space (N, C), at most eight.

    A lower curve means a richer space, which few components cannot summarize.
    """
    if not 1 <= len(spaces) <= LINE_COLORS:
        raise UsageError(f"a chart of energies has one to eight spaces, got {len(spaces)}; draw several charts")
    series = []
    for color, (name, vectors) in enumerate(spaces.items()):
        points = enumerate(100 * pca_energy(vectors), 1)
        series.append(Series(name, [(0.0, 0.0), *((float(count), float(share)) for count, share in points)], color))
    return line_chart(series, x_label="principal components", y_label="variance, %")


def tsne(vectors: Tensor, *, perplexity: float = 30.0, iterations: int = 500, seed: int = 0) -> np.ndarray:
    """Return positions (N, 2) that keep similar vectors (N, C) together; axes and large distances mean nothing.

    The perplexity, roughly the number of neighbors, is reduced to a third of N if N is small.
    """
    count = len(vectors)
    if count < LEAST_IMAGES:
        raise UsageError(f"t-SNE needs at least {LEAST_IMAGES} images, got {count}")
    near = neighbor_shares(numbers(vectors, "the embeddings"), min(perplexity, (count - 1) / 3))
    generator = torch.Generator().manual_seed(seed)
    places = (1e-4 * torch.randn(count, 2, generator=generator, dtype=torch.float64)).numpy()
    step, gains, rate = np.zeros_like(places), np.ones_like(places), max(count / EXAGGERATION / 4, 50.0)
    early = round(EXAGGERATED * iterations)
    exaggerated = EXAGGERATION * near
    for iteration in range(iterations):
        gradient = _gradient(places, exaggerated if iteration < early else near)
        # As in the authors' code, a coordinate that keeps its direction speeds up.
        gains = np.maximum(np.where(gradient * step < 0, gains + 0.2, gains * 0.8), 0.01)
        step = MOMENTA[iteration >= early] * step - rate * gains * gradient
        places = places + step
        places -= places.mean(axis=0)
    return places


def neighbor_shares(vectors: np.ndarray, perplexity: float) -> np.ndarray:
    """Return joint probabilities (N, N) of vectors (N, C): a Gaussian of the given perplexity per row, symmetrized."""
    norms = np.square(vectors).sum(axis=1)
    squared = np.maximum(norms[:, None] + norms - 2 * vectors @ vectors.T, 0)
    np.fill_diagonal(squared, 0)
    # A common factor and a term per row change only the widths, not the shares, so the search can start at one.
    squared /= max(squared.mean(), 1e-300)
    squared += np.diag(np.full(len(vectors), np.inf))
    squared -= squared.min(axis=1, keepdims=True)
    distances = np.where(np.isinf(squared), 0, squared)
    precision = np.ones((len(vectors), 1))
    low, high = np.zeros_like(precision), np.full_like(precision, np.inf)
    for _ in range(100):
        shares = np.exp(-precision * squared)
        total = shares.sum(axis=1, keepdims=True)
        shares /= total
        entropy = np.log(total) + precision * (shares * distances).sum(axis=1, keepdims=True)
        wide = entropy > math.log(perplexity)
        low, high = np.where(wide, precision, low), np.where(wide, high, precision)
        precision, before = np.where(np.isinf(high), precision * 2, (low + high) / 2), precision
        if np.array_equal(precision, before):
            break
    joint = shares + shares.T
    return joint / joint.sum()


def embedding_chart(places: np.ndarray, labels: Sequence[int], class_names: Sequence[str]) -> Markup:
    """Draw positions (N, 2) as points colored by class."""
    points = [Point(x, y, "", class_names[label]) for (x, y), label in zip(places.tolist(), labels, strict=True)]
    present = sorted(set(labels))
    return scatter_chart(points, groups=[class_names[label] for label in present])


def _gradient(places: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return the gradient of the divergence between `near` and the Student-t shares of the places, in float64.

    NumPy with few passes is faster than torch, which synchronizes its threads for each of these small operations.
    """
    x, y = places.T
    weights = np.subtract.outer(x, x)  # (N, N), overwritten from here on
    weights *= weights
    apart = np.subtract.outer(y, y)
    apart *= apart
    weights += apart
    weights += 1
    np.reciprocal(weights, out=weights)
    np.fill_diagonal(weights, 0)
    pull = np.multiply(weights, -1 / weights.sum(), out=apart)
    pull += near
    pull *= weights
    return 4 * (pull.sum(axis=1, keepdims=True) * places - pull @ places)
