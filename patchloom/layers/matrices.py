"""The weight matrices of a network's blocks, and how to prune and quantize them (ResMLP, section 3.3).

A mixes patches: ResMLP's matrix, both layers of Mixer's token MLP, sMLPNet's rows and columns. B and C are the first
and second layer of the channel MLP. Pruning sets the smallest weights of each matrix to zero. Quantization rounds each
weight to n bits relative to the largest of its matrix: with 4 bits, weights below 6.25 % of it become zero, as in the
paper.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from patchloom.layers.mlp import MLP
from patchloom.layers.residual import Block
from patchloom.layers.token_mixing import TokenLinear, TokenMLP, UntiedTokenMLP
from patchloom_runtime.errors import UsageError

LETTERS = "ABC"


class Matrix(NamedTuple):
    """One matrix of one block."""

    layer: int  # from 1
    letter: str  # A, B or C
    name: str  # key in the `state_dict`
    weight: Tensor

    @property
    def zeros(self) -> int:
        """Number of weights that are exactly zero."""
        return int((self.weight == 0).sum())


def all_matrices(network: nn.Module) -> list[Matrix]:
    """Return the matrices of all blocks, layer by layer; none for networks without such blocks."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    return [
        Matrix(number, letter, names[id(weight)], weight)
        for number, block in enumerate(blocks, 1)
        for letter, weight in _weights(block)
    ]


def matrices_of(network: nn.Module, letters: Sequence[str] = LETTERS) -> list[Matrix]:
    """Return the matrices with these letters; raise UsageError if the network has none for one of them."""
    matrices = all_matrices(network)
    chosen = [matrix for matrix in matrices if matrix.letter in letters]
    for letter in letters:
        if not any(matrix.letter == letter for matrix in chosen):
            has = ", ".join(sorted({matrix.letter for matrix in matrices})) or "none of A, B and C"
            what = "mixes patches" if letter == "A" else "is a layer of a channel MLP"
            raise UsageError(f"{type(network).__name__} has no matrix {letter}, which {what}; it has {has}")
    return chosen


def _weights(block: Block) -> list[tuple[str, Tensor]]:
    weights: list[tuple[str, Tensor]] = []
    for module in block.tokens.modules() if block.tokens is not None else ():
        if isinstance(module, TokenLinear):
            weights.append(("A", module.weight))
        elif isinstance(module, TokenMLP | UntiedTokenMLP):
            weights += [("A", module.weight1), ("A", module.weight2)]
    for module in block.channels.modules() if block.channels is not None else ():
        if isinstance(module, MLP):
            weights += [("B", module.fc1.weight), ("C", module.fc2.weight)]
    return weights


@torch.no_grad()
def prune_(weight: Tensor, share: float) -> None:
    """Set the smallest `share` of the weights of one matrix to zero, rounded to whole weights."""
    count = round(share * weight.numel())
    smallest = weight.abs().flatten().topk(count, largest=False).indices
    weight.view(-1)[smallest] = 0.0


def quantized(weight: Tensor, bits: int) -> Tensor:
    """Return the weights of one matrix, rounded to 2ⁿ equal steps.

    The largest weight becomes −2ⁿ⁻¹ steps whatever its sign, so one side has one step less than the other.
    """
    flat = weight.flatten()
    half = 2 ** (bits - 1)
    step = -flat[flat.abs().argmax()] / half
    return torch.where(step == 0, weight, (weight / step).round().clamp(-half, half - 1) * step)
