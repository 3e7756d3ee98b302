"""Pictures of any shape on one canvas: picture, masks and boxes go together, and back to pixels of the picture."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from patchloom.data.augmentation.canvas import CanvasView, JitteredCanvas, fitting_size, on_canvas
from patchloom.data.batches.loader import Loader
from patchloom.recipes.parts import AugmentPart, DetectPart
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.samples import EXTENT
from tests.data.painted import HEIGHT, OUTSIDE, WIDTH, check_aligned, painted

PARTS = ("mask", "instances", "boxes")
AUGMENT = AugmentPart(flip=0.5, scale_min=0.4, scale_max=2.0)
TRAINED = {
    "jitter": DetectPart(),
    "short_side": DetectPart(resize="short_side", short_min=24, short_max=88, long_max=90),
}


def loader(detection=TRAINED["jitter"], workers=0, **options) -> Loader:
    transform = JitteredCanvas(AUGMENT, (64, 72), detection)
    return Loader(painted(*PARTS, uneven=True), transform, batch_size=4, seed=3, workers=workers, **options)


@pytest.mark.parametrize("detection", TRAINED.values(), ids=TRAINED)
def test_parts_follow_their_picture(detection):
    batches = [batch for epoch in (0, 1) for batch in loader(detection).epoch(epoch)]
    seen = [check_aligned(batch.images, batch.parts) for batch in batches]
    assert sum(boxes for _, boxes in seen) > 24
    assert any((batch.parts["mask"] == OUTSIDE).any() for batch in batches)
    for batch in batches:
        for mask, (height, width, *whole) in zip(batch.parts["mask"], batch.parts[EXTENT].tolist(), strict=True):
            assert (mask[:height, :width] != OUTSIDE).all()
            assert (mask[height:] == OUTSIDE).all()
            assert (mask[:, width:] == OUTSIDE).all()
            assert whole in ([HEIGHT, WIDTH], [HEIGHT + 1, WIDTH])
    sizes = {tuple(extent[:2]) for batch in batches for extent in batch.parts[EXTENT].tolist()}
    assert len(sizes) > 3


def test_workers_steps_and_processes_change_nothing():
    def contents(batches):
        return [
            [batch.images.numpy().tobytes(), batch.parts[EXTENT].tolist(), batch.parts["boxes"].values.tolist()]
            for batch in batches
        ]

    helped, whole = loader(workers=2), contents(loader().epoch(1))
    assert contents(helped.epoch(1)) == whole
    assert contents(helped.epoch(1, start_step=1)) == whole[1:]
    helped.close()
    one, share = next(loader().epoch(0)), next(loader(rank=1, world=2).epoch(0))
    rows = [one.index.tolist().index(i) for i in share.index.tolist()]
    assert torch.equal(share.parts[EXTENT], one.parts[EXTENT][rows])


def test_a_picture_is_judged_whole_and_boxes_go_back():
    batch = next(
        iter(Loader(painted(*PARTS), CanvasView((96, 60)), batch_size=12, shuffle=False, drop_last=False).epoch(0))
    )
    check_aligned(batch.images, batch.parts)
    height, width = round(HEIGHT * 60 / WIDTH), 60
    assert batch.parts[EXTENT].tolist() == [[height, width, HEIGHT, WIDTH]] * 12
    for i, boxes in enumerate(batch.parts["boxes"].each()):
        back = boxes[:, :4].numpy() * np.array([WIDTH / width, HEIGHT / height] * 2)
        np.testing.assert_allclose(back, painted("boxes").boxes(i)[:, :4], atol=1e-4)


@pytest.mark.parametrize(
    ("picture", "limits", "size"),
    [
        ((640, 480), {}, (480, 640)),
        ((320, 240), {}, (480, 640)),
        ((1000, 10), {}, (6, 640)),
        ((1, 5000), {}, (640, 1)),
        ((640, 480), {"short": 240}, (240, 320)),
        ((640, 480), {"short": 400, "long": 320}, (240, 320)),
    ],
)
def test_sizes(picture, limits, size):
    assert fitting_size(picture, (640, 640), **limits) == size


def test_one_picture():
    shown = on_canvas(Image.new("RGB", (30, 20), "white"), CanvasView((32, 32)))
    assert shown["image"].shape == (32, 32, 3)
    assert shown[EXTENT].tolist() == [21, 32, 20, 30]
    assert (shown["image"][:21] == 255).all()
    assert (shown["image"][21:] == 0).all()


def test_policies_that_turn_pictures_are_refused():
    transform = JitteredCanvas(AugmentPart(policy="randaugment"), (32, 32), DetectPart())
    with pytest.raises(UsageError, match="randaugment"):
        transform.shapes(["boxes"])


def test_objects_that_a_view_hardly_shows_are_not_learned_from_it():
    whole, part = (
        [
            box
            for batch in loader(DetectPart(min_visible=share)).epoch(0)
            for number, boxes in zip(batch.index.tolist(), batch.parts["boxes"].each(), strict=True)
            for box in [(number, *box) for box in boxes.tolist()]
        ]
        for share in (0.0, 0.6)
    )
    assert set(part) < set(whole)


def test_the_largest_jitter_shows_parts_and_the_smallest_little():
    rng = random.Random(0)
    sample = painted(*PARTS).sample(0)
    for low, high, filled in ((2.0, 2.0, 1.0), (0.5, 0.5, 0.25)):
        transform = JitteredCanvas(AugmentPart(scale_min=low, scale_max=high), (48, 54), DetectPart())
        height, width, *_ = transform.arrays(sample, rng)[EXTENT].tolist()
        assert height * width / (48 * 54) == pytest.approx(filled, abs=0.02)
