"""Multi-label classification: one decision per label, from the labels of images and, if there is one, from a teacher.

Letters: B images, K labels. Targets are (B, K): 1 if a label applies, 0 if not, between them in mixed images, NaN if
unknown. Every loss is the mean over the known labels of an image, then over the images (partial BCE with α = 1 and
β = 0 of Durand et al., arXiv 1902.09720), so that processes and micro-batches of equal size average to the whole batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.distillation import CHARTS as CHARTS
from patchloom.objectives.distillation import TaughtObjective
from patchloom.objectives.objective import Ingredients
from patchloom.recipes.methods import method_of
from patchloom_runtime.errors import UsageError


def binary_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −y log p − (1 − y) log(1 − p) with p = sigmoid(logits), (B, K)."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def asymmetric_losses(
    logits: Tensor, targets: Tensor, negative_focus: float, positive_focus: float, margin: float
) -> Tensor:
    """Return the asymmetric loss (Ridnik et al., arXiv 2009.14119, equations 2 to 6), (B, K).

    −y (1 − p)^γ₊ log p − (1 − y) p_m^γ₋ log(1 − p_m) with p_m = max(p − m, 0): negatives below the margin m do not
    count, and γ₋ > γ₊ reduces the weight of easy negatives more than that of easy positives.
    """
    p = logits.sigmoid()
    shifted = (p - margin).clamp(min=0)
    positive = (1 - p) ** positive_focus * F.logsigmoid(logits)
    # Equal to log(1 − p) without a margin, and finite for p near 1.
    log_rest = F.logsigmoid(-logits) if not margin else torch.log((1 - shifted).clamp(min=torch.finfo(p.dtype).eps))
    negative = shifted**negative_focus * log_rest
    return -targets * positive - (1 - targets) * negative


def mean_over_known(losses: Tensor, known: Tensor) -> Tensor:
    """Return the mean over images of the mean over the known labels of each; an image without any counts as 0."""
    total = torch.where(known, losses, 0).sum(dim=1) / known.sum(dim=1).clamp(min=1)
    return total.mean()


class VectorObjective(TaughtObjective):
    """The mean loss of the known values of a target vector (B, K), with image mixing."""

    values = "labels"  # in messages

    def inputs(self, batch: ImageBatch, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return normalized, mixed images (B, 3, H, W) and their mixed targets (B, K)."""
        assert batch.targets is not None
        images, targets = self.transformed(batch.images, batch.targets, epoch, step)
        blend = self.blend(images, epoch, step)
        return blend.images(images), blend.vectors(targets)

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the method's loss of outputs (B, K)."""
        if logits.shape[1] != self.num_classes:
            raise UsageError(f"The network predicts {logits.shape[1]} {self.values}, the data have {self.num_classes}.")
        if self.own_loss is not None:
            return self.own_loss(at_least_float32(logits), targets)
        outputs, known = at_least_float32(logits), ~targets.isnan()
        filled = torch.where(known, targets, 0).to(outputs.dtype)
        return mean_over_known(self.losses(outputs, filled), known)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each value, (B, K)."""
        raise NotImplementedError

    def accuracy(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Return nothing: a vector is not right or wrong as a whole."""
        return {}


class MultilabelObjective(VectorObjective):
    """Binary cross-entropy or the asymmetric loss of every label, with an optional teacher.

    With a teacher, hard distillation learns its decisions and soft distillation its probabilities at `temperature`, of
    every label: loss = (1 − λ)·labels + λ·teacher.
    """

    def __init__(self, *parts: Any, asymmetry: Mapping[str, float], **options: Any) -> None:
        super().__init__(*parts, **options)
        self.asymmetry = asymmetry

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each label, (B, K)."""
        if self.asymmetry:
            return asymmetric_losses(outputs, targets, **self.asymmetry)
        return binary_losses(outputs, targets)

    def teacher_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the binary cross-entropy with the teacher's decisions, or τ² times that with its probabilities."""
        logits, teacher_logits = at_least_float32(logits), at_least_float32(teacher_logits)
        if self.objective.distillation == "hard":
            return binary_losses(logits, (teacher_logits > 0).to(logits.dtype)).mean()
        temperature = self.objective.temperature
        return temperature**2 * binary_losses(logits / temperature, (teacher_logits / temperature).sigmoid()).mean()


def make_objective(ingredients: Ingredients) -> MultilabelObjective:
    """Build the recipe's objective."""
    recipe, network = ingredients.recipe, ingredients.network
    return MultilabelObjective(
        recipe.objective,
        recipe.augment,
        num_classes=network.config.num_classes,
        seed=recipe.seed,
        asymmetry=method_of(recipe.objective.method).options,
        teacher=ingredients.teacher,
        token=network.has_distillation_token,
        **ingredients.pixels,
    )
