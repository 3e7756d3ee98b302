"""Quantization during training (Quant-Noise, arXiv 2004.07320): each step rounds a random share of the weights.

The forward and the backward pass use the rounded weights. The update is added to the exact ones, as if rounding had the
derivative 1 (straight-through estimator). Weights that end between two steps of the quantizer thus still move.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from patchloom.data.batches.sampler import step_seed
from patchloom.layers.matrices import quantized


class RoundedWeights:
    """Matrices of which a random share of the weights is rounded to `bits` bits in each step.

    The draw depends on seed and step alone: it is the same on every process and after a resume.
    """

    def __init__(self, weights: Sequence[Tensor], *, bits: int, share: float, seed: int) -> None:
        self._weights, self._bits, self._share, self._seed = list(weights), bits, share, seed

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Round weights, and restore the exact values at the end of the block."""
        exact = [weight.detach().clone() for weight in self._weights]
        generator = torch.Generator(exact[0].device).manual_seed(step_seed(self._seed, 0, step))
        try:
            with torch.no_grad():
                for weight in self._weights:
                    is_drawn = torch.rand(weight.shape, generator=generator, device=weight.device) < self._share
                    weight.copy_(torch.where(is_drawn, quantized(weight, self._bits), weight))
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._weights, exact)
