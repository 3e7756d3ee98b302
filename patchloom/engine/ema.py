"""Exponential moving average of the weights: ema ← decay·ema + (1 − decay)·weights after every update."""

import copy
from functools import cached_property

import torch
from torch import Tensor, nn

from patchloom.engine.distribution import unwrap
from patchloom.engine.state import weights_of
from patchloom.models.from_config import load_weights
from patchloom.models.sharding import local_parameters


class Ema:
    """A copy of `model` that follows its weights. Floating-point buffers are averaged, counters copied.

    The decay after t updates is at most (1 + t)/(10 + t), so that short runs are not dominated by the random
    initialization. Create it once the model is on its device and has its final parameters. If the model is sharded over
    ranks, shard `model` of the average alike before the first update: each rank averages its own part.
    """

    name = "ema"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._followed = unwrap(model)
        self.model = copy.deepcopy(self._followed).eval().requires_grad_(False)

    @cached_property
    def _pairs(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Return the tensors that are averaged and those that are copied, each next to the model's."""
        mine, theirs = ([*local_parameters(each), *each.buffers()] for each in (self.model, self._followed))
        pairs = list(zip(mine, theirs, strict=True))
        floating = [pair for pair in pairs if pair[0].is_floating_point()]
        return floating, [pair for pair in pairs if not pair[0].is_floating_point()]

    def decay_at(self, step: int) -> float:
        """Return the decay of update number `step`, counted from 0."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the model after update number `step`, counted from 0."""
        averaged, copied = self._pairs
        mine, theirs = map(list, zip(*averaged, strict=True))
        torch._foreach_lerp_(mine, theirs, 1 - self.decay_at(step))
        for counter, value in copied:
            counter.copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return weights_of(self.model)

    def restore(self, saved: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
        """Continue from the result of `tensors`, or from the model's `weights` if the checkpoint has no average."""
        load_weights(self.model, saved or weights, "the checkpoint's average")
        return [] if saved else ["the checkpoint has no average of the weights: it starts from the weights"]
