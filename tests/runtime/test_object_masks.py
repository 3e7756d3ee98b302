"""Masks of objects to and from what COCO's files hold."""

import numpy as np
import pytest

from patchloom_runtime.errors import DataError
from patchloom_runtime.images import object_masks
from patchloom_runtime.images.object_masks import ObjectMask, masks_from_coco, masks_of_instances, painted
from tests.data.facts import facts


def decoded(given, size):
    return masks_from_coco([given], size)[0].whole(size)


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
        assert np.array_equal(decoded(kept.to_coco(size), size), mask)


def test_a_known_string():
    # As COCO's own code packs 3 × 4 pixels with the counts 2, 3, 4, 3.
    mask = decoded({"size": [3, 4], "counts": [2, 3, 4, 3]}, (3, 4))
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
        assert np.array_equal(decoded([polygon], (height, width)), expected)
    for size, mask in random_masks():
        packed = coco.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]
        assert ObjectMask.of(mask).to_coco(size)["counts"] == (packed.decode() if isinstance(packed, bytes) else packed)


def test_a_square_of_whole_pixels_is_filled_exactly():
    mask = decoded([[2, 3, 7, 3, 7, 9, 2, 9], [10, 0, 12, 0, 12, 2, 10, 2]], (12, 14))
    expected = np.zeros((12, 14), bool)
    expected[3:9, 2:7] = expected[0:2, 10:12] = True
    assert np.array_equal(mask, expected)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"size": [3, 5], "counts": [15]}, ("[3, 5]", "[3, 4]")),
        ({"size": [3, 4], "counts": [2, 3]}, (5, 12)),
        ({"size": [3, 4], "counts": [2, -3, 13]}, (12,)),
        ({"size": [3, 4], "counts": "2é"}, ("'é'",)),
        ({"size": [3, 4], "counts": "2P"}, ()),
        ({"counts": [12]}, (None,)),
        ([[1, 2, 3]], ()),
        ([[1, 2, 3, 4]], (2, 3)),
        ([[1, 2, 3, 4, float("nan"), 1]], ()),
        ([[1, 2] * 20_000], ("20,000", "10,000")),
        ([[1, 2, 10**400, 4, 5, 6]], ()),
        ([[1, 2, "3", 4, 5, 6]], ()),
        ([[1, 2, [3], 4, 5, 6]], ()),
        ({"size": [3, 4], "counts": [10**400, 12]}, ()),
        ({"size": [3, 4], "counts": "oooooooo0"}, (9,)),
        ([], ()),
        (None, ()),
        ([1, 2, 3, 4, 5, 6], ()),
    ],
)
def test_what_does_not_fit_is_said(given, parts):
    with pytest.raises(DataError, match=facts(*parts)):
        decoded(given, (3, 4))


def test_edges_that_leave_the_image_cost_nothing_outside_of_it():
    far, near = (decoded([[-side, -side, side, side, side, -side]], (40, 40)) for side in (1 << 20, 100))
    assert np.array_equal(far, near)
    assert far[0, 39]
    assert not far[39, 0]


def test_masks_of_instances():
    rng = np.random.default_rng(2)
    for size, mask in random_masks():
        numbers = rng.integers(0, 4, size) * mask
        for number, one in enumerate(masks_of_instances(numbers, 5), 1):
            assert np.array_equal(one.whole(size), numbers == number)


# Limits on the work of one image

SIZE = (4000, 6000)
FULL = [[0, 0, 6000, 0, 6000, 4000, 0, 4000]]
ZIGZAG = [[0, 0, 6000, 1] * 5_000]


@pytest.mark.parametrize(
    ("outlines", "limit"),
    [
        ([FULL] * 3_000, "100,000,000"),
        ([FULL * 3_000], "100,000,000"),
        ([ZIGZAG], "4,194,304"),
        ([[[1, 2, 3, 4, 5, 6] * 3_000] * 500], "4,194,304"),
        ([[[1, 2, 3, 4, 5, 6]] * 30_000], "20,000"),
        ([[[1, 2, 3, 4, 5, 6]]] * 20_000, facts("20,000", "10,000")),
        ([{"size": list(SIZE), "counts": "1" * (1 << 23)}], "4,194,304"),
        ([{"size": list(SIZE), "counts": [1] * 24_000_000}], "4,194,304"),
        ([{"size": list(SIZE), "counts": [0, 24_000_000]}] * 50, "100,000,000"),
    ],
)
def test_the_work_of_one_image_is_bounded(outlines, limit, monkeypatch):
    monkeypatch.setattr(object_masks, "MOST_MASK_PIXELS", 100_000_000)  # a fifth, for the test's time
    with pytest.raises(DataError, match=limit):
        masks_from_coco(outlines, SIZE)


def test_an_object_costs_what_it_covers():
    centers = np.random.default_rng(3).integers(100, 3900, (3_000, 2))
    outlines = [[[x, y, x + 20, y, x + 20, y + 10, x, y + 10]] for x, y in centers.tolist()]
    masks = masks_from_coco(outlines, SIZE)
    assert {mask.bits.shape for mask in masks} == {(10, 20)}
    assert [(mask.left, mask.top) for mask in masks] == [tuple(center) for center in centers.tolist()]
    classes, instances = painted(masks, np.zeros(3_000), np.arange(3_000) % 2 == 1, SIZE, np.uint8)
    assert set(np.unique(classes)) == {0, 1}
    assert not {*range(2, 3_001, 2)} & {*np.unique(instances).tolist()}
