"""Several views of a picture: of the same picture, never alike, the same whenever and wherever they are drawn."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches.decoded_dataset import DeviceLoader
from patchloom.data.batches.loader import Loader
from patchloom.data.batches.views import ManyViews, View, make_view_loader
from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.batches import len_of, move, split
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.samples import Sample
from tests.data.facts import facts
from tests.data.test_device import photos, pictures

# DINO's: two of most of the picture, one of a part of it.
COLORS = {"color_jitter": 0.4, "saturation": 0.2, "hue": 0.1, "jitter_probability": 0.8, "grey": 0.2}
FIRST = AugmentPart(crop_min_scale=0.4, blur=1.0, **COLORS)
SECOND = AugmentPart(crop_min_scale=0.4, blur=0.1, solarise=0.2, **COLORS)
LOCAL = AugmentPart(crop_min_scale=0.05, crop_max_scale=0.4, blur=0.5, **COLORS)
VIEWS = [View(FIRST, 16), View(SECOND, 16), View(LOCAL, 8), View(LOCAL, 8)]
# AutoAugment has no version for whole batches, so workers prepare the pictures.
BY_WORKERS = [View(dataclasses.replace(FIRST, policy="autoaugment"), 16), View(LOCAL, (8, 12))]


def loader(views=VIEWS, **options):
    given = {"batch_size": 4, "seed": 3, "device": "cpu"} | options
    return make_view_loader(pictures(photos(height=16, width=16)), views, **given)[0]


@pytest.mark.parametrize(("views", "by"), [(VIEWS, DeviceLoader), (BY_WORKERS, Loader)])
def test_both_ways_are_tested(views, by) -> None:
    assert {type(one) for one in loader(views)._loaders} == {by}


@pytest.mark.parametrize("views", [VIEWS, BY_WORKERS])
def test_views_have_their_sizes_and_belong_to_one_picture(views) -> None:
    for batch in loader(views).epoch(0):
        assert [tuple(view.shape) for view in batch.views] == [
            (4, 3, *((v.size, v.size) if isinstance(v.size, int) else v.size)) for v in views
        ]
        assert batch.labels.tolist() == (batch.index % 5).tolist()


def test_views_show_the_picture_they_are_of() -> None:
    whole = AugmentPart(crop_min_scale=1.0, flip=0.0)
    shown = next(loader([View(whole, 16), View(whole, 16)], batch_size=12).epoch(0))
    originals = torch.from_numpy(photos(height=16, width=16)).permute(0, 3, 1, 2)[shown.index].float()
    for view in shown.views:
        away = (view.float() - originals).abs().mean(dim=(1, 2, 3))
        others = (view.float() - originals.roll(1, 0)).abs().mean(dim=(1, 2, 3))
        assert (away < others).all()


@pytest.mark.parametrize("views", [VIEWS, BY_WORKERS])
def test_no_two_views_are_alike(views) -> None:
    same = [View(views[0].augment, 16)] * 3
    batch = next(loader(same).epoch(0))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(batch.views[a], batch.views[b])


def test_views_made_at_once_are_those_made_alone() -> None:
    alike = [VIEWS[0], *[VIEWS[2]] * 3]
    together = next(loader(alike).epoch(2)).views
    assert len(loader(alike)._loaders) == 2
    unlike = [
        View(dataclasses.replace(view.augment, flip=0.5 + number * 1e-9), view.size)
        for number, view in enumerate(alike)
    ]
    alone = loader(unlike)
    assert len(alone._loaders) == 4
    assert all(torch.equal(a, b) for a, b in zip(together, next(alone.epoch(2)).views, strict=True))


@pytest.mark.parametrize("views", [VIEWS, BY_WORKERS])
def test_views_repeat_and_start_anywhere(views) -> None:
    whole = list(loader(views).epoch(1))
    for again, before in zip(loader(views).epoch(1, 1), whole[1:], strict=True):
        assert torch.equal(again.index, before.index)
        assert all(torch.equal(a, b) for a, b in zip(again.views, before.views, strict=True))


def test_workers_change_nothing() -> None:
    alone, helped = loader(BY_WORKERS), loader(BY_WORKERS, workers=2)
    for a, b in zip(alone.epoch(0), helped.epoch(0), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True))
    helped.close()


@pytest.mark.parametrize("views", [VIEWS, BY_WORKERS])
def test_two_processes_see_the_views_of_one(views) -> None:
    one = next(loader(views).epoch(0))
    shares = [next(loader(views, rank=rank, world=2).epoch(0)) for rank in (0, 1)]
    for share in shares:
        for place, index in enumerate(share.index.tolist()):
            row = one.index.tolist().index(index)
            for mine, theirs in zip(share.views, one.views, strict=True):
                assert torch.equal(mine[place], theirs[row])
    assert sorted(i for share in shares for i in share.index.tolist()) == sorted(one.index.tolist())


@pytest.mark.parametrize("policy", ["none", "autoaugment"])
def test_each_view_shows_as_much_of_the_picture_as_it_is_told(policy, monkeypatch) -> None:
    """Of a picture whose colour is its place, a view's colours span its share of the area."""
    # In the place of AutoAugment, which would change the colours.
    monkeypatch.setattr("patchloom.data.augmentation.augment.make_policy", lambda *_: None)
    ramp = np.zeros((40, 32, 32, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(32)[:, None] * 8, np.arange(32) * 8
    scales = (0.7, 1.0), (0.05, 0.4)
    views = [View(AugmentPart(policy=policy, crop_min_scale=low, crop_max_scale=high), 32) for low, high in scales]
    made, _ = make_view_loader(pictures(ramp), views, batch_size=40, seed=0, device="cpu")
    shown = next(made.epoch(0)).views
    for view, (low, high) in zip(shown, scales, strict=True):
        tall = (view[:, 0, 27, 16].float() - view[:, 0, 4, 16].float()) / 8 / 23  # source rows a row
        wide = (view[:, 1, 16, 27].float() - view[:, 1, 16, 4].float()).abs() / 8 / 23
        areas = tall * wide
        assert areas.min() > low - 0.06
        assert areas.max() < high + 0.06
        assert areas.std() > (high - low) / 6


def test_views_in_a_row_are_those_made_one_by_one() -> None:
    image = pictures(photos()).read(0)
    joined = ManyViews(tuple(BY_WORKERS))
    row = joined.arrays(Sample(image), random.Random(5))["image"]
    assert row.shape == joined.shapes(())["image"] == (1, 16 * 16 + 8 * 12, 3)
    rng = random.Random(5)
    expected = [train_transform(view.augment, view.size)(image, rng) for view in BY_WORKERS]
    apart = joined.separate(ImageBatch(torch.from_numpy(row)[None].permute(0, 3, 1, 2), *torch.zeros(2, 1))).views
    for view, pixels in zip(apart, expected, strict=True):
        assert np.array_equal(view[0].permute(1, 2, 0).numpy(), pixels)


def test_the_engine_can_move_and_cut_them() -> None:
    batch = next(loader().epoch(0))
    assert len_of(batch) == 4
    parts = split(move(batch, torch.device("cpu")), 2)
    assert [len(part) for part in parts] == [2, 2]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == sorted(batch.index.tolist())
    assert [tuple(view.shape[2:]) for view in parts[0].views] == [(16, 16), (16, 16), (8, 8), (8, 8)]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError):
        loader([])
    padded = AugmentPart(crop="pad")
    with pytest.raises(UsageError, match=facts("augment.crop", "pad", "(16, 16)", "(8, 8)")):
        loader([View(padded, 16), View(padded, 8)])
