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

from patchloom.errors import UsageError
from patchloom.evaluation.classification import in_eval_mode
from patchloom.inspection.sheets import numbers
from patchloom.models.network import Network
from patchloom.pages.charts import LINE_COLORS, Point, Series, line_chart, scatter_chart

LEAST = 10  # images; fewer have no neighbourhood worth a picture
AT_ONCE = 64  # images
EXAGGERATED = 0.25  # of the iterations, in which near images are pulled together first
EXAGGERATION = 12.0
MOMENTA = (0.5, 0.8)  # before and after


@torch.no_grad()
def embed(network: Network, images: Tensor) -> Tensor:
    """Normalised images (N, channels, H, W) → the vector each is classified by, (N, C) float32 on the CPU."""
    with in_eval_mode(network):
        return torch.cat([network.vectors(network.features(part)).float().cpu() for part in images.split(AT_ONCE)])


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
    values = torch.from_numpy(numbers(vectors, "the embeddings"))
    near = neighbour_shares(values, min(perplexity, (count - 1) / 3))
    generator = torch.Generator().manual_seed(seed)
    places = 1e-4 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    step, gains, rate = torch.zeros_like(places), torch.ones_like(places), max(count / EXAGGERATION / 4, 50.0)
    for iteration in range(iterations):
        early = iteration < EXAGGERATED * iterations
        gradient = _gradient(places, near * (EXAGGERATION if early else 1.0))
        # As in the authors' code: a coordinate that keeps its direction speeds up.
        gains = torch.where(gradient * step < 0, gains + 0.2, gains * 0.8).clamp(min=0.01)
        step = MOMENTA[not early] * step - rate * gains * gradient
        places = places + step
        places = places - places.mean(dim=0)
    return places.numpy()


def neighbour_shares(vectors: Tensor, perplexity: float) -> Tensor:
    """(N, C) → (N, N) joint probabilities: each row a Gaussian as wide as the perplexity asks, then made symmetric."""
    squared = torch.cdist(vectors, vectors).square()
    # A common factor changes only the widths that are searched for, so they can start at one.
    squared = squared / squared.mean().clamp(min=1e-300)
    squared.fill_diagonal_(math.inf)
    precision = squared.new_ones(len(vectors), 1)
    low, high = torch.zeros_like(precision), torch.full_like(precision, math.inf)
    for _ in range(100):
        shares = (-squared * precision).softmax(dim=1)
        entropy = -torch.xlogy(shares, shares).sum(dim=1, keepdim=True)
        wide = entropy > math.log(perplexity)
        low, high = torch.where(wide, precision, low), torch.where(wide, high, precision)
        precision = torch.where(high.isinf(), precision * 2, (low + high) / 2)
    joint = shares + shares.T
    return joint / joint.sum()


def embedding_chart(places: np.ndarray, labels: Sequence[int], class_names: Sequence[str]) -> Markup:
    """Places (N, 2) as points coloured by class."""
    points = [Point(x, y, "", class_names[label]) for (x, y), label in zip(places.tolist(), labels, strict=True)]
    present = sorted(set(labels))
    return scatter_chart(points, groups=[class_names[label] for label in present])


def _gradient(places: Tensor, near: Tensor) -> Tensor:
    """Of the divergence between `near` and the Student shares of the places."""
    weights = 1 / (1 + torch.cdist(places, places).square())
    weights.fill_diagonal_(0)
    pull = (near - weights / weights.sum()) * weights  # (N, N)
    return 4 * (pull.sum(dim=1, keepdim=True) * places - pull @ places)
