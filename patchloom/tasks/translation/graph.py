"""A translation network as two graphs: the encoder, and one decoder step; the artifact runs the beam search.

Letters: B sentences of S subwords, K beams, L decoder layers, M earlier positions, H heads of d channels, C' numbers
that a layer stores per position.
"""

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.exporters.graph import GraphPart
from patchloom.layers.sequence_mixing import AttendedSource, PositionLinear, SequenceAttention
from patchloom.models.seq2seq import Seq2Seq
from patchloom_runtime.artifacts.translator import STEP
from patchloom_runtime.text.vocabulary import BOS, EOS, PAD


class EncoderGraph(nn.Module):
    """Graph from source (B, S) to "keys" and "values" (L, B, H, S, d) for the decoder's cross-attention."""

    outputs: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, network: Seq2Seq) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: Tensor) -> dict[str, Tensor]:
        """Encode sources. Each has at least one word or EOS."""
        net, keep = self.network, source != PAD
        x = net._embed(source)
        for layer in net.encoder:
            x = layer(x, keep)
        states = net.encoder_norm(x)
        attended = [layer.prepare(states, None) for layer in net._decoder_layers()]
        return {"keys": torch.stack([one.k for one in attended]), "values": torch.stack([one.v for one in attended])}


class DecoderStep(nn.Module):
    """Graph for one decoder position, with the outputs "logits" (B, K, V) and "state" (L, B, K, C')."""

    outputs: ClassVar[tuple[str, ...]] = ("logits", "state")

    def __init__(self, network: Seq2Seq) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, words: Tensor, position: Tensor, past: Tensor, keys: Tensor, values: Tensor, is_word: Tensor
    ) -> dict[str, Tensor]:
        """Decode words (B, K) at position (1,). In `past` (M, L, B, K, C') only earlier positions count."""
        net = self.network
        x = net.embedding(words) * math.sqrt(net.config.dim)
        if net.positions is not None:
            x = x + net.positions.index_select(0, position)
        before = torch.arange(past.shape[0]) < position  # (M,)
        states = []
        for number, layer in enumerate(net._decoder_layers()):
            normed, mix = layer.mixing.norm(x), layer.mixing.mix
            if isinstance(mix, PositionLinear):
                mixed, state = _linear(mix, normed, past[:, number], before, position)
            else:
                mixed, state = _attention(cast(SequenceAttention, mix), normed, past[:, number], before)
            states.append(state)
            x = layer.mixing.add_to(x, mixed)
            x = layer.cross(x, AttendedSource(keys[number], values[number], is_word[:, None, None]))
            x = layer.channels(x)
        return {"logits": F.linear(net.decoder_norm(x), net.embedding.weight), "state": torch.stack(states)}


def _linear(mix: PositionLinear, x: Tensor, past: Tensor, before: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Mix (B, K, C) with earlier positions by the matrix over positions. Returns the result and the new state."""
    row = torch.where(before, mix.weight.index_select(0, position)[:, : past.shape[0]], 0.0)  # (1, M)
    mixed = (row @ past.flatten(1)).view_as(x)
    own = mix.weight.diagonal().index_select(0, position)
    return mixed + own * x + mix.bias.index_select(0, position), x


def _attention(mix: SequenceAttention, x: Tensor, past: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Mix (B, K, C) with earlier positions by attention. Returns the result and the new state."""
    q, state = mix.qkv(x).split([x.shape[2], 2 * x.shape[2]], dim=2)
    every = torch.cat([past, state[None]]).unflatten(3, (2, mix.heads, -1))  # (M+1, B, K, 2, H, d)
    k, v = every.permute(3, 1, 2, 4, 0, 5)  # (B, K, H, M+1, d) each
    q = q.unflatten(2, (mix.heads, 1, -1))  # (B, K, H, 1, d)
    weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    visible = torch.cat([before, before.new_ones(1)])
    weights = torch.where(visible, weights, -torch.inf).softmax(-1)
    return mix.proj((weights @ v).squeeze(3).flatten(2)), state


@torch.no_grad()
def translator_parts(network: Seq2Seq) -> list[GraphPart]:
    """Return both parts, with two short sentences and three beams as example inputs."""
    source = torch.tensor([[5, 6, 7, EOS], [8, EOS, PAD, PAD]])
    encoder, step = EncoderGraph(network).eval(), DecoderStep(network).eval()
    auto = torch.export.Dim.DYNAMIC
    dynamic: dict[str, Any] = {
        "words": {0: auto, 1: auto},
        "position": {},
        "past": {0: auto, 2: auto, 3: auto},
        "keys": {1: auto, 3: auto},
        "values": {1: auto, 3: auto},
        "is_word": {0: auto, 1: auto},
    }
    inputs = {
        "words": torch.full((2, 3), BOS),
        "position": torch.tensor([2]),
        "past": torch.zeros(5, network.config.layers[1], 2, 3, state_size(network)),
        **encoder(source),
        "is_word": source != PAD,
    }
    return [
        GraphPart(encoder, {"source": source}, EncoderGraph.outputs, {"source": {0: auto, 1: auto}}),
        GraphPart(step, inputs, DecoderStep.outputs, dynamic, STEP),
    ]


def state_size(network: Seq2Seq) -> int:
    """Return the numbers that a decoder layer stores per position."""
    return (PositionLinear if network.config.mixing == "linear" else SequenceAttention).cached * network.config.dim
