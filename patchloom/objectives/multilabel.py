"""Multi-label classification: one decision per label, from the labels of images and, if there is one, from a teacher.

Letters: B images, K labels. Targets are (B, K): 1 if a label applies, 0 if not, between them in mixed images, NaN if
unknown. Every loss is the mean over the known labels of an image, then over the images (partial BCE with α = 1 and
β = 0 of Durand et al., arXiv 1902.09720), so that processes and micro-batches of equal size average to the whole batch.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives.classification import ClassificationObjective, at_least_float32
from patchloom.objectives.distillation import CHARTS as CHARTS
from patchloom.objectives.objective import Ingredients
from patchloom.objectives.teacher import Teacher
from patchloom.recipes.methods import method_of
from patchloom.recipes.parts import AugmentPart, ObjectivePart
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


class MultilabelObjective(ClassificationObjective):
    """Binary cross-entropy or the asymmetric loss of every label, with image mixing and an optional teacher.

    With a teacher, hard distillation learns its decisions and soft distillation its probabilities at `temperature`, of
    every label: loss = (1 − λ)·labels + λ·teacher.
    """

    def __init__(
        self,
        objective: ObjectivePart,
        augment: AugmentPart,
        *,
        num_classes: int,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        seed: int,
        asymmetry: Mapping[str, float],
        teacher: Teacher | None = None,
        token: bool = False,
    ) -> None:
        super().__init__(
            objective, augment, num_classes=num_classes, pixel_mean=pixel_mean, pixel_std=pixel_std, seed=seed
        )
        self.asymmetry = asymmetry
        self.token = token and teacher is not None
        if teacher is not None:
            teacher.check_classes(num_classes)
            teacher = teacher.for_images_of(pixel_mean, pixel_std)
        self.teacher = teacher

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch: `loss` to be minimized, and values to be logged."""
        images, targets = self.inputs(batch, epoch, step)
        if self.teacher is None:
            return {"loss": self.label_loss(model(images), targets)}
        teacher_logits = self.teacher(images)
        if self.token:
            class_logits, student_logits = model(images, both_heads=True)
        else:
            class_logits = student_logits = model(images)
        label_loss = self.label_loss(class_logits, targets)
        teacher_loss = self.teacher_loss(student_logits, teacher_logits)
        weight = self.objective.distillation_weight
        return {
            "loss": (1 - weight) * label_loss + weight * teacher_loss,
            "label_loss": label_loss.detach(),
            "teacher_loss": teacher_loss.detach(),
        }

    def inputs(self, batch: ImageBatch, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return normalized, mixed images (B, 3, H, W) and their mixed targets (B, K)."""
        assert batch.targets is not None
        images, targets = self.transformed(batch.images, batch.targets, epoch, step)
        blend = self.blend(images, epoch, step)
        return blend.images(images), blend.vectors(targets)

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the method's loss of logits (B, K)."""
        if logits.shape[1] != self.num_classes:
            raise UsageError(f"The network has {logits.shape[1]} labels, the data {self.num_classes}.")
        if self.own_loss is not None:
            return self.own_loss(at_least_float32(logits), targets)
        logits, known = at_least_float32(logits), ~targets.isnan()
        filled = torch.where(known, targets, 0).to(logits.dtype)
        if self.asymmetry:
            return mean_over_known(asymmetric_losses(logits, filled, **self.asymmetry), known)
        return mean_over_known(binary_losses(logits, filled), known)

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
