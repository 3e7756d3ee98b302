"""Folding what is affine into the linear layer beside it (RM-5)."""

from torch import Tensor, nn


def fold_input_(linear: nn.Linear, weight: Tensor, bias: Tensor) -> Tensor:
    """linear(weight · x + bias) becomes linear(x). Returns the factor still owed after it: 1."""
    linear.bias.copy_(linear.bias + linear.weight @ bias)
    linear.weight.mul_(weight)
    return weight.new_ones(1)


def fold_output_(linear: nn.Linear, scale: Tensor) -> None:
    """scale · linear(x) becomes linear(x)."""
    linear.weight.mul_(scale.unsqueeze(-1))
    linear.bias.mul_(scale)
