"""Exponential moving average of the weights: ema ← decay·ema + (1 − decay)·weights after every update."""

import copy

import torch
from torch import Tensor, nn

from patchloom.engine.distribution import unwrap
from patchloom.engine.state import weights_of
from patchloom.models.from_config import is_sharded, load_weights
from patchloom_runtime.errors import UsageError


class Ema:
    """A copy of `model` that follows its weights. Floating-point buffers are averaged, counters copied.

    The decay after t updates is at most (1 + t)/(10 + t), so that short runs are not dominated by the random
    initialization. Create it once the model is on its device and has its final parameters.
    """

    name = "ema"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        source = unwrap(model)
        if any(is_sharded(p) for p in source.parameters()):
            raise UsageError("EMA of weights sharded over ranks is not supported. Set optim.ema_decay to none.")
        self.model = copy.deepcopy(source).eval().requires_grad_(False)
        pairs = [(mine, theirs) for (_, mine), (_, theirs) in zip(_tensors(self.model), _tensors(source), strict=True)]
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    def decay_at(self, step: int) -> float:
        """Return the decay of update number `step`, counted from 0."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the model after update number `step`, counted from 0."""
        mine, theirs = map(list, zip(*self._averaged, strict=True))
        torch._foreach_lerp_(mine, theirs, 1 - self.decay_at(step))
        for counter, value in self._copied:
            counter.copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return weights_of(self.model)

    def restore(self, saved: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
        """Continue from the result of `tensors`, or from the model's `weights` if the checkpoint has no average."""
        load_weights(self.model, saved or weights, "the checkpoint's average")
        return [] if saved else ["the checkpoint has no average of the weights: it starts from the weights"]


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
