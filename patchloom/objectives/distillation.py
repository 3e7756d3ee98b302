"""Learning from labels and from a teacher that sees the same mixed images (thesis 3.3).

Letters: B images, K classes, τ temperature, λ weight of the teacher's term: loss = (1 − λ)·labels + λ·teacher.
A network with a distillation token gives labels to its class head and the teacher to its other head; one without
(CaiT, ResMLP, plain DeiT) gives both to the head it has.
Paper and code: equation 3.2 averages the soft term's KL over the batch, as `objective.soft_mean` does by default; the
authors' code, with a τ and λ of its own, also divides it by K (their issue 61): `batch_and_classes`.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.objectives import classification
from patchloom.objectives.classification import ClassificationObjective, at_least_float32, cross_entropy
from patchloom.objectives.objective import Ingredients
from patchloom.objectives.teacher import Teacher
from patchloom.recipes.parts import AugmentPart, ObjectivePart
from patchloom_runtime.errors import UsageError

# What a report draws of its records: title → curve → name of the value.
CHARTS = {"Terms of the loss": {"labels": "label_loss", "teacher": "teacher_loss"}}


def soft_distillation(
    logits: Tensor, teacher_logits: Tensor, temperature: float, mean: Literal["batch", "batch_and_classes"] = "batch"
) -> Tensor:
    """τ²·Σ_k p_k (log p_k − log q_k) of p = softmax(teacher_logits/τ), q = softmax(logits/τ); (B, K) each."""
    student = F.log_softmax(at_least_float32(logits) / temperature, dim=1)
    teacher = F.log_softmax(at_least_float32(teacher_logits) / temperature, dim=1)
    total = F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2
    return total / (len(logits) if mean == "batch" else logits.numel())


def hard_distillation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy with the teacher's decision as the label; not smoothed, as in the authors' code."""
    return cross_entropy(logits, teacher_logits.argmax(dim=1))


class Distillation(ClassificationObjective):
    """Labels and a teacher → loss; its two terms are reported as `label_loss` and `teacher_loss`.

    `token` says that the network has a distillation token (`network.config.distilled`): it is then called as
    model(images, both_heads=True), which passes through wrappers. The teacher runs under the student's autocast.
    """

    def __init__(
        self,
        objective: ObjectivePart,
        augment: AugmentPart,
        *,
        teacher: Teacher,
        token: bool,
        num_classes: int,
        **inputs: Any,
    ) -> None:
        super().__init__(objective, augment, num_classes=num_classes, **inputs)
        if objective.distillation == "none":
            raise UsageError(
                "A teacher is given, but objective.distillation is none. Set it to hard or soft, "
                "or train with Classification."
            )
        teacher.check_classes(num_classes)
        self.teacher = teacher.for_images_of(self.pixel_mean, self.pixel_std)
        self.token = token

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Scalars of one batch: `loss`, to be minimised, and what is only looked at."""
        images, targets = self.inputs(batch, epoch, step)
        teacher_logits = self.teacher(images)
        if self.token:
            of_class, of_teacher = model(images, both_heads=True)
        else:
            of_class = of_teacher = model(images)
        label_loss = self.label_loss(of_class, targets)
        teacher_loss = self.teacher_loss(of_teacher, teacher_logits)
        weight = self.objective.distillation_weight
        return {
            "loss": (1 - weight) * label_loss + weight * teacher_loss,
            "label_loss": label_loss.detach(),
            "teacher_loss": teacher_loss.detach(),
            **self.accuracy(of_class, batch.labels),
        }

    def teacher_loss(self, logits: Tensor, teacher_logits: Tensor) -> Tensor:
        """The recipe's way to follow the teacher, for logits (B, K)."""
        if self.objective.distillation == "hard":
            return hard_distillation(logits, teacher_logits)
        return soft_distillation(logits, teacher_logits, self.objective.temperature, self.objective.soft_mean)


class TwoClassTokens(ClassificationObjective):
    """The control of thesis 3.3: both tokens learn the labels, each with the classifier it has."""

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Scalars of one batch: `loss`, to be minimised, and what is only looked at."""
        images, targets = self.inputs(batch, epoch, step)
        first, second = model(images, both_heads=True)
        losses = self.label_loss(first, targets), self.label_loss(second, targets)
        return {"loss": (losses[0] + losses[1]) / 2, **self.accuracy(first, batch.labels)}


def make_objective(given: Ingredients) -> ClassificationObjective:
    """By the recipe; without a teacher it is plain classification, of one class token or of two."""
    recipe, network = given.recipe, given.network
    if recipe.objective.distillation == "labels":
        classes = network.config.num_classes
        return TwoClassTokens(recipe.objective, recipe.augment, num_classes=classes, seed=recipe.seed, **given.pixels)
    if given.teacher is None:
        return classification.make_objective(given)
    return Distillation(
        recipe.objective,
        recipe.augment,
        teacher=given.teacher,
        token=network.has_distillation_token,
        num_classes=network.config.num_classes,
        seed=recipe.seed,
        **given.pixels,
    )
