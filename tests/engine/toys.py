"""A run small enough for a test: a tiny network with stochastic depth, pictures made from a seed, no files read."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchloom
from patchloom.data.batches.sampler import rank_positions
from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.distribution import Processes
from patchloom.engine.ema import Ema
from patchloom.engine.optimization import Schedule, make_optimizer
from patchloom.engine.records import Records
from patchloom.engine.run import Run
from patchloom.objectives.objective import Objective
from patchloom.recipes.parts import OptimPart, SchedulePart
from patchloom.runs.checkpoints import CheckpointFolder
from patchloom.runs.metrics import MetricsFile

STEPS, BATCH, CLASSES = 5, 8, 3


class ToyImages:
    """A loader that makes its batches from (epoch, step); like torch's, it draws from the global generator."""

    def __init__(self, steps: int = STEPS, batch: int = BATCH, rank: int = 0, world: int = 1) -> None:
        self.steps_per_epoch = steps
        self._batch, self._rank, self._world = batch, rank, world

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[ImageBatch]:
        torch.rand(1)
        for step in range(start_step, self.steps_per_epoch):
            generator = torch.Generator().manual_seed(1000 * epoch + step)
            images = torch.randn(self._batch, 3, 16, 16, generator=generator)
            labels = torch.randint(CLASSES, (self._batch,), generator=generator)
            rows = torch.from_numpy(rank_positions(self._batch, self._rank, self._world))
            yield ImageBatch(images[rows], labels[rows], rows + epoch * 1000)


class ByFunction(Objective):
    """An objective that is no more than its loss."""

    def __init__(self, function: Callable[..., dict[str, Tensor]]) -> None:
        self._function = function

    def __call__(self, model: nn.Module, batch: Any, *, epoch: int, step: int) -> dict[str, Tensor]:
        return self._function(model, batch, epoch=epoch, step=step)


def classify(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
    logits = model(batch.images)
    right = (logits.detach().argmax(1) == batch.labels).float().mean()
    return {"loss": F.cross_entropy(logits, batch.labels), "accuracy": 100 * right}


def evaluator(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Differs between model, average and epoch, and draws random numbers."""
    torch.rand(3)
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    yield "score", model(images).float().std().item()


def network(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    tiny = {"depth": 2, "dim": 16, "patch_size": 8, "image_size": 16, "drop_path": 0.2, "num_classes": CLASSES}
    model = patchloom.create_model("resmlp_s12", **(tiny | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def optim_part(name: str = "adamw", **fields: Any) -> OptimPart:
    return OptimPart(**({"name": name, "lr": 0.01, "batch_size": BATCH, "weight_decay": 0.05} | fields))


def make_run(folder: Path | None = None, *, optim: str = "adamw", epochs: int = 3, **fields: Any) -> Run:
    """A fresh run of 3 epochs of 5 steps, its metrics and checkpoints in `folder`."""
    processes = fields.pop("processes", None) or Processes("fp32", device="cpu")
    model = fields.pop("model", None) or network()
    average = fields.pop("ema_decay", None)
    loader = fields.pop("loader", None) or ToyImages(rank=processes.rank, world=processes.world)
    objective = fields.pop("objective", classify)
    part = optim_part(optim)
    torch.manual_seed(1 + processes.rank)
    saving = folder is not None and processes.is_main
    return Run(
        **{
            "model": model,
            "objective": objective if isinstance(objective, Objective) else ByFunction(objective),
            "optimizer": make_optimizer(model, part),
            "schedule": Schedule(part, SchedulePart(epochs=epochs, warmup_epochs=1), loader.steps_per_epoch),
            "loader": loader,
            "processes": processes,
            "records": Records([MetricsFile(folder / "metrics.jsonl")]) if saving else Records(),
            "saver": CheckpointFolder(folder) if saving else None,
            "average": Ema(model, average) if average else None,
            "evaluators": [evaluator],
            "metric": "score",
            "log_every": 2,
            **fields,
        }
    )
