"""The modules that are exported: pixels in, named float32 outputs out, with normalization inside.

Letters: B images of H×W pixels, K classes, C channels of an embedding.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchloom.models.dense.upernet import SegmentationNetwork
from patchloom.models.network import Network, absorb
from patchloom_runtime.engines.engine import MODEL

LOGITS, EMBEDDING, MAPS = "logits", "embedding", "maps"


@dataclass(frozen=True)
class GraphPart:
    """A module to export as one graph, with the example inputs it is traced with."""

    module: nn.Module
    inputs: Mapping[str, Tensor]  # in the order of the module's parameters
    outputs: Sequence[str]
    dynamic: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)  # axes of any length; default: the first
    name: str = MODEL

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Return the dynamic axes of each input, as torch.export takes them."""
        return tuple(dict(self.dynamic.get(name, {0: torch.export.Dim.DYNAMIC})) for name in self.inputs)

    @property
    def bytes(self) -> int:
        """Size of the weights."""
        return state_bytes(self.module)


class FromPixels(nn.Module):
    """Base of graphs that map pixels (B, H, W, 3) uint8 to named arrays."""

    outputs: ClassVar[tuple[str, ...]]  # names, in order
    scale: Tensor
    shift: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        # The same operations in the same order as `normalize`, so that images are equal to the bit.
        self.register_buffer("scale", torch.tensor([1 / (255 * s) for s in std]))
        self.register_buffer("shift", torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]))

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Map (B, H, W, 3) uint8 to float32 outputs by name."""
        images = self.normalized(pixels)
        results = self.network_outputs(images.half() if self.half_precision else images)
        return {name: results[name].float() for name in self.outputs}

    def normalized(self, pixels: Tensor) -> Tensor:
        """Map (B, H, W, 3) uint8 to (B, 3, H, W) float32."""
        return (pixels.to(torch.float32) * self.scale + self.shift).permute(0, 3, 1, 2)

    def network_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """Run the network on normalized images (B, 3, H, W)."""
        raise NotImplementedError


class EmbeddingGraph(FromPixels):
    """Graph with the output "embedding" (B, C)."""

    outputs: ClassVar[tuple[str, ...]] = (EMBEDDING,)

    def __init__(
        self, network: Network, mean: tuple[float, ...], std: tuple[float, ...], *, half: bool = False
    ) -> None:
        super().__init__(mean, std, half=half)
        self.network = absorb(network)
        if half:
            self.network.half()

    def network_outputs(self, images: Tensor) -> dict[str, Tensor]:
        features = self.network.features(images)
        results = {EMBEDDING: self.network.projector(self.network.vectors(features))}
        return results | ({LOGITS: self.network.head(features)} if LOGITS in self.outputs else {})


class ClassifierGraph(EmbeddingGraph):
    """Graph with the outputs "logits" (B, K) and "embedding" (B, C)."""

    outputs = (LOGITS, EMBEDDING)


class SegmenterGraph(FromPixels):
    """Graph with the output "maps" (B, K, H/4, W/4): logits at a quarter of the resolution."""

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

    def network_outputs(self, images: Tensor) -> dict[str, Tensor]:
        return {MAPS: self.head(self.neck(self.backbone.pyramid(images, self.strides)))}


def state_bytes(module: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    return sum(value.numel() * value.element_size() for value in module.state_dict().values())
