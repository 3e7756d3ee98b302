"""A detector as graphs: what is the same for every picture, between the steps that choose boxes (`object_choice.py`).

Letters: B canvases of H×W pixels, A anchors, R regions of all canvases, K classes and the background, C channels.
Regions are (R, 5): the number of their canvas, then the box; one list per map that they are read from.
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchloom.exporters.graph import FromPixels, Traced
from patchloom.models.absorb import absorb
from patchloom.models.dense.detector import Detector
from patchloom_runtime.artifacts.box_selection import LEVELS
from patchloom_runtime.artifacts.detector import CUT_TO, MASKS, REGIONS

TRACED = 4 * CUT_TO, 5 * CUT_TO  # pixels of a canvas whose sides are free
MAP_NAMES = tuple(f"map{number}" for number in range(LEVELS))


class ProposalGraph(FromPixels):
    """Pixels and the sizes of pictures on their canvases → maps, and what the proposal network says of every anchor."""

    outputs: ClassVar[tuple[str, ...]] = (*MAP_NAMES, "objectness", "offsets")

    def __init__(self, network: Detector, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(mean, std)
        self.backbone, self.strides = absorb(network.backbone), network.strides
        self.neck, self.pyramid, self.proposing = copy.deepcopy((network.neck, network.pyramid, network.rpn.head))

    def forward(self, pixels: Tensor, sizes: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """(B, H, W, 3) uint8, (B, 2) → (B, C, H/4, W/4) …, (B, A), (B, A, 4)."""
        images = self.normalized(pixels)
        rows, columns = (torch.arange(side) for side in images.shape[2:])
        filled = (rows < sizes[:, :1])[:, None, :, None] & (columns < sizes[:, 1:])[:, None, None, :]
        return self.answers(torch.where(filled, images, 0.0))

    def answers(self, images: Tensor) -> dict[str, Tensor]:
        """As the network's `forward`, up to the choice of proposals."""
        maps = self.neck(self.backbone.pyramid(images, self.strides))
        features = list(self.pyramid(OrderedDict((str(i), each) for i, each in enumerate(maps))).values())
        objectness, offsets = self.proposing(features)
        found = dict(zip(MAP_NAMES, features, strict=False))
        found["objectness"] = torch.cat([_by_place(each, 1) for each in objectness], 1).squeeze(2)
        found["offsets"] = torch.cat([_by_place(each, 4) for each in offsets], 1)
        return found


def _by_place(told: Tensor, values: int) -> Tensor:
    """(B, anchors·values, H, W) → (B, H·W·anchors, values)."""
    return told.unflatten(1, (-1, values)).permute(0, 3, 4, 1, 2).flatten(1, 3)


class RegionGraph(nn.Module):
    """What heads say of regions."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.scales, self.side, self.samples = tuple(pool.scales), pool.output_size, pool.sampling_ratio

    def pooled(self, maps: Sequence[Tensor], lists: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Maps and lists of regions → (R, C, side, side) in the order of the lists, and all regions (R, 5)."""
        align = torch.ops.torchvision.roi_align
        read = [
            align(each, regions, scale, *self.side, self.samples, False)
            for each, regions, scale in zip(maps, lists, self.scales, strict=True)
        ]
        return torch.cat(read), torch.cat(list(lists))


class ClassGraph(RegionGraph):
    """→ {"scores": (R, K), "boxes": (R, K, 4)}."""

    outputs: ClassVar[tuple[str, ...]] = ("scores", "boxes")

    def __init__(self, network: Detector) -> None:
        heads = network.roi_heads
        super().__init__(heads.box_roi_pool)
        self.head, self.predictor = copy.deepcopy((heads.box_head, heads.box_predictor))
        self.coder = heads.box_coder

    def forward(
        self,
        map0: Tensor, map1: Tensor, map2: Tensor, map3: Tensor,
        list0: Tensor, list1: Tensor, list2: Tensor, list3: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """One list of regions per map."""
        pooled, regions = self.pooled((map0, map1, map2, map3), (list0, list1, list2, list3))
        logits, offsets = self.predictor(self.head(pooled))
        boxes = self.coder.decode_single(offsets, regions[:, 1:]).unflatten(1, (-1, 4))
        return {"scores": logits.softmax(-1), "boxes": boxes}


class MaskGraph(RegionGraph):
    """→ {"shares": (R, 28, 28)}, of the class that each region has."""

    outputs: ClassVar[tuple[str, ...]] = ("shares",)

    def __init__(self, network: Detector) -> None:
        heads = network.roi_heads
        super().__init__(heads.mask_roi_pool)
        self.head, self.predictor = copy.deepcopy((heads.mask_head, heads.mask_predictor))

    def forward(
        self,
        map0: Tensor, map1: Tensor, map2: Tensor, map3: Tensor,
        list0: Tensor, list1: Tensor, list2: Tensor, list3: Tensor,
        labels: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """One list of regions per map, and the labels (R,) of all, one list after the other."""
        pooled, _ = self.pooled((map0, map1, map2, map3), (list0, list1, list2, list3))
        shares = self.predictor(self.head(pooled)).sigmoid()
        index = labels.view(-1, 1, 1, 1).expand(-1, 1, *shares.shape[2:])
        return {"shares": shares.gather(1, index).squeeze(1)}


@torch.no_grad()
def traced_detector(network: Detector, shown: Any, rows: Any) -> list[Traced]:
    """The parts of a detector, traced with two canvases."""
    scene = ProposalGraph(network, shown.mean, shown.std).eval()
    pixels, sizes = torch.from_numpy(rows["pixels"].copy()), torch.from_numpy(rows["extent"][:, :2].astype("int64"))
    if network.any_resolution:  # a side of one place would be taken for one that is never longer
        pixels = pixels.new_zeros(2, *TRACED, 3)
    maps = {name: value for name, value in scene(pixels, sizes).items() if name in MAP_NAMES}
    regions = torch.tensor([[0.0, 0, 0, 8, 8], [1, 4, 4, 16, 16], [1, 0, 2, 9, 9]])
    lists = {f"list{level}": regions.clone() for level in range(LEVELS)}  # the same tensor would be one input
    batch = torch.export.Dim.DYNAMIC
    free: dict[str, Any] = {}
    if network.any_resolution:
        height, width = (CUT_TO * torch.export.Dim(f"{side}_in_{CUT_TO}s", min=1, max=256) for side in ("h", "w"))
        free = {"pixels": {0: batch, 1: height, 2: width}, **{name: {0: batch, 2: batch, 3: batch} for name in maps}}
    parts = [
        Traced(scene, {"pixels": pixels, "sizes": sizes}, ProposalGraph.outputs, free),
        Traced(ClassGraph(network).eval(), {**maps, **lists}, ClassGraph.outputs, free, REGIONS),
    ]
    if network.config.masks:
        labels = {"labels": torch.ones(len(regions) * LEVELS, dtype=torch.int64)}
        parts.append(Traced(MaskGraph(network).eval(), {**maps, **lists, **labels}, MaskGraph.outputs, free, MASKS))
    return parts
