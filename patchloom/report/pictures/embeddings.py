"""Where a network puts images: the energy of principal components and t-SNE (thesis 2.2 and figure 2.5).

Letters: N images, C channels. The t-SNE is the exact one of van der Maaten and Hinton (2008): N² distances, good for a
few thousand images, and no dependency for one picture.
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

LEAST = 10  # images; fewer have no neighbourhood worth a picture
EXAGGERATED = 0.25  # of the iterations, in which near images are pulled together first
EXAGGERATION = 12.0
MOMENTA = (0.5, 0.8)  # before and after


def pca_energy(vectors: Tensor) -> np.ndarray:
    """(N, C) → (min(N−1, C),): share of the variance in the first 1, 2, … principal components, rising to 1."""
    values = numbers(vectors, "the embeddings")
    if len(values) < 2:
        raise UsageError(f"principal components are of at least two vectors, given {len(values)}")
    singular = np.linalg.svd(values - values.mean(axis=0), compute_uv=False)[: min(len(values) - 1, values.shape[1])]
    energy = np.cumsum(np.square(singular))
    return energy / (energy[-1] or 1.0)


def pca_energy_chart(spaces: dict[str, Tensor]) -> Markup:
    """Figure 2.1: percent of the variance over components, a line a named space (N, C), eight at most.

    A lower curve is a richer space: few components cannot summarise it.
    """
    if not 1 <= len(spaces) <= LINE_COLORS:
        raise UsageError(f"a chart of energies shows one to eight spaces, given {len(spaces)}; draw several charts")
    series = []
    for color, (name, vectors) in enumerate(spaces.items()):
        points = enumerate(100 * pca_energy(vectors), 1)
        series.append(Series(name, [(0.0, 0.0), *((float(count), float(share)) for count, share in points)], color))
    return line_chart(series, x_label="principal components")


def tsne(vectors: Tensor, *, perplexity: float = 30.0, iterations: int = 500, seed: int = 0) -> np.ndarray:
    """(N, C) → (N, 2): near vectors near one another; axes and distances between groups mean nothing.

    The perplexity, about how many neighbours count, is lowered to a third of N where N is small.
    """
    count = len(vectors)
    if count < LEAST:
        raise UsageError(f"t-SNE needs at least {LEAST} images to place, given {count}")
    near = neighbour_shares(numbers(vectors, "the embeddings"), min(perplexity, (count - 1) / 3))
    generator = torch.Generator().manual_seed(seed)
    places = (1e-4 * torch.randn(count, 2, generator=generator, dtype=torch.float64)).numpy()
    step, gains, rate = np.zeros_like(places), np.ones_like(places), max(count / EXAGGERATION / 4, 50.0)
    early = round(EXAGGERATED * iterations)
    exaggerated = EXAGGERATION * near
    for iteration in range(iterations):
        gradient = _gradient(places, exaggerated if iteration < early else near)
        # As in the authors' code: a coordinate that keeps its direction speeds up.
        gains = np.maximum(np.where(gradient * step < 0, gains + 0.2, gains * 0.8), 0.01)
        step = MOMENTA[iteration >= early] * step - rate * gains * gradient
        places = places + step
        places -= places.mean(axis=0)
    return places


def neighbour_shares(vectors: np.ndarray, perplexity: float) -> np.ndarray:
    """(N, C) → (N, N) joint probabilities: each row a Gaussian as wide as the perplexity asks, then made symmetric."""
    norms = np.square(vectors).sum(axis=1)
    squared = np.maximum(norms[:, None] + norms - 2 * vectors @ vectors.T, 0)
    np.fill_diagonal(squared, 0)
    # Neither a common factor nor a term per row changes the shares, only the widths, which can so start at one.
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
    """Places (N, 2) as points coloured by class."""
    points = [Point(x, y, "", class_names[label]) for (x, y), label in zip(places.tolist(), labels, strict=True)]
    present = sorted(set(labels))
    return scatter_chart(points, groups=[class_names[label] for label in present])


def _gradient(places: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Of the divergence between `near` and the Student shares of the places, in float64.

    NumPy and few passes: torch shares each of these small operations out among threads, and every one then waits.
    """
    x, y = places.T
    weights = np.subtract.outer(x, x)  # (N, N), and written over from here on
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
