"""Object detection: the losses of Faster and Mask R-CNN, summed as in torchvision's training.

    objectness, proposals   proposal network: object or not, and its box
    classes, boxes          regions: class and box
    masks                   regions that match an object, if masks are learned

Each loss is a mean over samples drawn from the images of a batch, so micro-batches and processes give nearly the same
sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchloom.data.batches.ragged import Boxes
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.models.dense.detector import LOSSES, Target
from patchloom.objectives.objective import Ingredients, Objective
from patchloom_runtime.images.samples import EXTENT

CHARTS: dict[str, dict[str, str]] = {  # charts of a report: title → curve → metric name
    "Losses of the proposals": {"objectness": "objectness", "boxes": "proposals"},
    "Losses of the regions": {"classes": "classes", "boxes": "boxes", "masks": "masks"},
}
Sizes = list[tuple[int, int]]  # height and width of the images on their canvases
# Canvases are cropped to what their images fill, in steps of this, so that all strides divide them and shapes are few.
CUT_TO = 32


def prepare_inputs(
    batch: ImageBatch, mean: tuple[float, ...], std: tuple[float, ...], cut: bool
) -> tuple[Tensor, Sizes]:
    """Return normalized images (B, 3, H, W) and the height and width of each image on its canvas.

    If the network accepts any size (`cut`), canvases are cropped to the largest image of the batch. Padding is 0 after
    normalization, as in torchvision.
    """
    sizes = [(height, width) for height, width, *_ in batch.parts[EXTENT].tolist()]  # type: ignore[union-attr]
    images = batch.images
    if cut:
        height, width = (-(-max(each) // CUT_TO) * CUT_TO for each in zip(*sizes, strict=True))
        images = images[:, :, :height, :width]
    normalized = normalize(images, mean, std)
    for image, (height, width) in zip(normalized, sizes, strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    return normalized, sizes


def targets_of(batch: ImageBatch, masks: bool, size: Sequence[int]) -> list[Target]:
    """Return boxes, labels from 1, and masks per image, in torchvision's format, for canvases cropped to `size`."""
    boxes, layers = batch.parts["boxes"], batch.parts.get("instances")
    assert isinstance(boxes, Boxes)
    targets = []
    for number, values in enumerate(boxes.each()):
        target = {"boxes": values[:, :4], "labels": values[:, 4].long() + 1}
        if masks:
            assert isinstance(layers, Tensor)
            layer = layers[number, : size[0], : size[1]]
            target["masks"] = (layer == values[:, 5, None, None].to(layer.dtype)).to(torch.uint8)
        targets.append(target)
    return targets


class DetectionObjective(Objective):
    """Sum of the detection losses for images with boxes."""

    def __init__(self, pixel_mean: tuple[float, ...], pixel_std: tuple[float, ...], *, masks: bool, cut: bool) -> None:
        self.pixel_mean, self.pixel_std, self.masks, self.cut = pixel_mean, pixel_std, masks, cut

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Return the scalars of one batch."""
        del epoch, step
        images, sizes = prepare_inputs(batch, self.pixel_mean, self.pixel_std, self.cut)
        losses = model(images, sizes, targets_of(batch, self.masks, images.shape[2:]))
        return {
            "loss": sum(losses.values()),
            **{name: losses[name].detach() for name in LOSSES.values() if name in losses},
        }

    def micro_batch_note(self, images: int) -> str:
        """Say that each loss is a mean over the images of a micro-batch."""
        return f"losses are then means over {images} images at a time"


def make_objective(ingredients: Ingredients) -> DetectionObjective:
    """Build the recipe's objective for its network."""
    network = ingredients.network
    return DetectionObjective(**ingredients.pixels, masks=network.config.masks, cut=network.any_resolution)
