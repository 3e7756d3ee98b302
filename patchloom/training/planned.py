"""The plan of a run for machines: what `train --dry-run --json` prints."""

from pathlib import Path
from typing import Any, Protocol

import torch

from patchloom.build import Choice
from patchloom.engine.run import Run
from patchloom.recipes.schema import Recipe


class AnyPlan(Protocol):
    """What the plans for images and for text have in common."""

    @property
    def recipe(self) -> Recipe:
        """What is run."""

    @property
    def choices(self) -> list[Choice]:
        """Fields that were chosen, with the reasons."""

    @property
    def folder(self) -> Path:
        """Where it goes."""


def planned(
    plan: AnyPlan,
    run: Run,
    *,
    data: dict[str, Any],
    multiply_adds: int | None = None,
    seconds: float,
    per_second: float,
    machine: str,
) -> dict[str, Any]:
    """All that the printed plan says, as fields."""
    recipe = plan.recipe
    return {
        "data": data,
        "model": {
            "name": recipe.model.name,
            "image_size": recipe.model.image_size,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "multiply_adds": multiply_adds,
        },
        "recipe": recipe.to_dict(),
        "choices": [{"key": each.key, "value": _plain(each.value), "why": each.why} for each in plan.choices],
        "epochs": recipe.schedule.epochs,
        "steps": run.schedule.total_steps,
        "batch": recipe.optim.batch_size,
        "micro_batches": run.accumulate,
        "machine": machine,
        "seconds": round(seconds, 1),
        "per_second": round(per_second, 1),  # images, or tokens of text
        "memory_mib": _memory_mib(run),
    }


def _memory_mib(run: Run) -> int | None:
    """What the measured steps took of a GPU; of a CPU it is not known."""
    device = run.processes.device
    return round(torch.cuda.max_memory_allocated(device) / 2**20) if device.type == "cuda" else None


def _plain(value: Any) -> Any:
    """A value that JSON has; others in words."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
