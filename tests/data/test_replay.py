"""CUDA graphs need a CUDA device; elsewhere `DeviceLoader` augments without them, as test_device.py tests."""

import pytest
import torch

from patchloom.data.batches import decoded_dataset as device_module
from patchloom.data.batches.decoded_dataset import DeviceLoader, Store, make_loader
from patchloom.data.images.image_batch import ImageBatch
from patchloom.recipes.parts import AugmentPart
from tests.data.painted import check_aligned, painted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

COLORS = {"color_jitter": 0.4, "saturation": 0.2, "hue": 0.1, "jitter_probability": 0.8, "grey": 0.2, "solarise": 0.2}


def batches(augment: AugmentPart, views: tuple[int, ...]) -> list[torch.Tensor]:
    pixels = torch.randint(0, 256, (300, 32, 32, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    store = Store(pixels.cuda(), torch.arange(300).cuda() % 7)
    loader = DeviceLoader(store, augment, 32, batch_size=128, views=views, drop_last=False)
    return [batch.images for epoch in (0, 1) for batch in loader.epoch(epoch)]


@pytest.mark.parametrize("views", [(0,), (0, 3)])
@pytest.mark.parametrize("policy", ["randaugment", "three_augment", "none"])
@pytest.mark.parametrize("crop", ["random_resized", "pad", "simple_random", "resize"])
def test_replayed_pictures_are_the_same_to_the_bit(crop, policy, views, monkeypatch):
    augment = AugmentPart(
        policy=policy, crop=crop, crop_padding=4, policy_magnitude_std=0.5, blur=0.5, erasing=0.5, **COLORS
    )
    before = torch.cuda.get_rng_state()
    replayed = batches(augment, views)
    assert torch.equal(before, torch.cuda.get_rng_state())
    monkeypatch.setattr(device_module, "MOST_VALUES_REPLAYED", 0)
    for ours, plain in zip(replayed, batches(augment, views), strict=True):
        assert torch.equal(ours, plain)
        assert ours.stride() == plain.stride()
    assert not torch.equal(replayed[0], replayed[1])


@pytest.mark.parametrize("crop", ["random_resized", "pad", "simple_random", "resize"])
def test_replayed_masks_and_boxes_are_the_same_and_stay_with_their_pictures(crop, monkeypatch):
    augment = AugmentPart(crop=crop, crop_min_scale=0.5, crop_padding=0 if crop == "simple_random" else 6)

    def annotated() -> list[ImageBatch]:
        dataset = painted("mask", "instances", "boxes")
        loader, _ = make_loader(dataset, augment, 36, batch_size=4, seed=3, device="cuda")
        return [batch.to("cpu") for epoch in (0, 1) for batch in loader.epoch(epoch)]

    replayed = annotated()
    monkeypatch.setattr(device_module, "MOST_VALUES_REPLAYED", 0)
    for ours, plain in zip(replayed, annotated(), strict=True):
        assert torch.equal(ours.parts["mask"], plain.parts["mask"])
        assert torch.equal(ours.parts["boxes"].values, plain.parts["boxes"].values)
        check_aligned(ours.images, ours.parts)
