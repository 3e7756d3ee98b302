"""Pictures of translation networks with known weights."""

import re

import numpy as np
import torch

from patchloom.report.pictures.sequences import SIDE, attention_chart, cross_attention, position_picture
from patchloom.report.pictures.sheets import NEGATIVE, POSITIVE
from patchloom_runtime.text.vocabulary import BOS, EOS
from tests.models.test_seq2seq import small


def colors(picture) -> set[tuple[int, ...]]:
    return {tuple(color) for color in np.asarray(picture).reshape(-1, 3).tolist()}


def test_a_matrix_over_positions_is_drawn() -> None:
    network = small("translation_resmlp_6")
    with torch.no_grad():
        for layers in (network.encoder, network.decoder):
            for layer in layers:
                layer.mixing.mix.weight.zero_()
    plain = colors(position_picture(network, (5, 5)))
    with torch.no_grad():
        network.encoder[0].mixing.mix.weight[1, 2] = 0.7
        network.encoder[0].mixing.mix.weight[7, 0] = 9.0  # beyond the longest sentence
        network.decoder[0].mixing.mix.weight[0, 3] = -0.5  # above the diagonal: never used
    drawn = colors(position_picture(network, (5, 5)))
    assert tuple(POSITIVE.tolist()) in drawn - plain
    assert tuple(NEGATIVE.tolist()) not in drawn
    assert position_picture(network, (5, 5)).height > 2 * SIDE - 40
    assert position_picture(small("translation_transformer_base"), (5, 5)) is None


def test_cross_attention_is_that_of_the_forward_pass() -> None:
    network = small("translation_resmlp_6").train()
    source, target = [4, 5, 6], [7, 8]
    result = cross_attention(network, source, target)
    assert network.training
    assert result.shape == (len(network.decoder), 3, 4)
    np.testing.assert_allclose(result.sum(axis=-1), 1.0, rtol=1e-6)
    network.eval()
    layer = network.decoder[0]
    with torch.no_grad():
        memory = network.encode(torch.tensor([[*source, EOS]]))
        words = torch.tensor([[BOS, *target]])
        x = layer.cross.norm(layer.mixing(network._embed(words), words != 0))
        mix = layer.cross.mix
        q = mix.q(x).unflatten(-1, (mix.heads, -1)).transpose(1, 2)
        k = mix.kv(memory.states).unflatten(-1, (2, mix.heads, -1))[:, :, 0].transpose(1, 2)
        expected = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(dim=-1).mean(dim=1)[0]
    np.testing.assert_allclose(result[0], expected.numpy(), atol=1e-6)


def test_the_chart_tells_words_and_escapes_them() -> None:
    chart = attention_chart(np.array([[0.25, 0.75], [1.0, 0.0]]), ["<b>"], ["zwei"])
    assert re.search(r"zwei\b[^<]*&lt;b&gt;[^<]*\b25%", chart)
    assert re.search(r"[^\d]0%", chart)
    assert "<b>" not in chart
