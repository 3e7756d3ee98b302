"""A geometry moves a picture, its mask and its boxes alike."""

import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches.ragged import Boxes
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images import evaluation_transform
from patchloom_runtime.images.geometry import Geometry
from patchloom_runtime.images.samples import Sample
from tests.data.painted import HEIGHT, OUTSIDE, PALETTE, WIDTH, check_aligned, painted

PARTS = ("mask", "instances", "boxes")


@st.composite
def geometries(draw) -> Geometry:
    left, top = draw(st.integers(0, WIDTH - 20)), draw(st.integers(0, HEIGHT - 20))
    box = left, top, draw(st.integers(left + 16, WIDTH)), draw(st.integers(top + 16, HEIGHT))
    scaled, size = ((draw(st.integers(12, 60)), draw(st.integers(12, 60))) for _ in range(2))
    start = draw(st.integers(-8, 20)), draw(st.integers(-8, 20))
    return Geometry(box, scaled, size, start, draw(st.booleans()))


def by_nearest(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Of each place the pixel that its centre is in."""
    rows = [int(Fraction(2 * y + 1, 2) * picture.height / size[0]) for y in range(size[0])]
    columns = [int(Fraction(2 * x + 1, 2) * picture.width / size[1]) for x in range(size[1])]
    return np.asarray(picture)[rows][:, columns]


@settings(max_examples=60, deadline=None)
@given(geometries(), st.integers(0, 5), st.booleans())
def test_a_mask_painted_into_its_picture_goes_where_the_picture_goes(geometry, index, reflect):
    """With the picture resized by its nearest pixels too, all must be the same."""
    geometry = replace(geometry, reflect=reflect)
    sample = painted(*PARTS).sample(index)
    seen = geometry.apply_mask(sample.layers["mask"].numbers, OUTSIDE)
    picture = geometry.apply_image(sample.image, by_nearest)
    assert seen.shape == picture.shape[:2] == geometry.size
    assert seen.dtype == np.uint8
    assert (PALETTE[seen] == picture).all()


@settings(max_examples=60, deadline=None)
@given(geometries(), st.integers(0, 5))
def test_boxes_are_the_extents_of_their_objects(geometry, index):
    sample = painted(*PARTS).sample(index)
    layers = {name: geometry.apply_mask(*layer)[None] for name, layer in sample.layers.items()}
    boxes = geometry.apply_boxes(sample.boxes)
    assert boxes.dtype == np.float32
    picture = torch.from_numpy(geometry.apply_image(sample.image).copy()).permute(2, 0, 1)[None]
    parts = {name: torch.from_numpy(numbers) for name, numbers in layers.items()} | {"boxes": Boxes.of([boxes])}
    check_aligned(picture, parts, reach=10)  # enlarged up to four times


def test_boxes_that_leave_the_crop_are_dropped_and_others_cut():
    geometry = Geometry((10, 10, 30, 30), (40, 40), (40, 40))
    boxes = np.array([[0, 0, 10, 10], [5, 15, 20, 20], [28, 12, 50, 14], [29.7, 12, 50, 14], [40, 40, 50, 50]])
    kept = geometry.apply_boxes(np.column_stack([boxes, np.arange(5), np.arange(5)]))
    assert kept.tolist() == [[0, 10, 20, 20, 1, 1], [36, 4, 40, 8, 2, 2]]
    flipped = replace(geometry, flip=True).apply_boxes(boxes)
    assert flipped.tolist() == [[20, 10, 40, 20], [0, 4, 4, 8]]
    assert geometry.apply_boxes(np.zeros((0, 6), np.float32)).shape == (0, 6)


def test_nothing_is_black_in_a_picture_and_outside_in_a_mask():
    geometry = Geometry((0, 0, 8, 8), (8, 8), (12, 10), (-3, 4))
    picture = geometry.apply_image(Image.new("RGB", (8, 8), "white"))
    mask = geometry.apply_mask(np.zeros((8, 8), np.int16), -1)
    assert mask.dtype == np.int16
    assert (picture[3:11, :4] == 255).all()
    assert (mask[3:11, :4] == 0).all()
    assert (picture == 255).sum() == 3 * 32
    assert (mask == 0).sum() == 32


@pytest.mark.parametrize("crop", ["random_resized", "simple_random", "pad", "resize"])
def test_parts_change_nothing_about_the_picture(crop):
    transform = train_transform(AugmentPart(crop=crop, color_jitter=0.3, erasing=0.5), (24, 32))
    sample = painted(*PARTS).sample(2)
    for seed in range(20):
        alone = transform(sample.image, random.Random(seed))
        both = transform.arrays(sample, random.Random(seed))
        assert (both["image"] == alone).all()
        assert (both["image"] == transform.arrays(Sample(sample.image), random.Random(seed))["image"]).all()


def test_evaluation_shows_masks_and_boxes_in_the_middle():
    sample = painted(*PARTS).sample(2)
    made = evaluation_transform.test_transform(32, 0.8).arrays(sample, evaluation_transform.NO_CHANCE)
    picture = torch.from_numpy(made["image"].copy()).permute(2, 0, 1)[None]
    parts = {name: torch.from_numpy(made[name])[None] for name in ("mask", "instances")}
    compared, boxes = check_aligned(picture, parts | {"boxes": Boxes.of([made["boxes"]])}, reach=3)
    assert compared > 60
    assert boxes >= 1
