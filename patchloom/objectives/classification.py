"""Supervised classification: image mixing and (binary) cross-entropy on mixed labels.

Letters: B images, K classes. Targets are class indices (B,) or class shares (B, K).
DeiT III's binary cross-entropy (thesis 6.2) is one two-way decision per class: every class with a share in a mixed
image is fully positive, however small its share.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.augmentation.mixing import draw_blend
from patchloom.data.batches.sampler import step_seed
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.recipes.parts import AugmentPart, ObjectivePart
from patchloom_runtime.errors import UsageError

CHARTS: dict[str, dict[str, str]] = {}  # charts of a report: title → curve → metric name


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return −Σ_k q_k log softmax(logits)_k, mean over B, with q = (1 − smoothing)·targets + smoothing/K."""
    return F.cross_entropy(at_least_float32(logits), targets, label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean logistic loss over B·K. A class is positive if its share is above 0."""
    logits = at_least_float32(logits)
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    return F.binary_cross_entropy_with_logits(logits, (targets > 0).to(logits.dtype))


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert to float32: losses of bfloat16 and float16 logits would keep only 3 digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class ClassificationObjective(Objective):
    """Cross-entropy or binary cross-entropy with image mixing.

    Runs that never mix images also report `accuracy` (percent of the batch). Mixing follows from (seed, epoch, step)
    alone. Nothing here waits for the device.
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
    ) -> None:
        self.objective = objective
        self.augment = augment
        self.num_classes = num_classes
        self.pixel_mean = pixel_mean
        self.pixel_std = pixel_std
        self.seed = seed

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch: `loss` to be minimized, and values to be logged."""
        images, targets = self.inputs(batch, epoch, step)
        logits = model(images)
        return {"loss": self.label_loss(logits, targets), **self.accuracy(logits, batch.labels)}

    def inputs(self, batch: ImageBatch, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return normalized, mixed images (B, 3, H, W) and their targets: (B,) if nothing is mixed, else (B, K)."""
        images = normalize(batch.images, self.pixel_mean, self.pixel_std)
        blend = draw_blend(
            *images.shape[2:],
            mixup=self.augment.mixup,
            cutmix=self.augment.cutmix,
            probability=self.augment.mix_probability,
            switch=self.augment.mix_switch,
            seed=step_seed(self.seed, epoch, step),
        )
        if blend.weight == 1.0:
            return images, batch.labels
        return blend.images(images), blend.targets(batch.labels, self.num_classes, 0.0, torch.float32)

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the recipe's loss of logits (B, K)."""
        if logits.shape[1] != self.num_classes:
            raise UsageError(
                f"The network has {logits.shape[1]} classes, the data {self.num_classes}. "
                f"Create it with num_classes={self.num_classes} or call reset_head({self.num_classes})."
            )
        if self.objective.loss == "bce":
            return binary_cross_entropy(logits, targets)
        return cross_entropy(logits, targets, self.objective.smoothing)

    def accuracy(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return `accuracy`, or nothing if the run mixes images: a mixed image has no single correct class."""
        if self.augment.mixup or self.augment.cutmix:
            return {}
        return {"accuracy": 100 * (logits.detach().argmax(dim=1) == labels).float().mean()}


def make_objective(ingredients: Ingredients) -> ClassificationObjective:
    """Build the recipe's objective."""
    recipe, classes = ingredients.recipe, ingredients.network.config.num_classes
    return ClassificationObjective(
        recipe.objective, recipe.augment, num_classes=classes, seed=recipe.seed, **ingredients.pixels
    )
