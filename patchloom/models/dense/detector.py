"""Mask R-CNN with any network as backbone; without masks, Faster R-CNN. Heads and losses are torchvision's.

    images → backbone → neck: strides 4 8 16 32 → pyramid, C channels, P2 … P6 → proposals → boxes and classes, masks

There are two pyramids: FPN (Lin et al. 2017; used with XCiT and PatchConvNet, thesis 5.3.3), which adds coarse maps to
finer ones, and ViTDet's simple pyramid (Li et al. 2022), which makes each map from the last map of the backbone. P6 is
every second position of P5. Anchors are 8 strides wide (32 … 512 pixels) with ratios 1:2, 1:1 and 2:1.

torchvision differs from mmdetection, which the papers used: smooth-L1 instead of L1, 2 samples per RoI bin instead of
one per pixel, and no match for bad proposals in the second stage.

Images are normalized and padded to one canvas size (`data/augmentation/canvas.py`); `sizes` are the image sizes on the
canvas. Boxes, and their 28×28 masks, are in pixels of the canvas.
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

from patchloom.models.dense.dense_network import DenseNetwork
from patchloom.models.dense.pyramid import STRIDES, Level
from patchloom.models.network import Network
from patchloom.models.registry import build_model
from patchloom_runtime.errors import UsageError

Target = dict[str, Tensor]  # boxes (n, 4), labels (n,) from 1, and with masks, masks (n, H, W)
RATIOS = (0.5, 1.0, 2.0)
COARSEST = 64  # stride of P6
map_layer_norm = partial(LayerNorm2d, eps=1e-6)  # over channels, as in ViTDet
ROI_SIZES = 7, 14  # positions per side of a RoI, for boxes and for masks
CONVOLUTIONS = 4  # in the mask head and the convolutional box head
LOSSES = {  # torchvision's names → names in records
    "loss_objectness": "objectness",
    "loss_rpn_box_reg": "proposals",
    "loss_classifier": "classes",
    "loss_box_reg": "boxes",
    "loss_mask": "masks",
}


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """Options of a detector. Fields after `image_size` have the names of a recipe's `detect` section."""

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
    """Create a detector on a backbone. `classes` excludes background; `options` are fields of `DetectorConfig`."""
    inner = asdict(backbone.config)
    name, size = inner.pop("name"), backbone.config.image_size
    config = DetectorConfig(name=name, backbone=inner, num_classes=classes, masks=masks, image_size=size, **options)
    return Detector(backbone, config)


def create_detector(name: str, **options: Any) -> "Detector":
    """Create a detector from the options of a config, with random weights."""
    known = {field.name for field in fields(DetectorConfig)} - {"name"}
    inner = options.get("backbone")
    if not isinstance(inner, Mapping) or options.keys() - known:
        raise UsageError(f"a detector has the options {', '.join(sorted(known))}, not {', '.join(options)}")
    backbone = build_model(name, **inner)
    return Detector(backbone, DetectorConfig(name=name, **options))


class Detector(DenseNetwork):
    """Backbone, neck, pyramid and torchvision's heads."""

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

    def one_pass(self) -> nn.Module:
        return OnePass(self)

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]], targets: Sequence[Target] | None = None) -> Any:
        """Return losses by name in training mode, otherwise one dict per image.

        Args:
            images: (B, 3, H, W), normalized.
            sizes: Height and width of each image on its canvas.
            targets: Boxes, labels and masks of each image, for training.

        The dicts have boxes (n, 4), labels (n,) from 1, scores (n,) and, with masks, masks (n, 1, 28, 28).
        """
        maps = self.maps(images)
        features = self.pyramid(OrderedDict((str(i), each) for i, each in enumerate(maps)))
        image_list, objects = ImageList(images, list(sizes)), list(targets) if targets is not None else None
        proposals, losses = self.rpn(image_list, features, objects)
        detections, more = self.roi_heads(features, proposals, image_list.image_sizes, objects)
        return {LOSSES[name]: value for name, value in (losses | more).items()} if self.training else detections


class OnePass(nn.Module):
    """A detector with as many regions per image as it allows, as mmdetection counts its operations.

    The number of regions of a real image depends on the image: those of zeros would be counted as none.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> None:
        """Run backbone, pyramid and proposals on (1, 3, H, W), then each head on its largest number of regions."""
        detector, c = self.detector, self.detector.config
        maps = detector.maps(images)
        features = detector.pyramid(OrderedDict((str(i), each) for i, each in enumerate(maps)))
        detector.rpn.head(list(features.values()))
        heads, (of_boxes, of_masks) = detector.roi_heads, ROI_SIZES
        heads.box_predictor(heads.box_head(images.new_zeros(c.proposals, c.channels, of_boxes, of_boxes)))
        if c.masks:
            heads.mask_predictor(heads.mask_head(images.new_zeros(c.most, c.channels, of_masks, of_masks)))


def make_rcnn(config: DetectorConfig) -> FasterRCNN:
    """Create torchvision's detector, whose proposal network and heads are used."""
    channels, norm = config.channels, norm_of(config.norm)
    sides = tuple((int(config.anchor_scale * stride),) for stride in (*STRIDES, COARSEST))
    anchors = AnchorGenerator(sides, (RATIOS,) * len(sides))
    common: dict[str, Any] = {
        "rpn_anchor_generator": anchors,
        "rpn_head": WideRPNHead(channels, len(RATIOS), conv_depth=2 if config.pyramid == "simple" else 1),
        "rpn_post_nms_top_n_train": config.proposals,
        "rpn_post_nms_top_n_test": config.proposals,
        "box_roi_pool": region_pool(ROI_SIZES[0]),
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
        mask_roi_pool=region_pool(ROI_SIZES[1]),
        mask_head=MaskRCNNHeads(channels, (channels,) * CONVOLUTIONS, 1, norm_layer=norm),
        mask_predictor=MaskRCNNPredictor(channels, channels, config.num_classes + 1),
        **common,
    )


def region_pool(side: int) -> MultiScaleRoIAlign:
    """Return RoIAlign to side × side positions, with fixed strides.

    torchvision infers the strides from the first image sizes. Here images fill only a part of their canvas, so these
    would be wrong: a landscape image would halve them.
    """
    pool = MultiScaleRoIAlign([str(i) for i in range(len(STRIDES))], side, 2)
    pool.scales = [1 / stride for stride in STRIDES]
    pool.map_levels = initLevelMapper(STRIDES[0].bit_length() - 1, STRIDES[-1].bit_length() - 1)
    return pool


class WideRPNHead(RPNHead):
    """RPNHead with float32 outputs. In bfloat16, 1,000 pixels are rounded to multiples of 4."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return objectness and boxes of every map."""
        scores, boxes = super().forward(x)
        return [each.float() for each in scores], [each.float() for each in boxes]


class WidePredictor(FastRCNNPredictor):
    """FastRCNNPredictor with float32 outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return class scores and boxes of every region."""
        scores, boxes = super().forward(x)
        return scores.float(), boxes.float()


class SimplePyramid(nn.Module):
    """ViTDet's pyramid: every map is made from the last map of a column of blocks.

    Finer maps by transposed convolutions that halve the channels, coarser ones by max-pooling; then 1×1 and 3×3
    convolutions with LayerNorm.
    """

    def __init__(self, last: Level, strides: Sequence[int], channels: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(_resizing(last, stride, channels) for stride in strides)
        self.extra = LastLevelMaxPool()

    def forward(self, maps: "OrderedDict[str, Tensor]") -> "OrderedDict[str, Tensor]":
        """Return one map of C channels per stride, by number, and P6, from the last map."""
        (last,) = maps.values()
        resized = [layers(last) for layers in self.maps]
        resized, names = self.extra(resized, resized, [str(i) for i in range(len(resized))])
        return OrderedDict(zip(names, resized, strict=True))


def _resizing(last: Level, stride: int, channels: int) -> nn.Sequential:
    """Return the layers from the last map to one of another stride."""
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
    """Return the stride of a network whose blocks all have the same stride, a power of two."""
    strides = {level.stride for level in backbone.pyramid_levels(STRIDES)}
    stride = max(strides)
    if len(strides) > 1 or stride & (stride - 1):
        listed = ", ".join(map(str, sorted(strides)))
        raise UsageError(
            f"detect.pyramid simple is for networks of one stride, a power of 2; {backbone.config.name} has {listed}. "
            "Set detect.pyramid to fpn."
        )
    return stride


def _box_head(config: DetectorConfig, norm: Callable[[int], nn.Module] | None) -> nn.Module:
    channels, side = config.channels, ROI_SIZES[0]
    if config.box_head == "linear":
        return TwoMLPHead(channels * side**2, config.hidden)
    return FastRCNNConvFCHead((channels, side, side), [channels] * CONVOLUTIONS, [config.hidden], norm_layer=norm)


def norm_of(name: str) -> Callable[[int], nn.Module] | None:
    """Return the constructor of a norm by name, or None for "none"."""
    norms: dict[str, Callable[[int], nn.Module] | None] = {
        "none": None,
        "batch": nn.BatchNorm2d,
        "group": _group_norm,
        "layer": map_layer_norm,
    }
    return norms[name]


def _group_norm(channels: int) -> nn.GroupNorm:
    """Return a GroupNorm with up to 32 groups (He et al., training from scratch) of at least 4 channels."""
    fitting = (groups for groups in (32, 16, 8, 4, 2, 1) if channels % groups == 0 and channels >= 4 * groups)
    return nn.GroupNorm(next(fitting, 1), channels)
