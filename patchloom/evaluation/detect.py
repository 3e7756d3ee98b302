"""What a detector finds in pictures, told in their own pixels."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchloom.data.datasets import Objects
from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.classification import in_eval_mode
from patchloom.evaluation.detection import Detections, TrueObjects
from patchloom.models.dense.detector import Detector
from patchloom.objectives.detection import prepare_inputs
from patchloom_runtime.images.object_masks import paste_mask
from patchloom_runtime.images.samples import EXTENT


@torch.no_grad()
def find_objects(
    network: Detector, batches: Iterable[ImageBatch], precision: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Iterator[tuple[int, tuple[int, int], Detections]]:
    """Place in the set, height and width, and what was found, of every picture."""
    device = next(network.parameters()).device
    with in_eval_mode(network):
        for given in batches:
            batch = given.to(device, non_blocking=True)
            images, sizes = prepare_inputs(batch, network.pixel_mean, network.pixel_std, network.any_resolution)
            with precision():
                outputs = network(images, sizes)
            extents = given.parts[EXTENT].tolist()  # type: ignore[union-attr]
            for index, extent, output in zip(given.index.tolist(), extents, outputs, strict=True):
                height, width = extent[2:]
                yield index, (height, width), in_picture(output, extent)


def in_picture(output: Mapping[str, Tensor], extent: Sequence[int]) -> Detections:
    """One picture's detections from pixels of the canvas to pixels of the picture."""
    seen_height, seen_width, height, width = extent
    on_host = {name: tensor.float().cpu() for name, tensor in output.items()}
    scale = torch.tensor([width / seen_width, height / seen_height] * 2)
    boxes = (on_host["boxes"] * scale).numpy()
    masks = None
    if "masks" in on_host:
        shares = on_host["masks"][:, 0].numpy()
        masks = [paste_mask(mask, box, (height, width)) for mask, box in zip(shares, boxes, strict=True)]
    categories = on_host["labels"].long().numpy() - 1
    return Detections(boxes.astype(np.float64), categories, on_host["scores"].double().numpy(), masks)


def truth_of(objects: Objects, size: tuple[int, int]) -> TrueObjects:
    """What there is to find in a picture of `size` (height, width): boxes cut to it, those without area left out."""
    boxes = objects.boxes[:, :4].copy()
    boxes[:, 0::2] = boxes[:, 0::2].clip(0, size[1])
    boxes[:, 1::2] = boxes[:, 1::2].clip(0, size[0])
    kept = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1))
    masks = None if objects.masks is None else [objects.masks[i] for i in kept]
    categories = objects.boxes[kept, 4].astype(np.int64)
    return TrueObjects(boxes[kept], categories, objects.crowd[kept], objects.areas[kept], masks)
