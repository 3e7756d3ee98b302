"""Masks and boxes reach the batch beside their pictures by every way, aligned after augmentation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches import decoded_dataset as device_module
from patchloom.data.batches.decoded_dataset import DeviceLoader, decode_all, fits_in_memory, make_loader, pixel_bytes
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.ragged import Boxes, padded, ragged
from patchloom.data.batches.views import View, make_view_loader
from patchloom.data.images.image_store import Mask
from patchloom.engine.batches import move, split
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images import evaluation_transform
from tests.data.facts import facts
from tests.data.painted import OUTSIDE, Painted, check_aligned, painted

PARTS = ("mask", "instances", "boxes")
CROP = AugmentPart(crop_min_scale=0.5)
CROPS = {
    "random_resized": CROP,
    "simple_random": AugmentPart(crop="simple_random", crop_padding=0),
    "pad": AugmentPart(crop="pad", crop_padding=6),
    "resize": AugmentPart(crop="resize"),
}


def loader(augment: AugmentPart = CROP, workers: int = 0, size: int = 32, **options) -> Loader:
    given = {"broken": options.pop("broken", ()), "uneven": options.pop("uneven", False)}
    return Loader(
        painted(*PARTS, **given), train_transform(augment, size), batch_size=4, seed=3, workers=workers, **options
    )


def on_device(augment: AugmentPart = CROP, size: int | tuple[int, int] = 36, **options) -> DeviceLoader:
    made, _ = make_loader(painted(*PARTS), augment, size, batch_size=4, seed=3, device="cpu", **options)
    assert isinstance(made, DeviceLoader)
    return made


def contents(batches) -> list[list[bytes | list[float]]]:
    return [
        [
            *(tensor.numpy().tobytes() for tensor in (b.images, b.index, b.parts["mask"], b.parts["instances"])),
            b.parts["boxes"].values.tolist(),
            b.parts["boxes"].splits.tolist(),
        ]
        for b in batches
    ]


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("make", [loader, on_device])
def test_parts_follow_their_picture(make, crop):
    batches = [batch for epoch in (0, 1) for batch in make(CROPS[crop], size=36).epoch(epoch)]
    assert len(batches) == 6
    seen = [check_aligned(batch.images, batch.parts) for batch in batches]
    assert sum(pixels for pixels, _ in seen) > 24 * 36 * 36 // 8
    assert sum(boxes for _, boxes in seen) > 24
    assert {batch.parts["mask"].dtype for batch in batches} == {torch.uint8}
    if crop == "pad":
        assert any((batch.parts["mask"] == OUTSIDE).any() for batch in batches)
        assert not any((batch.parts["instances"] == OUTSIDE).any() for batch in batches)


@pytest.mark.parametrize("largest", [1.0, 0.75])
def test_parts_follow_pictures_that_are_scaled_and_padded(largest):
    augment = AugmentPart(crop="scaled", largest_class=largest)
    made = loader(augment, size=64)
    batches = [batch for epoch in (0, 1) for batch in made.epoch(epoch)]
    seen = [check_aligned(batch.images, batch.parts) for batch in batches]
    assert sum(pixels for pixels, _ in seen) > 24 * 64 * 64 // 8
    assert sum(boxes for _, boxes in seen) > 24
    assert any((batch.parts["mask"] == OUTSIDE).any() for batch in batches)
    assert not any((batch.parts["instances"] == OUTSIDE).any() for batch in batches)
    assert all(not batch.images.amax(1)[batch.parts["mask"] == OUTSIDE].any() for batch in batches)


def test_windows_that_show_mostly_one_class_are_drawn_again():
    def mostly_one(largest: float) -> int:
        made = loader(AugmentPart(crop="scaled", scale_min=2, scale_max=2, largest_class=largest), size=24)
        masks = [mask for epoch in range(4) for batch in made.epoch(epoch) for mask in batch.parts["mask"]]
        shares = [mask.flatten().bincount(minlength=4).max() / mask.numel() for mask in masks]
        return sum(float(share) >= 0.75 for share in shares)

    assert mostly_one(0.75) < mostly_one(1.0) / 2


def test_workers_change_nothing():
    helped = loader(workers=2)
    whole = contents(loader().epoch(1))
    assert contents(helped.epoch(1)) == whole
    assert contents(helped.epoch(1, start_step=1)) == whole[1:]
    helped.close()


def test_the_device_starts_anywhere_too():
    assert contents(on_device().epoch(1, 2)) == contents(on_device().epoch(1))[2:]


def test_two_processes_see_what_one_sees():
    for make in (loader, on_device):
        one = next(make().epoch(0))
        for rank in (0, 1):
            share = next(make(rank=rank, world=2).epoch(0))
            rows = [one.index.tolist().index(i) for i in share.index.tolist()]
            assert torch.equal(share.parts["mask"], one.parts["mask"][rows])
            assert share.parts["boxes"].values.tolist() == one.parts["boxes"][torch.tensor(rows)].values.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_or_mask_that_is_broken_is_replaced_with_all_its_parts(workers):
    tolerant = loader(broken=(4, 7), workers=workers, skip_broken=True)
    batches = list(tolerant.epoch(0))
    for batch in batches:
        check_aligned(batch.images, batch.parts)
    assert {number: why.partition(":")[0] for number, why in tolerant.broken.items()} == {
        4: "painted 4",
        7: "painted 7, mask",
    }
    tolerant.close()
    with pytest.raises(DataError, match="painted 7, mask"):
        list(loader(broken=(7,), workers=workers).epoch(0))


def test_a_broken_mask_is_replaced_in_the_store():
    made, _ = make_loader(painted(*PARTS, broken=(7,)), CROP, 36, batch_size=4, seed=3, device="cpu", skip_broken=True)
    for batch in made.epoch(0):
        check_aligned(batch.images, batch.parts)
    assert list(made.broken) == [7]


def test_pictures_of_several_sizes_go_by_workers():
    made, reason = make_loader(painted(*PARTS, uneven=True), CROP, 36, batch_size=4, seed=3, device="cpu")
    assert isinstance(made, Loader)
    assert reason
    for batch in made.epoch(0):
        check_aligned(batch.images, batch.parts)


VIEWS = [View(CROP, 36), View(CROP, 36), View(replace(CROP, crop_max_scale=0.7), (36, 40))]


@pytest.mark.parametrize("workers", [0, 2, None])
def test_every_view_has_its_own_parts(workers, monkeypatch):
    if workers is not None:
        monkeypatch.setattr(device_module, "fits_in_memory", lambda *_: False)
    made, _ = make_view_loader(painted(*PARTS), VIEWS, batch_size=4, seed=3, device="cpu", workers=workers or 0)
    batches = list(made.epoch(0))
    made.close()
    for batch in batches:
        assert len(batch.parts) == len(batch.views) == 3
        for images, parts in zip(batch.views, batch.parts, strict=True):
            check_aligned(images, parts)
        assert not torch.equal(batch.parts[0]["mask"], batch.parts[1]["mask"])
    if workers:
        alone, _ = make_view_loader(painted(*PARTS), VIEWS, batch_size=4, seed=3, device="cpu")
        for mine, theirs in zip(batches, alone.epoch(0), strict=True):
            assert all(torch.equal(a["mask"], b["mask"]) for a, b in zip(mine.parts, theirs.parts, strict=True))
            assert [of["boxes"].values.tolist() for of in mine.parts] == [
                of["boxes"].values.tolist() for of in theirs.parts
            ]
    cut = split(move(batches[0], torch.device("cpu")), 2)
    for part in cut:
        check_aligned(part.views[1], part.parts[1])


def test_evaluation_keeps_masks_and_boxes_with_the_decoded_pictures():
    transform = evaluation_transform.test_transform(32, 0.8)
    store = decode_all(painted(*PARTS), transform, "cpu")
    kept = list(DeviceLoader(store, None, 32, batch_size=5, shuffle=False, drop_last=False).epoch(0))
    read = Loader(painted(*PARTS), transform, batch_size=5, shuffle=False, drop_last=False)
    assert contents(kept) == contents(read.epoch(0))
    for batch in kept:
        check_aligned(batch.images, batch.parts)


def test_micro_batches_hold_the_rows_of_every_part():
    batch = next(loader().epoch(0))
    parts = split(move(batch, torch.device("cpu")), 2)
    for part in parts:
        assert len(part) == len(part.parts["boxes"]) == 2
        check_aligned(part.images, part.parts)
    assert sorted(i for part in parts for i in part.index.tolist()) == sorted(batch.index.tolist())


def test_a_large_batch_is_made_in_parts_with_its_parts(monkeypatch):
    whole = contents(on_device().epoch(0))
    monkeypatch.setattr(device_module, "MOST_VALUES_AT_ONCE", 3 * 3 * 36 * 36)
    assert contents(on_device().epoch(0)) == whole


def test_only_what_is_asked_for_is_read():
    batch = next(Loader(painted("mask"), train_transform(CROP, 32), batch_size=4).epoch(0))
    assert list(batch.parts) == ["mask"]
    plain = next(Loader(painted(broken=(1, 3, 5, 7, 9, 11)), train_transform(CROP, 32), batch_size=4).epoch(0))
    assert plain.parts == {}
    assert batch.images.numpy().tobytes() == plain.images.numpy().tobytes()
    boxes = next(make_loader(painted("boxes"), CROP, 36, batch_size=4, seed=0, device="cpu")[0].epoch(0))
    assert list(boxes.parts) == ["boxes"]


def test_pictures_without_objects_have_no_boxes(monkeypatch):
    monkeypatch.setattr(Painted, "boxes", lambda *_: np.zeros((0, 5), np.int64))
    for make in (loader, on_device):
        batch = next(make().epoch(0))
        assert batch.parts["boxes"].values.shape == (0, 6)
        assert batch.parts["boxes"].splits.tolist() == [0] * 5


def test_layers_count_in_the_memory_of_a_set():
    assert pixel_bytes(painted(*PARTS)) == 3 + 1 + 2
    assert pixel_bytes(painted()) == 3
    assert not fits_in_memory(100, (10, 20), 60_000, pixel_bytes=4)
    assert loader().preparing_bytes() == (1 + 2) * 4 * 32 * 32 * 6  # one slot and two batches of four


def test_boxes_are_chosen_filled_up_and_cut_again():
    each = [np.full((count, 6), number, np.float32) for number, count in enumerate((2, 0, 3))]
    boxes = Boxes.of(each)
    assert boxes.splits.tolist() == [0, 2, 2, 5]
    chosen = boxes[torch.tensor([2, 1])]
    assert (chosen.splits.tolist(), chosen.categories.tolist()) == ([0, 3, 3], [2, 2, 2])
    assert boxes[1:].splits.tolist() == [0, 0, 3]
    filled = padded([boxes, chosen])
    assert filled.shape == (5, 3, 6)
    again = ragged(filled)
    assert again.splits.tolist() == [0, 2, 2, 5, 8, 8]
    assert torch.equal(again.corners, torch.cat([boxes.corners, chosen.corners]))
    assert again.instances.tolist() == [0, 0, 2, 2, 2, 2, 2, 2]
    moved = boxes.to("meta")
    assert (moved.values.device.type, moved.splits.device.type) == ("meta", "cpu")


@pytest.mark.parametrize("policy", ["randaugment", "autoaugment", "trivial"])
def test_policies_that_move_pixels_are_refused(policy):
    part = replace(CROP, policy=policy)
    words = facts("augment.policy", policy, "mask", "instances", "boxes")
    with pytest.raises(UsageError, match=words):
        loader(part)
    with pytest.raises(UsageError, match=words):
        make_loader(painted(*PARTS), part, 36, batch_size=4, seed=0, device="cpu")
    with pytest.raises(UsageError, match=words):
        make_view_loader(painted(*PARTS), [View(CROP, 36), View(part, 36)], batch_size=4, seed=0, device="cpu")


def test_a_part_that_the_data_do_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(Painted, "object_names", ())
    with pytest.raises(UsageError, match=facts("boxes", "mask", "instances")):
        painted("boxes")
    monkeypatch.setattr(Painted, "mask_names", ())
    monkeypatch.setattr(Painted, "mask_ignore", None)
    with pytest.raises(UsageError, match="mask"):
        painted("mask")


@pytest.mark.parametrize("make", [loader, on_device])
def test_masks_of_more_classes_than_a_byte_holds(make, monkeypatch):
    small = Painted.mask

    def large(self: Painted, index: int) -> Mask:
        classes, instances = small(self, index)
        return Mask(classes.astype(np.int16) * 300, instances)

    padded_crop = AugmentPart(crop="pad", crop_padding=6)
    expected = [batch.parts["mask"] for batch in make(padded_crop).epoch(0)]
    monkeypatch.setattr(Painted, "mask", large)
    monkeypatch.setattr(Painted, "mask_dtype", np.int16)
    monkeypatch.setattr(Painted, "mask_ignore", None)
    for batch, mask in zip(make(padded_crop).epoch(0), expected, strict=True):
        assert batch.parts["mask"].dtype == torch.int16
        assert torch.equal(batch.parts["mask"], torch.where(mask == OUTSIDE, -1, mask.short() * 300))


def test_a_set_decoded_for_other_parts_is_decoded_again():
    stores: dict = {}
    for parts in ((), ("mask",), PARTS):
        made, _ = make_loader(painted(*parts), CROP, 36, batch_size=4, seed=0, device="cpu", stores=stores)
        assert set(next(made.epoch(0)).parts) == set(parts)


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("boxes", [[0, 0, 5, 5, 3]], (3, "0…2")),
        ("boxes", [[0, 0, np.nan, 5, 1]], ()),
        ("boxes", [[0, 0, 5]], ()),
        ("boxes", [[0, 0, 5, 5, 1]] * 10_001, ("10,001", "10,000")),
        ("boxes", None, ()),
        ("mask", None, ("mask",)),
        ("mask", (np.zeros((5, 7), np.uint8), None), ("mask", "7×5", "54×48")),
        ("mask", (np.zeros((48, 54), np.int32), None), ("mask", "int32", "uint8")),
        ("mask", (np.zeros((48, 54), np.uint8), None), ("instances",)),
    ],
)
def test_parts_that_do_not_fit_are_named(name, given, parts, monkeypatch):
    dataset = painted(*PARTS)
    monkeypatch.setattr(Painted, "read", lambda *_: Image.new("RGB", (54, 48)))
    value = Mask(*given) if name == "mask" and given else np.array(given) if given else None
    monkeypatch.setattr(Painted, name, lambda *_: value)
    if name == "boxes":
        monkeypatch.setattr(Painted, "mask", lambda *_: Mask(*np.zeros((2, 48, 54), np.uint8)))
    with pytest.raises(DataError, match=facts("painted 0", *parts)):
        dataset.sample(0)
