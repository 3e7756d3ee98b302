"""Projection of a network's features to the embedding space of a contrastive loss (Grafit, BYOL)."""

from typing import Literal

from torch import nn

FC_DIM, MLP_DIM, HIDDEN_DIM = 128, 256, 4096


class Projector(nn.Sequential):
    """(B, C) → (B, D): a linear layer (`fc`), or BYOL's Linear, BatchNorm, ReLU, Linear (`mlp`)."""

    def __init__(self, kind: Literal["fc", "mlp"], inputs: int, outputs: int | None = None) -> None:
        self.dim = outputs or (FC_DIM if kind == "fc" else MLP_DIM)
        if kind == "fc":
            super().__init__(nn.Linear(inputs, self.dim))
        else:
            super().__init__(
                nn.Linear(inputs, HIDDEN_DIM),
                nn.BatchNorm1d(HIDDEN_DIM),
                nn.ReLU(),
                nn.Linear(HIDDEN_DIM, self.dim, bias=False),
            )
