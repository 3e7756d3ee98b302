"""Short runs of Grafit in the engine, alone or as one process of several."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchloom.data.batches.sampler import rank_positions
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import train
from patchloom.engine.optimization import make_optimizer
from patchloom.engine.run import Run
from patchloom.objectives.grafit import METHODS, Grafit
from tests.engine.toys import BATCH, STEPS, make_run, network, optim_part

IMAGES = STEPS * BATCH
LABELS = torch.arange(IMAGES) % 3
EPOCHS = 3


@dataclass(frozen=True)
class ViewBatch:
    views: list[Tensor]  # T of (B, 3, H, W) uint8
    labels: Tensor  # (B,)
    index: Tensor  # (B,)

    def __len__(self) -> int:
        return len(self.index)


class Views:
    """Every image once an epoch, in two views drawn from (epoch, step)."""

    steps_per_epoch = STEPS

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self._rows = torch.from_numpy(rank_positions(BATCH, rank, world))

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ViewBatch]:
        order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch))
        for step in range(start_step, STEPS):
            generator = torch.Generator().manual_seed(1000 * epoch + step)
            pixels = torch.randint(256, (2, BATCH, 3, 16, 16), dtype=torch.uint8, generator=generator)
            index = order[step * BATCH : (step + 1) * BATCH][self._rows]
            yield ViewBatch([view[self._rows] for view in pixels], LABELS[index], index)


def grafit_run(folder: Path | None, method: str, processes: Processes | None = None, **fields: Any) -> Run:
    processes = processes or Processes("fp32", device="cpu")
    model = network(num_classes=0, drop_path=0.0, projector=METHODS[method].projector)
    objective = Grafit(
        METHODS[method],
        model,
        LABELS,
        total_steps=EPOCHS * STEPS,
        pixel_mean=(0.5,) * 3,
        pixel_std=(0.25,) * 3,
        gather=processes.gather_rows,
    )
    optimizer = make_optimizer(model, optim_part("sgd", momentum=0.9), objective)
    loader = Views(processes.rank, processes.world)
    return make_run(
        folder, epochs=EPOCHS, processes=processes, model=model, objective=objective, optimizer=optimizer,
        loader=loader, evaluators=[], metric=None, **fields,
    )  # fmt: skip


def keep_states(folder: Path) -> None:
    """What the objectives of this process end with, in files."""
    processes = Processes("fp32", device="cpu")
    for method in ("snca", "grafit"):
        run = grafit_run(None, method, processes)
        train(run)
        torch.save(run.objective.state_dict(), folder / f"{method}-{processes.rank}.pt")
    processes.close()
