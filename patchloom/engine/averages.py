"""Running means of an objective's scalars, kept on the device because reading them makes the host wait."""

import torch
from torch import Tensor

from patchloom.engine.distribution import Processes


class Averages:
    """Sums since the last reset and the number of batches in them."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0.0

    def add(self, values: dict[str, Tensor], share: float) -> None:
        """Add the scalars of a micro-batch that makes up `share` of a batch."""
        for name, value in values.items():
            if name in self.sums:
                # Out of place: callers copy the dict to be able to undo a step.
                self.sums[name] = self.sums[name].add(value.detach(), alpha=share)
            else:
                self.sums[name] = value.detach().float() * share
        self.count += share

    def read(self, processes: Processes | None = None) -> dict[str, float]:
        """Return the means; with `processes`, over all ranks, which must then call this together."""
        if not self.sums:
            return {}
        sums = self.over_ranks(processes) if processes else self.sums
        names = sorted(sums)
        means = torch.stack([sums[name] for name in names]).tolist()
        return {name: mean / self.count for name, mean in zip(names, means, strict=True)}

    def over_ranks(self, processes: Processes) -> dict[str, Tensor]:
        """Return the sums averaged over ranks. All ranks must call this together."""
        if processes.world == 1 or not self.sums:
            return dict(self.sums)
        sums = processes.sum_(torch.stack(list(self.sums.values()))) / processes.world
        return dict(zip(self.sums, sums.unbind(), strict=True))

    def reset(self) -> None:
        self.sums, self.count = {}, 0.0

    def restore(self, sums: dict[str, Tensor], count: float, device: torch.device) -> None:
        """Continue interrupted means."""
        self.sums = {name: value.to(device) for name, value in sums.items()}
        self.count = count
