"""What is exported: pixels in, named float32 outputs out; normalisation, absorbed network and heads between them.

Letters: B images of H×W pixels, K classes, C channels of the vector that images are compared by.
"""

import torch
from torch import Tensor, nn

from patchloom.models.absorb import absorb
from patchloom.models.network import Network

LOGITS, EMBEDDING = "logits", "embedding"


class FromPixels(nn.Module):
    """(B, H, W, 3) uint8 → {"logits": (B, K), "embedding": (B, C)}; without a classifier the embedding alone."""

    def __init__(
        self, network: Network, mean: tuple[float, ...], std: tuple[float, ...], *, decides: bool, half: bool = False
    ) -> None:
        super().__init__()
        self.network = absorb(network)
        self.decides, self.half_precision = decides, half
        # The numbers of `normalise`, in the same order of operations, so that images are equal to the bit.
        self.register_buffer("scale", torch.tensor([1 / (255 * s) for s in std]))
        self.register_buffer("shift", torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]))
        if half:
            self.network.half()

    scale: Tensor
    shift: Tensor

    @property
    def outputs(self) -> tuple[str, ...]:
        """Their names, in order."""
        return (LOGITS, EMBEDDING) if self.decides else (EMBEDDING,)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """(B, H, W, 3) uint8 → outputs by name."""
        images = (pixels.to(torch.float32) * self.scale + self.shift).permute(0, 3, 1, 2)  # (B, 3, H, W)
        features = self.network.features(images.half() if self.half_precision else images)
        found = {LOGITS: self.network.head(features).float()} if self.decides else {}
        vectors = self.network.vectors(features)
        return found | {EMBEDDING: self.network.projector(vectors).float()}
