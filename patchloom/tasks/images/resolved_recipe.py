"""The recipe for some images: the fields that the user set, those of a published recipe, and automatic choices."""

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from patchloom.data.datasets import ImageSet, Splits
from patchloom.data.labels.class_balance import class_ratio
from patchloom.models.cost import Cost, cost
from patchloom.models.network import Network
from patchloom.models.own_module import OwnModule
from patchloom.models.pretrained.table import is_tag, weights_named
from patchloom.models.pretrained.weights_file import check_weights_file
from patchloom.plugins import MODULE
from patchloom.recipes.choices import Automatic, Choice, base_recipe, resolve_recipe, with_steps
from patchloom.recipes.fit import Facts
from patchloom.recipes.methods import method_of
from patchloom.recipes.schema import Recipe, flatten, override
from patchloom.runs.config import Preprocessing, check_preprocessing
from patchloom.runs.locate import find_run
from patchloom.tasks.images.init_weights import InitWeights, find_init_weights
from patchloom.tasks.images.networks import make_network, teacher_names
from patchloom.tasks.settings import TrainingSettings
from patchloom_runtime.errors import DataError, UsageError

MEDIAN_IMAGES = 64  # images that are decoded for the median size


@dataclass(frozen=True)
class OpenedImages:
    """The splits that a recipe is chosen for; the facts about them are computed once."""

    splits: Splits
    settings: TrainingSettings
    device: str
    decided: tuple[Choice, ...] = ()  # choices of a race

    @cached_property
    def median_side(self) -> int:
        """The median of the shorter sides of some images, in pixels."""
        return median_side(self.splits.train)

    def facts(self) -> Facts:
        """Return what automatic choices are based on."""
        kind: Literal["cpu", "cuda"] = "cuda" if self.device.startswith("cuda") else "cpu"
        ratio = class_ratio(self.splits.train.labels)
        return Facts(len(self.splits.train), self.median_side, kind, self.settings.init is not None, ratio)

    def changed(self, **changes: Any) -> "OpenedImages":
        """Return a copy with other fields that keeps the median size."""
        copy = replace(self, **changes)
        if "median_side" in vars(self):
            vars(copy)["median_side"] = self.median_side
        return copy


@dataclass(frozen=True)
class Resolved:
    """The recipe for some data, the choices made for it, the cost of its network, and the run it starts from."""

    recipe: Recipe
    choices: list[Choice]
    notes: tuple[str, ...]  # on the network
    cost: Cost
    start: InitWeights | None


def resolve(opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
    """Return the recipe for images that get classes or vectors; `epochs` are those that a planned time leads to."""
    recipe, choices, start = resolve_fields(opened, epochs)
    is_own = recipe.model.name.startswith(MODULE)
    with nullcontext() if is_own else torch.device("meta"):
        network = make_network(recipe, len(opened.splits.classes))
    if isinstance(network, OwnModule):
        network.check()
    if start:
        start.normalize_for(network)
    _check_views(recipe, network)
    if recipe.objective.distillation == "labels" and not network.has_distillation_token:
        raise UsageError(
            f"objective.distillation labels is for a second class token, which {recipe.model.name} does not have; use "
            "a network with one, such as deit_b_distilled, or model.options.distilled=true"
        )
    try:
        check_preprocessing(preprocessing_of(recipe, network), network.config.image_size)
    except ValueError as error:
        raise UsageError(f"a run with these test.image_size and test.crop_ratio could not be used: {error}") from error
    return Resolved(recipe, choices, network.notes, cost(network), start)


def resolve_fields(
    opened: OpenedImages, epochs: Choice | None = None, automatic: Automatic | None = None
) -> tuple[Recipe, list[Choice], InitWeights | None]:
    """Return recipe, choices and the run to start from; `automatic` makes the recipe of a task without --recipe."""
    splits, settings = opened.splits, opened.settings
    decided = {choice.key: choice for choice in opened.decided} | ({epochs.key: epochs} if epochs else {})
    changes = {key: choice.value for key, choice in decided.items()} | settings.recipe_changes()
    changes |= {epochs.key: epochs.value} if epochs else {}
    start = find_init_weights(settings.init, settings.recipe, changes.get("model.name", settings.model))
    taken = start.fields(settings.recipe) if start else {}
    if automatic is not None:  # dense tasks have their own image sizes
        taken = {key: value for key, value in taken.items() if key.startswith("model.options.")}
    recipe, choices = resolve_recipe(
        opened.facts,
        classes=len(splits.classes),
        recipe=settings.recipe,
        model=start.model if start and not start.is_bound(settings.recipe) else settings.model,
        changes=taken | changes,
        fit=settings.fit,
        automatic=automatic,
    )
    if start:
        choices = start.named(choices, [*changes, *(["model.name"] if settings.model else [])])
    own = settings.recipe_changes().keys() - ({epochs.key} if epochs else set())
    choices = [choice if choice.key in own else decided.get(choice.key, choice) for choice in choices]
    recipe, choices = with_steps(recipe, choices, len(splits.train), changes)
    _check_files(recipe, settings, len(splits.train))
    return recipe, choices, start


def with_network_of_init(opened: OpenedImages) -> OpenedImages:
    """Complete `--init in1k`, a tag alone, with the network that is given or chosen: resmlp_s12:in1k."""
    settings = opened.settings
    tag = settings.init
    if not tag or not is_tag(tag) or os.path.exists(tag):
        return opened
    changes = settings.recipe_changes()
    model = changes.get("model.name", settings.model)
    base = base_recipe(settings.recipe, model)
    if base is None and model is None:
        base, _ = resolve_recipe(
            opened.facts, classes=len(opened.splits.classes), recipe=settings.recipe, model=None, changes=changes
        )
    name = model or (base.model.name if base else "")
    if ":" in name:
        raise UsageError(f"--init {tag} names weights of patchloom's own networks, and {name} is not one of them")
    return opened.changed(settings=replace(settings, init=weights_named(f"{name}:{tag}").name))


def as_begun(begun: Recipe, recipe: Recipe, choices: list[Choice]) -> tuple[Recipe, list[Choice]]:
    """Keep the automatic choices that a resumed run began with, though more epochs may suit others."""
    before = flatten(begun)
    values = {
        c.key: before[c.key]
        for c in choices
        if c.why.startswith("auto: ") and c.key in before and before[c.key] != c.value
    }
    if recipe.schedule.warmup_epochs != begun.schedule.warmup_epochs and "schedule.warmup_steps" in values:
        values["schedule.warmup_epochs"] = begun.schedule.warmup_epochs
    if recipe.schedule.warmup_steps != begun.schedule.warmup_steps and "schedule.warmup_epochs" in values:
        values["schedule.warmup_steps"] = begun.schedule.warmup_steps
    if not values:
        return recipe, choices
    why = "auto: as this run began"
    others = [replace(c, value=values[c.key], why=why) if c.key in values else c for c in choices]
    return override(recipe, values), others


def preprocessing_of(recipe: Recipe, network: Network) -> Preprocessing:
    """Return the preprocessing of the trained network."""
    size = recipe.test.image_size
    shape = network.config.image_size if size is None else (size, size)
    return Preprocessing(
        network.pixel_mean, network.pixel_std, shape, recipe.test.crop_ratio, resize=recipe.test.resize
    )


def median_side(dataset: ImageSet) -> int:
    """Return the median of the shorter sides of some images that can be read, in pixels."""
    step = max(1, len(dataset) // MEDIAN_IMAGES)
    sides, reason = [], ""
    for i in range(0, len(dataset), step):
        try:
            sides.append(min(dataset.read(i).size))
        except DataError as error:
            reason = str(error)
    if not sides:
        tried = len(range(0, len(dataset), step))
        raise DataError(f"none of the {tried} images tried can be read; the last one: {reason}")
    return sorted(sides)[len(sides) // 2]


def _check_files(recipe: Recipe, settings: TrainingSettings, images: int) -> None:
    """Raise UsageError for runs and weights that do not exist."""
    part = recipe.objective
    if part.distillation in ("soft", "hard") and not part.teacher:
        raise UsageError(f"recipe {recipe.name} distills ({part.distillation}) but names no teacher; pass --teacher")
    if method_of(part.method).teacher == "features" and not part.teacher:
        raise UsageError(f"recipe {recipe.name} learns the features of a teacher; name one: --teacher RUN|timm:NAME")
    teachers = teacher_names(part.teacher or "")
    for run in (*teachers, recipe.model.scales_from):
        if run and Path(run).is_dir() and not find_run(run):
            raise UsageError(f"{run} is not a run folder: it has no config.json")
    if recipe.model.scales_from and not find_run(recipe.model.scales_from):
        raise UsageError(f"model.scales_from {recipe.model.scales_from}: no such run")
    if settings.init and not find_run(settings.init) and not Path(settings.init).is_file():
        raise UsageError(f"--init {settings.init}: no such run or file")
    for name in (settings.init, *(teacher.partition("@")[2] for teacher in teachers)):
        if name and Path(name).is_file():
            check_weights_file(Path(name))
    if method_of(part.method).learns_from == "clusters":
        clusters = recipe.grafit
        if clusters.clusters_of is None or not find_run(clusters.clusters_of):
            raise UsageError(
                f"clusterfit learns clusters of another run's features, and {clusters.clusters_of} is not a run "
                "folder; pass one with --set grafit.clusters_of=RUN"
            )
        if clusters.clusters > images:
            raise UsageError(f"grafit.clusters is {clusters.clusters}, more than the {images} images. Lower it.")


def _check_views(recipe: Recipe, network: Network) -> None:
    """Raise UsageError if the network cannot take the small views of the recipe."""
    if not recipe.views.local or network.any_resolution:
        return
    method = method_of(recipe.objective.method)
    if not method.reads_field("dino"):
        raise UsageError(
            f"{recipe.model.name} takes images of one size, and objective.method {recipe.objective.method} has no way "
            "to show it smaller views. Set views.local to 0."
        )
    if recipe.dino.small_views == "resample" and not network.resamples:
        raise UsageError(
            f"{recipe.model.name} takes images of one size, and its weights cannot be resampled for smaller views. "
            "Show it resized ones with --set dino.small_views=resize, or set that to none."
        )
