"""The plan of a run for machines: what `train --dry-run --json` prints."""

from typing import Any

import torch

from patchloom.engine.run import Run
from patchloom.tasks.plan import Plan
from patchloom.training.machine import machine_of
from patchloom.training.measuring import StepTimes


def planned(plan: Plan, run: Run, measured: StepTimes, seconds: float) -> dict[str, Any]:
    """All that the printed plan says, as fields."""
    recipe = plan.recipe
    return {
        "task": plan.task.name,
        "data": plan.data_facts(),
        "model": {
            "name": recipe.model.name,
            "image_size": recipe.model.image_size,
            "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
            "multiply_adds": None,
            **plan.model_facts(),
        },
        "recipe": recipe.to_dict(),
        "choices": [{"key": each.key, "value": _plain(each.value), "why": each.why} for each in plan.choices],
        "epochs": recipe.schedule.epochs,
        "steps": run.schedule.total_steps,
        "batch": recipe.optim.batch_size,
        "micro_batches": run.accumulate,
        "machine": machine_of(run.processes),
        "seconds": round(seconds, 1),
        "per_second": round(measured.images_per_s, 1),  # images, or tokens of text
        "memory_mib": _memory_mib(run),
    }


def _memory_mib(run: Run) -> int | None:
    """What the measured steps took of a GPU; of a CPU it is not known."""
    device = run.processes.device
    return round(torch.cuda.max_memory_allocated(device) / 2**20) if device.type == "cuda" else None


def _plain(value: Any) -> Any:
    """A value that JSON has; others in words."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
