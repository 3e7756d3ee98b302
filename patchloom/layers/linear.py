"""Fold affine operations into an adjacent linear layer: once for inference (RM-5), or at every training step.

A folded layer saves only its input for the backward pass: the gradients of the folded weight, bias and scale follow
from the gradient of the folded matrix.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ShiftedLinear(nn.Linear):
    """A linear layer of x + shift, where shift is one learned number that starts at 0 (Fixup)."""

    def __init__(self, linear: nn.Linear) -> None:
        # Shares the weights of `linear`.
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) → (..., outputs)."""
        return F.linear(x, *as_it_acts(self))


def as_autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that autocast uses for matrix products."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def as_it_acts(linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return weight and bias of an equivalent nn.Linear."""
    if isinstance(linear, ShiftedLinear):
        return linear.weight, linear.bias + linear.weight.sum(dim=1) * linear.shift
    return linear.weight, linear.bias


def fold_input(linear: nn.Linear, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer x ↦ linear(weight · x + bias)."""
    own, own_bias = as_it_acts(linear)
    return own * weight, own_bias + own @ bias


def fold_output(linear: nn.Linear, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the layer x ↦ scale · linear(x)."""
    weight, bias = as_it_acts(linear)
    return weight * scale.unsqueeze(-1), bias * scale


def fold_input_(linear: nn.Linear, weight: Tensor, bias: Tensor) -> Tensor:
    """Fold weight · x + bias into `linear` in place. Returns the factor to apply after the layer: 1."""
    _set(linear, *fold_input(linear, weight, bias))
    return weight.new_ones(1)


def fold_output_(linear: nn.Linear, scale: Tensor) -> None:
    """Fold a following scale into `linear` in place."""
    _set(linear, *fold_output(linear, scale))


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)
    if isinstance(linear, ShiftedLinear):
        linear.shift.zero_()
