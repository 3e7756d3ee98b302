"""Batches by tokens: every pair once an epoch, any step to go on from, processes that are together one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.text.encoded import EncodedPairs, Sentences, encode_pairs
from patchloom.data.text.pairs import open_parallel
from patchloom.data.text.token_batches import NOBODY, SentenceBatch, TokenLoader
from patchloom.engine.batches import len_of, move, split
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD, Vocabulary
from tests.data.facts import facts, has_facts


def sentences(lengths, seed):
    subwords = np.random.default_rng(seed).integers(4, 300, sum(lengths)).astype(np.uint16)
    return Sentences(subwords, np.cumsum([0, *lengths]))


def encoded(lengths, seed=0):
    """Pairs with these (source, target) lengths, at every second place of their text."""
    source, target = zip(*lengths, strict=True)
    places = 2 * np.arange(len(lengths))
    return EncodedPairs(sentences(source, seed), sentences(target, seed + 1), places, ())


def random_lengths(count=200, longest=30, seed=0):
    return np.random.default_rng(seed).integers(1, longest, (count, 2)).tolist()


LENGTHS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60)


def same(a: SentenceBatch, b: SentenceBatch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a._tensors(), b._tensors(), strict=True))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(21, 200), st.integers(0, 5), st.integers(0, 3))
def test_every_pair_once_an_epoch_within_the_budget(lengths, tokens, seed, epoch):
    pairs = encoded(lengths)
    loader = TokenLoader(pairs, tokens=tokens, seed=seed)
    batches = list(loader.epoch(epoch))
    assert len(batches) == loader.steps_per_epoch
    assert sorted(torch.cat([batch.index for batch in batches]).tolist()) == pairs.places.tolist()
    for batch in batches:
        assert len(batch) * max(batch.source.shape[1], batch.target.shape[1] - 1) <= tokens
        assert (batch.batch_tokens == (batch.target[:, 1:] != PAD).sum()).all()
        for source, target, index in zip(batch.source, batch.target, batch.index.tolist(), strict=True):
            assert source[source != PAD].tolist() == [*pairs.source[index // 2], EOS]
            assert target[target != PAD].tolist() == [BOS, *pairs.target[index // 2], EOS]
            assert source[: len(pairs.source[index // 2]) + 1].ne(PAD).all()
            assert target[: len(pairs.target[index // 2]) + 2].ne(PAD).all()
        assert batch.source.ne(PAD).any(dim=0).all()
        assert batch.target.ne(PAD).any(dim=0).all()


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 3), st.data())
def test_an_epoch_goes_on_from_any_step(lengths, epoch, data):
    loader = TokenLoader(encoded(lengths), tokens=40, seed=2)
    whole = list(loader.epoch(epoch))
    start = data.draw(st.integers(0, loader.steps_per_epoch))
    rest = list(TokenLoader(encoded(lengths), tokens=40, seed=2).epoch(epoch, start))
    assert len(rest) == len(whole) - start
    assert all(same(a, b) for a, b in zip(whole[start:], rest, strict=True))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 4))
def test_processes_are_together_one(lengths, world, parts):
    """Of any values that rows have, the mean over tokens of the whole batch, through the engine's means."""
    pairs = encoded(lengths)
    one = list(TokenLoader(pairs, tokens=60, seed=1).epoch(0))
    ranks = [list(TokenLoader(pairs, tokens=60, seed=1, rank=r, world=world).epoch(0)) for r in range(world)]
    assert {len(batches) for batches in ranks} == {len(one)}
    for whole, shares in zip(one, zip(*ranks, strict=True), strict=True):
        assert len({(share.source.shape, share.target.shape) for share in shares}) == 1
        assert len({len(split(share, parts)) for share in shares}) == 1
        index = torch.cat([share.index for share in shares])
        assert sorted(index[index != NOBODY].tolist()) == sorted(whole.index.tolist())
        rows = {place: pair for place, *pair in zip(whole.index.tolist(), whole.source, whole.target, strict=True)}
        total = 0.0
        for share in shares:
            for part in split(share, parts):
                values = (part.target[:, 1:] * (part.target[:, 1:] != PAD)).sum(dim=1).double()  # a loss of its own
                total += (values * part.weight).mean().item() * len_of(part) / len_of(share) / world
            for place, source, target in zip(share.index.tolist(), share.source, share.target, strict=True):
                if place != NOBODY:
                    assert torch.equal(rows[place][0], source)
                    assert torch.equal(rows[place][1], target)
        labels = whole.target[:, 1:]
        assert total == pytest.approx(labels.double().sum().item() / (labels != PAD).sum().item(), rel=1e-5)


def test_epochs_and_seeds_have_orders_of_their_own():
    pairs = encoded(random_lengths())
    loader = TokenLoader(pairs, tokens=128, seed=0)
    orders = [[batch.index.tolist() for batch in loader.epoch(epoch)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert {frozenset(rows) for rows in orders[0]} != {frozenset(rows) for rows in orders[1]}
    assert [b.index.tolist() for b in TokenLoader(pairs, tokens=128, seed=1).epoch(0)] != orders[0]


def test_without_shuffling_batches_come_from_short_to_long():
    loader = TokenLoader(encoded(random_lengths()), tokens=128, shuffle=False)
    widths = [max(batch.source.shape[1], batch.target.shape[1] - 1) for batch in loader.epoch(0)]
    assert widths == sorted(widths)
    assert all(same(a, b) for a, b in zip(loader.epoch(0), loader.epoch(7), strict=True))


def test_sorting_leaves_little_padding_and_full_batches():
    loader = TokenLoader(encoded([(n, n) for n, _ in random_lengths(2000)]), tokens=512)
    batches = list(loader.epoch(0))
    text = sum((batch.source != PAD).sum().item() for batch in batches)
    assert text > 0.95 * sum(batch.source.numel() for batch in batches)
    assert text > 0.8 * 512 * len(batches)
    assert sum(len(batch) % 8 == 0 for batch in batches) >= len(batches) - 1
    assert TokenLoader(encoded([(3, 3)] * 19), tokens=100).steps_per_epoch == 1


def test_a_batch_in_parts_and_on_a_device():
    (batch,) = TokenLoader(encoded([(3, 4), (5, 5), (2, 2)]), tokens=100).epoch(0)
    assert [len(part) for part in split(batch, 2)] == [2, 1]
    assert [len(part) for part in split(batch, 5)] == [1, 1, 1]
    assert torch.cat([part.index for part in split(batch, 2)]).tolist() == batch.index.tolist()
    moved = move(batch, torch.device("meta"))
    assert isinstance(moved, SentenceBatch)
    assert {tensor.device.type for tensor in moved._tensors()} == {"meta"}


def test_what_is_refused():
    pairs = encoded([(3, 4), (9, 30)])
    with pytest.raises(UsageError, match=facts(30, 31)):
        TokenLoader(pairs, tokens=30)
    assert TokenLoader(pairs, tokens=31).steps_per_epoch == 2
    with pytest.raises(UsageError, match=facts(2)):
        TokenLoader(pairs, tokens=31, rank=2, world=2)
    with pytest.raises(UsageError, match=facts("seed", "-1")):
        TokenLoader(pairs, tokens=31, seed=-1)


# From text to numbers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary():
    pytest.importorskip("sentencepiece", reason="subwords need sentencepiece")
    return Vocabulary.train(["ab abc ab ba", "c b a"], 270)


def opened(tmp_path, lines):
    for side, language in enumerate(("en", "de")):
        (tmp_path / f"train.{language}").write_text("".join(line[side] + "\n" for line in lines), "utf-8")
        (tmp_path / f"val.{language}").write_text("a\n", "utf-8")
    return open_parallel(tmp_path, source="en", target="de")


def test_pairs_that_do_not_fit_are_left_out_by_line(tmp_path, vocabulary):
    long = "日" * 10_000  # three bytes each
    lines = [("ab", "ba"), ("a", long), ("", "b"), ("ab", "ab"), ("a", "日日日日"), ("日", "ß"), (long, long)]
    text = opened(tmp_path, lines)
    pairs = encode_pairs(text.train, vocabulary, max_length=14, max_ratio=4)
    assert [int(entry.where.rpartition(" ")[2]) for entry in pairs.left_out] == [2, 5, 7]
    assert "train.en, line 2" in pairs.left_out[0].where
    assert has_facts(pairs.left_out[0].reason, 1, 30001, 13)
    assert has_facts(pairs.left_out[1].reason, 1, 13, 4)
    kept = [text.train.where(place).rpartition(" ")[2] for place in pairs.places]
    assert kept == ["1", "4", "6"]
    for i, line in enumerate((0, 3, 5)):
        assert vocabulary.decode(pairs.source[i].tolist()) == lines[line][0]
        assert vocabulary.decode(pairs.target[i].tolist()) == lines[line][1]
    assert pairs.source.subwords.dtype == np.uint16
    assert pairs.longest == (4, 3)
    assert len(encode_pairs(text.train, vocabulary, max_length=14, max_ratio=None)) == 4
    assert len(encode_pairs(text.train, vocabulary, max_length=14, max_ratio=13)) == 4
    assert len(encode_pairs(text.train, vocabulary, max_length=13, max_ratio=None)) == 3


def test_empty_lines_of_val_are_left_out_of_its_loss(tmp_path, vocabulary):
    text = opened(tmp_path, [("a", "b")])
    (tmp_path / "val.en").write_text("a\n\nb\n", "utf-8")
    (tmp_path / "val.de").write_text("a\nb\n\n", "utf-8")
    val = open_parallel(tmp_path, source="en", target="de").val
    pairs = encode_pairs(val, vocabulary, max_length=10)
    assert pairs.places.tolist() == [0]
    assert [entry.reason for entry in pairs.left_out] == ["empty sentence"] * 2
    assert len(text.train) == 1


def test_nothing_that_fits(tmp_path, vocabulary):
    text = opened(tmp_path, [("abc abc", "b")])
    with pytest.raises(DataError, match=facts("train.en, line 1", 2, 1)):
        encode_pairs(text.train, vocabulary, max_length=2)
    with pytest.raises(UsageError, match=facts("max_length", 1)):
        encode_pairs(text.train, vocabulary, max_length=1)
