"""LoRA: fine-tune a frozen weight matrix by a learned change of low rank (arXiv 2106.09685)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from patchloom.layers.attention import Attend
from patchloom.layers.mlp import MLP
from patchloom_runtime.errors import UsageError

_ORIGINAL = ".parametrizations.weight.original"
_UP, _DOWN = ".parametrizations.weight.0.up", ".parametrizations.weight.0.down"


class LowRank(nn.Module):
    """W ↦ W + up·down, with up (outputs, rank) and down (rank, inputs). It starts as the identity: up is 0."""

    decays = False

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        outputs, inputs = weight.shape
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))
        self.down = nn.Parameter(weight.new_empty(rank, inputs))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the changed weight, (outputs, inputs)."""
        return torch.addmm(weight, self.up, self.down)


def add_low_rank_(network: nn.Module, rank: int) -> None:
    """Add a change of low rank to each linear layer of attention and MLPs, in place."""
    layers = [m for m in network.modules() if isinstance(m, Attend | MLP)]
    linears = {each for layer in layers for each in layer.modules() if type(each) is nn.Linear}
    ordered = [module for module in network.modules() if module in linears]
    if not ordered:
        raise UsageError("model.trainable is lora, but the network has no attention or MLP layers. Set it to all.")
    for linear in ordered:
        parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, rank))


def has_low_rank(network: nn.Module) -> bool:
    """Return whether changes of low rank were added to a network."""
    return any(isinstance(module, LowRank) for module in network.modules())


def merge_low_rank(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the plain network that acts like one with changes of low rank."""
    merged: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(_ORIGINAL):
            layer = name.removesuffix(_ORIGINAL)
            merged[f"{layer}.weight"] = torch.addmm(tensor, weights[layer + _UP], weights[layer + _DOWN])
        elif not name.endswith((_UP, _DOWN)):
            merged[name] = tensor
    return merged
