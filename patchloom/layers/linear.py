"""Folding what is affine into the linear layer beside it: once for inference (RM-5), or at every training step.

A folded layer keeps nothing but its input for the backward pass: the gradients of the weight, bias and scale beside it
follow from the gradient of the folded matrix.
"""

from torch import Tensor, nn


def fold_input(linear: nn.Linear, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear layer that does on x what `linear` does on weight · x + bias."""
    return linear.weight * weight, linear.bias + linear.weight @ bias


def fold_output(linear: nn.Linear, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear layer that gives scale · linear(x)."""
    return linear.weight * scale.unsqueeze(-1), linear.bias * scale


def fold_input_(linear: nn.Linear, weight: Tensor, bias: Tensor) -> Tensor:
    """The same for good. Returns the factor still owed after the layer: 1."""
    _set(linear, *fold_input(linear, weight, bias))
    return weight.new_ones(1)


def fold_output_(linear: nn.Linear, scale: Tensor) -> None:
    """The same for good."""
    _set(linear, *fold_output(linear, scale))


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
