"""Mean of the weights after the last few epochs, the usual checkpoint average of translation networks."""

import copy

import torch
from torch import Tensor, nn

from patchloom.engine.distribution import unwrap


class EpochAverage:
    """An average over the last `epochs` epochs, updated at the end of each.

    The mean is computed in float32, oldest first, from copies in host memory that are saved with the run, so a resumed
    run computes it bit for bit. Counters are those of the last epoch.
    """

    name = "average"

    def __init__(self, model: nn.Module, epochs: int, steps_per_epoch: int) -> None:
        self.epochs, self._steps_per_epoch = epochs, steps_per_epoch
        self._followed = unwrap(model)
        self._averaged = copy.deepcopy(self._followed).eval().requires_grad_(False)
        self._copies: list[dict[str, Tensor]] = []  # oldest first

    @property
    def model(self) -> nn.Module | None:
        """Return the averaged network, or None until two epochs are available."""
        return self._averaged if len(self._copies) > 1 else None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the model's weights if update number `step`, counted from 0, ends an epoch."""
        if (step + 1) % self._steps_per_epoch == 0:
            state = self._followed.state_dict()
            self._add({name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()})

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {f"{number}.{name}": tensor for number, copy in enumerate(self._copies) for name, tensor in copy.items()}

    def restore(self, saved: dict[str, Tensor], weights: dict[str, Tensor]) -> list[str]:  # noqa: ARG002
        """Continue from the result of `tensors`, which is empty before the end of the first epoch."""
        by_epoch: dict[int, dict[str, Tensor]] = {}
        for key, tensor in saved.items():
            number, name = key.split(".", 1)
            by_epoch.setdefault(int(number), {})[name] = tensor
        self._copies = []
        for _, state in sorted(by_epoch.items()):
            self._add(state)
        return []

    def _add(self, weights: dict[str, Tensor]) -> None:
        self._copies = [*self._copies, weights][-self.epochs :]
        self._averaged.load_state_dict({name: self._mean(name) for name in weights})

    def _mean(self, name: str) -> Tensor:
        values = [copy[name] for copy in self._copies]
        if not values[-1].is_floating_point():
            return values[-1]
        total = values[0].float().clone()
        for value in values[1:]:
            total += value.float()
        return total / len(values)
