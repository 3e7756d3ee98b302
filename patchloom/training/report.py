"""What is left when a run has ended: its decisions about the val split, how it went, and `report.html`."""

from pathlib import Path
from typing import cast

import torch

from patchloom.checkpoint import load_network
from patchloom.deployment.report import report_run
from patchloom.deployment.run_record import RunRecord, write_run_record
from patchloom.engine.loop import Outcome
from patchloom.engine.run import Run
from patchloom.evaluation.classification import ClassificationReport
from patchloom.evaluation.predictions import Predictions, fingerprint, save_predictions
from patchloom.inspection.report import installed_versions
from patchloom.training.evaluators import Evaluator, Report
from patchloom.training.plan import Plan


def final_report(plan: Plan, run: Run) -> Report | None:
    """The best weights of the folder on the val split; None where nothing judges them."""
    if not run.evaluators:
        return None
    network, _ = load_network(plan.folder)
    with torch.no_grad(), run.processes.autocast():
        return cast(Evaluator, run.evaluators[0]).report(network.to(run.processes.device))


def keep_and_report(plan: Plan, report: Report | None, outcome: Outcome, *, seconds: float, machine: str) -> Path:
    """Write `predictions.safetensors` of a classifier, `run.json` and `report.html`."""
    settings, splits = plan.settings, plan.splits
    if isinstance(report, ClassificationReport):
        save_predictions(plan.folder, Predictions(report, fingerprint(splits.val)))
    record = RunRecord(
        data=settings.data,
        data_name=splits.name,
        level=settings.level,
        **settings.reading.given(),  # type: ignore[arg-type]
        init=settings.init,
        ended=outcome.ended,
        epochs=outcome.progress.epoch,
        seconds=seconds,
        best_weights=outcome.progress.best_weights or "model",
        machine=machine,
        versions=installed_versions(),
        choices={choice.key: choice.why for choice in plan.choices},
        notes=list(splits.notes),
    )
    write_run_record(plan.folder, record)
    return report_run(plan.folder, val=splits.val)
