"""A detector as graphs; `patchloom_runtime/artifacts/detector.py` selects boxes between them.

Letters: B canvases of H×W pixels, A anchors, R regions of all canvases, K classes and the background, C channels.
Regions are (R, 5): the number of their canvas, then the box; one list per feature map that they are pooled from.
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from patchloom.exporters.graph import FromPixels, GraphPart
from patchloom.models.dense.detector import Detector
from patchloom.models.network import absorb
from patchloom_runtime.artifacts.detector import CANVAS_STEP, LEVELS, MASKS, REGIONS

EXAMPLE_CANVAS = 4 * CANVAS_STEP, 5 * CANVAS_STEP  # pixels, for tracing with sides of any length
MAP_NAMES = tuple(f"map{number}" for number in range(LEVELS))


class ProposalGraph(FromPixels):
    """Graph from pixels and image sizes to feature maps, and to objectness and offsets of every anchor."""

    outputs: ClassVar[tuple[str, ...]] = (*MAP_NAMES, "objectness", "offsets")

    def __init__(self, network: Detector, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__(mean, std)
        self.backbone, self.strides = absorb(network.backbone), network.strides
        self.neck, self.pyramid, self.rpn_head = copy.deepcopy((network.neck, network.pyramid, network.rpn.head))

    def forward(self, pixels: Tensor, sizes: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        """Map (B, H, W, 3) uint8 and (B, 2) to maps (B, C, H/4, W/4) …, (B, A) and (B, A, 4)."""
        images = self.normalized(pixels)
        rows, columns = (torch.arange(side) for side in images.shape[2:])
        filled = (rows < sizes[:, :1])[:, None, :, None] & (columns < sizes[:, 1:])[:, None, None, :]
        return self.network_outputs(torch.where(filled, images, 0.0))

    def network_outputs(self, images: Tensor) -> dict[str, Tensor]:
        """Run the network up to the selection of proposals."""
        maps = self.neck(self.backbone.pyramid(images, self.strides))
        features = list(self.pyramid(OrderedDict((str(i), each) for i, each in enumerate(maps))).values())
        objectness, offsets = self.rpn_head(features)
        outputs = dict(zip(MAP_NAMES, features, strict=False))
        outputs["objectness"] = torch.cat([_by_anchor(each, 1) for each in objectness], 1).squeeze(2)
        outputs["offsets"] = torch.cat([_by_anchor(each, 4) for each in offsets], 1)
        return outputs


def _by_anchor(maps: Tensor, values: int) -> Tensor:
    """Reorder (B, anchors·values, H, W) to (B, H·W·anchors, values)."""
    return maps.unflatten(1, (-1, values)).permute(0, 3, 4, 1, 2).flatten(1, 3)


class RegionGraph(nn.Module):
    """Base of the graphs that run a head on regions."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.scales, self.side, self.samples = tuple(pool.scales), pool.output_size, pool.sampling_ratio

    def pooled(self, maps: Sequence[Tensor], lists: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return pooled features (R, C, side, side) in the order of the lists, and all regions (R, 5)."""
        align = torch.ops.torchvision.roi_align
        features = [
            align(each, regions, scale, *self.side, self.samples, False)
            for each, regions, scale in zip(maps, lists, self.scales, strict=True)
        ]
        return torch.cat(features), torch.cat(list(lists))


class ClassGraph(RegionGraph):
    """Graph with the outputs "scores" (R, K) and "boxes" (R, K, 4)."""

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
        """Classify regions, passed as one list per map."""
        pooled, regions = self.pooled((map0, map1, map2, map3), (list0, list1, list2, list3))
        logits, offsets = self.predictor(self.head(pooled))
        boxes = self.coder.decode_single(offsets, regions[:, 1:]).unflatten(1, (-1, 4))
        return {"scores": logits.softmax(-1), "boxes": boxes}


class MaskGraph(RegionGraph):
    """Graph with the output "shares" (R, 28, 28): mask probabilities for the class of each region."""

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
        """Predict masks of regions, passed as one list per map; `labels` (R,) are in the order of the lists."""
        pooled, _ = self.pooled((map0, map1, map2, map3), (list0, list1, list2, list3))
        shares = self.predictor(self.head(pooled)).sigmoid()
        index = labels.view(-1, 1, 1, 1).expand(-1, 1, *shares.shape[2:])
        return {"shares": shares.gather(1, index).squeeze(1)}


@torch.no_grad()
def detector_parts(network: Detector, preprocessing: Any, rows: Any) -> list[GraphPart]:
    """Return the parts of a detector, with two canvases as example inputs."""
    proposals = ProposalGraph(network, preprocessing.mean, preprocessing.std).eval()
    pixels, sizes = torch.from_numpy(rows["pixels"].copy()), torch.from_numpy(rows["extent"][:, :2].astype("int64"))
    if network.any_resolution:  # a map side of length 1 would be traced as fixed
        pixels = pixels.new_zeros(2, *EXAMPLE_CANVAS, 3)
    maps = {name: value for name, value in proposals(pixels, sizes).items() if name in MAP_NAMES}
    regions = torch.tensor([[0.0, 0, 0, 8, 8], [1, 4, 4, 16, 16], [1, 0, 2, 9, 9]])
    lists = {f"list{level}": regions.clone() for level in range(LEVELS)}  # one shared tensor would become one input
    auto = torch.export.Dim.DYNAMIC
    dynamic: dict[str, Any] = {}
    if network.any_resolution:
        height, width = (
            CANVAS_STEP * torch.export.Dim(f"{side}_in_{CANVAS_STEP}s", min=1, max=256) for side in ("h", "w")
        )
        dynamic = {"pixels": {0: auto, 1: height, 2: width}, **{name: {0: auto, 2: auto, 3: auto} for name in maps}}
    parts = [
        GraphPart(proposals, {"pixels": pixels, "sizes": sizes}, ProposalGraph.outputs, dynamic),
        GraphPart(ClassGraph(network).eval(), {**maps, **lists}, ClassGraph.outputs, dynamic, REGIONS),
    ]
    if network.config.masks:
        labels = {"labels": torch.ones(len(regions) * LEVELS, dtype=torch.int64)}
        inputs = {**maps, **lists, **labels}
        parts.append(GraphPart(MaskGraph(network).eval(), inputs, MaskGraph.outputs, dynamic, MASKS))
    return parts
