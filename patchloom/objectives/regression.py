"""Regression: one or several numbers per image, standardized by the mean and deviation of the training images.

Letters: B images, K numbers, r = output − target. Targets are (B, K), NaN if unknown. Every loss is the mean over the
known numbers of an image, then over the images.
    L1: |r|    L2: r²    Huber: r²/2 if |r| ≤ 1, else |r| − 1/2
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives.classification import ClassificationObjective, at_least_float32
from patchloom.objectives.multilabel import mean_over_known
from patchloom.objectives.objective import Ingredients
from patchloom.recipes.methods import method_of
from patchloom_runtime.errors import UsageError

CHARTS: dict[str, dict[str, str]] = {}  # charts of a report: title → curve → metric name

LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda outputs, targets: F.l1_loss(outputs, targets, reduction="none"),
    "l2": lambda outputs, targets: F.mse_loss(outputs, targets, reduction="none"),
    "huber": lambda outputs, targets: F.huber_loss(outputs, targets, reduction="none"),
}


class RegressionObjective(ClassificationObjective):
    """The loss of standardized numbers, with image mixing."""

    def __init__(self, *values: Any, loss: str, **options: Any) -> None:
        super().__init__(*values, **options)
        self.loss = LOSSES[loss]

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch: `loss` to be minimized."""
        images, targets = self.inputs(batch, epoch, step)
        return {"loss": self.label_loss(model(images), targets)}

    def inputs(self, batch: ImageBatch, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return normalized, mixed images (B, 3, H, W) and their mixed numbers (B, K)."""
        assert batch.targets is not None
        images, targets = self.transformed(batch.images, batch.targets, epoch, step)
        blend = self.blend(images, epoch, step)
        return blend.images(images), blend.vectors(targets)

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of outputs (B, K)."""
        if logits.shape[1] != self.num_classes:
            raise UsageError(f"The network predicts {logits.shape[1]} numbers, the data have {self.num_classes}.")
        outputs, known = at_least_float32(logits), ~targets.isnan()
        filled = torch.where(known, targets, 0).to(outputs.dtype)
        return mean_over_known(self.loss(outputs, filled), known)


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
