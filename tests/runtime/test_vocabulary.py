import pickle
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.text.pairs import open_parallel
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD, UNKNOWN, Vocabulary, clean
from tests.data.facts import facts, has_facts

pytest.importorskip("sentencepiece", reason="subwords need sentencepiece")


def lines():
    return [side for pair in open_parallel("numbers:count=300").train for side in pair]


@cache
def numbers():
    return Vocabulary.train(lines(), 400)


def test_the_same_text_gives_the_same_bytes():
    vocabulary = numbers()
    assert (len(vocabulary), vocabulary.note) == (400, "")
    assert Vocabulary.train(iter(lines()), 400).to_bytes() == vocabulary.to_bytes()
    assert Vocabulary.train(lines()[:-2], 400) != vocabulary


def test_subwords_are_shorter_than_characters_and_come_back():
    vocabulary = numbers()
    for text in ("nine hundred ninety-nine", "siebenundsiebzigtausend"):
        ids = vocabulary.encode(text)
        assert len(ids) < len(text) / 2
        assert vocabulary.decode(ids) == text
        assert not {PAD, BOS, EOS, UNKNOWN} & set(ids)
        assert vocabulary.decode([BOS, *ids, EOS, PAD, PAD]) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_no_character_is_lost(text):
    ids = numbers().encode(text)
    assert numbers().decode(ids) == clean(text)
    assert all(UNKNOWN < number < len(numbers()) for number in ids)
    assert bool(ids) == bool(clean(text))


@pytest.mark.parametrize("text", ["<s> </s> <pad> <unk>", "<0x41>", "▁", "日本語 🐕", "x" * 10_000, "\ufffd"])
def test_odd_text(text):
    assert numbers().decode(numbers().encode(text)) == clean(text)


def test_many_at_once_are_the_same_as_one_by_one():
    texts = [*lines(), "", "ß"]
    assert list(numbers().encode_all(iter(texts))) == [numbers().encode(text) for text in texts]


def test_a_long_line_is_learned_from():
    word = "abcdefghij"
    vocabulary = Vocabulary.train([word * 1000], 290)
    assert len(vocabulary.encode(word * 10)) < 60


def test_more_pieces_than_the_text_has():
    vocabulary = Vocabulary.train(["abc abd"], 5000)
    assert has_facts(vocabulary.note, len(vocabulary), "5,000")
    assert 260 < len(vocabulary) < 300


def test_sizes_and_texts_that_do_not_do():
    with pytest.raises(UsageError, match=facts(259, 260)):
        Vocabulary.train(["a"], 259)
    with pytest.raises(UsageError, match=facts(262, 10, 271)):
        Vocabulary.train(["abcdefghij"], 262)
    assert len(Vocabulary.train(["abcdefghij"], 271)) == 271
    with pytest.raises(DataError):
        Vocabulary.train(["", " \x00"], 300)


def test_kept_as_bytes():
    vocabulary = numbers()
    for again in (Vocabulary.from_bytes(vocabulary.to_bytes()), pickle.loads(pickle.dumps(vocabulary))):
        assert again == vocabulary
        assert again.encode("one two") == vocabulary.encode("one two")
    with pytest.raises(CheckpointError, match=r"vocabulary\.model"):
        Vocabulary.from_bytes(b"nothing of the kind")


def test_a_foreign_vocabulary_with_other_numbers_is_refused():
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()), model_writer=model, model_type="bpe", vocab_size=100, minloglevel=2
    )
    with pytest.raises(CheckpointError, match=facts("(-1, 1, 2, 0)", "(0, 1, 2, 3)")):
        Vocabulary.from_bytes(model.getvalue())


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UsageError, match=r"patchloom\[translate\]"):
        Vocabulary.train(["a"], 300)
