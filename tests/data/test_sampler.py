import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from patchloom.data.batches.sampler import (
    ClassSampling,
    SamplingPlan,
    epoch_order,
    rank_positions,
    step_seed,
)
from patchloom.data.labels.class_balance import class_counts, sampling_shares
from patchloom_runtime.errors import UsageError
from tests.data.facts import facts

PARITY = Path(__file__).parents[3] / "shared" / "parity" / "ra_sampler.safetensors"

sizes = st.integers(1, 700)
seeds = st.integers(0, 2**40)
epochs = st.integers(0, 1000)


@given(sizes, seeds, epochs)
def test_an_epoch_sees_every_picture_once(pictures, seed, epoch):
    order = epoch_order(pictures, seed, epoch)
    assert sorted(order) == list(range(pictures))
    assert (epoch_order(pictures, seed, epoch) == order).all()


def test_order_changes_with_seed_and_epoch_and_stays_without_shuffling():
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in (0, 1, 2**33) for epoch in range(4)}
    assert len(orders) == 12
    assert (epoch_order(50, 3, 4, shuffle=False) == np.arange(50)).all()


@pytest.mark.skipif(not PARITY.exists(), reason="the authors' stored indices are not here")
def test_repeated_augmentation_is_the_authors_order():
    from safetensors import safe_open

    with safe_open(PARITY, "pt") as stored:
        assert json.loads(stored.metadata()["config"])["family"] == "ra_sampler"
        for key in stored.keys():  # noqa: SIM118 - not a dict
            names = ("n", "replicas", "rank", "epoch", "repeats")
            parts = key.split("_")
            n, world, rank, epoch, repeats = (
                int(part.removeprefix(name)) for part, name in zip(parts, names, strict=True)
            )
            theirs = stored.get_tensor(key)
            ours = SamplingPlan(n, 1, repeats=repeats).order(epoch)[rank::world]
            assert ours[: len(theirs)].tolist() == theirs.tolist(), key
            # They cut every process to the same length, at most one view each.
            assert len(ours) - len(theirs) in (0, 1), key


@given(st.integers(1, 1500), st.integers(2, 4))
def test_repeated_epochs_have_whole_256s_of_few_pictures_seen_often(pictures, repeats):
    order = SamplingPlan(pictures, 1, repeats=repeats).order(0)
    assert len(order) == (pictures // 256 * 256 or pictures)
    seen, counts = np.unique(order, return_counts=True)
    assert len(seen) == -(-len(order) // repeats)
    assert (counts == repeats).sum() >= len(seen) - 1


@given(
    pictures=sizes,
    share=st.integers(1, 40),
    world=st.integers(1, 5),
    repeats=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=seeds,
    epoch=epochs,
)
def test_processes_share_the_batches_of_one(pictures, share, world, repeats, drop_last, seed, epoch):
    batch = share * world

    def plan(rank: int, world: int) -> SamplingPlan:
        return SamplingPlan(pictures, batch, seed, True, repeats, drop_last, rank, world)

    if drop_last and batch > plan_length(pictures, repeats):
        with pytest.raises(UsageError, match=facts(batch)):
            plan(0, 1)
        return
    for step in range(min(plan(0, 1).steps_per_epoch, 3)):
        whole = plan(0, 1).views(epoch, step)
        shares = [plan(rank, world).views(epoch, step) for rank in range(world)]
        together = sorted((s, i) for views in shares for s, i in zip(views.seed, views.index, strict=True))
        assert together == sorted(zip(whole.seed, whole.index, strict=True))
        if len(whole.index) == batch:
            assert {len(views.index) for views in shares} == {share}


def plan_length(pictures: int, repeats: int) -> int:
    return pictures if repeats == 1 else pictures // 256 * 256 or pictures


@given(st.integers(1, 20), st.integers(1, 6))
def test_mirrored_pictures_stay_on_one_process(pairs, world):
    size = 2 * world * pairs
    for rank in range(world):
        positions = rank_positions(size, rank, world)
        assert (positions + positions[::-1] == size - 1).all()


uneven = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(lambda counts: np.repeat(range(len(counts)), counts))


@given(uneven, st.sampled_from(["sqrt", "balanced"]), seeds, epochs)
def test_every_epoch_by_class_has_its_shares_rounded(labels, kind, seed, epoch):
    order = ClassSampling(labels, kind).order(seed, epoch)
    assert len(order) == len(labels)
    wanted = len(labels) * sampling_shares(class_counts(labels), kind)
    sampled = class_counts(labels[order], len(wanted))
    assert (np.abs(sampled - wanted) < 1 + 1e-9).all()
    of_image = np.bincount(order, minlength=len(labels))
    assert all(np.ptp(of_image[labels == label]) <= 1 for label in np.unique(labels))
    assert (ClassSampling(labels.copy(), kind).order(seed, epoch) == order).all()


def test_shares_by_class_hold_in_expectation():
    labels = np.repeat([0, 1, 2, -1], [80, 15, 3, 2])
    for kind, shares in (("balanced", np.ones(3) / 3), ("sqrt", np.sqrt([80, 15, 3]) / np.sqrt([80, 15, 3]).sum())):
        sampling = ClassSampling(labels, kind)
        orders = [sampling.order(5, epoch) for epoch in range(900)]
        counts = np.mean([class_counts(labels[order], 3) for order in orders], axis=0)
        np.testing.assert_allclose(counts, 100 * shares, atol=0.07)  # four deviations of a mean of 900
        of_image = np.mean([np.bincount(order, minlength=100) for order in orders], axis=0)
        assert (of_image[labels < 0] == 0).all()
        assert np.ptp(of_image[labels == 0]) < 0.15  # 33 or 51 of 80 images per epoch, any as often as another
        assert len({tuple(order) for order in orders[:20]}) == 20


@pytest.mark.parametrize("repeats", [1, 3])
def test_processes_share_the_batches_by_class_of_one(repeats):
    sampling = ClassSampling(np.repeat([0, 1], [250, 20]), "balanced")

    def plan(rank: int, world: int) -> SamplingPlan:
        return SamplingPlan(270, 12, 7, True, repeats, True, rank, world, sampling)

    for step in range(plan(0, 1).steps_per_epoch):
        whole, shares = plan(0, 1).views(2, step), [plan(rank, 3).views(2, step) for rank in range(3)]
        together = sorted((s, i) for views in shares for s, i in zip(views.seed, views.index, strict=True))
        assert together == sorted(zip(whole.seed, whole.index, strict=True))
    order = plan(0, 1).order(2)
    assert len(order) == (270 if repeats == 1 else 256)
    assert (np.reshape(order[: 84 * repeats], (-1, repeats)) == order[: 84 * repeats : repeats, None]).all()


def test_view_seeds_differ_between_copies_steps_epochs_and_seeds():
    plans = [SamplingPlan(512, 64, seed, repeats=3) for seed in (0, 1)]
    found = [plan.views(epoch, step).seed for plan in plans for epoch in (0, 1) for step in range(8)]
    assert len(np.unique(np.concatenate(found))) == 2 * 2 * 512
    assert len({step_seed(seed, epoch, step) for seed in (0, 1) for epoch in (0, 1) for step in (0, 1)}) == 8


def test_the_order_does_not_read_the_process_random_state():
    torch.manual_seed(0)
    first = epoch_order(20, 5, 6)
    state = torch.get_rng_state()
    assert (epoch_order(20, 5, 6) == first).all()
    assert (torch.get_rng_state() == state).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 3, "world": 2}, facts(3, 2)),
        ({"batch_size": 0}, facts(0)),
        ({"batch_size": 2, "world": 2, "rank": 2}, facts(2)),
        ({"batch_size": 2, "repeats": 0}, facts("repeats", 0)),
        ({"batch_size": 2, "seed": -1}, facts("seed", "-1")),
        ({"batch_size": 11}, facts(11, 10, "--batch 10")),
    ],
)
def test_impossible_plans_say_why(options, message):
    with pytest.raises(UsageError, match=message):
        SamplingPlan(10, **options)
