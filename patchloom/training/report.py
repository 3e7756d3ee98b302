"""What is left when a run has ended: its best weights, what they decided about val, how it went, and `report.html`."""

from pathlib import Path
from typing import Any

from torch import nn

from patchloom.engine.distribution import unwrap
from patchloom.engine.loop import TrainResult
from patchloom.engine.run import Run
from patchloom.engine.state import Progress
from patchloom.models.from_config import load_weights
from patchloom.report.run_report import installed_versions
from patchloom.runs.run_metadata import RunMetadata, write_run_metadata
from patchloom.runs.weights import WEIGHTS, read_weights
from patchloom.tasks.plan import Plan
from patchloom.tasks.report import report_run


def best_network(plan: Plan, run: Run, progress: Progress) -> nn.Module:
    """Return the run's network with its best weights, in eval mode; a new one if weights are sharded."""
    if plan.settings.shard:
        return plan.task.model.load_network(plan.folder)
    network = unwrap(run.model)
    if (progress.best_weights, progress.best_step) != ("model", progress.step):  # else it has them
        load_weights(network, read_weights(plan.folder / WEIGHTS), str(plan.folder / WEIGHTS))
    return network.eval()


def keep_and_report(
    plan: Plan, network: nn.Module, judged: Any, outcome: TrainResult, *, seconds: float, machine: str
) -> Path:
    """Write what the run decided about val, `run.json` and `report.html`."""
    settings = plan.settings
    if judged is not None:
        plan.task.training.write_val(plan, judged)
    record = RunMetadata(
        data=settings.data_text,
        data_name=plan.data_name,
        level=settings.level,
        **settings.reading.chosen(),  # type: ignore[arg-type]
        init=settings.init,
        ended=outcome.ended,
        epochs=outcome.progress.epoch,
        seconds=seconds,
        best_weights=outcome.progress.best_weights or "model",
        machine=machine,
        versions=installed_versions(),
        choices={choice.key: choice.why for choice in plan.choices},
        notes=list(plan.notes),
    )
    write_run_metadata(plan.folder, record)
    return report_run(plan.folder, plan=plan, network=network.cpu())
