"""Distillation: learning from labels and from a teacher that sees the same mixed images (thesis 3.3).

Letters: B images, K classes, τ temperature, λ weight of the teacher's term: loss = (1 − λ)·labels + λ·teacher.
A network with a distillation token learns the labels with its class head and the teacher with its other head; one
without (CaiT, ResMLP, plain DeiT) learns both with its only head. Paper and code: equation 3.2 averages the soft term's
KL over the batch, the default of `objective.soft_mean`; the authors' code, with its own τ and λ, also divides it by K
(their issue 61): `batch_and_classes`. The divergence is KL(teacher‖student), as in their code and in Hinton et al.;
equation 3.2 prints its arguments the other way round. A remedy for uneven classes changes the labels' term only: the
teacher's term is to repeat the teacher.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives import classification
from patchloom.objectives.classification import (
    ClassificationObjective,
    at_least_float32,
    cross_entropy,
    label_options,
)
from patchloom.objectives.objective import Ingredients
from patchloom.objectives.teacher import Teacher
from patchloom.recipes.parts import ObjectivePart
from patchloom_runtime.errors import UsageError

# Charts of a report: title → curve → metric name.
CHARTS = {"Terms of the loss": {"labels": "label_loss", "teacher": "teacher_loss"}}


def soft_distillation(
    logits: Tensor, teacher_logits: Tensor, temperature: float, mean: Literal["batch", "batch_and_classes"] = "batch"
) -> Tensor:
    """Return τ²·Σ_k p_k (log p_k − log q_k) with p = softmax(teacher_logits/τ), q = softmax(logits/τ); (B, K) each."""
    student = F.log_softmax(at_least_float32(logits) / temperature, dim=1)
    teacher = F.log_softmax(at_least_float32(teacher_logits) / temperature, dim=1)
    total = F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2
    return total / (len(logits) if mean == "batch" else logits.numel())


def hard_distillation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the cross-entropy with the teacher's decision as label, without smoothing as in the authors' code."""
    return cross_entropy(logits, teacher_logits.argmax(dim=1))


class TaughtObjective(ClassificationObjective):
    """A loss from labels and, if there is one, a teacher; the two terms are logged as `label_loss` and `teacher_loss`.

    `token`: the network has a distillation token (`network.config.distilled`) and is called as
    model(images, both_heads=True), which passes through wrappers. The teacher runs under the student's autocast.
    """

    def __init__(self, *parts: Any, teacher: Teacher | None = None, token: bool = False, **options: Any) -> None:
        super().__init__(*parts, **options)
        if teacher is not None:
            teacher.check_classes(self.num_classes)
            teacher = teacher.for_images_of(self.pixel_mean, self.pixel_std)
        self.teacher, self.token = teacher, token

    @property
    def followers(self) -> list[nn.Module]:
        """Return the teacher, if there is one."""
        return [] if self.teacher is None else [self.teacher]

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch: `loss` to be minimized, and values to be logged."""
        images, targets = self.inputs(batch, epoch, step)
        if self.teacher is None:
            logits = model(images)
            return {"loss": self.label_loss(logits, targets), **self.accuracy(logits, batch.labels)}
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
            **self.accuracy(class_logits, batch.labels),
        }

    def teacher_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the loss of logits (B, K) with those of the teacher."""
        raise NotImplementedError


class Distillation(TaughtObjective):
    """Cross-entropy with labels and the decisions or probabilities of a teacher."""

    def __init__(self, objective: ObjectivePart, *parts: Any, **options: Any) -> None:
        if objective.distillation == "none":
            raise UsageError(
                "A teacher is given, but objective.distillation is none. Set it to hard or soft, "
                "or train with Classification."
            )
        super().__init__(objective, *parts, **options)

    def teacher_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the recipe's distillation loss for logits (B, K)."""
        if self.objective.distillation == "hard":
            return hard_distillation(logits, teacher_logits)
        return soft_distillation(logits, teacher_logits, self.objective.temperature, self.objective.soft_mean)


class TwoClassTokens(ClassificationObjective):
    """The control of thesis 3.3: both tokens learn the labels, each with its own classifier."""

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch: `loss` to be minimized, and values to be logged."""
        images, targets = self.inputs(batch, epoch, step)
        first, second = model(images, both_heads=True)
        losses = self.label_loss(first, targets), self.label_loss(second, targets)
        return {"loss": (losses[0] + losses[1]) / 2, **self.accuracy(first, batch.labels)}


def make_objective(ingredients: Ingredients) -> ClassificationObjective:
    """Build the recipe's objective; without a teacher, plain classification with one class token or two."""
    recipe, network = ingredients.recipe, ingredients.network
    if recipe.objective.distillation == "labels":
        return TwoClassTokens(recipe.objective, recipe.augment, **label_options(ingredients))
    if ingredients.teacher is None:
        return classification.make_objective(ingredients)
    return Distillation(
        recipe.objective,
        recipe.augment,
        teacher=ingredients.teacher,
        token=network.has_distillation_token,
        **label_options(ingredients),
    )
