"""Principal components compared with numpy; t-SNE compared with its definition and on separable groups."""

import math
import re

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.report.pictures.embeddings import (
    embedding_chart,
    neighbor_shares,
    pca_energy,
    pca_energy_chart,
    tsne,
)
from patchloom.report.pictures.look import network_inputs
from patchloom_runtime.errors import NumericalError, UsageError
from tests.networks import assert_same, small


def groups(count: int = 4, each: int = 12, spread: float = 0.1) -> tuple[torch.Tensor, np.ndarray]:
    """Points around the corners of a cube of 8 dimensions."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.eye(8)[:count].repeat_interleave(each, dim=0)
    return centers + spread * torch.randn(len(centers), 8, generator=generator), np.repeat(np.arange(count), each)


@pytest.mark.parametrize("shape", [(50, 7), (5, 20)])
def test_energy_is_that_of_the_covariance(shape):
    vectors = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double() * torch.arange(1, shape[1] + 1)
    values = np.sort(np.linalg.eigvalsh(np.cov(vectors.numpy(), rowvar=False)))[::-1]
    energy = pca_energy(vectors + 100)  # the mean has no energy
    assert len(energy) == min(shape[0] - 1, shape[1])
    assert energy == pytest.approx((np.cumsum(values) / values.sum())[: len(energy)], abs=1e-9)
    assert energy[-1] == pytest.approx(1)


def test_the_chart_of_energy_begins_at_nothing_and_has_a_line_a_space():
    one, other = torch.randn(20, 4), torch.randn(20, 6)
    chart = pca_energy_chart({"coarse": one, "fine": other})
    assert chart.count("<circle") == 5 + 7
    assert re.search(r"<title>coarse 0,[^<]* 0</title>", chart)
    assert re.search(r"<title>fine 100,[^<]* 6</title>", chart)
    with pytest.raises(UsageError, match="0"):
        pca_energy_chart({})
    with pytest.raises(UsageError, match="1"):
        pca_energy(torch.zeros(1, 3))


def test_neighbors_have_the_requested_perplexity():
    """Conditional shares of the definition, from an independent search, symmetrized."""
    vectors, _ = groups(spread=0.5)
    vectors = vectors.double()
    count, perplexity = len(vectors), 7.0
    conditional = np.zeros((count, count))
    for i in range(count):
        squared = [(vectors[i] - vectors[j]).square().sum().item() for j in range(count)]
        low, high = 0.0, 1e6
        for _ in range(200):
            beta = (low + high) / 2
            weights = [0.0 if j == i else math.exp(-squared[j] * beta) for j in range(count)]
            total = sum(weights)
            if total == 0:
                high = beta
                continue
            shares = [weight / total for weight in weights]
            entropy = -sum(share * math.log2(share) for share in shares if share)
            low, high = (beta, high) if 2**entropy > perplexity else (low, beta)
        conditional[i] = shares
    expected = (conditional + conditional.T) / (2 * count)
    assert neighbor_shares(vectors.numpy(), perplexity) == pytest.approx(expected, abs=1e-9)


def test_groups_stay_groups():
    """Nearly every point's nearest neighbor is of its group; in a good run, the groups are separate.

    A single point may stay behind another group, in every t-SNE; which does hangs on the last bits of the numbers.
    """
    vectors, labels = groups()
    apart = []
    for seed in range(3):
        places = tsne(vectors, iterations=300, seed=seed)
        assert places.shape == (48, 2)
        distances = np.linalg.norm(places[:, None] - places[None], axis=-1)
        np.fill_diagonal(distances, np.inf)
        assert (labels[distances.argmin(axis=1)] == labels).mean() > 0.85
        centers = np.stack([np.median(places[labels == k], axis=0) for k in range(4)])
        inside = max(np.median(np.linalg.norm(places[labels == k] - centers[k], axis=1)) for k in range(4))
        between = np.linalg.norm(centers[:, None] - centers[None], axis=-1)[~np.eye(4, dtype=bool)].min()
        apart.append(between / inside)
    assert max(apart) > 2


def test_the_same_seed_gives_the_same_places_and_equal_vectors_no_error():
    vectors, _ = groups()
    assert np.array_equal(tsne(vectors, iterations=20), tsne(vectors, iterations=20))
    assert not np.array_equal(tsne(vectors, iterations=20), tsne(vectors, iterations=20, seed=1))
    assert np.isfinite(tsne(torch.ones(12, 3), iterations=50)).all()


def test_too_few_or_broken_vectors_are_one_line():
    with pytest.raises(UsageError) as error:
        tsne(torch.zeros(9, 3))
    assert "10" in str(error.value)
    assert "9" in str(error.value)
    with pytest.raises(NumericalError):
        tsne(torch.full((12, 3), torch.nan))


def test_points_are_colored_by_class_with_a_legend_of_those_present():
    chart = embedding_chart(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]]), [2, 0, 2], ["cat", "dog", "<bird>"])
    dots = re.findall(r'<circle [^>]*class="mark (\w+)"', chart)
    assert len(dots) == 3 + 2  # the legend has a dot a class
    first, second, third, cat, bird = dots
    assert first == third == bird
    assert second == cat != bird
    assert chart.index(">cat</text>") < chart.index("&lt;bird&gt;</text>")
    assert "dog" not in chart


def some_images(count: int) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in pixels]


@pytest.mark.parametrize("name", ["resmlp_s12", "smlpnet_t", "deit_s_distilled"])
def test_embeddings_are_the_input_of_the_head_in_the_same_pass(name, monkeypatch):
    network = small(name).eval()
    features, passes = network.features, []
    monkeypatch.setattr(network, "features", lambda images: passes.append(len(images)) or features(images))
    inputs = network_inputs(network, None, some_images(3))
    assert passes == [3]
    with torch.no_grad():
        assert_same(inputs.vectors, network.pool(features(inputs.images)))
        assert_same(torch.from_numpy(inputs.probabilities).float(), network(inputs.images).softmax(dim=1))


def test_tokens_a_class_are_averaged():
    network = small("patchconvnet_s60", class_tokens="per_class")
    assert network_inputs(network, None, some_images(2)).vectors.shape == (2, 16)
