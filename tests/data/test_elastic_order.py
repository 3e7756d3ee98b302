"""The samples of an epoch follow from seed and epoch, however many processes and whatever batches use them."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.batches import sampler
from patchloom.data.batches.decoded_dataset import make_loader
from patchloom.data.batches.sampler import MOST_LISTED, ClassSampling, SamplingPlan, permuted, rank_positions
from patchloom.data.batches.views import View, make_view_loader
from patchloom.recipes.parts import AugmentPart
from tests.data.test_loader import contents, loader, pictures

segments = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30), st.integers(1, 12)), max_size=6)


def samples_of(plan: SamplingPlan, epoch: int, step: int, offset: int, world: int) -> list[tuple[int, int]]:
    """(image, seed) of one step in the order of the whole batch, put together from the shares of all processes."""
    shares = [replace(plan, rank=rank, world=world).views(epoch, step, offset) for rank in range(world)]
    size = sum(len(share.index) for share in shares)
    batch: list[tuple[int, int]] = [(-1, -1)] * size
    for rank, share in enumerate(shares):
        for place, index, seed in zip(rank_positions(size, rank, world), share.index, share.seed, strict=True):
            batch[place] = (int(index), int(seed))
    return batch


@settings(deadline=None)
@given(
    images=st.integers(1, 700),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    repeats=st.integers(1, 3),
    by_class=st.booleans(),
    drop_last=st.booleans(),
    computed=st.booleans(),
    segments=segments,
)
def test_any_splits_use_the_order_of_the_epoch(images, seed, epoch, repeats, by_class, drop_last, computed, segments):
    sampling = ClassSampling(np.arange(images) % 3, "balanced") if by_class else None
    with patch.object(sampler, "MOST_LISTED", 0 if computed else MOST_LISTED):
        whole = SamplingPlan(images, 1, seed, True, repeats, drop_last, sampling=sampling)
        expected = samples_of(replace(whole, batch_size=whole.views_per_epoch), epoch, 0, 0, 1)
        assert [index for index, _ in expected] == whole.order(epoch).tolist()
        used: list[tuple[int, int]] = []
        for number, (world, share, steps) in enumerate([*segments, (1, 4, images)]):
            plan = replace(whole, batch_size=min(world * share, whole.views_per_epoch // world * world or 1))
            world = world if plan.batch_size % world == 0 else 1
            first, offset = plan.step_at(len(used)), plan.offset_at(len(used))
            assert abs(offset) < plan.batch_size
            assert 0 <= first <= plan.steps_per_epoch
            last = plan.steps_per_epoch if number == len(segments) else min(first + steps, plan.steps_per_epoch)
            for step in range(first, last):
                used += samples_of(plan, epoch, step, offset, world)
                # A checkpoint has the number of samples alone; from it, the run continues with the next step.
                assert plan.step_at(len(used)) == step + 1
                assert len(used) == len(expected) or plan.offset_at(len(used)) == offset
    assert used == expected[: len(used)]
    assert len(expected) - len(used) < (plan.batch_size if drop_last else 1)


@given(st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 1000))
def test_a_computed_order_has_every_image_once(images, seed, epoch):
    order = permuted(np.arange(images), images, seed, epoch)
    assert sorted(order.tolist()) == list(range(images))
    part = np.arange(images)[images // 3 :: 7]
    assert (permuted(part, images, seed, epoch) == order[part]).all()


def test_a_computed_order_is_as_irregular_as_a_shuffled_one():
    images, count = 10_000, 200
    orders = np.array([permuted(np.arange(images), images, seed, epoch) for seed in range(20) for epoch in range(10)])
    assert len({tuple(order[:20]) for order in orders}) == count
    # The image at a position is uniform: 10 equal bins of the images at each of the first 500 positions together.
    bins = np.bincount((orders[:, :500] // (images // 10)).ravel(), minlength=10)
    assert abs(bins - 500 * count / 10).max() < 5 * np.sqrt(500 * count / 10)
    # Neighbours are unrelated: steps upwards of 1 are as rare as chance makes them, and so are fixed points.
    assert np.mean(np.diff(orders, axis=1) == 1) == pytest.approx(1 / images, rel=0.25)
    assert np.mean(orders == np.arange(images)) == pytest.approx(1 / images, rel=0.25)
    correlation = [np.corrcoef(a, b)[0, 1] for a, b in pairwise(orders)]
    assert abs(np.mean(correlation)) < 5 / np.sqrt(images * count)


def test_a_large_dataset_has_no_list_of_its_order():
    plan = SamplingPlan(10**12, 4096, seed=7)
    first, last = plan.views(3, 0).index, plan.views(3, plan.steps_per_epoch - 1).index
    assert len({*first.tolist(), *last.tolist()}) == 2 * 4096
    assert 0 <= min(first.min(), last.min()) <= max(first.max(), last.max()) < 10**12


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_continue_after_any_number_of_samples(workers):
    plan = SamplingPlan(50, 8, seed=3)
    after = [[index for batch in loader(batch_size=1).epoch(1) for index in batch.index.tolist()]]
    some = loader(workers=workers)
    rest = contents(some.epoch(1, plan.step_at(13), plan.offset_at(13)))
    some.close()
    alone = contents(loader(batch_size=1).epoch(1))
    assert [index for _, _, indices in rest for index in indices] == after[0][13:45]
    # Each image is augmented from its own position in the epoch, in whatever batch it is.
    assert b"".join(images for images, _, _ in rest) == b"".join(images for images, _, _ in alone[13:45])


def test_decoded_datasets_and_views_continue_after_any_number_of_samples():
    plan = SamplingPlan(50, 8, seed=3)
    order, start = plan.order(2).tolist(), (2, plan.step_at(21), plan.offset_at(21))
    augment = AugmentPart(crop="pad")
    decoded, _ = make_loader(pictures(), augment, 16, batch_size=8, seed=3, device="cpu")
    views, _ = make_view_loader(pictures(), [View(augment, 16)] * 2, batch_size=8, seed=3, device="cpu")
    by_image = AugmentPart(crop="random_resized", policy="autoaugment")
    joined, _ = make_view_loader(pictures(), [View(by_image, 16)] * 2, batch_size=8, seed=3, device="cpu")
    for made in (decoded, views, joined):
        assert [index for batch in made.epoch(*start) for index in batch.index.tolist()] == order[21:45]
