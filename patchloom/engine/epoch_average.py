"""The mean of the weights after the last few epochs, as translation networks are averaged before they are used."""

import copy

import torch
from torch import Tensor, nn

from patchloom.engine.distribution import unwrap


class EpochAverage:
    """Takes in the model at the end of every epoch; `model` has the mean of the last `epochs` of them.

    The mean is taken in float32, oldest first, over copies that are kept in the host's memory and saved with the run,
    so a resumed run has bitwise the same. Counters are those of the last epoch.
    """

    name = "average"

    def __init__(self, model: nn.Module, epochs: int, steps_per_epoch: int) -> None:
        self.epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._followed = unwrap(model)
        self._averaged = copy.deepcopy(self._followed).eval().requires_grad_(False)
        self._kept: list[dict[str, Tensor]] = []  # oldest first

    @property
    def model(self) -> nn.Module | None:
        """The average; None while there are not two epochs to average."""
        return self._averaged if len(self._kept) > 1 else None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Called after the update that followed `step` others."""
        if (step + 1) % self._steps_per_epoch == 0:
            state = self._followed.state_dict()
            self._take({name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()})

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must keep."""
        return {f"{number}.{name}": tensor for number, kept in enumerate(self._kept) for name, tensor in kept.items()}

    def restore(self, kept: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:  # noqa: ARG002
        """Go on from what `tensors` gave; before the end of the first epoch that is nothing."""
        found: dict[int, dict[str, Tensor]] = {}
        for key, tensor in kept.items():
            number, name = key.split(".", 1)
            found.setdefault(int(number), {})[name] = tensor
        self._kept = []
        for _, of_epoch in sorted(found.items()):
            self._take(of_epoch)
        return []

    def _take(self, weights: dict[str, Tensor]) -> None:
        self._kept = [*self._kept, weights][-self.epochs :]
        self._averaged.load_state_dict({name: self._mean(name) for name in weights})

    def _mean(self, name: str) -> Tensor:
        values = [kept[name] for kept in self._kept]
        if not values[-1].is_floating_point():
            return values[-1]
        total = values[0].float().clone()
        for value in values[1:]:
            total += value.float()
        return total / len(values)
