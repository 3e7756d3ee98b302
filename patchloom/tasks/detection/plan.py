"""Planning of detection runs: the classes, whether masks are learned, the recipe and the network."""

from collections.abc import Sequence
from typing import Any

import torch

from patchloom.data.augmentation.canvas import CanvasView
from patchloom.data.datasets import ImageSet, LabeledImages, Source, Splits
from patchloom.data.splits import check_level
from patchloom.models.cost import Cost, cost, human
from patchloom.models.dense.detector import Detector, make_detector
from patchloom.recipes.candidates import Candidate
from patchloom.recipes.choices import Choice
from patchloom.recipes.detection import auto_detection
from patchloom.recipes.parts import DetectPart, fields_of
from patchloom.recipes.schema import Recipe
from patchloom.tasks.detection.data import number_objects
from patchloom.tasks.images.networks import make_backbone
from patchloom.tasks.images.plan import ImagePlan, ImagePlanner
from patchloom.tasks.images.resolved_recipe import OpenedImages, Resolved, resolve_fields
from patchloom.tasks.plan import LABEL_OPTIONS, TrainingSettings, refuse_fit, refuse_unread
from patchloom_runtime.errors import DataError

# Fields of a recipe's `detect` that are about images rather than the network.
_IMAGE_FIELDS = ("resize", "short_min", "short_max", "long_max", "min_visible", "masks")


class DetectionPlan(ImagePlan):
    """A plan for a run that learns boxes and, where the data has them, masks."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return object_classes(self.splits, self.settings.level)

    @property
    def learns_masks(self) -> bool:
        """Whether the data has masks and the recipe learns them."""
        return learns_masks(self.splits, self.recipe)

    def objects(self, split: str) -> LabeledImages:
        """Return a split whose objects are numbered by the classes of the plan."""
        return number_objects(getattr(self.splits, split), self.class_names, self.settings.level)

    def evaluation_view(self) -> CanvasView:
        """Return the transform of evaluation."""
        part, side = self.recipe.detect, self.recipe.model.image_size
        limits = {"short": part.short_max, "long": part.long_max} if part.resize == "short_side" else {}
        return CanvasView((side, side), **limits)

    def data_facts(self) -> dict[str, Any]:
        return super().data_facts() | {"masks": self.learns_masks}

    def _targets_text(self) -> str:
        count = len(self.class_names)
        return f"; {'boxes and masks' if self.learns_masks else 'boxes'} of {count} class{'es' * (count != 1)}"

    def _cost_text(self) -> str:
        return (
            f" under {'Mask' if self.learns_masks else 'Faster'} R-CNN: {human(self.cost.parameters)} parameters, "
            f"{human(self.cost.multiply_adds)} multiply-adds in the backbone"
        )


class DetectionPlanner(ImagePlanner):
    """Images whose targets are objects."""

    plan_type = DetectionPlan
    levels_are_of_labels = False  # but of the objects
    fits_recipes = False
    starts_at_one_size = False

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        refuse_unread(settings, LABEL_OPTIONS, self.task.refusal)
        refuse_fit(settings)
        return source

    def needs_labels(self, source: Source, settings: TrainingSettings) -> bool:
        del source, settings
        return False

    def candidate_rows(self, plan: ImagePlan) -> Sequence[Candidate]:
        """Return none: a trial that detects anything takes a good part of the run."""
        del plan
        return ()

    def resolve(self, opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
        splits, level = opened.splits, opened.settings.level
        object_classes(splits, level)
        recipe, choices, start = resolve_fields(opened, epochs, auto_detection)
        with torch.device("meta"):
            network = detector_of(recipe, splits, level)
            of_backbone = cost(network.backbone)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        total = Cost(parameters, of_backbone.multiply_adds, of_backbone.elementwise)
        return Resolved(recipe, choices, network.notes, total, start)


def object_classes(splits: Splits, level: str | None) -> tuple[str, ...]:
    """Return the names of the classes to detect, at a level of the labels if one is given."""
    train = _labeled(splits.train)
    names = train.images.object_names
    if not names:
        raise DataError(f"{splits.name}: no boxes; objects are learned from boxes (COCO, VOC, YOLO, parquet, shapes)")
    if level is None:
        return names
    check_level(level, train.classes.levels)
    return train.classes.levels[level][0]


def learns_masks(splits: Splits, recipe: Recipe) -> bool:
    """Return whether the data has masks of single objects and the recipe learns them."""
    return recipe.detect.masks and _labeled(splits.train).images.tells_objects_apart


def detector_of(recipe: Recipe, splits: Splits, level: str | None) -> Detector:
    """Build the recipe's network for these data with random weights."""
    part = recipe.detect
    options: dict[str, Any] = {name: getattr(part, name) for name in fields_of(DetectPart) if name not in _IMAGE_FIELDS}
    classes = len(object_classes(splits, level))
    return make_detector(make_backbone(recipe), classes, masks=learns_masks(splits, recipe), **options)


def _labeled(images: ImageSet) -> LabeledImages:
    assert isinstance(images, LabeledImages)
    return images
