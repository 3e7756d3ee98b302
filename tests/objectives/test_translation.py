import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.text.encoded import EncodedPairs, Sentences
from patchloom.data.text.token_batches import SentenceBatch, TokenLoader
from patchloom.engine.batches import split
from patchloom.engine.loop import train
from patchloom.objectives.translation import TranslationObjective, token_losses
from patchloom_runtime.errors import UsageError
from patchloom_runtime.text.vocabulary import PAD
from tests.engine.toys import make_run

PIECES = 11


class Toy(nn.Module):
    """Logits from the token before and the sum of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(PIECES, PIECES, dtype=torch.float64)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.table(target) + self.table(source).sum(dim=1, keepdim=True) * 0.1


def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


def loader(tokens: int = 60, rank: int = 0, world: int = 1) -> TokenLoader:
    rng = np.random.default_rng(0)

    def sentences() -> Sentences:
        lengths = rng.integers(1, 9, 20)
        return Sentences(rng.integers(4, PIECES, lengths.sum()).astype(np.uint16), np.cumsum([0, *lengths]))

    pairs = EncodedPairs(sentences(), sentences(), np.arange(20), ())
    return TokenLoader(pairs, tokens=tokens, rank=rank, world=world)


def batches(rank: int = 0, world: int = 1) -> list[SentenceBatch]:
    return list(loader(rank=rank, world=world).epoch(0))


def slow(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[float, float, int]:
    """Sums over tokens of the smoothed and of the plain loss, and their number, from the equation."""
    loss = nll = 0.0
    tokens = 0
    for row, row_labels in zip(logits.tolist(), labels.tolist(), strict=True):
        for scores, label in zip(row, row_labels, strict=True):
            if label == PAD:
                continue
            normalizer = math.log(sum(math.exp(z) for z in scores))
            tokens += 1
            nll -= scores[label] - normalizer
            for v, z in enumerate(scores):
                loss -= ((1 - smoothing) * (v == label) + smoothing / len(scores)) * (z - normalizer)
    return loss, nll, tokens


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_loss_is_its_equation_and_torchs(smoothing):
    network = toy()
    for batch in batches():
        results = TranslationObjective(smoothing)(network, batch, epoch=0, step=0)
        assert set(results) == {"loss", "nll", "tokens"}
        logits, labels = network(batch.source, batch.target[:, :-1]), batch.target[:, 1:]
        loss, nll, tokens = slow(logits, labels, smoothing)
        assert results["loss"].item() == pytest.approx(loss / tokens, rel=1e-6)
        assert results["nll"].item() == pytest.approx(nll / tokens, rel=1e-6)
        assert results["tokens"].item() == tokens
        assert results["loss"].requires_grad
        assert not results["nll"].requires_grad
        torchs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=smoothing)
        assert results["loss"].item() == pytest.approx(torchs.item(), rel=1e-6)


def test_how_fairseq_smooths():
    logits = torch.randn(2, 3, PIECES, dtype=torch.float64)
    labels = torch.randint(1, PIECES, (2, 3))
    eps = 0.1
    log_p = logits.log_softmax(-1)
    others = eps / (PIECES - 1)
    theirs = -(1 - eps - others) * log_p.gather(-1, labels[..., None])[..., 0] - others * log_p.sum(-1)
    ours, _ = token_losses(logits, labels, eps * PIECES / (PIECES - 1))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_parts_and_processes_give_the_gradient_of_the_whole(world, accumulate):
    """The engine weighs micro-batches by their rows and averages gradients over processes."""
    network, objective = toy(), TranslationObjective(0.1)
    shares = [batches(rank=rank, world=world) for rank in range(world)]
    for step, whole in enumerate(batches()):
        expected = objective(network, whole, epoch=0, step=step)
        (gradient,) = torch.autograd.grad(expected["loss"], network.table.weight)
        summed = torch.zeros_like(gradient)
        values = dict.fromkeys(expected, 0.0)
        for rank in range(world):
            share = shares[rank][step]
            for part in split(share, accumulate):
                results = objective(network, part, epoch=0, step=step)
                weight = len(part) / len(share) / world
                summed += torch.autograd.grad(results["loss"], network.table.weight)[0] * weight
                values = {name: value + results[name].item() * weight for name, value in values.items()}
        torch.testing.assert_close(summed, gradient, rtol=1e-5, atol=1e-7)
        assert values == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-5)


def test_the_engine_learns_from_it_the_same_in_any_parts():
    result = []
    for accumulate in (1, 3):
        network, data = toy().float(), loader()
        before = TranslationObjective(0.0)(network, batches()[0], epoch=0, step=0)["nll"].item()
        train(
            make_run(
                model=network,
                objective=TranslationObjective(),
                loader=data,
                accumulate=accumulate,
                evaluators=[],
                metric=None,
            )
        )
        assert TranslationObjective(0.0)(network, batches()[0], epoch=0, step=0)["nll"].item() < before
        result.append(network.table.weight.detach())
    torch.testing.assert_close(*result, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing():
    network, (batch, *_) = toy(), batches()
    wider = SentenceBatch(batch.source, F.pad(batch.target, (0, 5)), batch.index, batch.weight, batch.batch_tokens)
    one, two = (TranslationObjective()(network, b, epoch=0, step=0) for b in (batch, wider))
    assert one["loss"].item() == pytest.approx(two["loss"].item())
    labels = batch.target[:, 1:]
    losses, nll = token_losses(network(batch.source, batch.target[:, :-1]), labels, 0.1)
    assert losses[labels == PAD].eq(0).all()
    assert nll[labels == PAD].eq(0).all()


def test_gradients():
    labels = torch.tensor([[4, 2, PAD], [5, 6, 2]])
    logits = torch.randn(2, 3, PIECES, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: token_losses(z, labels, 0.1)[0].sum(), [logits])


def test_half_precision_logits_are_widened():
    logits, labels = torch.randn(2, 3, PIECES).bfloat16(), torch.randint(1, PIECES, (2, 3))
    assert torch.equal(token_losses(logits, labels, 0.1)[0], token_losses(logits.float(), labels, 0.1)[0])


def test_a_smoothing_that_is_none():
    with pytest.raises(UsageError, match=r"smoothing.*1\.0"):
        TranslationObjective(1.0)
