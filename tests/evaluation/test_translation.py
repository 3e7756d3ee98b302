import math
import re
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchloom.data.text.words import words
from patchloom.evaluation.translation import TranslationScores, split_compounds, token_loss, translation_scores
from patchloom_runtime.errors import DataError, UsageError
from tests.conftest import REPOSITORY
from tests.objectives.test_translation import batches, slow, toy

pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu")

REFERENCES = [
    "Ein gut-aussehender Mann, der läuft.",
    "Zwei Hunde spielen im Schnee und bellen laut.",
    "Die Frau liest ein rot-weißes Buch.",
]
HYPOTHESES = [
    "Ein gut-aussehender mann, der läuft.",
    "Zwei Hunde spielen im Schnee und essen.",
    "Die Frau liest ein rot-gelbes Buch.",
]


def slow_bleu(hypotheses, references):
    """Papineni's BLEU of lists of tokens, from the equation: all four precisions must be above 0 here."""
    matched, counted = [0] * 4, [0] * 4
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        for n in range(4):
            ours, theirs = (
                Counter(tuple(tokens[i : i + n + 1]) for i in range(len(tokens) - n))
                for tokens in (hypothesis, reference)
            )
            matched[n] += sum(min(count, theirs[gram]) for gram, count in ours.items())
            counted[n] += sum(ours.values())
    length, expected = sum(map(len, hypotheses)), sum(map(len, references))
    brevity = min(1.0, math.exp(1 - expected / length))
    return 100 * brevity * math.exp(sum(math.log(m / c) for m, c in zip(matched, counted, strict=True)) / 4)


def test_each_bleu_is_its_equation():
    scores = translation_scores(HYPOTHESES, REFERENCES, "de")
    tokens = [[words(line, "de") for line in lines] for lines in (HYPOTHESES, REFERENCES)]
    assert scores.bleu_tokenised == pytest.approx(slow_bleu(*tokens))
    lower = [[words(line.lower(), "de") for line in lines] for lines in (HYPOTHESES, REFERENCES)]
    assert scores.bleu_lowercase == pytest.approx(slow_bleu(*lower))
    apart = [[re.sub(r"(?<=\w)-(?=\w)", " - ", " ".join(line)).split() for line in lines] for lines in tokens]
    assert scores.bleu_compound == pytest.approx(slow_bleu(*apart))
    assert scores.bleu_compound > scores.bleu_tokenised
    assert scores.bleu_lowercase > scores.bleu_tokenised
    # 13a splits these sentences as words() does
    assert scores.bleu == pytest.approx(scores.bleu_tokenised)
    assert 0 < scores.chrf < 100
    assert scores.exact == 100 * sum(a == b for a, b in zip(HYPOTHESES, REFERENCES, strict=True)) / 3


def test_signatures_and_names():
    scores = translation_scores(HYPOTHESES, REFERENCES, "de")
    assert re.fullmatch(r"nrefs:1\|case:mixed\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", scores.signature)
    assert scores.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")
    assert [name for name, _ in scores] == [
        "bleu", "bleu_tokenised", "bleu_lowercase", "bleu_compound", "chrf", "exact", "sentences",
    ]  # fmt: skip
    assert dict(scores)["sentences"] == 3


def test_perfect_and_empty_translations():
    perfect = translation_scores(REFERENCES, REFERENCES, "de")
    assert [value for _, value in perfect] == pytest.approx([100] * 6 + [3])
    nothing = translation_scores([""] * 3, REFERENCES)
    assert [value for _, value in nothing] == [0] * 6 + [3]


def test_scores_do_not_depend_on_the_order_of_sentences():
    assert translation_scores(HYPOTHESES[::-1], REFERENCES[::-1], "de") == translation_scores(
        HYPOTHESES, REFERENCES, "de"
    )
    assert isinstance(translation_scores(HYPOTHESES, REFERENCES), TranslationScores)


def test_compounds():
    assert split_compounds("a well-known man - so") == "a well ##AT##-##AT## known man - so"
    assert split_compounds("a-b-c") == "a ##AT##-##AT## b-c"  # as perl's substitution does
    assert split_compounds("Nord-Süd-Achse") == "Nord ##AT##-##AT## Süd ##AT##-##AT## Achse"


def test_what_cannot_be_scored(monkeypatch):
    with pytest.raises(DataError) as error:
        translation_scores(HYPOTHESES[:2], REFERENCES)
    assert "2" in str(error.value)
    assert "3" in str(error.value)
    with pytest.raises(DataError, match="0"):
        translation_scores([], [])
    with pytest.raises(DataError, match="2"):
        translation_scores(["a", "b\nc"], ["a", "b"])
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError, match=r"pip install 'patchloom\[translate\]'"):
        translation_scores(HYPOTHESES, REFERENCES)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), min_size=1, max_size=4))
def test_any_text_has_scores(lines):
    one_line = [[" ".join(text.split()) for text in pair] for pair in lines]
    hypotheses, references = zip(*one_line, strict=True)
    scores = dict(translation_scores(hypotheses, references))
    assert all(0 <= value <= 100 + 1e-9 for name, value in scores.items() if name != "sentences")


def test_the_page_on_translation_runs():
    """Its first block, as it stands there."""
    pytest.importorskip("sentencepiece", reason="subwords need sentencepiece")
    block = re.search(
        r"```python\n(from patchloom.data.*?)```",
        (REPOSITORY / "docs" / "translation.md").read_text("utf-8"),
        re.DOTALL,
    )
    names: dict[str, Any] = {}
    exec(block[1], names)
    assert names["batch"].target.shape[0] == len(names["batch"])
    assert len(names["vocabulary"]) == 400


@pytest.mark.parametrize("world", [1, 3])
def test_the_loss_of_references_is_a_mean_over_tokens(world):
    network = toy().train()
    given = [batch for rank in range(world) for batch in batches(rank=rank, world=world)]
    results = dict(token_loss(network, given))
    sums = [slow(network(batch.source, batch.target[:, :-1]).detach(), batch.target[:, 1:], 0.0) for batch in batches()]
    nll, tokens = sum(nll for _, nll, _ in sums), sum(count for *_, count in sums)
    assert results == pytest.approx({"loss": nll / tokens, "perplexity": math.exp(nll / tokens), "tokens": tokens})
    assert network.training
    with pytest.raises(DataError):
        list(token_loss(network, []))
    assert torch.is_grad_enabled()
