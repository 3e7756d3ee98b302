"""Detectors: torchvision's losses, every family under them, pyramids, masks pasted as torchvision does."""

import dataclasses
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.roi_heads import paste_masks_in_image

from patchloom.data.batches.ragged import Boxes
from patchloom.data.images.image_batch import ImageBatch
from patchloom.evaluation.detection import find_objects, in_image_pixels
from patchloom.models.cost import cost
from patchloom.models.dense.detector import LOSSES, Detector, create_detector, make_detector
from patchloom.models.registry import create_model
from patchloom.objectives.detection import DetectionObjective, prepare_inputs, targets_of
from patchloom.recipes import get_recipe
from patchloom.tasks.images.networks import make_backbone
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.object_masks import paste_mask
from patchloom_runtime.images.samples import EXTENT

SIDE = 64
SMALL = {"channels": 16, "hidden": 32, "anchor_scale": 4.0, "proposals": 50, "regions": 16}
BACKBONES = {
    "patchconvnet_s20": {"depth": 1, "dim": 32},
    "resmlp_s12": {"depth": 2, "dim": 24},
    "mixer_s16": {"depth": 2, "dim": 24},
    "deit_ti": {"depth": 2, "dim": 24, "heads": 2},
    "cait_xxs24": {"depth": 2, "dim": 24, "heads": 2, "class_depth": 1},
    "smlpnet_t": {"dim": 8, "depths": (1, 1, 1, 1)},
}


def backbone(name="patchconvnet_s20", **options):
    torch.manual_seed(0)
    return create_model(name, num_classes=0, image_size=SIDE, **BACKBONES.get(name, {}) | options)


def detector(name="patchconvnet_s20", *, masks=True, **options) -> Detector:
    return make_detector(backbone(name), 3, masks=masks, **SMALL | options)


def batch_of(count=2, *, empty=()) -> ImageBatch:
    """Squares on noise; the pictures fill a part of their canvas."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 80, (count, SIDE, SIDE, 3), np.uint8)
    instances, boxes = np.zeros((count, SIDE, SIDE), np.int16), []
    for i in range(count):
        own = [] if i in empty else [(4, 6, 28, 30, 0, 1), (30, 20, 47, 44, 2, 2)]
        for x0, y0, x1, y1, category, number in own:
            pixels[i, y0:y1, x0:x1] = 100 + 70 * category
            instances[i, y0:y1, x0:x1] = number
        boxes.append(np.array(own, np.float32).reshape(-1, 6))
    extents = torch.tensor([[60, SIDE, 120, 128]] * count, dtype=torch.int32)
    return ImageBatch(
        torch.from_numpy(pixels).permute(0, 3, 1, 2),
        torch.full((count,), -1),
        torch.arange(count),
        {"boxes": Boxes.of(boxes), "instances": torch.from_numpy(instances), EXTENT: extents},
    )


def losses_of(network, batch, masks=True):
    objective = DetectionObjective(network.pixel_mean, network.pixel_std, masks=masks, cut=network.any_resolution)
    torch.manual_seed(1)
    return objective(network, batch, epoch=0, step=0)


class Below(nn.Module):
    """What torchvision calls a backbone."""

    def __init__(self, network: Detector) -> None:
        super().__init__()
        self.network, self.out_channels = [network], network.config.channels

    def forward(self, images):
        (network,) = self.network
        return network.pyramid(OrderedDict((str(i), each) for i, each in enumerate(network.maps(images))))


@pytest.mark.parametrize("pyramid", ["fpn", "simple"])
def test_the_five_losses_are_those_of_torchvision(pyramid):
    network, batch = detector(pyramid=pyramid).train(), batch_of()
    batch.parts[EXTENT][:, :2] = SIDE  # torchvision would pad a smaller picture itself
    own = losses_of(network, batch)
    images, _ = prepare_inputs(
        batch, network.pixel_mean, network.pixel_std, cut=False
    )  # normalised as ours, to the bit
    theirs = MaskRCNN(Below(network), 4, min_size=SIDE, max_size=SIDE, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    theirs.rpn, theirs.roi_heads = network.rpn, network.roi_heads
    theirs.transform.torch_choice = lambda sides: sides[0]  # it would draw one of one
    torch.manual_seed(1)
    expected = theirs.train()(list(images), targets_of(batch, True, (SIDE, SIDE)))
    assert set(expected) == set(LOSSES)
    assert {LOSSES[name]: value.item() for name, value in expected.items()} == pytest.approx(
        {name: own[name].item() for name in LOSSES.values()}, rel=1e-6
    )
    assert own["loss"].item() == pytest.approx(sum(value.item() for value in expected.values()), rel=1e-6)


def test_settings_are_those_of_the_papers():
    with torch.device("meta"):
        network = make_detector(create_model("patchconvnet_s60", num_classes=0, image_size=1344), 80, masks=True)
    anchors = network.rpn.anchor_generator
    assert (anchors.sizes, anchors.aspect_ratios[0]) == (((32,), (64,), (128,), (256,), (512,)), (0.5, 1.0, 2.0))
    heads = network.roi_heads
    assert (heads.score_thresh, heads.nms_thresh, heads.detections_per_img) == (0.05, 0.5, 100)
    assert (heads.fg_bg_sampler.batch_size_per_image, heads.fg_bg_sampler.positive_fraction) == (512, 0.25)
    assert heads.box_roi_pool.output_size == (7, 7)
    assert heads.mask_roi_pool.output_size == (14, 14)
    assert network.rpn._post_nms_top_n == {"training": 1000, "testing": 1000}
    assert (network.rpn.nms_thresh, network.rpn.fg_bg_sampler.batch_size_per_image) == (0.7, 256)
    on_backbone = [part for name, part in network.named_children() if name not in ("backbone", "neck")]
    count = sum(parameter.numel() for part in on_backbone for parameter in part.parameters())
    assert round(count / 1e6, 2) == 20.30  # FPN and heads of 80 classes at a width of 384


@pytest.mark.parametrize("name", [*BACKBONES, "timm:test_resnet"])
def test_every_network_can_be_trained(name):
    options = {"backbone": "test_resnet", "pool": "average"} if name.startswith("timm") else {}
    made = backbone(name if not options else "resnet50_attention_pool", **options)
    network = make_detector(made, 3, masks=False, **SMALL).train()
    losses = losses_of(network, batch_of(empty=(1,)), masks=False)
    losses["loss"].backward()
    assert set(losses) == {"loss", "objectness", "proposals", "classes", "boxes"}
    unused = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []  # several processes would wait for their gradients for ever
    network.eval()
    for _, size, result in find_objects(network, [batch_of()]):
        assert size == (120, 128)
        assert result.masks is None
        assert result.boxes.shape == (len(result.scores), 4)
        assert (result.boxes >= 0).all()
        assert (result.boxes[:, 0::2] <= 128).all()


def test_pictures_without_objects_teach_too():
    network = detector().train()
    losses = losses_of(network, batch_of(empty=(0, 1)))
    assert losses["boxes"] == losses["masks"] == losses["proposals"] == 0
    losses["loss"].backward()
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "options", [{"norm": "group", "box_head": "convolutions"}, {"norm": "batch"}, {"norm": "layer"}]
)
def test_norms_and_heads(options):
    network = detector(**options).train()
    losses_of(network, batch_of())["loss"].backward()
    assert all(p.grad is not None for p in network.parameters() if p.requires_grad)


def test_a_network_of_several_strides_has_no_simple_pyramid():
    with pytest.raises(UsageError) as error:
        detector("smlpnet_t", pyramid="simple")
    assert "simple" in str(error.value)
    assert "smlpnet_t" in str(error.value)
    assert "4, 8, 16, 32" in str(error.value)


def test_a_config_tells_the_whole_network():
    network = detector(pyramid="simple", norm="layer")
    options = dataclasses.asdict(network.config)
    again = create_detector(options.pop("name"), **options)
    again.load_state_dict(network.state_dict())
    network.eval()
    again.eval()
    (_, _, one), *_ = find_objects(network, [batch_of()])
    (_, _, other), *_ = find_objects(again, [batch_of()])
    assert np.array_equal(one.boxes, other.boxes)
    with pytest.raises(UsageError, match="wings"):
        create_detector("patchconvnet_s20", backbone={}, wings=2)


def test_what_a_picture_does_not_fill_is_zero_and_canvases_are_cut():
    batch = batch_of()
    batch.parts[EXTENT][:] = torch.tensor([[20, 30, 40, 60], [33, 10, 66, 20]])
    images, sizes = prepare_inputs(batch, (0.5,) * 3, (0.5,) * 3, cut=True)
    assert images.shape == (2, 3, 64, 32)
    assert sizes == [(20, 30), (33, 10)]
    assert (images[0, :, 20:] == 0).all()
    assert (images[1, :, :, 10:] == 0).all()
    whole, _ = prepare_inputs(batch, (0.5,) * 3, (0.5,) * 3, cut=False)
    assert whole.shape == (2, 3, 64, 64)
    assert torch.equal(whole[:, :, :64, :32], images)
    masks = targets_of(batch, True, (64, 32))[0]["masks"]
    assert masks.shape == (2, 64, 32)
    assert masks.sum(dim=(1, 2)).tolist() == [24 * 24, 24 * 2]


def test_masks_are_pasted_as_torchvision_does():
    generator = torch.Generator().manual_seed(0)
    size = (50, 70)
    corners = torch.rand(30, 2, generator=generator) * torch.tensor([80, 60]) - 8
    boxes = torch.cat([corners, corners + 1 + torch.rand(30, 2, generator=generator) * 40], 1)
    masks = torch.nn.functional.interpolate(torch.rand(30, 1, 4, 4, generator=generator), (28, 28), mode="bilinear")
    inside = boxes.clamp(min=0).clamp(max=torch.tensor([70.0, 50, 70, 50]))
    inside = inside[(inside[:, 2:] > inside[:, :2] + 0.5).all(1)]
    expected = paste_masks_in_image(masks[: len(inside)], inside, size)[:, 0] > 0.5
    for mask, box, whole in zip(masks, inside, expected, strict=False):
        assert np.array_equal(paste_mask(mask[0].numpy(), box.numpy(), size).whole(size), whole.numpy())


def test_a_picture_is_answered_alike_whatever_was_seen_before_it():
    wide, square = torch.rand(2, 1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    network, other = detector("resmlp_s12", min_score=0.0).eval(), detector("resmlp_s12", min_score=0.0).eval()
    other.load_state_dict(network.state_dict())
    with torch.inference_mode():
        other(square, [(SIDE, SIDE)])
        result, wanted = network(wide, [(SIDE // 2, SIDE)]), other(wide, [(SIDE // 2, SIDE)])
    assert torch.equal(result[0]["scores"], wanted[0]["scores"])


def test_boxes_go_back_to_the_picture():
    output = {"boxes": torch.tensor([[10.0, 20, 30, 40]]), "labels": torch.tensor([2]), "scores": torch.tensor([0.9])}
    result = in_image_pixels(output, (50, 100, 100, 300))
    assert result.boxes.tolist() == [[30, 40, 90, 80]]
    assert (result.categories.tolist(), result.masks) == ([1], None)


def test_boxes_are_not_rounded_in_bfloat16():
    network = detector(masks=False).eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        features = network.pyramid(
            OrderedDict((str(i), m) for i, m in enumerate(network.maps(torch.rand(1, 3, 64, 64))))
        )
        assert features["0"].dtype == torch.bfloat16
        scores, boxes = network.rpn.head(list(features.values()))
        assert {each.dtype for each in (*scores, *boxes)} == {torch.float32}
        result = network(torch.rand(1, 3, 64, 64), [(64, 64)])
    assert result[0]["boxes"].dtype == torch.float32


def test_the_cost_is_that_of_all_regions() -> None:
    """Thesis table 5.6 prints 264 G for PatchConvNet-S60 at 800×1280, counted as mmdetection does."""
    whole, boxes = detector(), detector(masks=False)
    assert cost(whole.one_pass(), SIDE).multiply_adds > cost(boxes.one_pass(), SIDE).multiply_adds
    assert cost(whole.one_pass(), SIDE).parameters == sum(p.numel() for p in whole.parameters())
    fewer = detector(masks=False, proposals=SMALL.get("proposals", 1000) // 2)
    of_head = cost(boxes.one_pass(), SIDE).multiply_adds - cost(fewer.one_pass(), SIDE).multiply_adds
    c = boxes.config
    per_region = c.channels * 49 * c.hidden + c.hidden**2 + c.hidden * 5 * (c.num_classes + 1)
    assert of_head == per_region * (c.proposals - fewer.config.proposals)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "giga"), [("patchconvnet_s60", 264), ("patchconvnet_s120", 339)])
def test_multiply_adds_of_thesis_table_5_6(name, giga) -> None:
    recipe = get_recipe("mask_rcnn", name)
    with torch.device("meta"):
        network = make_detector(make_backbone(recipe), 80, masks=True)
    assert cost(network.one_pass(), (800, 1280)).multiply_adds / 1e9 == pytest.approx(giga, rel=0.03)
