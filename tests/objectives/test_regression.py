"""The losses of numbers against slow references written from their equations."""

import math

import numpy as np
import pytest
import torch

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives.objective import Ingredients, make_objective
from patchloom.recipes import get_recipe
from patchloom.recipes.schema import override
from patchloom_runtime.errors import UsageError
from tests.networks import small

SLOW = {
    "regression_l1": abs,
    "regression_l2": lambda r: r * r,
    "regression": lambda r: r * r / 2 if abs(r) <= 1 else abs(r) - 0.5,
}


def objective(method: str, numbers: int = 2, **changes):
    network = small("resmlp_s12", num_classes=numbers, image_size=16, patch_size=8, dim=8, depth=1)
    fixed = {"objective.method": method, "objective.smoothing": 0.0, "augment.mixup": 0.0, "augment.cutmix": 0.0}
    recipe = override(get_recipe("small_images"), fixed | changes)
    return make_objective(Ingredients(recipe=recipe, network=network)), network


def batch(targets) -> ImageBatch:
    pixels = np.random.default_rng(0).integers(0, 256, (len(targets), 16, 16, 3), np.uint8)
    made = ImageBatch.of_pixels(list(pixels))
    return ImageBatch(made.images, made.labels, made.index, targets=torch.tensor(targets, dtype=torch.float32))


@pytest.mark.parametrize("method", SLOW)
def test_the_loss_is_the_mean_over_known_numbers_then_over_images(method) -> None:
    loss, _ = objective(method)
    targets = [[0.5, math.nan], [-2.0, 3.0], [math.nan, math.nan]]
    outputs = [[1.0, 9.0], [0.0, 2.5], [4.0, 4.0]]
    rows = []
    for own, true in zip(outputs, targets, strict=True):
        known = [SLOW[method](o - t) for o, t in zip(own, true, strict=True) if not math.isnan(t)]
        rows.append(sum(known) / len(known) if known else 0.0)
    value = loss.label_loss(torch.tensor(outputs), torch.tensor(targets))
    assert value.item() == pytest.approx(sum(rows) / len(rows), rel=1e-6)


def test_unknown_numbers_have_no_gradient() -> None:
    loss, network = objective("regression")
    images = batch([[0.3, math.nan], [math.nan, math.nan]])
    value = loss(network, images, epoch=0, step=0)["loss"]
    value.backward()
    assert torch.isfinite(value)
    assert network.classifier.weight.grad[0].abs().sum() > 0
    assert network.classifier.weight.grad[1].abs().sum() == 0


def test_mixup_blends_the_numbers() -> None:
    mixing = {"augment.mixup": 0.8, "augment.mix_probability": 1.0}
    loss, network = objective("regression_l2", 1, **mixing)
    seen = []
    loss.loss = lambda outputs, targets: seen.append(targets) or outputs * 0
    loss(network, batch([[0.0], [1.0]]), epoch=0, step=0)
    first, second = seen[0].flatten().tolist()
    assert 0 < first < 1
    assert first + second == pytest.approx(1)


def test_another_number_of_outputs_is_refused() -> None:
    loss, _ = objective("regression")
    with pytest.raises(UsageError, match="3"):
        loss.label_loss(torch.zeros(1, 3), torch.zeros(1, 3))
