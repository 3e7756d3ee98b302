"""Separability with random labels."""

import torch

from patchloom.evaluation.embeddings import Embeddings
from patchloom.evaluation.separability import conditioned, random_halves, separability


def clouds(images: int, dim: int, within: float, seed: int = 0) -> Embeddings:
    """Three coarse classes far apart; their images `within` of the centre."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    vectors = 5 * torch.eye(3, dim)[labels] + within * torch.randn(images, dim, generator=generator)
    return Embeddings(vectors, labels, torch.arange(images))


def test_halves_are_even_and_keep_their_class():
    coarse = torch.tensor([0] * 7 + [2] * 4 + [1] * 1)[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
    halves = random_halves(coarse, 1)
    assert torch.equal(halves // 2, coarse)
    assert halves.bincount(minlength=6).tolist() == [4, 3, 1, 0, 2, 2]
    assert torch.equal(halves, random_halves(coarse, 1))
    assert not torch.equal(halves, random_halves(coarse, 2))


def test_conditioning_is_the_product_of_both():
    scores, posterior = torch.randn(4, 6), torch.rand(4, 3)
    result = conditioned(scores, posterior)
    for n in range(4):
        for half in range(6):
            pair = scores[n, 2 * (half // 2) : 2 * (half // 2) + 2].exp()
            expected = pair[half % 2] / pair.sum() * posterior[n, half // 2]
            torch.testing.assert_close(result[n, half], expected)


def test_spread_features_separate_more():
    """More directions than images separate anything; a point a class separates classes alone."""
    spread = dict(separability(clouds(30, 40, 1.0), classes=3, splits=2))
    collapsed = dict(separability(clouds(30, 40, 0.0), classes=3, splits=2))
    assert spread["separability_top1"] == 100.0
    assert 45 <= collapsed["separability_top1"] <= 55
    assert [*spread] == ["separability_top1", "separability_std"]


def test_a_true_posterior_can_only_help():
    images = clouds(90, 8, 3.0)
    posterior = torch.nn.functional.one_hot(images.labels, 3).float()
    result = dict(separability(images, classes=3, splits=3, posterior=posterior))
    assert result["separability_conditioned_top1"] >= result["separability_top1"]
