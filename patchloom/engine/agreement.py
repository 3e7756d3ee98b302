"""What all ranks must know before an update: whether the loss is finite and whether somebody wants to stop or save.

The numbers leave the device between the last forward and the last backward pass and are read before the update.
So no update with a bad loss is ever made, and all ranks stop at the same step; yet the host waits at most for the
forward pass, while the backward pass is already queued, and the device is never idle. A gradient that
overflows under a finite loss shows one step later, in that step's loss; nothing is saved in between that is
not finite.
"""

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from patchloom.engine.distribution import Processes


@dataclass(frozen=True)
class RankRequests:
    """What a rank asks for after this step; of all ranks together, how many ask."""

    terminate: int = 0  # SIGTERM
    interrupt: int = 0  # SIGINT
    time_up: int = 0
    save: int = 0


class RankAgreement:
    """One exchange a step: `send` before the last backward pass, `receive` before the update."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._event = torch.cuda.Event() if processes.device.type == "cuda" else None
        slots = 1 if processes.world == 1 else 1 + len(astuple(RankRequests()))
        self._host = torch.zeros(slots, pin_memory=self._event is not None)

    def send(self, loss: Tensor, wishes: Callable[[], RankRequests]) -> None:
        """Set this rank's loss and wishes on their way."""
        shared = loss.detach().float().reshape(1)
        if self._processes.world > 1:
            asked = torch.tensor(astuple(wishes()), dtype=torch.float32).to(shared.device, non_blocking=True)
            shared = self._processes.sum_(torch.cat([shared, asked]))
        self._host.copy_(shared, non_blocking=True)
        if self._event:
            self._event.record()

    def receive(self, wishes: Callable[[], RankRequests]) -> tuple[float, RankRequests]:
        """The mean loss of all ranks and what they ask for together; a single one may have asked since `send`."""
        if self._event:
            self._event.synchronize()
        loss, *asked = self._host.tolist()
        return loss / self._processes.world, RankRequests(*map(int, asked)) if asked else wishes()


def is_bad(loss: float) -> bool:
    """Whether a loss must not be learned from."""
    return not math.isfinite(loss)
