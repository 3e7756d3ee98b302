"""The results of a run: its best weights, val predictions, metadata and report; and the plan of a dry run."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.loop import TrainResult
from patchloom.engine.run import Run
from patchloom.engine.state import Progress
from patchloom.layers.low_rank import has_low_rank
from patchloom.machine import accelerator_name
from patchloom.models.cost import training_multiply_adds
from patchloom.models.from_config import load_weights
from patchloom.report.run_report import installed_versions
from patchloom.runs.run_metadata import RunMetadata, write_run_metadata
from patchloom.runs.weights import WEIGHTS, read_weights
from patchloom.tasks.plan import Plan
from patchloom.tasks.report import report_run
from patchloom.training.timing import StepTimes
from patchloom_runtime.printable import plural


def best_network(plan: Plan, run: Run, progress: Progress) -> nn.Module:
    """Return the run's network with its best weights, in eval mode; a new one if weights are sharded or of low rank."""
    if plan.settings.shard or has_low_rank(run.model):
        return plan.task.model.load_network(plan.folder)
    network = unwrap(run.model)
    if (progress.best_weights, progress.best_step) != ("model", progress.step):  # else it has them
        load_weights(network, read_weights(plan.folder / WEIGHTS), str(plan.folder / WEIGHTS))
    return network.eval()


def images_seen(run: Run, progress: Progress) -> int:
    """Return how many images the run was trained on so far: every view of an image and every epoch counts."""
    if run.plan is None:
        return 0
    per_epoch = min(run.plan.views_per_epoch, run.plan.steps_per_epoch * run.plan.batch_size)
    return progress.epoch * per_epoch + progress.samples


def write_results(
    plan: Plan, run: Run, network: nn.Module, val_report: Any, result: TrainResult, *, seconds: float
) -> Path:
    """Write the val predictions, `run.json` and `report.html`."""
    settings = plan.settings
    images = images_seen(run, result.progress) if plan.task.whole_images else 0
    per_image = plan.model_facts().get("multiply_adds") or 0
    if val_report is not None:
        plan.task.training.write_val(plan, val_report)
    record = RunMetadata(
        data=settings.data_text,
        data_name=plan.data_name,
        level=settings.level,
        **settings.reading.chosen(),  # type: ignore[arg-type]
        init=settings.init,
        ended=result.ended,
        epochs=result.progress.epoch,
        seconds=seconds,
        images_seen=images,
        training_multiply_adds=training_multiply_adds(images, per_image),
        best_weights=result.progress.best_weights or "model",
        machine=machine_of(run.processes),
        versions=installed_versions(),
        choices={choice.key: choice.why for choice in plan.choices},
        notes=list(plan.notes),
    )
    write_run_metadata(plan.folder, record)
    return report_run(plan.folder, plan=plan, network=network.cpu())


def plan_facts(plan: Plan, run: Run, measured: StepTimes, seconds: float) -> dict[str, Any]:
    """Return the plan of a dry run for `--json`."""
    recipe, device = plan.recipe, run.processes.device
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None  # unknown on a CPU
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
        "memory_mib": None if memory is None else round(memory / 2**20),
    }


def _plain(value: Any) -> Any:
    """Return the value if JSON has it, else as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def machine_of(processes: Processes) -> str:
    """Return the devices of the processes and their precision as text."""
    device = processes.device
    cpu = f"CPU, {plural(torch.get_num_threads(), 'thread')}"
    return f"{processes.world} × {accelerator_name(device) or cpu}, {processes.precision}"
