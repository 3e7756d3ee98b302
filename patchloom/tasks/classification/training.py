"""Training of classifiers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from patchloom.data.datasets import LabeledImages, Source
from patchloom.engine.distribution import Processes
from patchloom.engine.run import Run
from patchloom.evaluation.classification import ClassificationReport, metric_names
from patchloom.inference.classifier import load
from patchloom.inference.evaluation_methods import EvaluationSettings
from patchloom.models.network import Network
from patchloom.options import share_of
from patchloom.plugins import metrics_by_name
from patchloom.recipes.candidates import Candidate
from patchloom.recipes.choices import Choice
from patchloom.runs.calibration import RunCalibration, write_calibration
from patchloom.runs.predictions import Predictions, fingerprint, save_predictions
from patchloom.tasks.classification.calibrate import RuleSettings, fit_rules, negatives_note
from patchloom.tasks.classification.teacher_labels import (
    keep_teacher_labels,
    labeled_by_teacher,
    labeling_teacher,
    lacks_labels,
    with_teacher_classes,
)
from patchloom.tasks.images.judges import ClassJudge
from patchloom.tasks.images.plan import ImagePlan, ImagePlanner
from patchloom.tasks.images.resolved_recipe import OpenedImages, Resolved
from patchloom.tasks.images.training import WholeImageTraining, check_loss
from patchloom.tasks.settings import TrainingSettings
from patchloom_runtime.calibration import Calibration
from patchloom_runtime.errors import UsageError, nearest


class ClassPlanner(ImagePlanner):
    """Images with one class each, of which some may be negatives."""

    fits_rules = True

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        teacher = labeling_teacher(source, settings)
        return with_teacher_classes(source, teacher) if teacher else source

    def needs_labels(self, source: Source, settings: TrainingSettings) -> bool:
        return super().needs_labels(source, settings) and not labeling_teacher(source, settings)

    def candidates(self, plan: ImagePlan) -> list[Candidate]:
        return [] if lacks_labels(plan) else super().candidates(plan)

    def resolve(self, opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
        names, negatives = opened.splits.classes.names, opened.settings.negatives
        RuleSettings(negatives=negatives).check(names)
        resolved = super().resolve(opened, epochs)
        return replace(resolved, notes=(*resolved.notes, *filter(None, [negatives_note(names, negatives)])))


class ClassificationTraining(WholeImageTraining):
    """A network with a classifier for the classes of the data, evaluated by its predictions for val."""

    planner_type = ClassPlanner
    plugins = (*WholeImageTraining.plugins, "model", "transform", "batch_transform", "loss", "metric", "select")

    def plan(self, settings: TrainingSettings, device: str) -> ImagePlan:
        plan = super().plan(settings, device)
        for kind in ("transform", "batch_transform", "loss"):
            if plan.method.views and getattr(settings, kind) is not None:
                raise UsageError(f"{kind} cannot be plugged into {plan.recipe.objective.method}, which compares views")
        if settings.loss is not None:
            classes, augment = len(plan.class_names), plan.recipe.augment
            labels = torch.arange(2) % classes
            targets = {"class numbers (B,)": labels}
            if augment.mixup or augment.cutmix:
                targets["class shares (B, K) of mixed images"] = F.one_hot(labels, classes).float()
            check_loss(settings.loss, classes, targets)
        known = [*metric_names(len(plan.class_names)), *metrics_by_name(settings.metrics)]
        if settings.select is not None and settings.select not in known:
            hint = nearest(settings.select, known)
            raise UsageError(f"--select is {settings.select!r}; expected one of {', '.join(known)}.{hint}")
        return plan

    def prepare(self, plan: ImagePlan, processes: Processes) -> ImagePlan:
        """Let the teacher label images without labels."""
        return replace(plan, splits=labeled_by_teacher(plan, processes)) if lacks_labels(plan) else plan

    def write_files(self, plan: ImagePlan, network: Network) -> None:
        super().write_files(plan, network)
        if lacks_labels(plan):
            keep_teacher_labels(plan)

    def judge(self, plan: ImagePlan, processes: Processes) -> ClassJudge:
        return ClassJudge(plan, processes)

    def evaluate_best(self, plan: ImagePlan, run: Run, network: Any, reports: Sequence[Any]) -> Any:
        """Evaluate the best weights on val, at the temperature that is chosen on these predictions."""
        report: ClassificationReport | None = super().evaluate_best(plan, run, network, reports)
        if report is None or report.logits is None or not np.isfinite(report.logits).all():
            return report
        return report.calibrated()

    def write_val(self, plan: ImagePlan, report: ClassificationReport) -> None:
        """Write `predictions.safetensors`, one row per image of val, and `calibration.json`."""
        save_predictions(plan.folder, Predictions(report, fingerprint(plan.splits.val)))
        if report.logits is None:
            return
        before, after = report.at_temperature(1.0).reliability(), report.reliability()
        rules = Calibration(report.temperature, plan.settings.negatives)
        write_calibration(plan.folder, RunCalibration(rules, len(report.index), before, after, report.fit))
        if plan.settings.max_error is not None:
            _fit_promise(plan)


def _fit_promise(plan: ImagePlan) -> None:
    """Store the rules of a run with --max-error, if val allows its promise; the report names them."""
    settings = plan.settings
    assert settings.max_error is not None
    wanted = RuleSettings(share_of(settings.max_error, "--max-error"), negatives=settings.negatives)
    evaluation = EvaluationSettings(batch=plan.recipe.optim.batch_size, workers=plan.workers)
    classifier, val = load(plan.folder, device=settings.device), plan.splits.val
    assert isinstance(val, LabeledImages)
    result = fit_rules(classifier, val, plan.splits.train, wanted, evaluation)
    if result.predictions is not None:
        result.store()
