"""Translation networks: a slow reference, sizes, and that neither padding, the future nor the cache changes a word.

In float64, with random biases everywhere: fresh networks have none, which would hide what leaks through them.
"""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from patchloom.layers.attention import record_attention
from patchloom.models.seq2seq import VARIANTS, Seq2Seq, create_seq2seq
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD

NAMES = list(VARIANTS)
BOTH = ["translation_resmlp_6", "translation_transformer_base"]
WORDS = 13


def small(name: str, *, seed: int = 0, **options) -> Seq2Seq:
    """A small one in eval mode, with random weights that hide nothing."""
    torch.manual_seed(seed)
    sizes = {"vocabulary": WORDS, "dim": 12, "hidden": 20, "layers": (2, 3), "heads": 3, "max_length": 10}
    torch.set_default_dtype(torch.float64)
    try:
        network = create_seq2seq(name, **(sizes | options)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            spread = 0.2 if parameter.ndim == 1 else 0.5 * parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
        network.decoder_norm.weight.mul_(0.3)  # words so uncertain that a search finds many lengths
    return network


def sentence(length: int, seed: int = 0) -> list[int]:
    return torch.randint(4, WORDS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def padded(sentences: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, sentences))
    return torch.tensor([each + [PAD] * (longest - len(each)) for each in sentences])


SOURCES = [[*sentence(5, 1), EOS], [*sentence(2, 2), EOS], [*sentence(8, 3), EOS]]
TARGETS = [[BOS, *sentence(3, 4), EOS], [BOS, *sentence(8, 5), EOS], [BOS, *sentence(6, 6), EOS]]


# What it computes ---------------------------------------------------------------------------------------------------


class Reference:
    """The equations, one sentence at a time, position by position."""

    def __init__(self, network: Seq2Seq) -> None:
        self.config = network.config
        self.weights = {key: tensor.numpy() for key, tensor in network.state_dict().items()}

    def logits(self, source: list[int], target: list[int]) -> np.ndarray:
        memory = self.embed(source)
        for i in range(self.config.layers[0]):
            memory = self.mix(memory, f"encoder.{i}.mixing", causal=False)
            memory = self.mlp(memory, f"encoder.{i}.channels")
        memory = self.norm(memory, "encoder_norm")
        x = self.embed(target)
        for i in range(self.config.layers[1]):
            x = self.mix(x, f"decoder.{i}.mixing", causal=True)
            x = self.cross(x, memory, f"decoder.{i}.cross")
            x = self.mlp(x, f"decoder.{i}.channels")
        return self.norm(x, "decoder_norm") @ self.weights["embedding.weight"].T

    def embed(self, tokens: list[int]) -> np.ndarray:
        dim = self.config.dim
        x = self.weights["embedding.weight"][tokens] * math.sqrt(dim)
        for t in range(len(tokens)):
            if self.config.position == "learned":
                x[t] += self.weights["positions"][t]
            for i in range(dim if self.config.position == "sinusoidal" else 0):
                angle = t / 10_000 ** (2 * (i // 2) / dim)
                x[t, i] += math.cos(angle) if i % 2 else math.sin(angle)
        return x

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        if self.config.norm == "layer":
            x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
        return self.weights[f"{name}.weight"] * x + self.weights[f"{name}.bias"]

    def add(self, x: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
        return x + self.weights.get(f"{name}.scale", 1.0) * y

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def mix(self, x: np.ndarray, name: str, *, causal: bool) -> np.ndarray:
        z = self.norm(x, f"{name}.norm")
        if self.config.mixing == "attention":
            q, k, v = np.split(self.linear(z, f"{name}.mix.qkv"), 3, axis=1)
            return self.add(x, self.linear(self.attend(q, k, v, causal), f"{name}.mix.proj"), name)
        matrix, bias = self.weights[f"{name}.mix.weight"], self.weights[f"{name}.mix.bias"]
        y = np.zeros_like(x)
        for t in range(len(x)):
            for s in range(t + 1 if causal else len(x)):
                y[t] += matrix[t, s] * z[s]
            y[t] += bias[t]
        return self.add(x, y, name)

    def cross(self, x: np.ndarray, memory: np.ndarray, name: str) -> np.ndarray:
        q = self.linear(self.norm(x, f"{name}.norm"), f"{name}.mix.q")
        k, v = np.split(self.linear(memory, f"{name}.mix.kv"), 2, axis=1)
        return self.add(x, self.linear(self.attend(q, k, v, causal=False), f"{name}.mix.proj"), name)

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
        out, width = np.zeros_like(q), self.config.dim // self.config.heads
        for head in range(self.config.heads):
            part = slice(head * width, (head + 1) * width)
            for t in range(len(q)):
                seen = t + 1 if causal else len(k)
                weights = np.exp([q[t, part] @ k[s, part] / math.sqrt(width) for s in range(seen)])
                for s in range(seen):
                    out[t, part] += weights[s] / weights.sum() * v[s, part]
        return out

    def mlp(self, x: np.ndarray, name: str) -> np.ndarray:
        hidden = self.linear(self.norm(x, f"{name}.norm"), f"{name}.mix.fc1")
        if self.config.activation == "relu":
            hidden = np.maximum(hidden, 0)
        else:
            hidden *= 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        return self.add(x, self.linear(hidden, f"{name}.mix.fc2"), name)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("translation_resmlp_6", {}),
        ("translation_resmlp_6", {"norm": "layer", "position": "sinusoidal"}),
        ("translation_transformer_base", {}),
        ("translation_transformer_base", {"position": "learned", "scale_init": 0.5, "norm": "affine"}),
    ],
)
def test_it_is_what_the_equations_say(name, options) -> None:
    network = small(name, **options)
    reference = Reference(network)
    with torch.no_grad():
        inputs = network(padded(SOURCES), padded(TARGETS))
    for row, source, target in zip(inputs, SOURCES, TARGETS, strict=True):
        expected = torch.from_numpy(reference.logits(source, target))
        torch.testing.assert_close(row[: len(target)], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "vocabulary", "parameters", "printed"),
    [
        ("translation_resmlp_6", 32_768, 49_115_136, 49.1),
        ("translation_resmlp_12", 32_768, 81_451_008, 81.5),
        ("translation_transformer_base", 32_768, 60_917_760, 60.9),
        ("translation_transformer_base", 37_000, 63_084_544, 63.1),  # Vaswani's vocabulary
    ],
)
def test_parameters(name, vocabulary, parameters, printed) -> None:
    with torch.device("meta"):
        network = create_seq2seq(name, vocabulary=vocabulary, max_length=256)
    counted = sum(parameter.numel() for parameter in network.parameters())
    assert counted == parameters
    assert round(counted / 1e6, 1) == printed


def test_how_weights_start() -> None:
    torch.manual_seed(0)
    network = create_seq2seq("translation_resmlp_6", vocabulary=2000, dim=64, heads=4, hidden=128, layers=1)
    table = network.embedding.weight
    assert not table[PAD].any()
    assert table[1:].std().item() == pytest.approx(1 / 8, rel=0.02)
    for layer in (network.encoder[0], network.decoder[0]):
        assert layer.mixing.mix.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert not layer.mixing.mix.bias.any()
        assert layer.channels.mix.fc1.weight.std().item() == pytest.approx(0.02, rel=0.03)
        assert layer.mixing.scale.tolist() == layer.channels.scale.tolist() == pytest.approx([0.2] * 64)
    assert network.decoder[0].cross.scale.tolist() == pytest.approx([0.2] * 64)

    twin = create_seq2seq("translation_transformer_base", vocabulary=2000, dim=64, heads=4, hidden=128, layers=1)
    square, wide = math.sqrt(6 / 128), math.sqrt(6 / 192)  # Xavier's bounds
    layer = twin.decoder[0]
    assert layer.mixing.mix.qkv.weight.abs().max().item() == pytest.approx(square, rel=0.01)
    assert layer.cross.mix.kv.weight.abs().max().item() == pytest.approx(square, rel=0.01)
    assert layer.channels.mix.fc1.weight.abs().max().item() == pytest.approx(wide, rel=0.01)
    assert layer.mixing.scale is None


# Future, padding, batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_future_changes_nothing(name) -> None:
    network, source = small(name), padded(SOURCES)
    target = torch.tensor([[BOS, *sentence(8, seed)] for seed in range(3)])
    before = network(source, target)
    for position in range(1, 9):
        other = target.clone()
        other[:, position:] = torch.tensor([[*sentence(9 - position, seed + 9)] for seed in range(3)])
        after = network(source, other)
        assert torch.equal(before[:, :position], after[:, :position])
        assert (before[:, position] != after[:, position]).any()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_sentence_alone_is_the_sentence_in_a_batch(name) -> None:
    network = small(name)
    together = network(padded(SOURCES), padded(TARGETS))
    for row, source, target in zip(together, SOURCES, TARGETS, strict=True):
        alone = network(torch.tensor([source]), torch.tensor([target]))[0]
        torch.testing.assert_close(row[: len(target)], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", BOTH)
def test_how_sentences_are_batched_changes_neither_loss_nor_gradients(name) -> None:
    network = small(name, dropout=0.0).train()
    lengths = [(1, 9), (7, 2), (4, 4), (9, 1), (2, 6), (5, 5)]
    pairs = [([*sentence(s - 1, s), EOS], [BOS, *sentence(t, 9 * t)]) for s, t in lengths]

    def measured(batches: list[list[int]]) -> list[torch.Tensor]:
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            source, target = padded([pairs[i][0] for i in batch]), padded([[*pairs[i][1], EOS] for i in batch])
            logits = network(source, target[:, :-1])
            total = total + F.cross_entropy(
                logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, reduction="sum"
            )
        return [total.detach(), *torch.autograd.grad(total, list(network.parameters()))]

    expected = measured([[i] for i in range(6)])
    for batches in ([[0, 1, 2, 3, 4, 5]], [[3, 1, 5], [2, 4, 0]], [[0, 4], [2, 5], [1, 3]]):
        for inputs, wanted in zip(measured(batches), expected, strict=True):
            torch.testing.assert_close(inputs, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_nothing_to_translate(name) -> None:
    network = small(name)
    empty, target = torch.empty(1, 0, dtype=torch.long), torch.tensor([[BOS, 5, 6]])
    alone = network(empty, target)
    with record_attention(network) as maps:  # as kernels see it that do not look for rows without anything to see
        torch.testing.assert_close(network(empty, target), alone, rtol=0, atol=1e-13)
    assert all(weights.isfinite().all() for layer in maps.values() for weights in layer)
    batch = network(padded([SOURCES[0], []]), target.expand(2, -1))
    torch.testing.assert_close(batch[1:], alone, rtol=0, atol=1e-13)


def test_nothing_above_the_diagonal_is_learned() -> None:
    network = small("translation_resmlp_6").train()
    network(padded(SOURCES), padded(TARGETS)).square().sum().backward()
    used = max(map(len, TARGETS))
    for layer in network.decoder:
        gradient = layer.mixing.mix.weight.grad
        assert not gradient.triu(1).any()
        below = gradient[:used, :used].tril()
        assert (below != 0).sum().item() == used * (used + 1) // 2
        assert layer.mixing.mix.bias.grad[:used].all()
    used = max(map(len, SOURCES))
    assert network.encoder[0].mixing.mix.weight.grad[:used, :used].all()


# Word by word -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_word_by_word_is_the_whole_sentence(name, beams) -> None:
    network, source = small(name), padded(SOURCES)
    target = torch.tensor([[BOS, *sentence(9, seed)] for seed in range(3 * beams)])
    expected = network(source.repeat_interleave(beams, dim=0), target)
    cache = network.start(network.encode(source), beams, steps=10)
    assert all(part.shape[0] == 3 for source in cache.sources for part in source)
    for position in range(10):
        logits = network.step(target[:, position], cache)
        torch.testing.assert_close(logits, expected[:, position], rtol=0, atol=1e-13)
    with pytest.raises(UsageError, match="10"):
        network.step(target[:, 0], cache)


@pytest.mark.parametrize("name", BOTH)
def test_rows_take_other_places_and_sentences_leave(name) -> None:
    network, source, beams = small(name), padded(SOURCES), 2
    generator = torch.Generator().manual_seed(0)
    cache = network.start(network.encode(source), beams, steps=9)
    texts, left = torch.full((6, 1), BOS), torch.arange(3)  # what each row has read; the sentences there are
    for position in range(9):
        logits = network.step(texts[:, -1], cache)
        expected = network(source[left].repeat_interleave(beams, dim=0), texts)[:, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-13)
        stay = torch.tensor([2, 0]) if position == 3 else torch.tensor([1]) if position == 6 else None
        places = torch.arange(len(left)) if stay is None else stay
        rows = (places[:, None] * beams + torch.randint(beams, (len(places), beams), generator=generator)).flatten()
        cache.reorder(rows, stay)
        left = left[places]
        words = torch.randint(4, WORDS, (len(rows), 1), generator=generator)
        texts = torch.cat([texts[rows], words], dim=1)
    assert left.tolist() == [0]


# Training, looking, mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_dropout_is_on_in_training_alone(name) -> None:
    source, target = padded(SOURCES).repeat(9, 1), padded(TARGETS).repeat(9, 1)  # so many that scales are folded
    network = small(name, dropout=0.0)
    torch.testing.assert_close(network.train()(source, target), network.eval()(source, target), rtol=0, atol=1e-12)
    network = small(name, dropout=0.2).train()
    assert (network(source, target) != network(source, target)).all()
    for part in [network.encoder[0].mixing, network.encoder[0].channels, network.decoder[0].cross]:
        assert part.mix.dropout == 0.2


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_attention_can_be_looked_at(name) -> None:
    network, source, target = small(name), padded(SOURCES), padded(TARGETS)
    expected = network(source, target)
    with record_attention(network) as maps:
        torch.testing.assert_close(network(source, target), expected, rtol=0, atol=1e-13)
    crosses = [layer for layer in maps if "cross" in layer]
    assert len(crosses) == 3
    for layer in crosses:
        (weights,) = maps[layer]  # (B, H, T, S)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
        assert not weights[1, ..., len(SOURCES[1]) :].any()
    for layer in set(maps) - set(crosses):
        (weights,) = maps[layer]
        assert weights.triu(1).any() == layer.startswith("encoder")


def test_gradients_reach_every_parameter() -> None:
    for name in BOTH:
        network = small(name, position="learned").train()
        longest = torch.randint(4, WORDS, (2, 10))
        network(longest, longest).square().mean().backward()
        assert [key for key, each in network.named_parameters() if each.grad is None or not each.grad.any()] == []


def test_weights_can_be_stored_and_read() -> None:
    for name in BOTH:
        network, other = small(name), small(name, seed=1)
        other.load_state_dict(network.state_dict())
        assert torch.equal(network(padded(SOURCES), padded(TARGETS)), other(padded(SOURCES), padded(TARGETS)))


def test_sentences_that_are_too_long() -> None:
    network, long = small("translation_resmlp_6"), torch.full((1, 11), 5)
    with pytest.raises(DataError) as error:
        network(long, long)
    assert "11" in str(error.value)
    assert "translation_resmlp_6" in str(error.value)
    assert "max_length" in str(error.value)
    assert "10" in str(error.value)
    with pytest.raises(DataError, match="11"):
        network(long[:, :3], long)
    with pytest.raises(UsageError) as error:
        network.start(network.encode(long[:, :3]), 1, 11)
    assert "steps" in str(error.value)
    assert "max_length" in str(error.value)
    assert "11" in str(error.value)


def test_what_is_no_batch_of_sentences() -> None:
    network = small("translation_resmlp_6")
    with pytest.raises(UsageError) as error:
        network.encode(torch.tensor([5, 6, EOS]))
    assert "torch.int64" in str(error.value)
    assert "(3,)" in str(error.value)
    with pytest.raises(UsageError) as error:
        network.encode(torch.zeros(1, 3))
    assert "torch.float32" in str(error.value)
    assert "(1, 3)" in str(error.value)
    with pytest.raises(UsageError) as error:
        network(torch.full((2, 3), 5), torch.full((1, 3), 5))
    assert "2" in str(error.value)
    assert "1" in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("translation_resmlp_7", {}, "translation_resmlp_7.*translation_resmlp_6"),
        ("translation_resmlp_6", {"head": 8}, r"\bhead\b.*\bheads\b"),
        ("translation_resmlp_6", {"mixing": "mlp"}, "mixing.*mlp"),
        ("translation_resmlp_6", {"mixing": "attention"}, "position=sinusoidal"),
        ("translation_resmlp_6", {"heads": 7}, r"\b512\b.*\b7\b"),
        ("translation_resmlp_6", {"layers": (6, 0)}, r"layers.*\(6, 0\)"),
        ("translation_resmlp_6", {"max_length": 0}, "max_length.*0"),
        ("translation_resmlp_6", {"dropout": 1.0}, "dropout.*1"),
        ("translation_resmlp_6", {"vocabulary": 4}, "vocabulary.*4"),
    ],
)
def test_mistakes(name, options, message) -> None:
    with pytest.raises(UsageError, match=message):
        create_seq2seq(name, **({"vocabulary": 100} | options))
