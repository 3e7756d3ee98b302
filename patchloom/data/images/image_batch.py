"""Batches of images, and their normalization."""

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
    """Images, labels and other parts of one training step of one process."""

    images: Tensor  # (B, 3, H, W) uint8, channels last in memory
    labels: Tensor  # (B,) int64
    index: Tensor  # (B,) int64, positions in the dataset
    parts: "Parts" = field(default_factory=dict)  # name → (B, H, W) integers of a layer, or boxes
    targets: Tensor | None = None  # (B, K) float32: labels that apply (1) or not (0), or numbers; NaN if unknown

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of_pixels(cls, pixels: Sequence[np.ndarray], first: int = 0) -> "ImageBatch":
        """Make a batch of (H, W, 3) images without labels. The position of the first one is `first`."""
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        positions = torch.arange(first, first + len(images))
        return cls(images, torch.full_like(positions, UNLABELED), positions)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "ImageBatch":
        """Return the batch on another device. `non_blocking` helps if the loader pins its memory."""
        tensors = (self.images, self.labels, self.index)
        images, labels, index = (tensor.to(device, non_blocking=non_blocking) for tensor in tensors)
        parts = {name: part.to(device, non_blocking=non_blocking) for name, part in self.parts.items()}
        targets = None if self.targets is None else self.targets.to(device, non_blocking=non_blocking)
        return ImageBatch(images, labels, index, parts, targets)


def normalize(images: Tensor, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD) -> Tensor:
    """Return (x/255 − mean)/std of (B, 3, H, W) images of 0…255, as float32, channels last in memory."""
    width = images.shape[3]
    # Rows of W·3 values: an innermost loop over 3 channels is much slower on a CPU.
    rows = images.permute(0, 2, 3, 1).flatten(2).to(torch.float32, copy=True)  # (B, H, W·3)
    scale = _row(tuple(1 / (255 * s) for s in std), width, images.device)
    shift = _row(tuple(-m / s for m, s in zip(mean, std, strict=True)), width, images.device)
    return rows.mul_(scale).add_(shift).unflatten(2, (width, -1)).permute(0, 3, 1, 2)


@lru_cache(maxsize=16)
def _row(values: tuple[float, ...], width: int, device: torch.device) -> Tensor:
    """Return (W·3,) on the device, cached, since a transfer makes the host wait."""
    return torch.tensor(values, dtype=torch.float32, device=device).repeat(width)
