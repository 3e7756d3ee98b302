"""The exponential average of the weights: ema ← decay·ema + (1 − decay)·weights after every update."""

import copy

import torch
from torch import Tensor, nn

from patchloom.engine.distribution import unwrap
from patchloom.engine.state import weights_of
from patchloom.models.from_config import load_weights
from patchloom.models.sharding import is_sharded
from patchloom_runtime.errors import UsageError


class Ema:
    """A copy of `model` on its device that follows it; floating-point buffers are averaged, counters copied.

    Early on the average is shorter, (1 + t)/(10 + t) after t updates, so that short runs do not keep their
    random start. Make it after the model is on its device and has its final parameters.
    """

    name = "ema"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        source = unwrap(model)
        if any(is_sharded(p) for p in source.parameters()):
            raise UsageError("An average of weights split over ranks is not kept. Set optim.ema_decay to none.")
        self.model = copy.deepcopy(source).eval().requires_grad_(False)
        pairs = [(mine, theirs) for (_, mine), (_, theirs) in zip(_tensors(self.model), _tensors(source), strict=True)]
        self._averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self._copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    def decay_at(self, step: int) -> float:
        """The decay of the update that follows `step` others."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the model after an update that followed `step` others."""
        mine, theirs = map(list, zip(*self._averaged, strict=True))
        torch._foreach_lerp_(mine, theirs, 1 - self.decay_at(step))
        for counter, value in self._copied:
            counter.copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""
        return weights_of(self.model)

    def restore(self, kept: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:
        """Go on from what `tensors` gave; where a checkpoint has none, from the model's `weights`."""
        load_weights(self.model, kept or weights, "the checkpoint's average")
        return [] if kept else ["the checkpoint has no average of the weights: it starts from the weights"]


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
