"""Training of segmentation networks: any backbone under UperNet or a linear head, evaluated by mIoU."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from patchloom.data.annotations.mask_classes import of_masks
from patchloom.data.checking.survey import Survey
from patchloom.data.datasets import Source, Splits
from patchloom.engine.distribution import Processes
from patchloom.evaluation.calibration import choose_temperature, reliability_at
from patchloom.evaluation.segmentation import SegmentationReport
from patchloom.models.cost import cost
from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
from patchloom.objectives.objective import Ingredients, Objective, make_objective
from patchloom.recipes.candidates import Candidate, segmentation_candidates
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.schema import Recipe, override
from patchloom.recipes.segmentation import auto_segmentation, upernet_160k
from patchloom.runs.calibration import RunCalibration, write_calibration
from patchloom.runs.predictions import fingerprint
from patchloom.tasks.images.networks import network_options
from patchloom.tasks.images.plan import ImagePlan, ImagePlanner
from patchloom.tasks.images.resolved_recipe import OpenedImages, Resolved, preprocessing_of, resolve_fields
from patchloom.tasks.images.training import ImageTraining, image_loader, initialize_backbone, write_image_files
from patchloom.tasks.plan import LABEL_OPTIONS, TrainingSettings, refuse_fit, refuse_unread
from patchloom.tasks.segmentation.judge import SegmentationJudge, sampled_logits
from patchloom.tasks.segmentation.model import load_segmenter
from patchloom.tasks.segmentation.run_files import ValSegmentation, write_segmented
from patchloom_runtime.calibration import Calibration
from patchloom_runtime.errors import DataError, UsageError

MASK = "mask"


class SegmentationPlanner(ImagePlanner):
    """Images whose targets are masks."""

    levels_are_of_labels = False
    fits_recipes = False
    starts_at_one_size = False

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        refuse_unread(settings, LABEL_OPTIONS, self.task.refusal)
        refuse_fit(settings)
        base, key = base_recipe(settings.recipe, settings.model), "segment.reduce_zero_label"
        if base is None:
            base = override(upernet_160k(), {key: False})
        changes = {name: value for name, value in settings.recipe_changes().items() if name == key}
        reduced = override(base, changes).segment.reduce_zero_label
        return of_masks(source, reduce_zero_label=reduced, level=settings.level)

    def with_targets(self, splits: Splits) -> Splits:
        test: Any = splits.test
        return replace(
            splits,
            train=splits.train.with_parts(MASK),  # type: ignore[attr-defined]
            val=splits.val.with_parts(MASK),  # type: ignore[attr-defined]
            test=test and test.with_parts(MASK),
        )

    def fault_notes(self, scan: Survey, settings: TrainingSettings) -> tuple[str, ...]:
        """Return a note on masks that are faulty in whole or in part; raise DataError with --strict."""
        faults = [fault for fault in scan.annotation_faults() if fault.kind.startswith(MASK)]
        faults += [fault for fault in scan.source.faults if MASK in fault.kind]
        if not faults:
            return ()
        first = f"{faults[0].where}: {faults[0].kind} ({faults[0].detail})"
        check = f"patchloom check {shlex.join(settings.data)}"
        note = f"{len(faults):,} masks have faults, first {first}; all: {check}"
        if settings.strict:
            raise DataError(note)
        return (note,)

    def needs_labels(self, source: Source, settings: TrainingSettings) -> bool:
        del source, settings
        return False

    def candidate_rows(self, plan: ImagePlan) -> Sequence[Candidate]:
        return segmentation_candidates(plan.recipe, plan.opened.facts())

    def resolve(self, opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
        recipe, choices, start = resolve_fields(opened, epochs, auto_segmentation)
        if recipe.optim.batch_size < 2 and recipe.segment.norm == "batch":
            raise UsageError(
                "optim.batch_size is 1, and a batch of one image has no statistics; set segment.norm=group"
            )
        with torch.device("meta"):
            network = make_segmentation(recipe, len(opened.splits.classes))
        return Resolved(recipe, choices, network.notes, cost(network, recipe.model.image_size), start)


class SegmentationTraining(ImageTraining):
    """A backbone under a segmentation head, trained with one loss per labeled pixel."""

    planner_type = SegmentationPlanner
    compiles_by_default = False

    def network(self, plan: ImagePlan) -> SegmentationNetwork:
        network = make_segmentation(plan.recipe, len(plan.splits.classes))
        network.gradient_checkpointing = plan.recipe.model.gradient_checkpointing
        initialize_backbone(plan, network.backbone)
        return network

    def loader(self, plan: ImagePlan, processes: Processes, stores: Any) -> Any:
        return image_loader(plan, processes, stores)

    def objective(self, plan: ImagePlan, network: Any, loader: Any, processes: Processes) -> Objective:
        if processes.world > 1 and processes.device.type == "cuda":  # SyncBatchNorm needs a GPU
            for name in network.classifiers():
                setattr(network, name, nn.SyncBatchNorm.convert_sync_batchnorm(getattr(network, name)))
        train: Any = plan.splits.train
        return make_objective(
            Ingredients(
                recipe=plan.recipe,
                network=network,
                ignored=train.layers[MASK].outside,
                steps_per_epoch=loader.steps_per_epoch,
                add_up=processes.sum_,
            )
        )

    def judge(self, plan: ImagePlan, processes: Processes) -> SegmentationJudge:
        return SegmentationJudge(plan, processes)

    def write_files(self, plan: ImagePlan, network: Any) -> None:
        write_image_files(plan, network, preprocessing_of(plan.recipe, network), plan.class_names)

    def write_val(self, plan: ImagePlan, report: SegmentationReport) -> None:
        """Write `segmented.safetensors`, pixel counts per image of val and class, and `calibration.json`."""
        write_segmented(plan.folder, ValSegmentation(report, fingerprint(plan.splits.val)))
        maps = load_segmenter(plan.folder, device=plan.settings.device).maps
        train: Any = plan.splits.train
        ignored = train.layers[MASK].outside
        pixels = sampled_logits(maps, plan.splits.val, len(plan.class_names), ignored)
        if not len(pixels.logits) or not np.isfinite(pixels.logits).all():
            return
        fit = choose_temperature(pixels)
        before, after = (reliability_at(pixels.logits, pixels.labels, each) for each in (1.0, fit.temperature))
        rules = Calibration(fit.temperature)
        write_calibration(plan.folder, RunCalibration(rules, len(pixels.labels), before, after, fit))


def make_segmentation(recipe: Recipe, classes: int) -> SegmentationNetwork:
    """Build the recipe's network with random weights."""
    part, size = recipe.segment, (recipe.model.image_size,) * 2
    name, options = network_options(recipe)
    return SegmentationNetwork(
        SegmentationConfig(
            name=name,
            num_classes=classes,
            image_size=size,
            backbone={"num_classes": 0, "image_size": size, **options},
            head=part.head,
            channels=part.channels,
            auxiliary_channels=part.auxiliary_channels if part.auxiliary_weight else 0,
            norm=part.norm,
            dropout=part.dropout,
        )
    )
