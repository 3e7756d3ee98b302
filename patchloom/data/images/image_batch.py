"""Pictures of one step as a network is shown them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from patchloom_runtime.images.samples import UNLABELED

if TYPE_CHECKING:
    from patchloom.data.batches.ragged import Parts

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageBatch:
    """Pictures, labels and whatever else was asked of the set, of one step, of one process."""

    images: Tensor  # (B, 3, H, W) uint8, channels last in memory
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, places in the set
    parts: "Parts" = field(default_factory=dict)  # name → (B, H, W) whole numbers of a layer, or boxes

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of_pixels(cls, pixels: Sequence[np.ndarray], first: int = 0) -> "ImageBatch":
        """Pictures (H, W, 3) without labels; the place of the first is `first`."""
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        places = torch.arange(first, first + len(images))
        return cls(images, torch.full_like(places, UNLABELED), places)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ImageBatch":
        """The same batch on another device; `non_blocking` pays when the loader pins its memory."""
        tensors = (self.images, self.labels, self.index)
        images, labels, index = (tensor.to(device, non_blocking=non_blocking) for tensor in tensors)
        parts = {name: part.to(device, non_blocking=non_blocking) for name, part in self.parts.items()}
        return ImageBatch(images, labels, index, parts)


def normalize(images: Tensor, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD) -> Tensor:
    """(B, 3, H, W) of 0…255 → (x/255 − mean)/std in float32, channels last in memory."""
    width = images.shape[3]
    # Rows of W·3 values: with the 3 channels as its innermost loop a CPU takes much longer.
    rows = images.permute(0, 2, 3, 1).flatten(2).to(torch.float32, copy=True)  # (B, H, W·3)
    scale = _row(tuple(1 / (255 * s) for s in std), width, images.device)
    shift = _row(tuple(-m / s for m, s in zip(mean, std, strict=True)), width, images.device)
    return rows.mul_(scale).add_(shift).unflatten(2, (width, -1)).permute(0, 3, 1, 2)


@lru_cache(maxsize=16)
def _row(values: tuple[float, ...], width: int, device: torch.device) -> Tensor:
    """(W·3,), sent to the device once: a transfer makes the host wait."""
    return torch.tensor(values, dtype=torch.float32, device=device).repeat(width)
