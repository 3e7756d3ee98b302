"""Encoder-decoder networks for translation: ResMLP with matrices over positions, and the base Transformer.

Letters: B sentences, S and T positions of source and target, C channels, V words, N rows decoded together. Both stacks
are pre-norm residual branches; the decoder also attends to the encoder's output. ResMLP (Touvron et al. 2021, section
3.6; thesis 4.2) replaces self-attention by a matrix over positions, triangular in the decoder, and keeps
cross-attention. The Transformer (Vaswani et al. 2017) normalizes before a branch rather than after the sum.

Sentences start at position 0, end with EOS and are padded with PAD; the input of the decoder starts with BOS. The
papers do not specify norms, scales and positions. Here: Affine before and LayerScale after every branch, one Affine at
the end of each stack, and no position embeddings, since the matrix depends on positions.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.init import truncated_normal_
from patchloom.layers.mlp import MLP, ActivationName
from patchloom.layers.norms import make_norm
from patchloom.layers.residual import Residual, make_scale
from patchloom.layers.sequence_mixing import (
    AttendedSource,
    CrossAttention,
    PositionLinear,
    SequenceAttention,
    SequenceResidual,
    StepCache,
    few_rows_linear,
)
from patchloom.layers.transformer_init import xavier_
from patchloom.models.network import check_types
from patchloom_runtime.errors import DataError, UsageError, at_least, nearest
from patchloom_runtime.text.vocabulary import PAD, UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """Options of a translation network."""

    name: str = ""
    vocabulary: int  # words of both languages and special tokens
    max_length: int = 256  # positions per sentence, including EOS or BOS
    dim: int = 512
    hidden: int = 2048  # of the MLPs
    layers: tuple[int, int] = (6, 6)  # encoder and decoder; an int means both
    heads: int = 8
    mixing: Literal["linear", "attention"] = "linear"
    position: Literal["none", "sinusoidal", "learned"] = "none"
    norm: Literal["affine", "layer"] = "affine"
    scale_init: float | None = 0.2  # initial LayerScale; None: no LayerScale
    activation: ActivationName = "gelu"
    dropout: float = 0.1  # on embeddings, outputs of branches and inside MLPs

    def __post_init__(self) -> None:
        if isinstance(self.layers, int):
            object.__setattr__(self, "layers", (self.layers, self.layers))
        check_types(self)
        for name in ("max_length", "dim", "hidden", "heads"):
            at_least(name, getattr(self, name), 1)
        if self.vocabulary <= UNKNOWN + 1:
            raise UsageError(f"vocabulary is {self.vocabulary}, expected more than the {UNKNOWN + 1} special tokens")
        if len(self.layers) != 2 or min(self.layers) < 1:
            raise UsageError(f"layers is {self.layers!r}, expected a number or (encoder, decoder), at least 1 each")
        if self.dim % self.heads:
            raise UsageError(f"dim must be a multiple of heads, but they are {self.dim} and {self.heads}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout is {self.dropout}, expected a probability below 1")
        if self.mixing == "attention" and self.position == "none":
            raise UsageError("attention alone ignores the order of words: use position=sinusoidal or learned")


class EncoderOutput(NamedTuple):
    """The encoder's output for a batch of sentences."""

    states: Tensor  # (B, S, C)
    keep: Tensor  # (B, S), False at padding


class EncoderLayer(nn.Module):
    """Mixes positions, then channels."""

    def __init__(self, *, mixing: SequenceResidual, channels: Residual) -> None:
        super().__init__()
        self.mixing = mixing
        self.channels = channels

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """(B, S, C), (B, S) → (B, S, C)."""
        return self.channels(self.mixing(x, keep))


class DecoderLayer(nn.Module):
    """Mixes the positions so far, attends to the source, mixes channels."""

    def __init__(self, *, mixing: SequenceResidual, cross: SequenceResidual, channels: Residual) -> None:
        super().__init__()
        self.mixing = mixing
        self.cross = cross
        self.channels = channels

    def forward(self, x: Tensor, keep: Tensor, memory: EncoderOutput) -> Tensor:
        """(B, T, C), (B, T) → (B, T, C)."""
        return self.channels(self.cross(self.mixing(x, keep), self.prepare(memory.states, memory.keep[:, None, None])))

    def prepare(self, states: Tensor, mask: Tensor | None) -> AttendedSource:
        """Return keys and values of the source, (B, S, C)."""
        mix: CrossAttention = self.cross.mix  # type: ignore[assignment]
        return mix.prepare(states, mask)

    def start(self, buffer: Tensor, rows: int, steps: int) -> StepCache:
        """Return an empty cache of positions."""
        mix: PositionLinear | SequenceAttention = self.mixing.mix  # type: ignore[assignment]
        return mix.start(buffer, rows, steps)

    def step(self, x: Tensor, past: StepCache, source: AttendedSource, position: int) -> Tensor:
        """(N, C) at `position` → (N, C)."""
        return self.channels(self.cross.step(self.mixing.step(x, past, position), source))


class Cache:
    """The state of decoding: for each layer, past positions of the rows, and keys and values of the sentences.

    A sentence has `beams` adjacent rows. Keys and values exist once per sentence and are never reordered.
    """

    def __init__(self, past: list[StepCache], spare: Tensor, sources: list[AttendedSource], steps: int) -> None:
        self.past, self.sources, self.steps = past, sources, steps
        self.length = 0  # positions done
        self._spare = spare  # receives a layer's reordered rows; the layer's old buffer is then the spare one

    def reorder(self, rows: Tensor, sentences: Tensor | None = None) -> None:
        """Replace row i by row rows[i] of the same sentence.

        With `sentences`, only those are kept, in that order, and `rows` are the rows of these.
        """
        for past in self.past:
            self._spare = past.reorder(rows, self.length, self._spare)
        if sentences is not None:
            self.sources = [
                AttendedSource(*(None if part is None else part.index_select(0, sentences) for part in source))  # type: ignore[arg-type]
                for source in self.sources
            ]


class Seq2Seq(nn.Module):
    """Shared embedding, encoder and decoder. The embedding is also the output matrix."""

    Config = Seq2SeqConfig
    positions: Tensor | None  # (max_length, C)

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config = c = config
        self.embedding = nn.Embedding(c.vocabulary, c.dim, padding_idx=PAD)
        if c.position == "learned":
            self.positions = nn.Parameter(torch.randn(c.max_length, c.dim) * c.dim**-0.5)
        else:
            waves = sinusoids(c.max_length, c.dim) if c.position == "sinusoidal" else None
            self.register_buffer("positions", waves, persistent=False)
        encoder, decoder = c.layers
        self.encoder = nn.ModuleList(
            EncoderLayer(mixing=self._mixing(causal=False), channels=self._channels()) for _ in range(encoder)
        )
        self.encoder_norm = make_norm(c.norm, c.dim)
        self.decoder = nn.ModuleList(
            DecoderLayer(
                mixing=self._mixing(causal=True),
                cross=self._branch(CrossAttention(c.dim, c.heads, dropout=c.dropout)),
                channels=self._channels(),
            )
            for _ in range(decoder)
        )
        self.decoder_norm = make_norm(c.norm, c.dim)
        (truncated_normal_ if c.mixing == "linear" else xavier_)(self)
        nn.init.normal_(self.embedding.weight, std=c.dim**-0.5)
        with torch.no_grad():
            self.embedding.weight[PAD] = 0.0

    def _branch(self, mix: nn.Module) -> SequenceResidual:
        return SequenceResidual(make_norm(self.config.norm, self.config.dim), mix, self._scale())

    def _scale(self) -> nn.Parameter | None:
        init = self.config.scale_init
        return None if init is None else make_scale("layerscale", self.config.dim, init)

    def _mixing(self, *, causal: bool) -> SequenceResidual:
        c = self.config
        if c.mixing == "linear":
            return self._branch(PositionLinear(c.max_length, causal=causal, dropout=c.dropout))
        return self._branch(SequenceAttention(c.dim, c.heads, causal=causal, dropout=c.dropout))

    def _channels(self) -> Residual:
        c = self.config
        mlp = MLP(c.dim, c.hidden, activation=c.activation, dropout=c.dropout)
        return Residual(make_norm(c.norm, c.dim), mlp, self._scale())

    # Whole sentences --------------------------------------------------------------------------------------------------

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map ids (B, S) and (B, T), which start with BOS, to logits (B, T, V). Position t predicts word t + 1."""
        if source.shape[:1] != target.shape[:1]:
            raise UsageError(
                f"there are {source.shape[0]} sources and {target.shape[0]} targets, expected as many of each"
            )
        return self.logits(self.decode(target, self.encode(source)))

    def encode(self, source: Tensor) -> EncoderOutput:
        """Encode ids (B, S), padded with PAD. A row of PAD alone counts as one word."""
        self._check("source", source)
        if source.shape[1] == 0:
            source = source.new_full((source.shape[0], 1), PAD)
        keep = source != PAD
        keep[:, 0] = True
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, keep)
        return EncoderOutput(self.encoder_norm(x), keep)

    def decode(self, target: Tensor, memory: EncoderOutput) -> Tensor:
        """Ids (B, T) starting with BOS → states (B, T, C), the input of `logits`."""
        self._check("target", target)
        x, keep = self._embed(target), target != PAD
        for layer in self.decoder:
            x = layer(x, keep, memory)
        return self.decoder_norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """(..., C) → (..., V)."""
        return F.linear(states, self.embedding.weight)

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.config.dim)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        return F.dropout(x, self.config.dropout) if self.config.dropout and self.training else x

    def _check(self, side: str, tokens: Tensor) -> None:
        c = self.config
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise UsageError(
                f"a {side} is word ids of shape (sentences, positions), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if tokens.shape[1] > c.max_length:
            raise DataError(
                f"a {side} has {tokens.shape[1]} tokens, {c.name or 'the network'} was made for max_length "
                f"{c.max_length}; split or skip longer sentences, or train with a larger max_length"
            )

    # Word by word, without gradients ----------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, memory: EncoderOutput, beams: int, steps: int) -> Cache:
        """Return an empty cache for `beams` rows per sentence and `steps` words."""
        at_least("beams", beams, 1)
        if not 1 <= steps <= self.config.max_length:
            raise UsageError(f"steps is {steps}, expected 1 to max_length {self.config.max_length}")
        rows = memory.states.shape[0] * beams
        mask = None if bool(memory.keep.all()) else memory.keep[:, None, None]
        cached = (PositionLinear if self.config.mixing == "linear" else SequenceAttention).cached
        # One allocation for all layers: a large one is returned to the system when the sentences are done.
        size = (self.config.layers[1] + 1, rows * steps * cached * self.config.dim)
        *buffers, spare = self.embedding.weight.new_empty(size)
        layers = list(self._decoder_layers())
        past = [layer.start(buffer, rows, steps) for layer, buffer in zip(layers, buffers, strict=True)]
        return Cache(past, spare, [layer.prepare(memory.states, mask) for layer in layers], steps)

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Ids (N,) of the next word of every row, BOS first → logits (N, V) of the word after it."""
        position = cache.length
        if position == cache.steps:
            raise UsageError(f"the cache was started for {cache.steps} steps, which are used up; start it with more")
        x = self.embedding(tokens) * math.sqrt(self.config.dim)
        if self.positions is not None:
            x = x + self.positions[position]
        for layer, past, source in zip(self._decoder_layers(), cache.past, cache.sources, strict=True):
            x = layer.step(x, past, source, position)
        cache.length += 1
        return few_rows_linear(self.decoder_norm(x), self.embedding.weight)

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        return cast(Iterator[DecoderLayer], iter(self.decoder))


def sinusoids(positions: int, dim: int) -> Tensor:
    """Return sinusoidal position embeddings (positions, dim), with wavelengths from 2π to 20000π (Vaswani 3.5)."""
    rates = 10_000 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), rates)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :dim].to(torch.get_default_dtype())


# Name → options that differ from the defaults (ResMLP table 5, and Vaswani's base).
VARIANTS: dict[str, dict[str, Any]] = {
    "translation_resmlp_6": {"layers": 6},
    "translation_resmlp_12": {"layers": 12},
    "translation_transformer_base": {
        "layers": 6,
        "mixing": "attention",
        "position": "sinusoidal",
        "norm": "layer",
        "scale_init": None,
        "activation": "relu",
    },
}


def create_seq2seq(name: str, *, vocabulary: int, **options: Any) -> Seq2Seq:
    """Create a translation network with random weights.

    `options` are fields of `Seq2SeqConfig`. Raises UsageError with the nearest match for an unknown name or option.
    """
    if name not in VARIANTS:
        known = list(VARIANTS)
        raise UsageError(f"there is no translation network {name!r}.{nearest(name, known)} Known: {', '.join(known)}")
    fields = [field.name for field in dataclasses.fields(Seq2SeqConfig) if field.name != "name"]
    for option in options:
        if option not in fields:
            raise UsageError(
                f"{name} has no option {option!r}.{nearest(option, fields)} Its options: {', '.join(fields)}"
            )
    return Seq2Seq(Seq2SeqConfig(name=name, vocabulary=vocabulary, **(VARIANTS[name] | options)))
