"""One class table by name, and a held-out list that depends on names and seed alone."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from patchloom.data.datasets import ImageSet, Listing, Source
from patchloom.data.images.image_store import ImageStore
from patchloom.data.reading_options import Reading
from patchloom.data.splits import class_table, fold_numbers, group_by_split, make_splits, match, split_rows, with_val
from patchloom_runtime.errors import DataError, UsageError
from tests.data.facts import facts, has_facts


class Named(ImageStore):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def read(self, index):
        return Image.new("RGB", (8, 8))

    def where(self, index):
        return self.names[index]


def listing(pairs):
    """[(picture, class), …] → a listing."""
    names = tuple(sorted({label for _, label in pairs}))
    labels = np.array([names.index(label) for _, label in pairs], dtype=np.int64)
    return Listing(Named([name for name, _ in pairs]), np.arange(len(pairs)), labels, names)


def held(images):
    return {images.where(i): images.classes.names[images.labels[i]] for i in range(len(images))}


classes = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(1, 30), min_size=2, max_size=6)


@given(classes, st.floats(0.05, 0.95), st.integers(0, 5), st.randoms(use_true_random=False))
def test_held_out_list(counts, fraction, seed, random):
    pairs = [(f"{name}/{i}.png", name) for name, count in counts.items() for i in range(count)]
    if all(count == 1 for count in counts.values()):
        with pytest.raises(DataError, match="val"):
            make_splits(Source("test", listing(pairs)), val_fraction=fraction, seed=seed)
        return
    data = make_splits(Source("test", listing(pairs)), val_fraction=fraction, seed=seed)
    train, val = held(data.train), held(data.val)
    assert not set(train) & set(val)
    assert train | val == dict(pairs)
    for name, count in counts.items():
        held_out = Counter(val.values())[name]
        assert held_out == min(max(round(fraction * count), 1), count - 1)

    random.shuffle(pairs)
    again = make_splits(Source("test", listing(pairs)), val_fraction=fraction, seed=seed)
    assert (held(again.train), held(again.val)) == (train, val)


# Rows of (class, group); a group may hold pictures of several classes, as wrong labels make them.
grouped_rows = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), min_size=2, max_size=60)


def groups_of(numbers):
    members = {}
    for position, number in enumerate(numbers):
        members.setdefault(number, []).append(position)
    return [group for group in members.values() if len(group) > 1]


def split_of(rows, fraction, seed):
    """Train and val as positions of `rows`, which are pictures (name, class, group)."""
    table, _ = class_table(listing([(name, label) for name, label, _ in rows]))
    images = match(listing([(name, label) for name, label, _ in rows]), table)
    remaining, held_out = split_rows(images, fraction, seed, groups_of([group for *_, group in rows]))
    return remaining.tolist(), held_out.tolist()


@given(grouped_rows, st.floats(0.05, 0.95), st.integers(0, 5), st.randoms(use_true_random=False))
def test_copies_stay_on_one_side(rows, fraction, seed, random):
    rows = [(f"{i}", label, group) for i, (label, group) in enumerate(rows)]
    remaining, held_out = split_of(rows, fraction, seed)
    assert sorted(remaining + held_out) == list(range(len(rows)))
    assert not {rows[i][2] for i in remaining} & {rows[i][2] for i in held_out}
    assert {rows[i][1] for i in remaining} == {label for _, label, _ in rows}  # train keeps every class
    again = rows.copy()
    random.shuffle(again)
    assert {again[i][0] for i in split_of(again, fraction, seed)[1]} == {rows[i][0] for i in held_out}


@given(grouped_rows, st.floats(0.05, 0.95), st.integers(0, 5))
def test_shares_of_classes_are_kept_as_near_as_groups_allow(rows, fraction, seed):
    rows = [(f"{i}", label, f"{label}{group}") for i, (label, group) in enumerate(rows)]
    _, held_out = split_of(rows, fraction, seed)
    for label in {label for _, label, _ in rows}:
        sizes = Counter(group for _, own, group in rows if own == label)
        size = sizes.total()
        wanted = min(max(round(fraction * size), 1), size - 1)
        result = sum(rows[i][1] == label for i in held_out)
        if len(sizes) > 1:
            assert 0 < result < size
            assert abs(result - wanted) < max(sizes.values())
        else:
            assert result == 0


def test_copies_may_be_all_there_is():
    pairs = [(f"{name}{i}", name) for name in "ab" for i in range(3)]
    with pytest.raises(DataError, match=facts(6, 0, "train", "val")):
        make_splits(Source("test", listing(pairs)), copies=[[0, 1, 2], [3, 4, 5]])


def test_seed_changes_the_list():
    pairs = [(f"{name}/{i}", name) for name in "ab" for i in range(50)]
    first, second = (held(make_splits(Source("test", listing(pairs)), seed=seed).val) for seed in (0, 1))
    assert len(first) == len(second) == 20
    assert first != second


def test_the_list_does_not_change_between_releases():
    pairs = [(f"{name}/{i}", name) for name in "ab" for i in range(5)]
    assert sorted(held(make_splits(Source("test", listing(pairs))).val)) == ["a/3", "b/2"]


@given(
    st.sets(st.sampled_from("abcdefgh"), min_size=2),
    st.sets(st.sampled_from("abcdefgh"), min_size=1),
)
def test_val_is_numbered_by_name(in_train, in_val):
    train = listing([(f"train/{name}{i}", name) for name in sorted(in_train) for i in range(2)])
    val = listing([(f"val/{name}", name) for name in sorted(in_val)])
    if not in_train & in_val:
        with pytest.raises(DataError, match=facts("train", *map(repr, in_val))):
            make_splits(Source("test", train, val))
        return
    data = make_splits(Source("test", train, val))
    assert data.classes.names == tuple(sorted(in_train))
    assert held(data.val) == {f"val/{name}": name for name in in_train & in_val}
    strangers = in_val - in_train
    assert len(data.notes) == bool(strangers)
    assert all(repr(name) in data.notes[0] for name in strangers)


def test_fraction_out_of_range():
    pairs = [(f"{name}{i}", name) for name in "ab" for i in range(3)]
    for fraction in (0, 1, -0.2, 20):
        with pytest.raises(UsageError, match=facts(fraction, 0, 1)):
            make_splits(Source("test", listing(pairs)), val_fraction=fraction)


def test_label_outside_the_names_is_located():
    bad = Listing(Named(["a", "b", "c"]), np.arange(3), np.array([0, 7, 1]), ("x", "y"))
    with pytest.raises(DataError, match=facts("b: ", 7, "0…1")):
        class_table(bad)


def test_sets_follow_the_protocol():
    pairs = [(f"{name}{i}", name) for name in "ab" for i in range(3)]
    data = make_splits(Source("test", listing(pairs)))
    assert isinstance(data.train, ImageSet)
    assert data.train.labels.dtype == np.int64
    assert data.train.mask(0) is None
    assert data.train.boxes(0) is None


def test_many_strangers_are_counted():
    table, _ = class_table(listing([("p", "a"), ("q", "b")]))
    many = listing([("p", "a"), *((f"{i}", f"x{i:02d}") for i in range(12))])
    note = match(many, table).notes[0]
    assert has_facts(note, "'x07'", 4)
    assert not has_facts(note, "'x08'")


def test_names_that_say_their_split():
    files = ["c-train-0.tar", "c-train-1.tar", "c-test.tar", "c-val.tar", "trainer.tar"]
    assert group_by_split(files) == (files[:2], ["c-val.tar"], ["c-test.tar"], ["trainer.tar"])
    assert group_by_split(["c-test.tar"]) == (["c-test.tar"], [], [], [])
    assert group_by_split(["train", "validation"]) == (["train"], ["validation"], [], [])


@given(classes, st.integers(2, 6), st.integers(0, 3), st.randoms(use_true_random=False))
def test_folds_hold_every_image_once_and_every_class_evenly(counts, folds, seed, random):
    pairs = [(f"{name}/{i}.png", name) for name, count in counts.items() for i in range(count)]

    def numbers(rows):
        images = match(listing(rows), class_table(listing(rows))[0])
        return dict(zip([name for name, _ in rows], fold_numbers(images, folds, seed).tolist(), strict=True))

    if len(pairs) < folds:
        with pytest.raises(UsageError, match=str(folds)):
            numbers(pairs)
        return
    chosen = numbers(pairs)
    assert set(chosen.values()) <= set(range(1, folds + 1))
    for name in counts:
        sizes = Counter(chosen[image] for image, label in pairs if label == name)
        assert max(sizes.values()) - min(sizes[fold] for fold in range(1, folds + 1)) <= 1
    shuffled = list(pairs)
    random.shuffle(shuffled)
    assert numbers(shuffled) == chosen  # names and the seed decide, not the order


@given(grouped_rows, st.integers(2, 4), st.integers(0, 3))
def test_copies_are_in_one_fold(rows, folds, seed):
    named = [(f"{i}.png", label) for i, (label, _) in enumerate(rows)]
    copies = groups_of([group for _, group in rows])
    images = match(listing(named), class_table(listing(named))[0])
    if len({group for _, group in rows}) < folds:
        with pytest.raises(UsageError):
            fold_numbers(images, folds, seed, copies)
        return
    numbers = fold_numbers(images, folds, seed, copies)
    assert set(numbers.tolist()) == set(range(1, folds + 1))  # none is empty
    for group in copies:
        assert len({numbers[i] for i in group}) == 1


def test_folds_are_of_train_and_leave_the_other_splits_for_a_test():
    train = listing([(f"{name}{i}", name) for name in "ab" for i in range(10)])
    val, test = (listing([(f"{split}{name}", name) for name in "ab"]) for split in ("val", "test"))
    reading = Reading(val="2/5")
    held_out = [set(held(make_splits(with_val(Source("s", train), Reading(val=f"{n}/5"))).val)) for n in range(1, 6)]
    assert [len(one) for one in held_out] == [4] * 5
    assert set.union(*held_out) == {f"{name}{i}" for name in "ab" for i in range(10)}
    with_own = make_splits(with_val(Source("s", train, val), reading))
    assert set(held(with_own.test)) == {"vala", "valb"}
    assert set(held(with_own.val)) == held_out[1]
    both = make_splits(with_val(Source("s", train, val, test=test), reading))
    assert set(held(both.test)) == {"testa", "testb"}


@pytest.mark.parametrize("val", ["0/5", "6/5", "1/1", "1/101", "2/5/6", "-1/5", "2", "٢/5"])
def test_a_fold_is_one_of_a_few(val):
    with pytest.raises(UsageError) as error:
        Reading(val=val)
    assert has_facts(error.value, val, "held-out", "2/5")
