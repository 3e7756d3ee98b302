"""A run on pictures that could start now: the pictures, looked through, and the recipe for them."""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from patchloom.data.checking.scan import scan_bar
from patchloom.data.checking.survey import Survey, Unreadable, is_made_in_memory, name_unreadable, survey
from patchloom.data.datasets import ImageSet, Source, Splits
from patchloom.data.labels.unlabeled import missing_labels
from patchloom.data.sources.source import find_source
from patchloom.data.splits import make_splits, share_of_train
from patchloom.data.text.pairs import holds_pairs
from patchloom.engine.rendezvous import place_from
from patchloom.machine import cores
from patchloom.models.catalog import CATALOG
from patchloom.models.cost import Cost, cost, human
from patchloom.models.network import Network
from patchloom.models.pretrained.table import is_tag, published, weights_named
from patchloom.models.pretrained.weights_file import check_weights_file
from patchloom.recipes.choices import Automatic, Choice, base_recipe, resolve_recipe, with_steps
from patchloom.recipes.fit import Facts, advice
from patchloom.recipes.methods import Method, method_of
from patchloom.recipes.schema import Recipe, flatten, override
from patchloom.runs.config import Preprocessing, check_preprocessing, read_recipe
from patchloom.runs.locate import find_run
from patchloom.runs.provenance import LEFT_OUT, provenance_of
from patchloom.tasks.images.init_weights import InitWeights, find_init_weights
from patchloom.tasks.images.networks import make_network, teacher_names
from patchloom.tasks.plan import (
    OpenedSettings,
    Plan,
    TrainingSettings,
    check_numbers,
    method_of_settings,
    placed,
    same_run,
    seconds_of,
    val_share_of_settings,
)
from patchloom.tasks.provenance import (
    changes_since,
    refuse_fewer_options,
    refuse_other_data,
    refuse_other_start,
    starting_record,
)
from patchloom.tasks.task import Task
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import plural

# Pictures of which the median size is taken: enough to know it, few enough to open at once.
SIZED_PICTURES = 64
# One picture of a smaller val split is more than two points of accuracy.
ENOUGH_TO_CHOOSE_BY = 50


@dataclass(frozen=True, kw_only=True)
class ImagePlan(Plan):
    """A plan for a run on images."""

    splits: Splits
    cost: Cost
    unreadable: tuple[Unreadable, ...] = ()
    start: InitWeights | None = None  # the run that --init names
    clustered: ImageSet | None = None  # the training images with clusters as labels, if those are learned

    @property
    def learned(self) -> ImageSet:
        """The training images, with what is learned from them as labels."""
        return self.clustered if self.clustered is not None else self.splits.train

    @property
    def method(self) -> Method:
        """The row of its objective.method."""
        return method_of(self.recipe.objective.method)

    @property
    def workers(self) -> int:
        """The number of worker processes: --workers, else the number of cores, at most 8."""
        return self.settings.workers if self.settings.workers is not None else min(8, cores())

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that are learned."""
        return tuple(self.splits.classes.names)

    @property
    def examples(self) -> ImageSet:
        return self.splits.train

    @property
    def data_name(self) -> str:
        return self.splits.name

    def data_lines(self, *, dry_run: bool) -> list[str]:
        r, s = self.recipe, self.splits
        tested = f"patchloom evaluate {shlex.quote(str(self.folder))} {shlex.quote(self.settings.data)} --split test"
        listed = f"all: {_look(self.settings)}" if dry_run else f"all in {self.folder / LEFT_OUT}"
        return [
            f"data       {s.name}: {len(s.train):,} images to train on, {len(s.val):,} to validate"
            + self._targets_text(),
            *([f"           {len(s.test):,} to test later: {tested}"] if s.test is not None and len(s.classes) else []),
            *([f"left out   {name_unreadable(self.unreadable)}; {listed}"] if self.unreadable else []),
            *(f"           note: {note}" for note in self.notes),
            f"model      {r.model.name} at {r.model.image_size} px{self._cost_text()}",
            *([f"init       {self.start.told(r, s.classes.names)}"] if self.start else _published_start(self)),
        ]

    def _targets_text(self) -> str:
        return f", {plural(len(self.splits.classes), 'class')}" if len(self.splits.classes) else ", no labels"

    def _cost_text(self) -> str:
        return f": {human(self.cost.parameters)} parameters, {human(self.cost.multiply_adds)} multiply-adds"

    def data_facts(self) -> dict[str, Any]:
        return {
            "name": self.splits.name,
            "train": len(self.splits.train),
            "val": len(self.splits.val),
            "classes": list(self.class_names),
            "notes": list(self.notes),
        }

    def model_facts(self) -> dict[str, Any]:
        return {"multiply_adds": self.cost.multiply_adds}


@dataclass(frozen=True)
class Resolved:
    """The recipe for some data, the choices made for it, the cost of its network, and the run it starts from."""

    recipe: Recipe
    choices: list[Choice]
    notes: tuple[str, ...]  # of the network
    cost: Cost
    start: InitWeights | None


class ImagePlanner:
    """How a task plans a run on images. The defaults are those of classification."""

    plan_type: ClassVar[type[ImagePlan]] = ImagePlan
    levels_are_of_labels: ClassVar[bool] = True  # else `source` applies --level
    fits_recipes: ClassVar[bool] = True  # whether --fit fits a named recipe to the data

    def __init__(self, task: Task) -> None:
        self.task = task

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        """Return the source with the targets that the task learns."""
        del settings
        return source

    def with_targets(self, splits: Splits) -> Splits:
        """Return splits whose samples include what the task reads besides images and labels."""
        return splits

    def fault_notes(self, scanned: Survey, settings: TrainingSettings) -> tuple[str, ...]:
        """Return notes on faulty targets."""
        del scanned, settings
        return ()

    def needs_labels(self, settings: TrainingSettings) -> bool:
        """Return whether every image must have a label."""
        return learns_from_labels(settings)

    def resolve(
        self, splits: Splits, settings: TrainingSettings, device: str, epochs: Choice | None = None
    ) -> Resolved:
        """Return the recipe for these splits and the cost of its network; `epochs` replaces the recipe's."""
        return resolve(splits, settings, device, epochs)


def plan_images(planner: ImagePlanner, settings: TrainingSettings, device: str) -> ImagePlan:
    """Plan a run on images. Errors in options, recipe and data are raised here, before any work."""
    check_numbers(settings)
    source = planner.source(_found(settings), settings)
    labeled = planner.needs_labels(settings)
    if labeled and len(source.train) and np.all(source.train.labels == UNLABELED):
        raise DataError(f"{source.name}: {missing_labels(source.train)}")
    level = settings.level if planner.levels_are_of_labels else None
    chosen: dict[str, Any] = {"strict": settings.strict, "level": level, "labeled": labeled}
    # A wrong name or option is said at once, not after all pictures have been looked at.
    share = val_share_of_settings(settings)
    whole = planner.with_targets(make_splits(source, **chosen))
    splits = share_of_train(whole, share)
    settings = _with_whole_init(settings, splits, device)
    resolved = planner.resolve(splits, settings, device)
    seen = None if is_made_in_memory(source) else _surveyed(source, settings)
    if seen:
        source = _readable(seen, settings)
        whole = planner.with_targets(make_splits(source, copies=seen.copies() if source.val is None else (), **chosen))
        splits = share_of_train(whole, share)
    record = starting_record(provenance_of(whole, seen), settings.data, settings.init)
    record = replace(record, options=options_set(settings))
    begins = resolved

    def in_folder(folder: Path, why: str) -> tuple[Path, str, Recipe | None, float | None, Resolved]:
        """The run as it would be in a folder; an OtherRunError where that holds another."""
        resolved, time_s = begins, seconds_of(settings.time)
        refuse_other_data(folder, record)
        begun = read_recipe(folder) if folder.is_dir() else None
        if time_s and begun:  # its epochs were planned when it began
            why_epochs = f"auto: as the run in {folder} began; --epochs trains longer"
            epochs, time_s = Choice("schedule.epochs", begun.schedule.epochs, why_epochs), None
            resolved = planner.resolve(splits, settings, device, epochs)
        if begun and begun.name == resolved.recipe.name:
            recipe, choices = _as_begun(begun, resolved.recipe, resolved.choices)
            resolved = replace(resolved, recipe=recipe, choices=choices)
        same_run(folder, resolved.recipe)
        refuse_other_start(folder, record)
        if settings.out is None:
            refuse_fewer_options(folder, record)
        return folder, why, begun, time_s, resolved

    folder, why, begun, time_s, resolved = placed(settings, record.is_of, in_folder)
    recipe, choices = resolved.recipe, resolved.choices
    notes = (*splits.notes, *resolved.notes, *_too_few(splits), *changes_since(folder, record))
    notes += planner.fault_notes(seen, settings) if seen else ()
    unreadable = tuple(seen.unreadable) if seen else ()
    plan = planner.plan_type(
        task=planner.task,
        settings=settings,
        recipe=recipe,
        choices=choices,
        folder=folder,
        why_folder=why,
        record=record,
        left_out=[(bad.place.where, bad.reason) for bad in unreadable],
        notes=notes,
        time_s=time_s,
        splits=replace(splits, notes=notes),
        cost=resolved.cost,
        unreadable=unreadable,
        start=resolved.start,
    )
    return replace(plan, advice=() if begun else _advice(planner, plan, device))


def with_epochs(planner: ImagePlanner, plan: ImagePlan, epochs: Choice, device: str) -> ImagePlan:
    """Return the plan with another number of epochs and what depends on it."""
    resolved = planner.resolve(plan.splits, plan.settings, device, epochs)
    planned = replace(plan, recipe=resolved.recipe, choices=resolved.choices)
    return replace(planned, advice=_advice(planner, planned, device))


def _published_start(plan: ImagePlan) -> list[str]:
    """That trained weights of the chosen network can be had, where nobody has said what to start from."""
    name, settings = plan.recipe.model.name, plan.settings
    there = published(name)
    if settings.init or base_recipe(settings.recipe, settings.model) or not there:
        return []
    first = there[0]
    cost = f"{first.size} to fetch, {human(CATALOG[name].multiply_adds)} multiply-adds at {first.image_size} px"
    return [f"init       random; --init {first.tag} fine-tunes {name} as published on {first.trained_on} ({cost})"]


def learns_from_labels(settings: TrainingSettings) -> bool:
    """Whether the method learns from labels; that of `auto` does."""
    method = method_of_settings(settings)
    return method is None or method_of(method).learns_from == "labels"


def options_set(settings: TrainingSettings) -> tuple[str, ...]:
    """Return the recipe fields that a command sets; its network and its recipe count as such."""
    named = {"model.name": settings.model, "recipe": None if settings.recipe == "auto" else settings.recipe}
    return tuple(sorted({*settings.recipe_changes(), *(key for key, value in named.items() if value)}))


def preprocessing_of(recipe: Recipe, network: Network) -> Preprocessing:
    """How pictures are shown to the network once it is trained."""
    size = recipe.test.image_size
    shape = network.config.image_size if size is None else (size, size)
    return Preprocessing(
        network.pixel_mean, network.pixel_std, shape, recipe.test.crop_ratio, resize=recipe.test.resize
    )


# Opening --------------------------------------------------------------------------------------------------------------


def _found(settings: TrainingSettings) -> Source:
    if isinstance(settings, OpenedSettings) and settings.source is not None:
        return settings.source
    try:
        return find_source(settings.data, reading=settings.reading, strict=settings.strict)
    except (DataError, UsageError):
        if not holds_pairs(settings.data):
            raise
        told = f"{settings.data} holds sentence pairs, not images; learn to translate them with"
        raise UsageError(f"{told} --recipe translation-small (see `patchloom recipes`)") from None


def _surveyed(source: Source, settings: TrainingSettings) -> Survey:
    """Every picture is looked at once; with --strict one that cannot be read ends it."""
    with scan_bar(enabled=place_from(os.environ).rank == 0) as progress:
        seen = survey(source, progress=progress)
    if settings.strict and seen.unreadable:
        raise DataError(
            f"{name_unreadable(seen.unreadable)}; repair or remove them (all: {_look(settings)}), "
            "or leave them out by training without --strict"
        )
    return seen


def _readable(seen: Survey, settings: TrainingSettings) -> Source:
    """The source without what cannot be read; notes on pictures that are in two splits."""
    leaks = [
        f"{later} has {count:,} of {first}'s pictures, so its score is too good; see {_look(settings)}"
        for (first, later), count in seen.leaks().items()
    ]
    found = seen.readable()
    return replace(found, notes=(*found.notes, *leaks))


def _look(settings: TrainingSettings) -> str:
    reading = replace(settings.reading, val=None)  # which changes no picture
    return f"patchloom check {shlex.quote(settings.data)}{reading.options()}"


def _too_few(splits: Splits) -> list[str]:
    """A note where the best weights would be chosen by chance."""
    count = int((splits.val.labels >= 0).sum())
    if not 0 < count < ENOUGH_TO_CHOOSE_BY:
        return []
    return [
        f"val has only {plural(count, 'image')}, so one image is {100 / count:.1f} points of accuracy and the best "
        f"weights are chosen partly by chance; give val {ENOUGH_TO_CHOOSE_BY} images or more"
    ]


# The recipe -----------------------------------------------------------------------------------------------------------


def facts_of(splits: Splits, settings: TrainingSettings, device: str) -> Facts:
    """What choices for a run are based on."""
    kind: Literal["cpu", "cuda"] = "cuda" if device.startswith("cuda") else "cpu"
    return Facts(len(splits.train), median_side(splits.train), kind, settings.init is not None)


def median_side(dataset: ImageSet) -> int:
    """The median of the shorter sides of some pictures that can be read, in pixels."""
    step = max(1, len(dataset) // SIZED_PICTURES)
    sides, reason = [], ""
    for i in range(0, len(dataset), step):
        try:
            sides.append(min(dataset.read(i).size))
        except DataError as error:
            reason = str(error)
    if not sides:
        raise DataError(
            f"none of {len(range(0, len(dataset), step))} pictures tried can be read; the last one: {reason}"
        )
    return sorted(sides)[len(sides) // 2]


def _advice(planner: ImagePlanner, plan: ImagePlan, device: str) -> tuple[str, ...]:
    """What of a named recipe does not suit the data, where it was not fitted to them."""
    settings = plan.settings
    if settings.fit or not planner.fits_recipes or base_recipe(settings.recipe, settings.model) is None:
        return ()
    found = advice(plan.recipe, facts_of(plan.splits, settings, device), settings.recipe_changes())
    return (found,) if found else ()


def _as_begun(begun: Recipe, recipe: Recipe, choices: list[Choice]) -> tuple[Recipe, list[Choice]]:
    """A run that goes on keeps what was chosen for it when it began, though more epochs might suit another choice."""
    before = flatten(begun)
    kept = {
        c.key: before[c.key]
        for c in choices
        if c.why.startswith("auto: ") and c.key in before and before[c.key] != c.value
    }
    if recipe.schedule.warmup_epochs != begun.schedule.warmup_epochs and "schedule.warmup_steps" in kept:
        kept["schedule.warmup_epochs"] = begun.schedule.warmup_epochs
    if recipe.schedule.warmup_steps != begun.schedule.warmup_steps and "schedule.warmup_epochs" in kept:
        kept["schedule.warmup_steps"] = begun.schedule.warmup_steps
    if not kept:
        return recipe, choices
    why = "auto: as this run began"
    others = [replace(c, value=kept[c.key], why=why) if c.key in kept else c for c in choices]
    return override(recipe, kept), others


def _with_whole_init(settings: TrainingSettings, splits: Splits, device: str) -> TrainingSettings:
    """`--init in1k`, a tag alone, as that of the network that is asked for or chosen: resmlp_s12:in1k."""
    tag = settings.init
    if not tag or not is_tag(tag) or os.path.exists(tag):
        return settings
    changes = settings.recipe_changes()
    asked = changes.get("model.name", settings.model)
    base = base_recipe(settings.recipe, asked)
    if base is None and asked is None:
        base, _ = resolve_recipe(
            lambda: facts_of(splits, settings, device),
            classes=len(splits.classes),
            recipe=settings.recipe,
            model=None,
            changes=changes,
        )
    name = asked or (base.model.name if base else "")
    if ":" in name:
        raise UsageError(f"--init {tag} names weights of patchloom's own networks, and {name} is not one of them")
    return replace(settings, init=weights_named(f"{name}:{tag}").name)


def resolve(splits: Splits, settings: TrainingSettings, device: str, epochs: Choice | None = None) -> Resolved:
    """The recipe for these data; `epochs` are those that a planned time leads to, as if they had been given."""
    recipe, choices, start = resolve_fields(splits, settings, device, epochs)
    with torch.device("meta"):
        network = make_network(recipe, len(splits.classes))
    if start:
        start.normalize_for(network)
    _check_views(recipe, network)
    if recipe.objective.distillation == "labels" and not network.has_distillation_token:
        raise UsageError(
            f"objective.distillation labels is for a second class token, which {recipe.model.name} has not; use a "
            "network with one, such as deit_b_distilled, or model.options.distilled=true"
        )
    try:
        check_preprocessing(preprocessing_of(recipe, network), network.config.image_size)
    except ValueError as error:
        raise UsageError(f"a run with these test.image_size and test.crop_ratio could not be used: {error}") from error
    return Resolved(recipe, choices, network.notes, cost(network), start)


def resolve_fields(
    splits: Splits,
    settings: TrainingSettings,
    device: str,
    epochs: Choice | None = None,
    automatic: Automatic | None = None,
) -> tuple[Recipe, list[Choice], InitWeights | None]:
    """Recipe, choices and start; `automatic` makes the recipe of a task where nobody names one."""
    changes = settings.recipe_changes() | ({epochs.key: epochs.value} if epochs else {})
    start = find_init_weights(settings.init, settings.recipe, changes.get("model.name", settings.model))
    taken = start.fields(settings.recipe) if start else {}
    if automatic is not None:  # a task at every place shows windows of its own size
        taken = {key: value for key, value in taken.items() if key.startswith("model.options.")}
    recipe, choices = resolve_recipe(
        lambda: facts_of(splits, settings, device),
        classes=len(splits.classes),
        recipe=settings.recipe,
        model=start.model if start and not start.is_bound(settings.recipe) else settings.model,
        changes=taken | changes,
        fit=settings.fit,
        automatic=automatic,
    )
    if start:
        choices = start.named(choices, [*changes, *(["model.name"] if settings.model else [])])
    if epochs:
        choices = [epochs if choice.key == epochs.key else choice for choice in choices]
    recipe, choices = with_steps(recipe, choices, len(splits.train), changes)
    _check_files(recipe, settings, len(splits.train))
    return recipe, choices, start


def _check_files(recipe: Recipe, settings: TrainingSettings, images: int) -> None:
    """Runs and weights that are named must be there."""
    part = recipe.objective
    if part.distillation in ("soft", "hard") and not part.teacher:
        raise UsageError(f"recipe {recipe.name} distils ({part.distillation}) but names no teacher; give --teacher")
    teachers = teacher_names(part.teacher or "")
    for run in (*teachers, recipe.model.scales_from):
        if run and Path(run).is_dir() and not find_run(run):
            raise UsageError(f"{run} is not the folder of a run: it has no config.json")
    if recipe.model.scales_from and not find_run(recipe.model.scales_from):
        raise UsageError(f"model.scales_from {recipe.model.scales_from}: no such run")
    if settings.init and not find_run(settings.init) and not Path(settings.init).is_file():
        raise UsageError(f"--init {settings.init}: no such run or file")
    for given in (settings.init, *(teacher.partition("@")[2] for teacher in teachers)):
        if given and Path(given).is_file():
            check_weights_file(Path(given))
    if method_of(part.method).learns_from == "clusters":
        clusters = recipe.grafit
        if clusters.clusters_of is None or not find_run(clusters.clusters_of):
            raise UsageError(
                f"clusterfit learns clusters of another run's features; given {clusters.clusters_of}, expected the "
                "folder of a run: --set grafit.clusters_of=RUN"
            )
        if clusters.clusters > images:
            raise UsageError(f"grafit.clusters is {clusters.clusters}, more than the {images} images. Lower it.")


def _check_views(recipe: Recipe, network: Network) -> None:
    """Small views need a network that takes them."""
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
