"""The matrices of a network's blocks, and what is left of them when they are pruned or rounded (ResMLP, section 3.3).

A mixes patches: ResMLP's matrix, both layers of Mixer's token MLP, sMLPNet's rows and columns. B and C are the first
and the second layer of the channel MLP. Pruning sets the smallest weights of each matrix to zero; rounding keeps n bits
of each weight over the largest of its matrix: with 4 bits all below 6.25 % of it become zero, as the paper says.
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
    name: str  # of its weight, as `state_dict` has it
    weight: Tensor

    @property
    def zeros(self) -> int:
        """Weights that are exactly zero."""
        return int((self.weight == 0).sum())


def matrices_of(network: nn.Module, letters: Sequence[str] = LETTERS) -> list[Matrix]:
    """Those of all blocks, layer by layer; a UsageError where the network has none of these letters."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    blocks = [module for module in network.modules() if isinstance(module, Block)]
    found = [
        Matrix(number, letter, names[id(weight)], weight)
        for number, block in enumerate(blocks, 1)
        for letter, weight in _weights(block)
    ]
    chosen = [matrix for matrix in found if matrix.letter in letters]
    for letter in letters:
        if not any(matrix.letter == letter for matrix in chosen):
            has = ", ".join(sorted({matrix.letter for matrix in found})) or "none of A, B and C"
            what = "mixes patches" if letter == "A" else "is a layer of a channel MLP"
            raise UsageError(f"{type(network).__name__} has no matrix {letter}, which {what}; it has {has}")
    return chosen


def _weights(block: Block) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for module in block.tokens.modules() if block.tokens is not None else ():
        if isinstance(module, TokenLinear):
            found.append(("A", module.weight))
        elif isinstance(module, TokenMLP | UntiedTokenMLP):
            found += [("A", module.weight1), ("A", module.weight2)]
    for module in block.channels.modules() if block.channels is not None else ():
        if isinstance(module, MLP):
            found += [("B", module.fc1.weight), ("C", module.fc2.weight)]
    return found


@torch.no_grad()
def prune_(weight: Tensor, share: float) -> None:
    """Set the smallest `share` of the weights of one matrix to zero, to the nearest whole weight."""
    count = round(share * weight.numel())
    smallest = weight.abs().flatten().topk(count, largest=False).indices
    weight.view(-1)[smallest] = 0.0


@torch.no_grad()
def quantize_(weight: Tensor, bits: int) -> None:
    """Round the weights of one matrix to 2ⁿ equal steps.

    The largest weight is kept as −2ⁿ⁻¹ steps whatever its sign, so one side has a step less than the other.
    """
    flat = weight.flatten()
    largest = flat[flat.abs().argmax()]
    if largest == 0:
        return
    half = 2 ** (bits - 1)
    step = -largest / half
    weight.copy_((weight / step).round().clamp(-half, half - 1) * step)
