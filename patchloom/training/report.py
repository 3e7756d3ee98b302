"""What is left when a run has ended: its numbers on the val split and `report.html`."""

from pathlib import Path
from typing import Any

from patchloom.checkpoint import load_network
from patchloom.engine.distribution import Processes
from patchloom.engine.loop import Outcome
from patchloom.engine.records import read_metrics
from patchloom.evaluation.classification import ClassificationReport
from patchloom.inspection.interactions import interaction_picture, sparsity_chart, token_unit_picture
from patchloom.inspection.report import RecipeRow, Summary, recipe_rows, write_report
from patchloom.models.mixer import Mixer
from patchloom.models.network import Network
from patchloom.models.resmlp import ResMLP
from patchloom.training.assemble import Evaluator, worker_count
from patchloom.training.plan import Plan

WORST_SHOWN = 24


def final_report(plan: Plan, processes: Processes) -> ClassificationReport:
    """The best weights of the folder on the val split."""
    network, _ = load_network(plan.folder)
    with processes.autocast():
        return Evaluator(plan, processes, worker_count(plan.settings)).report(network.to(processes.device))


def report_run(plan: Plan, report: ClassificationReport, outcome: Outcome, seconds: float) -> Path:
    """`report.html`: curves, confusion, mistakes, what the patches listen to, the resolved recipe, the cost."""
    network, _ = load_network(plan.folder)
    why = {choice.key: choice.why for choice in plan.choices}
    page = plan.folder / "report.html"
    write_report(
        page,
        title=f"{plan.recipe.model.name} on {plan.splits.name}",
        summary=Summary(
            model=plan.recipe.model.name,
            data=plan.splits.name,
            top1=report.top(1),
            weights="ema" if outcome.progress.best_weights == "ema" else "model",
            epochs=outcome.progress.epoch,
            seconds=seconds,
            command=f"patchloom train {plan.settings.data} --recipe {plan.folder / 'recipe.yaml'} --out NEW-FOLDER",
            next_command=f"patchloom predict {plan.folder} IMAGE",
        ),
        curves=read_metrics(plan.folder / "metrics.jsonl"),
        confusion=report.confusion,
        class_names=report.classes,
        per_class=report.class_accuracy,
        mistakes=[(plan.splits.val.read(mistake.index), mistake) for mistake in report.worst(WORST_SHOWN)],
        pictures=_pictures(network),
        recipe=[RecipeRow(row.key, row.value, why.get(row.key, row.why)) for row in recipe_rows(plan.recipe)],
        cost=plan.cost,
        notes=plan.splits.notes,
    )
    return page


def _pictures(network: Network) -> list[tuple[str, Any, str]]:
    """What the network's patches listen to, where it has a picture of that."""
    if isinstance(network, ResMLP) and network.config.communication == "linear":
        return [
            (
                "Patch interactions",
                interaction_picture(network),
                "Rows of each layer's matrix across patches, one small image for each of the central patches.",
            ),
            ("Sparsity", sparsity_chart(network), "Share of weights below 5 % of the layer's largest."),
        ]
    if isinstance(network, Mixer) and not network.config.untied and network.config.groups == 1:
        return [("Token-mixing units", token_unit_picture(network), "Weights of hidden units over the patches.")]
    return []
