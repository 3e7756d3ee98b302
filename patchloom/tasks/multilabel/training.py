"""Training of multi-label classifiers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.data.annotations.image_labels import of_labels
from patchloom.data.datasets import Source
from patchloom.engine.distribution import Processes
from patchloom.engine.run import Run
from patchloom.evaluation.calibration import reliability_at
from patchloom.evaluation.multilabel import MultilabelReport, evaluate
from patchloom.models.network import Network
from patchloom.recipes.choices import Choice
from patchloom.runs.calibration import RunCalibration, write_calibration
from patchloom.runs.config import is_run
from patchloom.runs.predictions import fingerprint
from patchloom.tasks.images.judges import ImageJudge
from patchloom.tasks.images.networks import teacher_names
from patchloom.tasks.images.plan import ImagePlan, ImagePlanner
from patchloom.tasks.images.resolved_recipe import OpenedImages, Resolved, resolve
from patchloom.tasks.images.training import WholeImageTraining, check_loss
from patchloom.tasks.multilabel.run_files import ValLabels, write_val_labels
from patchloom.tasks.plan import TrainingSettings, method_of_settings, refuse_unread
from patchloom.tasks.table import task_of_run
from patchloom_runtime.calibration import Calibration
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import plural

METHOD = "objective.method"
LEAST_SHARE = 0.01  # to which the share of a label is bounded where its bias starts


class MultilabelPlan(ImagePlan):
    """A plan for a run on images with several labels each."""

    def _targets_text(self) -> str:
        targets = self.splits.train.targets
        assert targets is not None
        per_image = np.nansum(targets.values, axis=1).mean()
        return f", {plural(len(targets.names), 'label')}, {per_image:.1f} per image"


class MultilabelPlanner(ImagePlanner):
    """Plans runs on the labels of images: those of a list, or the classes of objects, pixels or folders."""

    plan_type = MultilabelPlan

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        refuse_unread(settings, ("level",), "is a level of classes; runs with several labels per image have none")
        labeled = of_labels(source)
        if len(labeled.train.names) < 2:
            names = ", ".join(labeled.train.names) or "none"
            raise DataError(f"{source.name}: one label or none ({names}); multi-label needs two or more")
        return labeled

    def needs_labels(self, source: Source, settings: TrainingSettings) -> bool:
        del source, settings
        return False

    def resolve(self, opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
        settings = opened.settings
        reasons: dict[str, Choice] = {}
        if method_of_settings(settings) is None:
            automatic = (
                Choice(METHOD, self.task.name, "auto: one decision per label"),
                Choice("objective.smoothing", 0.0, "auto: decisions on labels are not smoothed"),
            )
            reasons = {choice.key: choice for choice in automatic if choice.key not in settings.changes}
            values = {key: choice.value for key, choice in reasons.items()}
            opened = opened.changed(settings=replace(settings, changes=values | settings.changes))
        resolved = resolve(opened, epochs)
        teacher = resolved.recipe.objective.teacher
        for name in teacher_names(teacher) if teacher else ():
            _check_teacher(name, self.task.name)
        return replace(resolved, choices=[reasons.get(each.key, each) for each in resolved.choices])


class MultilabelJudge(ImageJudge):
    """Evaluates the scores of val images; the mean average precision selects the best weights."""

    metric = "map"
    tie_breaker = "loss"

    def report(self, model: nn.Module) -> MultilabelReport:
        network = self.network(model)
        return evaluate(
            network,
            self._batches("val"),
            classes=self._plan.splits.classes.names,
            pixel_mean=network.pixel_mean,
            pixel_std=network.pixel_std,
            gather=self._joined,
        )


class MultilabelTraining(WholeImageTraining):
    """A network with one output per label, evaluated by its scores for val."""

    planner_type = MultilabelPlanner
    has_classes = False
    plugins = (*WholeImageTraining.plugins, "model", "transform", "batch_transform", "loss")

    def plan(self, settings: TrainingSettings, device: str) -> ImagePlan:
        plan = super().plan(settings, device)
        if settings.loss is not None:
            labels = len(plan.class_names)
            check_loss(settings.loss, labels, {"0/1 vectors (B, K)": torch.eye(2, labels)})
        return plan

    @torch.no_grad()
    def begin(self, plan: ImagePlan, network: Network, processes: Processes, say: Callable[[str], None]) -> None:
        """Let a new classifier start at the share of each label, so that it does not first have to learn these."""
        del processes, say
        if plan.start is not None and plan.start.keeps(plan.splits.classes.names):
            return
        targets = plan.splits.train.targets
        assert targets is not None
        known = np.maximum((~np.isnan(targets.values)).sum(axis=0), 1)
        shares = np.clip(targets.counts / known, LEAST_SHARE, 1 - LEAST_SHARE)
        odds = torch.tensor([math.log(share / (1 - share)) for share in shares])
        for name in network.classifiers():
            layer = network.get_submodule(name)
            if isinstance(layer, nn.Linear) and layer.bias is not None and len(layer.bias) == len(odds):
                layer.bias.copy_(odds)

    def images_before(self, plan: ImagePlan) -> int:
        del plan
        return 0

    def judge(self, plan: ImagePlan, processes: Processes) -> MultilabelJudge:
        return MultilabelJudge(plan, processes)

    def evaluate_best(self, plan: ImagePlan, run: Run, network: Any, reports: Sequence[Any]) -> Any:
        """Evaluate the best weights on val, and choose the temperature and the thresholds of all labels there."""
        report: MultilabelReport | None = super().evaluate_best(plan, run, network, reports)
        if report is None or not np.isfinite(report.scores).all():
            return report
        return report.calibrated()

    def write_val(self, plan: ImagePlan, report: MultilabelReport) -> None:
        """Write `thresholds.json`, `calibration.json`, and `labeled.safetensors` with the scores of val."""
        write_val_labels(plan.folder, ValLabels(report, fingerprint(plan.splits.val)))
        logits, applies, _ = report.decisions_on_labels
        before, after = (reliability_at(logits, applies, each) for each in (1.0, report.temperature))
        calibration = RunCalibration(Calibration(report.temperature), len(report.index), before, after, report.fit)
        write_calibration(plan.folder, calibration)


def _check_teacher(name: str, task: str) -> None:
    """Raise UsageError for a run of another task, whose outputs are not one decision per label."""
    if not is_run(name) or task_of_run(Path(name)).name != task:
        raise UsageError(f"--teacher {name}: expected the folder of a multi-label run with the labels of these data")
