"""Learning the class of every pixel: cross-entropy of UperNet's logits, and of its auxiliary head's.

Letters: B images, K classes, H×W pixels. Logits have a quarter of the sides and are resized to the masks, bilinearly.
The loss is a mean over the labelled pixels of all processes; mmsegmentation divides by all pixels instead, so that
images with few labelled ones count less. Numbers that are no class are not labelled.
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
    """Whole numbers (B, H, W) → classes as int64, IGNORED where there is none."""
    numbers = mask.long()
    return numbers.where((numbers >= 0) & (numbers < classes) & (numbers != ignored), IGNORED)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, K, h, w) and (B, H, W) → the sum of −log p(label) over the labelled pixels."""
    logits = F.interpolate(at_least_float32(logits), labels.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


class SegmentationObjective(Objective):
    """Images and their masks → loss; `accuracy` is the share of labelled pixels that are right, in percent."""

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
        """Scalars of one batch."""
        labels = labeled(batch.parts["mask"], self.classes, self.ignored)  # type: ignore[arg-type]
        images = normalize(batch.images, self.pixel_mean, self.pixel_std)
        logits, auxiliary = model(images, auxiliary=True)
        pixels = self._mean_pixels(labels)
        head_loss = summed_loss(logits, labels) / pixels
        found = {"loss": head_loss, "accuracy": self._accuracy(logits, labels)}
        if auxiliary is not None:
            auxiliary_loss = summed_loss(auxiliary, labels) / pixels
            found["loss"] = head_loss + self.auxiliary_weight * auxiliary_loss
            found |= {"head_loss": head_loss.detach(), "auxiliary_loss": auxiliary_loss.detach()}
        return found

    def _mean_pixels(self, labels: Tensor) -> Tensor:
        """Labelled pixels of all processes over their number: what makes the mean of their losses that over pixels."""
        count = torch.stack([(labels != IGNORED).sum().float(), torch.ones((), device=labels.device)])
        pixels, processes = self._add_up(count)  # type: ignore[operator]
        return pixels.clamp(min=1) / processes

    @torch.no_grad()
    def _accuracy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """At the places of the logits: nearly the same, and a sixteenth of the work."""
        few = F.interpolate(labels[:, None].float(), logits.shape[2:], mode="nearest")[:, 0].long()
        known = few != IGNORED
        return 100 * ((logits.argmax(dim=1) == few) & known).sum() / known.sum().clamp(min=1)

    def cut_in_words(self, images: int) -> str:
        """The mean over labelled pixels is then taken in each of them."""
        return f"the loss is then a mean over the labelled pixels of {images} images at a time"


def make_objective(given: Ingredients) -> SegmentationObjective:
    """By the recipe; what is not labelled is what the masks of the data say."""
    return SegmentationObjective(
        classes=given.network.config.num_classes,
        ignored=given.ignored,
        auxiliary_weight=given.recipe.segment.auxiliary_weight,
        add_up=given.add_up,
        **given.pixels,
    )
