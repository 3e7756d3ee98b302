"""digits and shapes: the same pictures always, and annotations that fit what is drawn."""

import numpy as np
import pytest

from patchloom.data.sources.builtin import FAMILIES, SHAPES
from patchloom.data.sources.source import open_data
from patchloom_runtime.errors import UsageError
from tests.data.facts import facts


def test_digits():
    data = open_data("digits")
    assert data.name.startswith("digits (")
    assert (len(data.train), len(data.val)) == (1437, 360)
    assert data.classes.names == tuple("0123456789")
    assert not set(data.train.rows) & set(data.val.rows)
    share = np.bincount(data.val.labels) / (np.bincount(data.train.labels) + np.bincount(data.val.labels))
    assert np.all(np.abs(share - 0.2) < 0.005)
    image = np.asarray(data.train.read(0))
    assert image.shape == (8, 8, 3)
    everything = np.stack([np.asarray(data.val.read(i)) for i in range(len(data.val))])
    assert (everything.min(), everything.max()) == (0, 255)


@pytest.fixture(scope="module")
def shapes():
    return open_data("shapes:count=64,size=48")


def test_shapes_are_balanced_and_have_levels(shapes):
    assert shapes.classes.names == SHAPES
    assert np.array_equal(np.bincount(shapes.train.labels), np.full(16, 4))
    families, family_of = shapes.classes.levels["coarse"]
    assert families == tuple(sorted(FAMILIES))
    assert all(name in FAMILIES[families[family_of[i]]] for i, name in enumerate(SHAPES))
    coarse = open_data("shapes:count=64,size=48", level="coarse")
    assert np.array_equal(np.bincount(coarse.train.labels), np.full(4, 16))


def test_shapes_depend_on_seed_and_number_alone(shapes):
    again = open_data("shapes:count=64,size=48")
    assert np.array_equal(again.train.read(40), shapes.train.read(40))
    assert np.array_equal(shapes.train.read(40), shapes.train.read(40))
    assert not np.array_equal(shapes.train.read(40), shapes.train.read(24))
    other = open_data("shapes:count=64,size=48,seed=1")
    assert not np.array_equal(other.train.read(40), shapes.train.read(40))
    train = {shapes.train.read(i).tobytes() for i in range(64)}
    assert len(train) == 64
    assert not train & {shapes.val.read(i).tobytes() for i in range(16)}


def test_masks_and_boxes_fit_each_other(shapes):
    for i in range(64):
        assert shapes.train.read(i).size == (48, 48)
        mask, boxes = shapes.train.mask(i), shapes.train.boxes(i)
        assert mask.classes.shape == mask.instances.shape == (48, 48)
        assert np.array_equal(mask.classes > 0, mask.instances > 0)
        assert boxes[0, 4] == shapes.train.labels[i]
        areas = []
        for number, (x0, y0, x1, y1, label) in zip(np.unique(mask.instances)[1:], boxes, strict=True):
            inside = mask.instances == number
            assert set(mask.classes[inside]) == {label + 1}
            assert np.flatnonzero(inside.any(axis=0))[[0, -1]].tolist() == [x0, x1 - 1]
            assert np.flatnonzero(inside.any(axis=1))[[0, -1]].tolist() == [y0, y1 - 1]
            areas.append((x1 - x0) * (y1 - y0))
        assert areas[0] == max(areas)  # the label is that of the largest object
    assert shapes.train.images.mask_names[1:] == shapes.train.images.object_names == SHAPES


def test_the_object_stands_out_from_its_ground(shapes):
    contrasts = []
    for i in range(64):
        grey, visible = (
            np.asarray(shapes.train.read(i).convert("L"), dtype=float),
            shapes.train.mask(i).instances == 1,
        )
        contrasts.append(abs(grey[visible].mean() - grey[~visible].mean()))
    assert np.median(contrasts) > 30


def test_options_of_shapes():
    with pytest.raises(UsageError, match=r"counts=9.*\bcount\b"):
        open_data("shapes:counts=9")
    with pytest.raises(UsageError, match=facts("count=3", 16)):
        open_data("shapes:count=3")
    for count in ("1000000000000", "1" + "0" * 30, "٣٣٣"):
        with pytest.raises(UsageError, match=f"count={count}"):
            open_data(f"shapes:count={count}")
