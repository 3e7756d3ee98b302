"""Initializations for networks with attention: Xavier, Fixup, T-Fixup. The default is in `layers.init`."""

import torch
from torch import nn

from patchloom.layers.attention import Attention, ClassAttention
from patchloom.layers.linear import ShiftedLinear
from patchloom.layers.mlp import MLP
from patchloom.layers.residual import Branch
from patchloom.layers.sequence_mixing import CrossAttention


@torch.no_grad()
def xavier_(network: nn.Module) -> None:
    """Set linear weights to U(±√(6/(inputs + outputs))), separately for q, k and v, and biases to 0 (Transformer)."""
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
    """Apply Fixup: in L branches of two layers, multiply the first layer by L^(-1/2) and set the last to 0.

    Every linear layer of a branch gets a scalar bias before it. Fixup's biases before activations and after a branch
    are omitted, because the biases of the linear layers include them.
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
    """Apply T-Fixup for an encoder: Xavier weights; value path and MLP are multiplied by 0.67·L^(-1/4)."""
    branches = [module for module in network.modules() if isinstance(module, Branch)]
    for branch in branches:
        xavier_(branch)
        for weight in _value_path(branch.mix):
            weight.mul_(0.67 * (len(branches) / 2) ** -0.25)


def _value_path(mix: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and last weight on the signal path of a branch: values and projection, or fc1 and fc2."""
    if isinstance(mix, Attention):
        return mix.qkv.weight[-mix.proj.weight.shape[0] :], mix.proj.weight
    if isinstance(mix, ClassAttention):
        return mix.v.weight, mix.proj.weight
    assert isinstance(mix, MLP)
    return mix.fc1.weight, mix.fc2.weight
