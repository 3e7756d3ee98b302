"""A run that finds objects, before it begins: its classes, whether it learns masks, its recipe and its network."""

from typing import Any

import torch

from patchloom.data.augmentation.canvas import CanvasView
from patchloom.data.datasets import ImageSet, LabeledImages, Splits
from patchloom.data.splits import check_level
from patchloom.models.cost import Cost, cost, human
from patchloom.models.dense.detector import Detector, make_detector
from patchloom.recipes.choices import Choice
from patchloom.recipes.detection import automatic
from patchloom.recipes.parts import DetectPart, fields_of
from patchloom.recipes.schema import Recipe
from patchloom.tasks.images.networks import make_backbone
from patchloom.tasks.images.plan import ImagePlan, Resolved, resolve_fields
from patchloom.tasks.plan import TrainingSettings
from patchloom_runtime.errors import DataError

# Fields of a recipe's `detect` that say how pictures are shown, and not what the network is.
_SHOWN = ("resize", "short_min", "short_max", "long_max", "min_visible", "masks")


def resolve_detection(
    splits: Splits, settings: TrainingSettings, device: str, epochs: Choice | None = None
) -> Resolved:
    """The recipe for these data, and what its network costs."""
    object_classes(splits, settings.level)
    recipe, choices, start = resolve_fields(splits, settings, device, epochs, automatic)
    with torch.device("meta"):
        network = detector_of(recipe, splits, settings.level)
        of_backbone = cost(network.backbone)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    counted = Cost(parameters, of_backbone.multiply_adds, of_backbone.elementwise)
    return Resolved(recipe, choices, network.notes, counted, start)


def object_classes(splits: Splits, level: str | None) -> tuple[str, ...]:
    """The names of what is to be found, at a level of the data's where one is asked for."""
    train = _pictures(splits.train)
    names = train.images.object_names
    if not names:
        raise DataError(f"{splits.name}: no boxes; objects are learned from boxes (COCO, VOC, YOLO, parquet, shapes)")
    if level is None:
        return names
    check_level(level, train.classes.levels)
    return train.classes.levels[level][0]


def learns_masks(splits: Splits, recipe: Recipe) -> bool:
    """Where the data have them and the recipe wants them."""
    return recipe.detect.masks and _pictures(splits.train).images.tells_objects_apart


def parts_of(plan: ImagePlan) -> tuple[str, ...]:
    """What is read with each picture."""
    return ("instances", "boxes") if learns_masks(plan.splits, plan.recipe) else ("boxes",)


def detector_of(recipe: Recipe, splits: Splits, level: str | None) -> Detector:
    """The recipe's network for these data, with random weights."""
    part = recipe.detect
    options: dict[str, Any] = {name: getattr(part, name) for name in fields_of(DetectPart) if name not in _SHOWN}
    classes = len(object_classes(splits, level))
    return make_detector(make_backbone(recipe), classes, masks=learns_masks(splits, recipe), **options)


def view_of_plan(plan: ImagePlan) -> CanvasView:
    """How pictures are judged."""
    part, side = plan.recipe.detect, plan.recipe.model.image_size
    limits = {"short": part.short_max, "long": part.long_max} if part.resize == "short_side" else {}
    return CanvasView((side, side), **limits)


def detection_lines(plan: ImagePlan, lines: list[str]) -> list[str]:
    """The lines of a plan on images, with what is to be found."""
    recipe, splits = plan.recipe, plan.splits
    names = object_classes(splits, plan.settings.level)
    what = "boxes and masks" if learns_masks(splits, recipe) else "boxes"
    counted = f"{len(splits.train):,} images to train on, {len(splits.val):,} to validate"
    found = f"data       {splits.name}: {counted}; {what} of {len(names)} class{'es' * (len(names) != 1)}"
    model = (
        f"model      {recipe.model.name} at {recipe.model.image_size} px under "
        f"{'Mask' if learns_masks(splits, recipe) else 'Faster'} R-CNN: {human(plan.cost.parameters)} parameters, "
        f"{human(plan.cost.multiply_adds)} multiply-adds in the backbone"
    )
    replaced = {"data ": found, "model": model}
    return [replaced.get(line[:5], line) for line in lines]


def _pictures(images: ImageSet) -> LabeledImages:
    assert isinstance(images, LabeledImages)
    return images
