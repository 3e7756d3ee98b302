"""Regression: one or several numbers per image, standardized by the mean and deviation of the training images.

Letters: B images, K numbers, r = output − target. Targets are (B, K), NaN if unknown. Every loss is the mean over the
known numbers of an image, then over the images.
    L1: |r|    L2: r²    Huber: r²/2 if |r| ≤ 1, else |r| − 1/2
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from patchloom.objectives.multilabel import VectorObjective
from patchloom.objectives.objective import Ingredients
from patchloom.recipes.methods import method_of

CHARTS: dict[str, dict[str, str]] = {}  # charts of a report: title → curve → metric name

LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda outputs, targets: F.l1_loss(outputs, targets, reduction="none"),
    "l2": lambda outputs, targets: F.mse_loss(outputs, targets, reduction="none"),
    "huber": lambda outputs, targets: F.huber_loss(outputs, targets, reduction="none"),
}


class RegressionObjective(VectorObjective):
    """The loss of standardized numbers."""

    values = "numbers"

    def __init__(self, *parts: Any, loss: str, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.loss = LOSSES[loss]

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each number, (B, K)."""
        return self.loss(outputs, targets)


def make_objective(ingredients: Ingredients) -> RegressionObjective:
    """Build the recipe's objective."""
    recipe, classes = ingredients.recipe, ingredients.network.config.num_classes
    return RegressionObjective(
        recipe.objective,
        recipe.augment,
        num_classes=classes,
        seed=recipe.seed,
        loss=method_of(recipe.objective.method).options["loss"],
        **ingredients.pixels,
    )
