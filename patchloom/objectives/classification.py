"""Supervised classification: image mixing and (binary) cross-entropy on mixed labels.

Letters: B images, K classes. Targets are class indices (B,) or class shares (B, K). With class weights, an image counts
by the weight of its class, a mixed one by the weights of its classes in their shares: a loss that is linear in the
shares, as cross-entropy is, gives Σ_k share_k·weight_k·loss(label k), label smoothing included.
DeiT III's binary cross-entropy (thesis 6.2) is one two-way decision per class: every class with a share in a mixed
image is fully positive, however small its share.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.augmentation.mixing import Blend, draw_blend
from patchloom.data.augmentation.own_transform import transform_batch
from patchloom.data.batches.sampler import step_seed
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.data.labels.class_balance import class_counts, class_weights, logit_adjustment
from patchloom.objectives.objective import Ingredients, Objective
from patchloom.recipes.parts import AugmentPart, ObjectivePart
from patchloom_runtime.errors import UsageError

CHARTS: dict[str, dict[str, str]] = {}  # charts of a report: title → curve → metric name


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """Return −Σ_k q_k log softmax(logits)_k, mean over B, with q = (1 − smoothing)·targets + smoothing/K.

    `weights` (K,) are those of the classes. The mean is over images, not over weights, so that it is the same for the
    images of one process, of several and of micro-batches.
    """
    logits = at_least_float32(logits)
    if weights is None:
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)
    log_probabilities = F.log_softmax(logits, dim=1)
    weighted = _shares(targets, logits) * weights  # (B, K)
    of_labels = -(weighted * log_probabilities).sum(dim=1)
    of_all = -weighted.sum(dim=1) * log_probabilities.mean(dim=1)
    return ((1 - smoothing) * of_labels + smoothing * of_all).mean()


def binary_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean logistic loss over B·K. A class is positive if its share is above 0.

    With `weights` (K,) of the classes, all K decisions about an image count by the weight of its classes.
    """
    logits = at_least_float32(logits)
    shares = _shares(targets, logits)
    of_image = None if weights is None else (shares * weights).sum(dim=1, keepdim=True)
    return F.binary_cross_entropy_with_logits(logits, (shares > 0).to(logits.dtype), weight=of_image)


def _shares(targets: Tensor, logits: Tensor) -> Tensor:
    return F.one_hot(targets, logits.shape[1]).to(logits.dtype) if targets.ndim == 1 else targets


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert to float32: losses of bfloat16 and float16 logits would keep only 3 digits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class ClassificationObjective(Objective):
    """Cross-entropy or binary cross-entropy with image mixing.

    Runs that never mix images also report `accuracy` (percent of the batch). Mixing follows from (seed, epoch, step)
    alone. Nothing here waits for the device. `weights` and `adjustment` (K,) are the recipe's remedies for uneven
    classes: weights of the loss, and what it adds to the logits.
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
        weights: Tensor | None = None,
        adjustment: Tensor | None = None,
    ) -> None:
        self.weights, self.adjustment = weights, adjustment
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
        images, labels = self.transformed(batch.images, batch.labels, epoch, step)
        if labels.ndim > 1:  # mixed already
            return images, labels
        blend = self.blend(images, epoch, step)
        if blend.weight == 1.0:
            return images, labels
        return blend.images(images), blend.targets(labels, self.num_classes, 0.0, torch.float32)

    def transformed(self, pixels: Tensor, targets: Tensor, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return normalized images and their targets after the user's own transform of batches, if there is one."""
        if self.batch_transform is not None:
            pixels, targets = transform_batch(self.batch_transform, pixels, targets, step_seed(self.seed, epoch, step))
        return normalize(pixels, self.pixel_mean, self.pixel_std), targets

    def blend(self, images: Tensor, epoch: int, step: int) -> Blend:
        """Return how the images of a step are mixed."""
        return draw_blend(
            *images.shape[2:],
            mixup=self.augment.mixup,
            cutmix=self.augment.cutmix,
            probability=self.augment.mix_probability,
            switch=self.augment.mix_switch,
            seed=step_seed(self.seed, epoch, step),
        )

    def label_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the recipe's loss of logits (B, K)."""
        if logits.shape[1] != self.num_classes:
            raise UsageError(
                f"The network has {logits.shape[1]} classes, the data {self.num_classes}. "
                f"Create it with num_classes={self.num_classes} or call reset_head({self.num_classes})."
            )
        if self.own_loss is not None:
            return self.own_loss(at_least_float32(logits), targets)
        if self.adjustment is not None:
            logits = at_least_float32(logits) + self.adjustment
        if self.objective.loss == "bce":
            return binary_cross_entropy(logits, targets, self.weights)
        return cross_entropy(logits, targets, self.objective.smoothing, self.weights)

    def accuracy(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return `accuracy`, or nothing if the run mixes images: a mixed image has no single correct class."""
        if self.augment.mixup or self.augment.cutmix:
            return {}
        return {"accuracy": 100 * (logits.detach().argmax(dim=1) == labels).float().mean()}


def make_objective(ingredients: Ingredients) -> ClassificationObjective:
    """Build the recipe's objective."""
    recipe = ingredients.recipe
    return ClassificationObjective(recipe.objective, recipe.augment, **label_options(ingredients))


def label_options(ingredients: Ingredients) -> dict[str, Any]:
    """Return the keywords of a `ClassificationObjective`: classes, pixels, seed and the remedy for uneven classes."""
    recipe, classes = ingredients.recipe, ingredients.network.config.num_classes
    options = {"num_classes": classes, "seed": recipe.seed, **ingredients.pixels}
    balance, loss = recipe.balance, recipe.objective.loss
    if balance.class_weights == "none" and not balance.logit_adjustment:
        return options
    assert ingredients.labels is not None
    counts = class_counts(ingredients.labels.numpy(), classes)
    if balance.class_weights != "none":
        name, values = "weights", class_weights(counts, balance.class_weights, balance.effective_beta)
    else:
        name, values = "adjustment", logit_adjustment(counts, balance.logit_adjustment, loss)
    return {**options, name: torch.tensor(values, dtype=torch.float32, device=ingredients.device)}
