"""Channel mixing: a two-layer MLP applied at each position."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.kernels import usable, usable_without_gradients
from patchloom.layers.linear import as_autocast, as_it_acts, fold_input, fold_input_, fold_output, fold_output_

ActivationName = Literal["gelu", "gelu_tanh", "silu", "hardswish", "relu"]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    # name: (out of place, in place)
    "gelu": (_gelu, lambda x: torch.ops.aten.gelu_(x)),
    "gelu_tanh": (_gelu_tanh, lambda x: torch.ops.aten.gelu_(x, approximate="tanh")),
    "silu": (F.silu, lambda x: F.silu(x, inplace=True)),
    "hardswish": (F.hardswish, lambda x: F.hardswish(x, inplace=True)),
    "relu": (F.relu, lambda x: F.relu(x, inplace=True)),
}


def activate(name: str, x: Tensor) -> Tensor:
    """Apply an activation to a tensor that nothing else reads.

    Without gradients this overwrites x: on a CPU, page faults of a new hidden tensor cost more than the GELU itself.
    """
    out_of_place, in_place = ACTIVATIONS[name]
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.requires_grad:
        return out_of_place(x)
    return in_place(x)


def activated(name: str, linear: nn.Linear, x: Tensor) -> Tensor:
    """Return activation(linear(x)). For inference on a GPU, linear and GELU are one operation."""
    if name in ("gelu", "gelu_tanh") and type(linear) is nn.Linear and usable_without_gradients(x, linear.weight):
        from patchloom.layers.kernels.linear_gelu import linear_gelu

        return linear_gelu(x, linear.weight, linear.bias)
    return activate(name, linear(x))


class MLP(nn.Module):
    """fc2(activation(fc1(x))) over the last dimension."""

    def __init__(self, dim: int, hidden: int, *, activation: ActivationName = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.activation, self.dropout = activation, dropout

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → (..., C)."""
        if (out := self._by_kernels(x, as_it_acts(self.fc1), as_it_acts(self.fc2))) is not None:
            return out
        hidden = activated(self.activation, self.fc1, x)  # (..., hidden)
        return self._drop(self.fc2(self._drop(hidden)))

    def added_to(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor | None:
        """Return x + self(y) if the second layer has no bias, so that its product can start from x; otherwise None."""
        if scale is not None or self.fc2.bias is not None or not usable_without_gradients(x, self.fc2.weight):
            return None
        hidden = activated(self.activation, self.fc1, y)
        return torch.addmm(x.flatten(0, -2), hidden.flatten(0, -2), self.fc2.weight.T).view_as(x)

    def folded(self, x: Tensor, norm: tuple[Tensor, Tensor] | None, scale: Tensor) -> Tensor:
        """Return scale · self(weight · x + bias), with `norm` = (weight, bias) and scale folded into the two layers."""
        inner = as_it_acts(self.fc1) if norm is None else fold_input(self.fc1, *norm)
        outer = fold_output(self.fc2, scale)
        if (out := self._by_kernels(x, inner, outer)) is not None:
            return out
        hidden = activate(self.activation, F.linear(x, *inner))
        return self._drop(F.linear(self._drop(hidden), *outer))

    def _by_kernels(
        self, x: Tensor, inner: tuple[Tensor, Tensor], outer: tuple[Tensor, Tensor | None]
    ) -> Tensor | None:
        """Return the output with these weights and biases if training on a GPU, otherwise None."""
        gelu = self.activation in ("gelu", "gelu_tanh") and not (self.dropout and self.training)
        trains = torch.is_grad_enabled() and outer[1] is not None
        if not (gelu and trains and x.is_cuda and usable(low := as_autocast(x))):
            return None
        from patchloom.layers.kernels.gelu_mlp import GeluMLP

        out: Tensor = GeluMLP.apply(low, *inner, *outer, self.activation == "gelu_tanh")
        return out

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def owe_bias_(self) -> Tensor:
        """Remove and return the last bias. The caller adds it to x; the first layer subtracts it again."""
        bias = self.fc2.bias.clone()
        self.fc1.bias.sub_(self.fc1.weight @ bias)
        self.fc2.register_parameter("bias", None)
        return bias

    def absorb_input_(self, weight: Tensor, bias: Tensor) -> Tensor | None:
        """Fold a preceding weight · x + bias. Returns the factor to apply after the layer."""
        return fold_input_(self.fc1, weight, bias)

    def absorb_output_(self, scale: Tensor) -> None:
        """Fold a following scale · x."""
        fold_output_(self.fc2, scale)
