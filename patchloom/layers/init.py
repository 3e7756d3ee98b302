"""Weight initialization as in the authors' code of each family."""

import torch
from torch import nn

from patchloom.layers.patches import LearnedTokens, PatchProjection, PositionEmbedding
from patchloom.layers.token_mixing import AcrossPositions, TokenMLP

STD = 0.02  # of truncated_normal_


def truncated_normal_(network: nn.Module) -> None:
    """Set linear weights, tokens and positions to N(0, 0.02²) cut at ±2, biases to 0. Convolutions keep PyTorch's."""
    for module in network.modules():
        if isinstance(module, nn.Linear | AcrossPositions):
            nn.init.trunc_normal_(module.weight, std=STD)
            nn.init.zeros_(module.bias)
        elif isinstance(module, TokenMLP):
            for weight in (module.weight1, module.weight2):
                nn.init.trunc_normal_(weight, std=STD)
            nn.init.zeros_(module.bias1)
            nn.init.zeros_(module.bias2)
        elif isinstance(module, LearnedTokens | PositionEmbedding):
            nn.init.trunc_normal_(module.weight, std=STD)


def lecun_normal_(network: nn.Module) -> None:
    """Set weights to a truncated normal of variance 1/inputs and biases to 0, as Flax does (Mixer)."""
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
    std = inputs**-0.5 / 0.87962566  # standard deviation of a standard normal cut at ±2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
