"""Beam search against plain loops without a cache, and against all translations there are."""

import itertools

import pytest
import torch

from patchloom.models.beam_search import beam_search
from patchloom.models.seq2seq import Seq2Seq, create_seq2seq
from patchloom_runtime.errors import NumericalError, UsageError
from patchloom_runtime.text.line_translator import Hypothesis
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD, UNKNOWN
from tests.models.test_seq2seq import BOTH, SOURCES, padded, small


@torch.no_grad()
def slow_search(
    network: Seq2Seq, source: list[int], beams: int, penalty: float, limit: int, wanted: int | None = None
) -> list[Hypothesis]:
    """fairseq's rules for one sentence, every prefix computed anew; with `wanted` it goes on while that may help."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[Hypothesis] = []
    for length in range(1, limit + 2):  # of what is written, with EOS
        candidates = []
        for total, text in live:
            logits = network(torch.tensor([source]), torch.tensor([[BOS, *text]]))[0, -1]
            for word, value in enumerate(logits.log_softmax(dim=-1).tolist()):
                if word not in (PAD, BOS) and (word == EOS or length <= limit):
                    candidates.append((total + value, text, word))
        candidates = sorted(candidates, key=lambda candidate: -candidate[0])[: 2 * beams]
        for total, text, word in candidates[:beams]:
            if word == EOS and (wanted or len(finished) < beams):
                finished.append(Hypothesis(text, total / length**penalty, total))
        live = [(total, (*text, word)) for total, text, word in candidates if word != EOS][:beams]
        best = sorted((each.score for each in finished), reverse=True)
        if len(finished) >= beams and (
            not wanted or not live or live[0][0] / (length + 1) ** penalty <= best[wanted - 1]
        ):
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)


def assert_found(inputs: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [each.tokens for each in inputs] == [each.tokens for each in expected]
    for one, other in zip(inputs, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=1e-12)
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("beams", "penalty"), [(1, 0.6), (2, 0.0), (4, 0.6), (5, 1.2)])
@pytest.mark.parametrize("name", BOTH)
def test_it_is_the_slow_search(name, beams, penalty, seed) -> None:
    network = small(name, seed=seed)
    result = beam_search(network, padded(SOURCES), beams=beams, length_penalty=penalty, n_best=beams)
    for inputs, source in zip(result, SOURCES, strict=True):
        assert_found(inputs, slow_search(network, source, beams, penalty, limit=9))


def test_hypotheses_end_at_many_lengths() -> None:
    """The comparison above would say little if all ended by the limit."""
    result = [beam_search(small(name, seed=seed), padded(SOURCES), n_best=4) for name in BOTH for seed in range(5)]
    assert len({len(each.tokens) for batch in result for sentence in batch for each in sentence}) >= 6


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("name", BOTH)
def test_with_room_for_all_it_finds_the_best_there_is(name, penalty) -> None:
    words, longest = 6, 3
    network, source = small(name, vocabulary=words), torch.tensor([[4, 5, EOS]])
    possible = [w for w in range(words) if w not in (PAD, BOS, EOS)]
    everything = []
    for length in range(longest + 1):
        for text in itertools.product(possible, repeat=length):
            with torch.no_grad():
                logs = network(source, torch.tensor([[BOS, *text]]))[0].log_softmax(dim=-1)
            total = sum(logs[t, word].item() for t, word in enumerate([*text, EOS]))
            everything.append(Hypothesis(text, total / (length + 1) ** penalty, total))
    everything.sort(key=lambda hypothesis: -hypothesis.score)
    assert len(everything) == 1 + 3 + 9 + 27
    beams = words**longest
    (result,) = beam_search(network, source, beams=beams, length_penalty=penalty, max_length_b=longest, n_best=beams)
    assert_found(result, everything)
    assert UNKNOWN in {word for each in result for word in each.tokens}


@pytest.mark.parametrize("name", BOTH)
def test_alone_or_in_a_batch_or_again(name) -> None:
    network = small(name)
    sources = [*SOURCES, [EOS], [], [7, EOS], [4, 5, 6, 7, 8, 9, 10, 11, 12, EOS]]
    together = beam_search(network, padded(sources), beams=3, n_best=3, max_length_a=0.5, max_length_b=2)
    assert together == beam_search(network, padded(sources), beams=3, n_best=3, max_length_a=0.5, max_length_b=2)
    for inputs, source in zip(together, sources, strict=True):
        alone = torch.tensor([source], dtype=torch.long)
        (expected,) = beam_search(network, alone, beams=3, n_best=3, max_length_a=0.5, max_length_b=2)
        assert_found(inputs, expected)
        assert max(len(each.tokens) for each in inputs) <= int(0.5 * len(source) + 2)


def test_best_first_and_as_many_as_wanted() -> None:
    network = small("translation_resmlp_6", seed=3)
    best = beam_search(network, padded(SOURCES), beams=4)
    many = beam_search(network, padded(SOURCES), beams=4, n_best=3)
    for one, several in zip(best, many, strict=True):
        assert one == several[:1]
        assert len(several) == 3
        assert [each.score for each in several] == sorted((each.score for each in several), reverse=True)


@pytest.mark.parametrize("name", BOTH)
def test_the_log_probability_is_the_networks(name) -> None:
    network = small(name)
    for source, (result,) in zip(SOURCES, beam_search(network, padded(SOURCES)), strict=True):
        target = torch.tensor([[BOS, *result.tokens]])
        with torch.no_grad():
            logs = network(torch.tensor([source]), target)[0].log_softmax(dim=-1)
        total = sum(logs[t, word].item() for t, word in enumerate([*result.tokens, EOS]))
        assert result.log_probability == pytest.approx(total, abs=1e-12)
        assert result.score == pytest.approx(total / (len(result.tokens) + 1) ** 0.6, abs=1e-12)


def test_the_networks_length_is_the_limit() -> None:
    network = small("translation_resmlp_6")
    with torch.no_grad():  # EOS is never likely
        network.decoder_norm.weight.zero_()
        network.decoder_norm.bias.copy_(-100 * network.embedding.weight[EOS])
    ((result,),) = beam_search(network, padded(SOURCES[:1]), beams=1)
    assert len(result.tokens) == 9
    ((result,),) = beam_search(network, padded(SOURCES[:1]), beams=2, max_length_b=0)
    assert result.tokens == ()


def test_lower_precision_is_scored_in_float32() -> None:
    network = small("translation_resmlp_6").to(torch.bfloat16)
    ((result,),) = beam_search(network, padded(SOURCES[:1]), beams=1)
    cache = network.start(network.encode(padded(SOURCES[:1])), 1, 10)
    with torch.no_grad():
        logs = [
            network.step(torch.tensor([word]), cache)[0].float().log_softmax(dim=-1) for word in (BOS, *result.tokens)
        ]
    total = sum(log[word].item() for log, word in zip(logs, [*result.tokens, EOS], strict=True))
    assert result.log_probability == pytest.approx(total, rel=1e-5)


def test_the_mode_is_left_as_it_was() -> None:
    network = small("translation_resmlp_6").train()
    first = beam_search(network, padded(SOURCES))
    assert network.training
    assert first == beam_search(network.eval(), padded(SOURCES))
    assert not network.training


@pytest.mark.parametrize("name", [BOTH[0], pytest.param(BOTH[1], marks=pytest.mark.slow)])
def test_turning_sentences_round_is_learned(name) -> None:
    torch.manual_seed(0)
    network = create_seq2seq(name, vocabulary=10, dim=32, hidden=64, layers=2, heads=2, max_length=8, dropout=0.0)
    linear = network.config.mixing == "linear"
    peak, warmup = (0.1, 150) if linear else (3e-3, 50)  # Adagrad, the paper's, has to begin slowly
    optimizer = (torch.optim.Adagrad if linear else torch.optim.Adam)(network.parameters(), lr=peak)

    def some(count: int) -> tuple[list[list[int]], list[list[int]]]:
        texts = [torch.randint(4, 10, (length,)).tolist() for length in torch.randint(1, 5, (count,)).tolist()]
        return [[*text, EOS] for text in texts], [text[::-1] for text in texts]

    for step in range(400):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / warmup)
        sources, targets = some(32)
        wanted = padded([[*text, EOS] for text in targets])
        logits = network(padded(sources), padded([[BOS, *text] for text in targets]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sources, targets = some(100)
    result = beam_search(network, padded(sources))
    assert sum(list(best.tokens) == text for (best,), text in zip(result, targets, strict=True)) >= 90


def test_no_sentences() -> None:
    assert beam_search(small("translation_resmlp_6"), torch.empty(0, 4, dtype=torch.long)) == []


def test_mistakes() -> None:
    network, source = small("translation_resmlp_6"), padded(SOURCES)
    with pytest.raises(UsageError) as error:
        beam_search(network, source, beams=0)
    assert "beams" in str(error.value)
    assert "0" in str(error.value)
    with pytest.raises(UsageError) as error:
        beam_search(network, source, beams=2, n_best=3)
    assert "n_best" in str(error.value)
    assert "2" in str(error.value)
    assert "3" in str(error.value)
    with pytest.raises(UsageError) as error:
        beam_search(network, source[0])
    assert "torch.int64" in str(error.value)
    assert str(tuple(source[0].shape)) in str(error.value)
    with torch.no_grad():
        network.decoder_norm.bias.fill_(torch.nan)
    with pytest.raises(NumericalError):
        beam_search(network, source)


def test_late_but_likely_translations_are_found_unless_it_stops_early() -> None:
    lost = 0
    for seed in range(12):
        network = small("translation_resmlp_6", seed=seed)
        early = beam_search(network, padded(SOURCES), beams=3, length_penalty=1.0)
        late = beam_search(network, padded(SOURCES), beams=3, length_penalty=1.0, stop_early=False)
        for (a,), (b,) in zip(early, late, strict=True):
            assert b.score >= a.score
            lost += b.score > a.score
    assert lost > 0


def test_the_late_search_is_the_slow_one_that_goes_on() -> None:
    for seed in range(4):
        network = small("translation_resmlp_6", seed=seed)
        result = beam_search(network, padded(SOURCES), beams=3, length_penalty=0.6, n_best=2, stop_early=False)
        for inputs, source in zip(result, SOURCES, strict=True):
            assert_found(inputs, slow_search(network, source, 3, 0.6, limit=9, wanted=2)[:2])
