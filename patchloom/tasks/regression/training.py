"""Training of regression models."""

import os
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from patchloom.data.annotations.image_labels import of_numbers
from patchloom.data.datasets import LabeledImages, Source
from patchloom.engine.distribution import Processes
from patchloom.evaluation.regression import RegressionReport, evaluate, scale_of
from patchloom.models.network import Network
from patchloom.recipes.choices import Choice
from patchloom.runs.predictions import fingerprint
from patchloom.tasks.images.judges import ImageJudge
from patchloom.tasks.images.plan import ImagePlan, ImagePlanner
from patchloom.tasks.images.resolved_recipe import OpenedImages, Resolved, resolve
from patchloom.tasks.images.training import WholeImageTraining
from patchloom.tasks.plan import TrainingSettings, method_of_settings, refuse_unread
from patchloom.tasks.regression.run_files import SCALE, ValNumbers, read_scale, write_scale, write_val_numbers
from patchloom_runtime.artifacts.regression import NumberScale
from patchloom_runtime.printable import plural

MOST_GRADES = 12  # different whole numbers up to which a number is an ordinal label
# Choices for numbers that a recipe for classes would make in another way.
WHOLE_IMAGES = {
    "augment.crop": ("resize", "a crop can change a number, such as a count"),
    "augment.policy": ("none", "strong changes of color and shape can change a number"),
    "augment.mixup": (0.0, "the mean of two images need not have the mean of their numbers"),
    "augment.cutmix": (0.0, "parts of two images have other numbers than the images"),
    "objective.smoothing": (0.0, "numbers are not smoothed"),
    "test.crop_ratio": (1.0, "the whole image, as in training"),
    "test.resize": ("square", "the whole image, as in training"),
}


class RegressionPlan(ImagePlan):
    """A plan for a run on images with numbers."""

    @cached_property
    def scale(self) -> NumberScale:
        """The scale of the training targets; a resumed run keeps the one it began with."""
        targets = self.splits.train.targets
        assert targets is not None
        if os.path.lexists(self.folder / SCALE):
            return read_scale(self.folder, targets.names)
        return scale_of(targets.names, targets.values, MOST_GRADES)

    @property
    def learned(self) -> LabeledImages:
        """The training images with standardized numbers."""
        train: Any = self.splits.train
        values = ((train.targets.values - self.scale.mean) / self.scale.std).astype(train.targets.values.dtype)
        return replace(train, targets=replace(train.targets, values=values))

    def _targets_text(self) -> str:
        scale = self.scale
        if scale.grades:
            return f", grades {scale.grades[0]:g} to {scale.grades[-1]:g} of {scale.names[0]}"
        listed = [
            f"{name} {mean:.4g} ± {std:.4g}" for name, mean, std in zip(scale.names, scale.mean, scale.std, strict=True)
        ]
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        return f", {plural(len(listed), 'number')} ({', '.join(listed[:3])}{more})"


class RegressionPlanner(ImagePlanner):
    """Plans runs on the numbers of images."""

    plan_type = RegressionPlan

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        refuse_unread(settings, ("level",), "is a level of classes; runs on numbers have none")
        return of_numbers(source)

    def needs_labels(self, source: Source, settings: TrainingSettings) -> bool:
        del source, settings
        return False

    def resolve(self, opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
        settings = opened.settings
        if method_of_settings(settings) is not None:
            return resolve(opened, epochs)
        automatic = {"objective.method": (self.task.name, "Huber loss of standardized numbers"), **WHOLE_IMAGES}
        own = {key: value for key, value in automatic.items() if key not in settings.recipe_changes()}
        changes = {key: value for key, (value, _) in own.items()}
        resolved = resolve(opened.changed(settings=replace(settings, changes=changes | settings.changes)), epochs)
        choices = [
            Choice(each.key, each.value, f"auto: {own[each.key][1]}") if each.key in own else each
            for each in resolved.choices
        ]
        images, numbers = len(opened.splits.train), len(opened.splits.classes)
        source = f"Rules of thumb for {plural(images, 'image')} with {plural(numbers, 'number')}."
        return replace(resolved, choices=choices, recipe=replace(resolved.recipe, source=source))


class NumberJudge(ImageJudge):
    """Evaluates the predicted numbers of val images; the mean absolute error selects the best weights."""

    metric, lower_is_better = "scaled_mae", True

    def report(self, model: nn.Module) -> RegressionReport:
        network, plan = self.network(model), self._plan
        assert isinstance(plan, RegressionPlan)
        return evaluate(
            network,
            self._batches("val"),
            scale=plan.scale,
            pixel_mean=network.pixel_mean,
            pixel_std=network.pixel_std,
            gather=self._joined,
        )


class RegressionTraining(WholeImageTraining):
    """A network with one output per number, evaluated by its predictions for val."""

    planner_type = RegressionPlanner
    has_classes = False

    def plan(self, settings: TrainingSettings, device: str) -> ImagePlan:
        """Plan a run; a number that never changes in the training images is an error."""
        plan: Any = super().plan(settings, device)
        _ = plan.scale  # raises DataError now rather than in the first step
        return plan

    def begin(self, plan: ImagePlan, network: Network, processes: Processes, say: Any) -> None:
        """Change nothing: outputs start near 0, which is the mean of the training images."""

    def images_before(self, plan: ImagePlan) -> int:
        del plan
        return 0

    def judge(self, plan: ImagePlan, processes: Processes) -> NumberJudge:
        return NumberJudge(plan, processes)

    def write_files(self, plan: ImagePlan, network: Network) -> None:
        """Write `scale.json` in addition to the files of all image tasks."""
        assert isinstance(plan, RegressionPlan)
        super().write_files(plan, network)
        write_scale(plan.folder, plan.scale)

    def write_val(self, plan: ImagePlan, report: RegressionReport) -> None:
        """Write `numbers.safetensors` with the predictions for val."""
        write_val_numbers(plan.folder, ValNumbers(report, fingerprint(plan.splits.val)))
