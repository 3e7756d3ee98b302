"""DINO's projection head: features → a point on the sphere → its cosines with K learned prototypes, each times g.

As the authors' DINOHead, under its key names. The weight norm is written out instead of taken from torch: torch's old
one cannot be copied (a teacher is a copy of the student's head), and its new one has other names.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.layers.init import truncated_normal_
from patchloom_runtime.errors import UsageError


class Prototypes(nn.Module):
    """A linear layer without bias whose row k is weight_g[k] · weight_v[k] / |weight_v[k]|."""

    def __init__(self, inputs: int, outputs: int, *, fixed_norm: bool) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(outputs, 1), requires_grad=not fixed_norm)
        self.weight_v = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.uniform_(self.weight_v, -(inputs**-0.5), inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) → (B, outputs)."""
        return F.linear(x, self.weight_g * F.normalize(self.weight_v, dim=1))


class DinoHead(nn.Module):
    """Three linear layers with GELU between them, ℓ2 norm, prototypes.

    `fixed_norm` keeps every prototype at length 1: steadier, and a little worse for the longest trainings.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int = 65536,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        batch_norm: bool = False,
        fixed_norm: bool = True,
    ) -> None:
        super().__init__()
        if min(inputs, outputs, hidden, bottleneck) < 1:
            given = f"{inputs}, {hidden}, {bottleneck}, {outputs}"
            raise UsageError(f"A head has at least one unit per layer, given {given}")
        layers: list[nn.Module] = []
        for width in (inputs, hidden):
            layers += [nn.Linear(width, hidden), *([nn.BatchNorm1d(hidden)] if batch_norm else []), nn.GELU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(hidden, bottleneck))
        truncated_normal_(self.mlp)
        self.last_layer = Prototypes(bottleneck, outputs, fixed_norm=fixed_norm)

    def forward(self, features: Tensor) -> Tensor:
        """(B, inputs) → (B, outputs)."""
        return self.last_layer(F.normalize(self.mlp(features), dim=1))
