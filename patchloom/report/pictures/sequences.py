"""Pictures of a translation network: its matrices over positions, and the attention of the decoder to the source.

Letters: S and T positions of source and target, H heads, L layers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image
from torch import nn

from patchloom.evaluation.classification import in_eval_mode
from patchloom.layers.attention import record_attention
from patchloom.layers.sequence_mixing import PositionLinear
from patchloom.models.seq2seq import Seq2Seq
from patchloom.report.charts import share_map
from patchloom.report.pictures.sheets import SheetCell, SheetRow, colored, enlarged, numbers, sheet
from patchloom_runtime.text.vocabulary import BOS, EOS

SIDE = 190  # pixels of a matrix


def position_picture(network: Seq2Seq, longest: tuple[int, int]) -> Image.Image | None:
    """Draw every matrix over positions, up to the lengths seen in training; None if attention mixes positions.

    Row t has the weights of position t of the output; each matrix has its own color scale.
    """
    rows = []
    for name, layers, length in zip(("encoder", "decoder"), (network.encoder, network.decoder), longest, strict=True):
        cells = [_matrix_cell(number, mixer, length + 1) for number, mixer in enumerate(_mixers(layers), 1)]
        if cells:
            rows.append(SheetRow(f"{name}, positions 1 to {length + 1}", cells))
    return sheet(rows) if rows else None


@torch.no_grad()
def cross_attention(network: Seq2Seq, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """Return the attention from target to source tokens per layer, averaged over heads: (L, T + 1, S + 1).

    `source` and `target` are subword numbers; the end of the sentence is the last token of either side.
    """
    device = network.embedding.weight.device
    with in_eval_mode(network), record_attention(network) as maps:
        network(torch.tensor([[*source, EOS]], device=device), torch.tensor([[BOS, *target]], device=device))
    layers = [maps[f"decoder.{number}.cross.mix"][0] for number in range(len(network.decoder))]
    return np.stack([numbers(weights[0].mean(dim=0), "attention") for weights in layers])


def attention_chart(weights: np.ndarray, source: Sequence[str], target: Sequence[str]) -> Markup:
    """Draw one layer of `cross_attention` with the texts of the subwords."""
    return share_map(weights, [*target, "end"], [*source, "end"], down="translation", across="source")


def _mixers(layers: nn.ModuleList) -> list[PositionLinear]:
    mixers = [layer.mixing.mix for layer in layers]  # type: ignore[union-attr]
    return [mixer for mixer in mixers if isinstance(mixer, PositionLinear)]


def _matrix_cell(number: int, mixer: PositionLinear, length: int) -> SheetCell:
    matrix = numbers(mixer.weight[:length, :length])
    matrix = np.tril(matrix) if mixer.causal else matrix
    return SheetCell(enlarged(colored(matrix), SIDE), f"layer {number}   ±{np.abs(matrix).max():.2g}")
