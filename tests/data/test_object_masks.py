"""Masks of objects to and from what COCO's files hold."""

import numpy as np
import pytest

from patchloom.data.pictures.object_masks import ObjectMask, mask_from_coco
from patchloom.errors import DataError


def random_masks(count=40):
    rng = np.random.default_rng(0)
    for _ in range(count):
        size = tuple(map(int, rng.integers(1, 50, 2)))
        yield size, rng.random(size) < rng.choice([0, 0.02, 0.5, 1])


def test_run_lengths_and_back():
    for size, mask in random_masks():
        kept = ObjectMask.of(mask)
        assert kept.area == mask.sum()
        assert np.array_equal(kept.whole(size), mask)
        assert np.array_equal(mask_from_coco(kept.to_coco(size), size), mask)


def test_a_known_string():
    # As COCO's own code packs 3 × 4 pixels with the counts 2, 3, 4, 3.
    mask = mask_from_coco({"size": [3, 4], "counts": [2, 3, 4, 3]}, (3, 4))
    assert mask.T.reshape(-1).tolist() == [False] * 2 + [True] * 3 + [False] * 4 + [True] * 3
    assert ObjectMask.of(mask).to_coco((3, 4)) == {"size": [3, 4], "counts": "2340"}


def test_overlap_is_that_of_whole_masks():
    masks = [np.pad(mask, ((0, 50 - size[0]), (0, 50 - size[1]))) for size, mask in random_masks(12)]
    for one in masks:
        for other in masks:
            assert ObjectMask.of(one).overlap(ObjectMask.of(other)) == (one & other).sum()


def test_equal_to_coco():
    coco = pytest.importorskip("faster_coco_eval.core.mask")
    rng = np.random.default_rng(1)
    for number in range(60):
        height, width = map(int, rng.integers(1, 60, 2))
        polygon = rng.uniform(-5, 65, 2 * int(rng.integers(3, 9))).round(number % 3).tolist()
        expected = coco.decode(coco.frPyObjects([polygon], height, width)[0])
        assert np.array_equal(mask_from_coco([polygon], (height, width)), expected)
    for size, mask in random_masks():
        packed = coco.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]
        assert ObjectMask.of(mask).to_coco(size)["counts"] == (packed.decode() if isinstance(packed, bytes) else packed)


def test_a_square_of_whole_pixels_is_filled_exactly():
    mask = mask_from_coco([[2, 3, 7, 3, 7, 9, 2, 9], [10, 0, 12, 0, 12, 2, 10, 2]], (12, 14))
    expected = np.zeros((12, 14), bool)
    expected[3:9, 2:7] = expected[0:2, 10:12] = True
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"size": [3, 5], "counts": [15]}, r"run lengths of a picture of \[3, 5\], expected \[3, 4\]"),
        ({"size": [3, 4], "counts": [2, 3]}, "run lengths of 5 pixels, the picture has 12"),
        ({"size": [3, 4], "counts": [2, -3, 13]}, "run lengths of no whole numbers, the picture has 12"),
        ({"size": [3, 4], "counts": "2é"}, "run lengths with the letter 'é', which they do not have"),
        ({"size": [3, 4], "counts": "2P"}, "run lengths that end in the middle of a number"),
        ({"counts": [12]}, "run lengths of a picture of None"),
        ([[1, 2, 3]], "a polygon that is no list of x and y"),
        ([[1, 2, 3, 4]], "a polygon of 2 points, expected at least 3"),
        ([[1, 2, 3, 4, float("nan"), 1]], "of finite numbers"),
        ([[1, 2] * 20_000], "a polygon of 20,000 points, expected at most 10,000"),
        ([], "expected polygons, each a list of x and y, or run lengths"),
        (None, "expected polygons"),
        ([1, 2, 3, 4, 5, 6], "expected polygons"),
    ],
)
def test_what_does_not_fit_is_said(given, reason):
    with pytest.raises(DataError, match=reason):
        mask_from_coco(given, (3, 4))
