"""A translation network as two graphs: the encoder, and one step of the decoder (`artefact_translator.py` searches).

Letters: B sentences of S subwords, K beams, L layers of the decoder, M positions before, H heads of d channels.
"""

import math
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.exporters.graph import Traced
from patchloom.layers.sequence_mixing import AttendedSource, PositionLinear, SequenceAttention
from patchloom.models.seq2seq import Seq2Seq
from patchloom_runtime.artifacts.metadata import STEP
from patchloom_runtime.text.special_tokens import BOS, EOS, PAD


class EncoderGraph(nn.Module):
    """Sources (B, S) → {"keys", "values"}: (L, B, H, S, d), as the layers of the decoder look at them."""

    outputs: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, network: Seq2Seq) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: Tensor) -> dict[str, Tensor]:
        """As the network's `encode`; a source has a word or EOS at least."""
        net, keep = self.network, source != PAD
        x = net._embed(source)
        for layer in net.encoder:
            x = layer(x, keep)
        states = net.encoder_norm(x)
        looked = [layer.look(states, None) for layer in net._decoder_layers()]
        return {"keys": torch.stack([one.k for one in looked]), "values": torch.stack([one.v for one in looked])}


class DecoderStep(nn.Module):
    """The next position of all rows → {"logits": (B, K, V), "state": (L, B, K, C')}."""

    outputs: ClassVar[tuple[str, ...]] = ("logits", "state")

    def __init__(self, network: Seq2Seq) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, words: Tensor, position: Tensor, past: Tensor, keys: Tensor, values: Tensor, seen: Tensor
    ) -> dict[str, Tensor]:
        """Words (B, K), position (1,), past (M, L, B, K, C') of which what is before the position counts."""
        net = self.network
        x = net.embedding(words) * math.sqrt(net.config.dim)
        if net.positions is not None:
            x = x + net.positions.index_select(0, position)
        before = torch.arange(past.shape[0]) < position  # (M,)
        states = []
        for number, layer in enumerate(net._decoder_layers()):
            given, mix = layer.mixing.norm(x), layer.mixing.mix
            if isinstance(mix, PositionLinear):
                mixed, state = _linear(mix, given, past[:, number], before, position)
            else:
                mixed, state = _attention(cast(SequenceAttention, mix), given, past[:, number], before)
            states.append(state)
            x = layer.mixing.add_to(x, mixed)
            x = layer.cross(x, AttendedSource(keys[number], values[number], seen[:, None, None]))
            x = layer.channels(x)
        return {"logits": F.linear(net.decoder_norm(x), net.embedding.weight), "state": torch.stack(states)}


def _linear(mix: PositionLinear, x: Tensor, past: Tensor, before: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K, C) → what the matrix over positions makes of it, and what it leaves."""
    row = torch.where(before, mix.weight.index_select(0, position)[:, : past.shape[0]], 0.0)  # (1, M)
    mixed = (row @ past.flatten(1)).view_as(x)
    own = mix.weight.diagonal().index_select(0, position)
    return mixed + own * x + mix.bias.index_select(0, position), x


def _attention(mix: SequenceAttention, x: Tensor, past: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """(B, K, C) → what attention over the positions so far makes of it, and what it leaves."""
    q, state = mix.qkv(x).split([x.shape[2], 2 * x.shape[2]], dim=2)
    every = torch.cat([past, state[None]]).unflatten(3, (2, mix.heads, -1))  # (M+1, B, K, 2, H, d)
    k, v = every.permute(3, 1, 2, 4, 0, 5)  # (B, K, H, M+1, d) each
    q = q.unflatten(2, (mix.heads, 1, -1))  # (B, K, H, 1, d)
    weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    seen = torch.cat([before, before.new_ones(1)])
    weights = torch.where(seen, weights, -torch.inf).softmax(-1)
    return mix.proj((weights @ v).squeeze(3).flatten(2)), state


@torch.no_grad()
def traced_translator(network: Seq2Seq) -> list[Traced]:
    """Both parts, traced with two short sentences and three beams."""
    config = network.config
    source = torch.tensor([[5, 6, 7, EOS], [8, EOS, PAD, PAD]])
    encoder, step = EncoderGraph(network).eval(), DecoderStep(network).eval()
    looked = encoder(source)
    words, position = torch.full((2, 3), BOS), torch.tensor([2])
    past = torch.zeros(5, config.layers[1], 2, 3, kept_of(network))
    auto = torch.export.Dim.DYNAMIC
    free: dict[str, Any] = {
        "words": {0: auto, 1: auto},
        "position": {},
        "past": {0: auto, 2: auto, 3: auto},
        "keys": {1: auto, 3: auto},
        "values": {1: auto, 3: auto},
        "seen": {0: auto, 1: auto},
    }
    inputs = {"words": words, "position": position, "past": past, **looked, "seen": source != PAD}
    return [
        Traced(encoder, {"source": source}, EncoderGraph.outputs, {"source": {0: auto, 1: auto}}),
        Traced(step, inputs, DecoderStep.outputs, free, STEP),
    ]


def kept_of(network: Seq2Seq) -> int:
    """Numbers that a layer of the decoder keeps of a position."""
    return (PositionLinear if network.config.mixing == "linear" else SequenceAttention).kept * network.config.dim
