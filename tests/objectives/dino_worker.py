"""One process of a DINO training, which writes the weights it ends with."""

import torch

from patchloom.data.batches.sampler import rank_positions
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import train
from patchloom.engine.optimization import make_optimizer
from tests.engine.toys import make_run, optim_part
from tests.objectives.test_dino import Seen, ViewBatches, make, network


class Share(ViewBatches):
    """This rank's images of every batch."""

    def __init__(self, processes: Processes) -> None:
        super().__init__()
        self.processes = processes

    def epoch(self, epoch: int, start_step: int = 0):  # type: ignore[no-untyped-def]
        for batch in super().epoch(epoch, start_step):
            rows = torch.from_numpy(rank_positions(4, self.processes.rank, self.processes.world))
            yield Seen([view[rows] for view in batch.views])


def train_and_write(beginning: str) -> None:
    """Into the file whose name begins so and ends with the rank."""
    processes = Processes("fp32", device="cpu")
    student = network()
    dino = make(student, add_up=processes.sum_)
    parts = {"model": student, "objective": dino, "optimizer": make_optimizer(student, optim_part("sgd"), dino)}
    train(make_run(None, processes=processes, loader=Share(processes), evaluators=(), metric=None, **parts))
    torch.save({"student": student.state_dict(), "dino": dino.state_dict()}, f"{beginning}{processes.rank}")
    processes.close()
