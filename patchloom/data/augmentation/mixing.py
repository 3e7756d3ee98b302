"""Mixup and CutMix: every image of a batch, and its label, is blended with the one at the mirrored position.

One λ (and for CutMix one box) is drawn per batch, on the host and from a seed, so the host never waits for the device
and all processes of a run draw the same. Mixup: arXiv 1710.09412; CutMix: arXiv 1905.04899.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Box = tuple[int, int, int, int]  # top, bottom, left, right


@dataclass(frozen=True)
class Blend:
    """A blend with share `weight` of the image itself; with a `box`, that box is taken from the partner."""

    weight: float = 1.0
    box: Box | None = None

    def images(self, images: Tensor) -> Tensor:
        """Blend (B, 3, H, W) with itself reversed along B, out of place."""
        if self.weight == 1.0:
            return images
        if self.box is None:
            return torch.lerp(images.flip(0), images, self.weight)
        top, bottom, left, right = self.box
        mixed = images.clone()
        mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right].flip(0)
        return mixed

    def targets(self, labels: Tensor, num_classes: int, smoothing: float, dtype: torch.dtype) -> Tensor:
        """Convert class indices (B,) to shares (B, num_classes) that sum to 1."""
        targets = F.one_hot(labels, num_classes).to(dtype)
        targets = targets * (1 - smoothing) + smoothing / num_classes
        return torch.lerp(targets.flip(0), targets, self.weight) if self.weight < 1.0 else targets

    def vectors(self, targets: Tensor) -> Tensor:
        """Blend labels or numbers (B, K); a value that is unknown (NaN) of either image stays unknown."""
        return torch.lerp(targets.flip(0), targets, self.weight) if self.weight < 1.0 else targets


def draw_blend(
    height: int,
    width: int,
    *,
    mixup: float,
    cutmix: float,
    probability: float = 1.0,
    switch: float = 0.5,
    seed: int,
) -> Blend:
    """Draw one batch's blend. `mixup` and `cutmix` are α of Beta(α, α), 0 = off; `switch` is CutMix's share."""
    rng = np.random.default_rng(seed)
    if not (mixup or cutmix) or rng.random() >= probability:
        return Blend()
    if cutmix and (not mixup or rng.random() < switch):
        box = _random_box(height, width, rng.beta(cutmix, cutmix), rng)
        top, bottom, left, right = box
        # The box may be clipped at the border: the labels follow the area that was actually replaced.
        return Blend(1 - (bottom - top) * (right - left) / (height * width), box)
    return Blend(float(rng.beta(mixup, mixup)))


def _random_box(height: int, width: int, weight: float, rng: np.random.Generator) -> Box:
    """Draw a box of the image's shape with 1 − weight of its area, centered anywhere, clipped at the border."""
    side = float(np.sqrt(1 - weight))
    box_height, box_width = int(height * side), int(width * side)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    return (
        max(y - box_height // 2, 0),
        min(y + (box_height + 1) // 2, height),
        max(x - box_width // 2, 0),
        min(x + (box_width + 1) // 2, width),
    )
