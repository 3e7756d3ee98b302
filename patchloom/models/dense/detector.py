"""Mask R-CNN on any network of patchloom; without masks Faster R-CNN. Heads, losses and rules are torchvision's.

    images → backbone → neck: strides 4 8 16 32 → pyramid, C channels, P2 … P6 → proposals → boxes and classes, masks

Two pyramids: FPN (Lin et al. 2017; as under XCiT and PatchConvNet, thesis 5.3.3), whose coarse maps are added to the
finer ones, and ViTDet's simple one (Li et al. 2022), where each map is made from the last map of the backbone alone; P6
is every second place of P5. Anchors are 8 strides wide (32 … 512 pixels) at ratios 1:2, 1:1 and 2:1.

torchvision differs from mmdetection, which the papers used, in smooth-L1 instead of L1, 2 samples a RoI bin instead of
as many as there are pixels, and no match of a bad proposal in the second stage.

Images come normalised, on canvases of one size (`data/augmentation/canvas.py`); sizes say how much of each is picture.
Boxes, and masks of 28×28 pixels in them, are told in pixels of the canvas.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import initLevelMapper

from patchloom.models.dense.dense import DenseNetwork
from patchloom.models.dense.pyramid import STRIDES, Level
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom_runtime.errors import UsageError

Target = dict[str, Tensor]  # boxes (n, 4), labels (n,) from 1, and masks (n, H, W) where they are learned
RATIOS = (0.5, 1.0, 2.0)
COARSEST = 64  # stride of P6
map_layer_norm = partial(LayerNorm2d, eps=1e-6)  # of the channels at every place, as ViTDet's
POOLED = 7, 14  # places of a RoI, for boxes and for masks
CONVOLUTIONS = 4  # of mask head and convolutional box head
LOSSES = {  # torchvision's names → those of records
    "loss_objectness": "objectness",
    "loss_rpn_box_reg": "proposals",
    "loss_classifier": "classes",
    "loss_box_reg": "boxes",
    "loss_mask": "masks",
}


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """The backbone, and what stands on it; fields of the same name are those of a recipe's `detect`."""

    name: str  # of the backbone
    backbone: Mapping[str, Any]  # its options
    num_classes: int  # without background
    masks: bool
    image_size: tuple[int, int]
    pyramid: Literal["fpn", "simple"] = "fpn"
    channels: int = 256
    norm: Literal["none", "batch", "group", "layer"] = "none"
    box_head: Literal["linear", "convolutions"] = "linear"
    hidden: int = 1024
    anchor_scale: float = 8.0
    proposals: int = 1000
    regions: int = 512
    min_score: float = 0.05
    overlap: float = 0.5
    most: int = 100


def make_detector(backbone: Network, classes: int, *, masks: bool, **options: Any) -> "Detector":
    """A detector of so many classes, without background; `options` are fields of `DetectorConfig`."""
    inner = asdict(backbone.config)
    name, size = inner.pop("name"), backbone.config.image_size
    config = DetectorConfig(name=name, backbone=inner, num_classes=classes, masks=masks, image_size=size, **options)
    return Detector(backbone, config)


def create_detector(name: str, **options: Any) -> "Detector":
    """The detector that a config tells of, with random weights."""
    known = {field.name for field in fields(DetectorConfig)} - {"name"}
    inner = options.get("backbone")
    if not isinstance(inner, Mapping) or options.keys() - known:
        raise UsageError(f"a detector has the options {', '.join(sorted(known))}; given {', '.join(options)}")
    backbone = build_model(name, **inner)
    return Detector(backbone, DetectorConfig(name=name, **options))


class Detector(DenseNetwork):
    """A backbone, the neck on it, a pyramid and torchvision's heads."""

    def __init__(self, backbone: Network, config: DetectorConfig) -> None:
        simple = config.pyramid == "simple"
        super().__init__(backbone, (_column_stride(backbone),) if simple else STRIDES)
        self.config = config
        self.pyramid: nn.Module
        if simple:
            self.pyramid = SimplePyramid(self.levels[0], STRIDES, config.channels)
        else:
            channels, norm = [level.channels for level in self.levels], norm_of(config.norm)
            self.pyramid = FeaturePyramidNetwork(channels, config.channels, LastLevelMaxPool(), norm_layer=norm)
        rcnn = make_rcnn(config)
        self.rpn, self.roi_heads = rcnn.rpn, rcnn.roi_heads

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]], targets: Sequence[Target] | None = None) -> Any:
        """(B, 3, H, W) and the height and width of each picture on its canvas → in training losses by name, else one
        dict of boxes, labels from 1, scores and, where masks are learned, masks (n, 1, 28, 28) per image."""
        maps = self.maps(images)
        features = self.pyramid(OrderedDict((str(i), each) for i, each in enumerate(maps)))
        shown, wanted = ImageList(images, list(sizes)), list(targets) if targets is not None else None
        proposals, losses = self.rpn(shown, features, wanted)
        found, more = self.roi_heads(features, proposals, shown.image_sizes, wanted)
        return {LOSSES[name]: value for name, value in (losses | more).items()} if self.training else found


def make_rcnn(config: DetectorConfig) -> FasterRCNN:
    """torchvision's detector, of which proposals and heads are used."""
    channels, norm = config.channels, norm_of(config.norm)
    sides = tuple((int(config.anchor_scale * stride),) for stride in (*STRIDES, COARSEST))
    anchors = AnchorGenerator(sides, (RATIOS,) * len(sides))
    common: dict[str, Any] = {
        "rpn_anchor_generator": anchors,
        "rpn_head": WideRPNHead(channels, len(RATIOS), conv_depth=2 if config.pyramid == "simple" else 1),
        "rpn_post_nms_top_n_train": config.proposals,
        "rpn_post_nms_top_n_test": config.proposals,
        "box_roi_pool": region_pool(POOLED[0]),
        "box_head": _box_head(config, norm),
        "box_predictor": WidePredictor(config.hidden, config.num_classes + 1),
        "box_batch_size_per_image": config.regions,
        "box_score_thresh": config.min_score,
        "box_nms_thresh": config.overlap,
        "box_detections_per_img": config.most,
    }
    backbone = nn.Module()
    backbone.out_channels = channels  # type: ignore[assignment]
    if not config.masks:
        return FasterRCNN(backbone, **common)
    return MaskRCNN(
        backbone,
        mask_roi_pool=region_pool(POOLED[1]),
        mask_head=MaskRCNNHeads(channels, (channels,) * CONVOLUTIONS, 1, norm_layer=norm),
        mask_predictor=MaskRCNNPredictor(channels, channels, config.num_classes + 1),
        **common,
    )


def region_pool(side: int) -> MultiScaleRoIAlign:
    """Regions of the maps as (side, side) places, from maps of strides that are known.

    torchvision would take the strides from the sizes of the first pictures it sees, which here fill only a part of
    their canvas: a landscape picture halves them.
    """
    pool = MultiScaleRoIAlign([str(i) for i in range(len(STRIDES))], side, 2)
    pool.scales = [1 / stride for stride in STRIDES]
    pool.map_levels = initLevelMapper(STRIDES[0].bit_length() - 1, STRIDES[-1].bit_length() - 1)
    return pool


class WideRPNHead(RPNHead):
    """torchvision's; what it says of boxes is not rounded to bfloat16, which knows 1,000 pixels to within 4."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Objectness and boxes of every map."""
        scores, boxes = super().forward(x)
        return [each.float() for each in scores], [each.float() for each in boxes]


class WidePredictor(FastRCNNPredictor):
    """torchvision's; likewise not rounded."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Classes and boxes of every region."""
        scores, boxes = super().forward(x)
        return scores.float(), boxes.float()


class SimplePyramid(nn.Module):
    """ViTDet's: every map from the last map of a column of blocks, nothing is added from above.

    Up by transposed convolutions that halve the channels, down by max-pooling, then 1×1 and 3×3 with LayerNorm.
    """

    def __init__(self, last: Level, strides: Sequence[int], channels: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(_resized(last, stride, channels) for stride in strides)
        self.extra = LastLevelMaxPool()

    def forward(self, maps: "OrderedDict[str, Tensor]") -> "OrderedDict[str, Tensor]":
        """The last map → one of C channels per stride, by number, and the coarsest."""
        (last,) = maps.values()
        made = [layers(last) for layers in self.maps]
        made, names = self.extra(made, made, [str(i) for i in range(len(made))])
        return OrderedDict(zip(names, made, strict=True))


def _resized(last: Level, stride: int, channels: int) -> nn.Sequential:
    """Layers from the last map to one of another stride."""
    layers: list[nn.Module] = []
    width, at = last.channels, last.stride
    while at > stride:
        if layers:
            layers += [map_layer_norm(width), nn.GELU()]
        layers.append(nn.ConvTranspose2d(width, width // 2, 2, 2))
        width, at = width // 2, at // 2
    if at < stride:
        layers.append(nn.MaxPool2d(stride // at))
    return nn.Sequential(
        *layers,
        nn.Conv2d(width, channels, 1, bias=False),
        map_layer_norm(channels),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        map_layer_norm(channels),
    )


def _column_stride(backbone: Network) -> int:
    """The stride of a network whose blocks all have the same, a power of two."""
    found = {level.stride for level in backbone.pyramid_levels(STRIDES)}
    stride = max(found)
    if len(found) > 1 or stride & (stride - 1):
        have = ", ".join(map(str, sorted(found)))
        raise UsageError(
            f"detect.pyramid simple is for networks of one stride, a power of 2; {backbone.config.name} has {have}. "
            "Set detect.pyramid to fpn."
        )
    return stride


def _box_head(config: DetectorConfig, norm: Callable[[int], nn.Module] | None) -> nn.Module:
    channels, side = config.channels, POOLED[0]
    if config.box_head == "linear":
        return TwoMLPHead(channels * side**2, config.hidden)
    return FastRCNNConvFCHead((channels, side, side), [channels] * CONVOLUTIONS, [config.hidden], norm_layer=norm)


def norm_of(name: str) -> Callable[[int], nn.Module] | None:
    """What makes a norm of so many channels; None for none."""
    made: dict[str, Callable[[int], nn.Module] | None] = {
        "none": None,
        "batch": nn.BatchNorm2d,
        "group": _group_norm,
        "layer": map_layer_norm,
    }
    return made[name]


def _group_norm(channels: int) -> nn.GroupNorm:
    """32 groups, as He et al. train from scratch; fewer where channels are few, so that none has one alone."""
    fitting = (groups for groups in (32, 16, 8, 4, 2, 1) if channels % groups == 0 and channels >= 4 * groups)
    return nn.GroupNorm(next(fitting, 1), channels)
