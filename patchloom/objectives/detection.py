"""Learning to find objects: the losses of Faster and Mask R-CNN, added up as torchvision's training does.

    objectness, proposals   of the proposal network: object or not, and its box
    classes, boxes          of the regions: which class, and the box
    masks                   of the regions that match an object, where masks are learned

Each is a mean over what was drawn from the images of a batch, so micro-batches and processes add up to nearly the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from patchloom.data.batches.ragged import Boxes
from patchloom.data.images.image_batch import ImageBatch, normalize
from patchloom.models.dense.detector import LOSSES, Target
from patchloom.objectives.objective import Ingredients, Objective
from patchloom_runtime.images.samples import EXTENT

CHARTS: dict[str, dict[str, str]] = {  # what a report draws of its records: title → curve → name of the value
    "Losses of the proposals": {"objectness": "objectness", "boxes": "proposals"},
    "Losses of the regions": {"classes": "classes", "boxes": "boxes", "masks": "masks"},
}
Sizes = list[tuple[int, int]]  # height and width of pictures on their canvases
# Canvases are cut to what their pictures fill, in steps of this, so that maps of all strides fit and shapes are few.
CUT_TO = 32


def prepare_inputs(
    batch: ImageBatch, mean: tuple[float, ...], std: tuple[float, ...], cut: bool
) -> tuple[Tensor, Sizes]:
    """Normalised images (B, 3, H, W) and height and width of each picture on its canvas.

    Where the network takes any size (`cut`), the part of the canvases that no picture of the batch fills is left out.
    What a picture does not fill is 0 once normalised, as torchvision pads.
    """
    sizes = [(height, width) for height, width, *_ in batch.parts[EXTENT].tolist()]  # type: ignore[union-attr]
    images = batch.images
    if cut:
        height, width = (-(-max(each) // CUT_TO) * CUT_TO for each in zip(*sizes, strict=True))
        images = images[:, :, :height, :width]
    shown = normalize(images, mean, std)
    for image, (height, width) in zip(shown, sizes, strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    return shown, sizes


def targets_of(batch: ImageBatch, masks: bool, size: Sequence[int]) -> list[Target]:
    """Boxes, labels from 1 and masks of every image, as torchvision takes them, of canvases cut to `size`."""
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
    """Images with boxes → losses."""

    def __init__(self, pixel_mean: tuple[float, ...], pixel_std: tuple[float, ...], *, masks: bool, cut: bool) -> None:
        self.pixel_mean, self.pixel_std, self.masks, self.cut = pixel_mean, pixel_std, masks, cut

    def __call__(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        """Scalars of one batch."""
        del epoch, step
        images, sizes = prepare_inputs(batch, self.pixel_mean, self.pixel_std, self.cut)
        losses = model(images, sizes, targets_of(batch, self.masks, images.shape[2:]))
        return {
            "loss": sum(losses.values()),
            **{name: losses[name].detach() for name in LOSSES.values() if name in losses},
        }

    def cut_in_words(self, images: int) -> str:
        """Each loss is a mean over what was drawn from the images of a micro-batch."""
        return f"losses are then means over {images} images at a time"


def make_objective(given: Ingredients) -> DetectionObjective:
    """By the recipe and the network."""
    network = given.network
    return DetectionObjective(**given.pixels, masks=network.config.masks, cut=network.any_resolution)
