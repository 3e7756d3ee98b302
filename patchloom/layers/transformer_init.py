"""How weights of networks with attention start, beside the usual rule of `layers.init`."""

import torch
from torch import nn

from patchloom.layers.attention import Attention, ClassAttention
from patchloom.layers.linear import ShiftedLinear
from patchloom.layers.mlp import MLP
from patchloom.layers.residual import Branch
from patchloom.layers.sequence_mixing import CrossAttention


@torch.no_grad()
def xavier_(network: nn.Module) -> None:
    """Linear weights U(±√(6/(inputs + outputs))), queries, keys and values each for itself; biases 0 (Transformer)."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for module in network.modules():
        if isinstance(module, Attention):
            joint, parts = module.qkv.weight, 3
        elif isinstance(module, CrossAttention):
            joint, parts = module.kv.weight, 2
        else:
            continue
        for weight in joint.chunk(parts):
            nn.init.xavier_uniform_(weight)


@torch.no_grad()
def fixup_(network: nn.Module) -> None:
    """Fixup: with L branches of two layers, the first is multiplied by L^(-1/2) and the last starts at 0.

    Every linear layer of a branch gets a scalar bias before it. Those that Fixup has before activations and after a
    branch would say again what the biases of the linear layers say.
    """
    branches = [module for module in network.modules() if isinstance(module, Branch)]
    for branch in branches:
        first, last = _value_path(branch.mix)
        first.mul_(len(branches) ** -0.5)
        last.zero_()
        for name, linear in list(branch.mix.named_children()):
            if isinstance(linear, nn.Linear):
                setattr(branch.mix, name, ShiftedLinear(linear))


@torch.no_grad()
def tfixup_(network: nn.Module) -> None:
    """T-Fixup for an encoder: Xavier weights, those of the value path and the MLP multiplied by 0.67·L^(-1/4)."""
    branches = [module for module in network.modules() if isinstance(module, Branch)]
    for branch in branches:
        xavier_(branch)
        for weight in _value_path(branch.mix):
            weight.mul_(0.67 * (len(branches) / 2) ** -0.25)


def _value_path(mix: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and last weight a signal passes through in a branch: values and projection, or fc1 and fc2."""
    if isinstance(mix, Attention):
        return mix.qkv.weight[-mix.proj.weight.shape[0] :], mix.proj.weight
    if isinstance(mix, ClassAttention):
        return mix.v.weight, mix.proj.weight
    assert isinstance(mix, MLP)
    return mix.fc1.weight, mix.fc2.weight
