"""What is exported: pixels in, named float32 outputs out; normalisation, absorbed network and heads between them.

Letters: B images of H×W pixels, K classes, C channels of the vector that images are compared by.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchloom.models.absorb import absorb
from patchloom.models.dense.upernet import SegmentationNetwork
from patchloom.models.network import Network
from patchloom_runtime.engines.formats import MODEL

LOGITS, EMBEDDING, MAPS = "logits", "embedding", "maps"


@dataclass(frozen=True)
class Traced:
    """One part of what is exported: a module, and the inputs it is traced with."""

    module: nn.Module
    inputs: Mapping[str, Tensor]  # in the order of the module's parameters
    outputs: Sequence[str]
    free: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)  # sides that are of any length; else the first
    part: str = MODEL

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """As torch.export has them."""
        return tuple(dict(self.free.get(name, {0: torch.export.Dim.DYNAMIC})) for name in self.inputs)

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return sum(value.numel() * value.element_size() for value in self.module.state_dict().values())


class FromPixels(nn.Module):
    """(B, H, W, 3) uint8 → arrays by name."""

    outputs: ClassVar[tuple[str, ...]]  # their names, in order
    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        # The numbers of `normalise`, in the same order of operations, so that images are equal to the bit.
        self.register_buffer("scale", torch.tensor([1 / (255 * s) for s in std]))
        self.register_buffer("shift", torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]))

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """(B, H, W, 3) uint8 → float32 outputs by name."""
        images = self.normalized(pixels)
        found = self.answers(images.half() if self.half_precision else images)
        return {name: found[name].float() for name in self.outputs}

    def normalized(self, pixels: Tensor) -> Tensor:
        """(B, H, W, 3) uint8 → (B, 3, H, W)."""
        return (pixels.to(torch.float32) * self.scale + self.shift).permute(0, 3, 1, 2)

    def answers(self, images: Tensor) -> dict[str, Tensor]:
        """What the network says of (B, 3, H, W), normalised."""
        raise NotImplementedError


class EmbeddingGraph(FromPixels):
    """→ {"embedding": (B, C)}."""

    outputs: ClassVar[tuple[str, ...]] = (EMBEDDING,)

    def __init__(
        self, network: Network, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False
    ) -> None:
        super().__init__(mean, std, half=half)
        self.network = absorb(network)
        if half:
            self.network.half()

    def answers(self, images: Tensor) -> dict[str, Tensor]:
        """By the network's own parts."""
        features = self.network.features(images)
        found = {EMBEDDING: self.network.projector(self.network.vectors(features))}
        return found | ({LOGITS: self.network.head(features)} if LOGITS in self.outputs else {})


class ClassifierGraph(EmbeddingGraph):
    """→ {"logits": (B, K), "embedding": (B, C)}."""

    outputs = (LOGITS, EMBEDDING)


class SegmenterGraph(FromPixels):
    """→ {"maps": (B, K, H/4, W/4)}, the logits of places of an image."""

    outputs = (MAPS,)

    def __init__(
        self, network: SegmentationNetwork, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False
    ) -> None:
        super().__init__(mean, std, half=half)
        self.backbone, self.strides = absorb(network.backbone), network.strides
        self.neck, self.head = copy.deepcopy((network.neck, network.head))
        if half:
            for part in (self.backbone, self.neck, self.head):
                part.half()

    def answers(self, images: Tensor) -> dict[str, Tensor]:
        """As the network's `forward`."""
        return {MAPS: self.head(self.neck(self.backbone.pyramid(images, self.strides)))}
