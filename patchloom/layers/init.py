"""How weights start: the authors' rules for each family."""

import torch
from torch import nn

from patchloom.layers.patches import LearnedTokens, PatchProjection, PositionEmbedding
from patchloom.layers.token_mixing import AcrossPositions, TokenMLP


def truncated_normal_(network: nn.Module, *, std: float = 0.02) -> None:
    """Linear weights, tokens and positions N(0, std) cut at ±2, biases 0; convolutions as PyTorch starts them."""
    for module in network.modules():
        if isinstance(module, nn.Linear | AcrossPositions):
            nn.init.trunc_normal_(module.weight, std=std)
            nn.init.zeros_(module.bias)
        elif isinstance(module, TokenMLP):
            for weight in (module.weight1, module.weight2):
                nn.init.trunc_normal_(weight, std=std)
            nn.init.zeros_(module.bias1)
            nn.init.zeros_(module.bias2)
        elif isinstance(module, LearnedTokens | PositionEmbedding):
            nn.init.trunc_normal_(module.weight, std=std)


def lecun_normal_(network: nn.Module) -> None:
    """Weights truncated normal of variance 1/inputs, biases 0, as Flax starts its layers (Mixer)."""
    for module in network.modules():
        if isinstance(module, nn.Linear | PatchProjection):
            _lecun(module.weight, module.weight[0].numel())
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, TokenMLP):
            for weight in (module.weight1, module.weight2):
                _lecun(weight, weight.shape[-1])
            nn.init.zeros_(module.bias1)
            nn.init.zeros_(module.bias2)


def _lecun(weight: torch.Tensor, inputs: int) -> None:
    std = inputs**-0.5 / 0.87962566  # the deviation of a standard normal cut at ±2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
