"""Semantic segmentation: pixel-wise cross-entropy of UperNet's logits and of its auxiliary head.

Letters: B images, K classes, H×W pixels. Logits have 1/4 of the resolution and are resized bilinearly to the masks.
The loss is a mean over the labeled pixels of all processes; mmsegmentation divides by all pixels instead, so that
images with few labeled pixels count less. Mask values that are not a class are unlabeled.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.objectives.classification import at_least_float32
from patchloom.objectives.objective import Ingredients, Objective, no_sum

IGNORED = -1
CHARTS = {
    "Pixels right while training, %": {"pixels": "accuracy"},
    "Losses": {"head": "head_loss", "auxiliary head": "auxiliary_loss"},
}


def labeled(mask: Tensor, classes: int, ignored: int) -> Tensor:
    """Convert integer masks (B, H, W) to int64 classes, with IGNORED for unlabeled pixels."""
    numbers = mask.long()
    return numbers.where((numbers >= 0) & (numbers < classes) & (numbers != ignored), IGNORED)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum −log p(label) over the labeled pixels, from logits (B, K, h, w) and labels (B, H, W)."""
    logits = F.interpolate(at_least_float32(logits), labels.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


class SegmentationObjective(Objective):
    """Cross-entropy of images and masks; `accuracy` is the percentage of labeled pixels that are correct."""

    def __init__(
        self,
        *,
        classes: int,
        ignored: int,
        auxiliary_weight: float,
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
        add_up: object = no_sum,
    ) -> None:
        self.classes, self.ignored, self.auxiliary_weight = classes, ignored, auxiliary_weight
        self.pixel_mean, self.pixel_std = pixel_mean, pixel_std
        self._add_up = add_up

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the scalars of one batch."""
        labels = labeled(batch.parts["mask"], self.classes, self.ignored)  # type: ignore[arg-type]
        images = normalize(batch.images, self.pixel_mean, self.pixel_std)
        logits, auxiliary = model(images, auxiliary=True)
        pixels = self._mean_pixels(labels)
        head_loss = summed_loss(logits, labels) / pixels
        values = {"loss": head_loss, "accuracy": self._accuracy(logits, labels)}
        if auxiliary is not None:
            auxiliary_loss = summed_loss(auxiliary, labels) / pixels
            values["loss"] = head_loss + self.auxiliary_weight * auxiliary_loss
            values |= {"head_loss": head_loss.detach(), "auxiliary_loss": auxiliary_loss.detach()}
        return values

    def _mean_pixels(self, labels: Tensor) -> Tensor:
        """Return labeled pixels per process: dividing by it makes the mean over processes a mean over pixels."""
        count = torch.stack([(labels != IGNORED).sum().float(), torch.ones((), device=labels.device)])
        pixels, processes = self._add_up(count)  # type: ignore[operator]
        return pixels.clamp(min=1) / processes

    @torch.no_grad()
    def _accuracy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the accuracy at the resolution of the logits: nearly the same for 1/16 of the work."""
        few = F.interpolate(labels[:, None].float(), logits.shape[2:], mode="nearest")[:, 0].long()
        known = few != IGNORED
        return 100 * ((logits.argmax(dim=1) == few) & known).sum() / known.sum().clamp(min=1)

    def micro_batch_note(self, images: int) -> str:
        """Say that the mean over labeled pixels is taken per micro-batch."""
        return f"the loss is then a mean over the labeled pixels of {images} images at a time"


def make_objective(ingredients: Ingredients) -> SegmentationObjective:
    """Build the recipe's objective; the data's masks define which pixels are unlabeled."""
    return SegmentationObjective(
        classes=ingredients.network.config.num_classes,
        ignored=ingredients.ignored,
        auxiliary_weight=ingredients.recipe.segment.auxiliary_weight,
        add_up=ingredients.add_up,
        **ingredients.pixels,
    )
