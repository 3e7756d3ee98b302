"""The exchange between ranks before each update: is the loss finite, and does any rank want to stop or save?

The values leave the device between the last forward and the last backward pass and are read before the update. A
non-finite loss therefore never reaches the weights, and all ranks stop at the same step. The host waits for the forward
pass at most, while the backward pass is already queued, so the device is never idle. If a gradient overflows under a
finite loss, the next step's loss shows it; no checkpoint is written in between.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from patchloom.engine.distribution import Processes


@dataclass(frozen=True)
class RankRequests:
    """Requests of one rank after this step. Summed over ranks: the number of ranks with each request."""

    terminate: int = 0  # SIGTERM
    interrupt: int = 0  # SIGINT
    time_up: int = 0
    save: int = 0


class RankAgreement:
    """One exchange per step: call `send` before the last backward pass and `receive` before the update."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._event = torch.cuda.Event() if processes.device.type == "cuda" else None
        slots = 1 if processes.world == 1 else 1 + len(astuple(RankRequests()))
        self._host = torch.zeros(slots, pin_memory=self._event is not None)

    def send(self, loss: Tensor, requests: Callable[[], RankRequests]) -> None:
        """Start sending this rank's loss and requests."""
        shared = loss.detach().float().reshape(1)
        if self._processes.world > 1:
            counts = torch.tensor(astuple(requests()), dtype=torch.float32).to(shared.device, non_blocking=True)
            shared = self._processes.sum_(torch.cat([shared, counts]))
        self._host.copy_(shared, non_blocking=True)
        if self._event:
            self._event.record()

    def receive(self, requests: Callable[[], RankRequests]) -> tuple[float, RankRequests]:
        """Return the mean loss and the summed requests of all ranks. A single process evaluates `requests` now."""
        if self._event:
            self._event.synchronize()
        loss, *counts = self._host.tolist()
        return loss / self._processes.world, RankRequests(*map(int, counts)) if counts else requests()


def is_bad(loss: float) -> bool:
    """Return whether a loss is infinite or NaN."""
    return not math.isfinite(loss)
