"""Translation of lines with random weights: order, subwords, unusual characters."""

import itertools
import re

import numpy as np
import pytest
import torch

from patchloom.data.text.encoded import learn_vocabulary
from patchloom.data.text.pairs import open_parallel
from patchloom.evaluation.translation import translation_scores
from patchloom.models.seq2seq import create_seq2seq
from patchloom.tasks.translation.evaluation import evaluate_text
from patchloom.tasks.translation.model import Translator
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text import line_translator as module
from patchloom_runtime.text.vocabulary import clean

LONGEST = 12
ODD = [
    "",
    "one",
    "   ",
    "two hundred thirty-four thousand five hundred sixty-seven",
    "tab\tNUL\0 line\u2028separator",
    "日本語 ☃ \U0001f600",
    "twenty",
    "x" * 500,
    "nine hundred. " * 40,
    "\ufeffseven",
    "forty-two thousand",
]


@pytest.fixture(scope="module")
def text():
    return open_parallel("numbers:count=150")


@pytest.fixture(scope="module")
def translator(text) -> Translator:
    vocabulary = learn_vocabulary(text.train, 330)
    torch.manual_seed(3)
    network = create_seq2seq(
        "translation_resmlp_6", vocabulary=len(vocabulary), max_length=20, dim=16, hidden=32, layers=1, heads=2
    )
    return Translator(network.double().eval(), vocabulary, languages=("en", "de"), longest=LONGEST)


def test_the_order_does_not_depend_on_the_lengths(translator, monkeypatch) -> None:
    lines = [*ODD, *np.random.default_rng(0).permutation(ODD)]
    alone = [next(translator.translate([line])) for line in lines]
    monkeypatch.setattr(module, "WINDOW", 5)
    together = list(translator.translate(iter(lines), batch=3))
    assert len(together) == len(lines)
    for actual, expected in zip(together, alone, strict=True):
        assert [each.text for each in actual] == [each.text for each in expected]
        assert actual[0].score == pytest.approx(expected[0].score)
    assert [result[0].text for result, line in zip(together, lines, strict=True) if not line.strip()] == [""] * 4
    assert all("\n" not in result[0].text for result in together)


def test_an_endless_stream_is_read_a_window_at_a_time(translator, monkeypatch) -> None:
    monkeypatch.setattr(module, "WINDOW", 4)
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield "one"

    result = translator.translate(endless(), beams=1)
    for _ in range(6):
        next(result)
    assert len(taken) == 8


def pieces(translator, line) -> list[str]:
    return [translator.vocabulary.decode(ids) for ids in translator._pieces(clean(line))]


@pytest.mark.parametrize("line", [line for line in ODD if line.strip()])
def test_pieces_fit_and_nothing_is_lost(translator, line) -> None:
    result = pieces(translator, line)
    assert "".join("".join(result).split()) == "".join(clean(line).split())
    most = translator.network.config.max_length - 1
    assert all(1 <= len(ids) <= most for ids in translator._pieces(clean(line)))


def test_a_long_line_is_cut_at_sentence_ends_then_at_spaces_then_in_words(translator) -> None:
    def count(line: str) -> int:
        return len(translator.vocabulary.encode(line))

    sentences = ["one hundred two.", "three!", "four?", "five hundred six thousand seven."]
    assert count(" ".join(sentences)) > LONGEST
    packed = pieces(translator, " ".join(sentences))
    assert " ".join(packed) == " ".join(sentences)
    assert 1 < len(packed) < 4  # whole sentences, several together where they fit
    assert all(part[-1] in ".!?" and count(part) <= 19 for part in packed)
    # One sentence that the network can still hold is not cut, only marked.
    between = "nine hundred ninety-nine thousand one two"
    assert LONGEST < count(between) <= 19
    assert pieces(translator, between) == [between]
    assert next(translator.translate([between]))[0].untrained
    assert not next(translator.translate(["one"]))[0].untrained
    longer = " ".join(["hundred"] * 40)
    parts = pieces(translator, longer)
    assert " ".join(parts) == longer
    assert all(count(part) <= LONGEST for part in parts)
    assert "".join(pieces(translator, "x" * 100)) == "x" * 100


def test_a_break_that_the_network_spells_is_a_space(translator, monkeypatch) -> None:
    monkeypatch.setattr(translator.vocabulary, "decode", lambda ids: " a\nb\r\u2028c ")  # noqa: ARG005
    assert next(translator.translate(["one"]))[0].text == "a b c"


def test_several_are_best_first(translator) -> None:
    for result in translator.translate(["one", "x" * 300], n_best=3):
        assert len(result) == 3
    single = next(translator.translate(["one"], n_best=3))
    assert [each.score for each in single] == sorted((each.score for each in single), reverse=True)
    with pytest.raises(UsageError) as error:
        next(translator.translate(["one"], beams=2, n_best=3))
    assert "n_best" in str(error.value)
    assert "3" in str(error.value)


def test_a_text_is_judged_line_by_line(translator, text) -> None:
    result = evaluate_text(translator, "numbers:count=150", beams=2)
    assert list(result) == ["test"]
    judged = result["test"]
    best = [one for one, *_ in translator.translate(text.tests["test"].sources(), beams=2)]
    assert list(judged.translations) == [one.text for one in best]
    assert judged.scores == translation_scores(judged.translations, text.tests["test"].targets(), "de")
    assert dict(judged)["sentences"] == 200
    assert dict(judged)["perplexity"] == pytest.approx(np.exp(dict(judged)["loss"]))
    assert f"{sum(one.untrained for one in best):,} " in judged.notes[0]


def test_splits_that_can_be_judged(translator, tmp_path) -> None:
    for name, lines in {"test_a.en": "one\n\n", "test_a.de": "eins\nzwei\n"}.items():
        (tmp_path / name).write_text(lines)
    judged = evaluate_text(translator, tmp_path)["test_a"]  # the only split: all of it, whatever its name
    assert judged.translations[1] == ""
    assert len(judged.sources) == 2
    assert re.search(r"\b1\b.*\btest_a\b", judged.notes[-1])
    with pytest.raises(UsageError) as error:
        evaluate_text(translator, tmp_path, split="test_b")
    assert "test_b" in str(error.value)
    assert "test_a" in str(error.value)
    (tmp_path / "test_a.de").write_text("eins\n")
    with pytest.raises(DataError, match="test_a"):
        evaluate_text(translator, tmp_path)
    (tmp_path / "test_a.de").rename(tmp_path / "test_a.fr")
    with pytest.raises(UsageError) as error:
        evaluate_text(translator, tmp_path)
    assert "en-de" in str(error.value)
    assert "en-fr" in str(error.value)
