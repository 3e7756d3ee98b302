"""Means of what an objective returns, kept on the device: reading a number makes the host wait for the device."""

import torch
from torch import Tensor

from patchloom.engine.distribution import Processes


class Averages:
    """Sums since the last reset and how many batches they hold."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.count = 0.0

    def add(self, values: dict[str, Tensor], share: float) -> None:
        """Count in the scalars of a micro-batch that is `share` of a batch."""
        for name, value in values.items():
            if name in self.sums:
                # A new tensor, so that whoever copied the dict can go back to it.
                self.sums[name] = self.sums[name].add(value.detach(), alpha=share)
            else:
                self.sums[name] = value.detach().float() * share
        self.count += share

    def read(self, processes: Processes | None = None) -> dict[str, float]:
        """The means: of all ranks when `processes` is given, which all of them must then do together."""
        if not self.sums:
            return {}
        sums = self.over_ranks(processes) if processes else self.sums
        names = sorted(sums)
        means = torch.stack([sums[name] for name in names]).tolist()
        return {name: mean / self.count for name, mean in zip(names, means, strict=True)}

    def over_ranks(self, processes: Processes) -> dict[str, Tensor]:
        """The sums of an average rank; all ranks do this together."""
        if processes.world == 1 or not self.sums:
            return dict(self.sums)
        sums = processes.sum_(torch.stack(list(self.sums.values()))) / processes.world
        return dict(zip(self.sums, sums.unbind(), strict=True))

    def reset(self) -> None:
        """Start a new mean."""
        self.sums, self.count = {}, 0.0

    def restore(self, sums: dict[str, Tensor], count: float, device: torch.device) -> None:
        """Go on with a mean that was interrupted."""
        self.sums = {name: value.to(device) for name, value in sums.items()}
        self.count = count
