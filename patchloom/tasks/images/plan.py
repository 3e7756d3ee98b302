"""The plan of a run on images: the images, scanned for faults, and the recipe for them."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from patchloom.data.checking.scan import scan_bar
from patchloom.data.checking.survey import Survey, Unreadable, is_scanned, name_unreadable, survey
from patchloom.data.datasets import ImageSet, LabeledImages, Source, Splits
from patchloom.data.labels.class_balance import class_counts, is_imbalanced
from patchloom.data.labels.unlabeled import missing_labels
from patchloom.data.sources.corrections import corrections_digest
from patchloom.data.sources.python_objects import PythonData
from patchloom.data.sources.source import find_source
from patchloom.data.splits import hold_out_of_train, make_splits, share_of_train
from patchloom.data.text.pairs import holds_pairs
from patchloom.engine.rendezvous import place_from
from patchloom.machine import cores
from patchloom.models.catalog import CATALOG
from patchloom.models.cost import Cost, human
from patchloom.models.pretrained.table import published
from patchloom.recipes.auto import pretrained_network
from patchloom.recipes.candidates import Candidate, classification_candidates, narrowed
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.fit import advice, balance_advice
from patchloom.recipes.methods import Method, method_of
from patchloom.recipes.schema import Recipe
from patchloom.runs.config import read_recipe
from patchloom.runs.provenance import LEFT_OUT, Provenance, provenance_of
from patchloom.runs.race import race_choices
from patchloom.tasks.images.automatic_start import (
    MOST_MULTIPLY_ADDS,
    cached_starts,
    may_start_from_weights,
    offered_start,
)
from patchloom.tasks.images.init_weights import InitWeights
from patchloom.tasks.images.networks import make_backbone
from patchloom.tasks.images.resolved_recipe import OpenedImages, Resolved, as_begun, resolve, with_network_of_init
from patchloom.tasks.plan import (
    AUTOMATIC,
    RULE_OPTIONS,
    OpenedSettings,
    Plan,
    check_numbers,
    method_of_settings,
    named_start,
    placed,
    plugged_parts,
    refuse_unread,
    same_run,
    seconds_of,
    train_share_of_settings,
)
from patchloom.tasks.provenance import (
    changes_since,
    recorded,
    refuse_fewer_options,
    refuse_other_corrections,
    refuse_other_data,
    refuse_other_plugins,
    refuse_other_start,
    starting_record,
)
from patchloom.tasks.settings import TrainingSettings
from patchloom.tasks.task import Task
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import plural

ENOUGH_VAL_IMAGES = 50  # of fewer, one image is more than two points of accuracy


@dataclass(frozen=True, kw_only=True)
class ImagePlan(Plan):
    """A plan for a run on images."""

    splits: Splits
    cost: Cost
    opened: OpenedImages  # what the recipe was chosen by
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
        data = shlex.quote(self.settings.data_text)
        tested = f"patchloom evaluate {shlex.quote(str(self.folder))} {data} --split test"
        if isinstance(self.settings.data[0], PythonData):
            tested = f"patchloom.evaluate({str(self.folder)!r}, data, split='test')"
        is_auto = self.record is not None and self.record.automatic_init
        listed = f"all: {_check_command(self.settings)}" if dry_run else f"all in {self.folder / LEFT_OUT}"
        return [
            f"data       {s.name}: {len(s.train):,} images to train on, {len(s.val):,} to validate"
            + self._targets_text(),
            *([f"           {len(s.test):,} to test later: {tested}"] if s.test is not None and len(s.classes) else []),
            *([f"left out   {name_unreadable(self.unreadable)}; {listed}"] if self.unreadable else []),
            *(f"           note: {note}" for note in self.notes),
            f"model      {r.model.name} at {r.model.image_size} px{self._cost_text()}",
            *([f"init       {self.start.text(r, s.classes.names)}"] if self.start else _published_start(self)),
            *(["           (auto: these weights are in the cache; --init none starts from random ones)"] * is_auto),
        ]

    def _targets_text(self) -> str:
        if not len(self.splits.classes):
            return ", no labels"
        uneven = ""
        if is_imbalanced(labels := self.splits.train.labels):
            counts = class_counts(labels)
            uneven = f" of {counts[counts > 0].min():,} to {counts.max():,} images"
        return f", {plural(len(self.splits.classes), 'class')}{uneven}"

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


class ImagePlanner:
    """How a task plans a run on images. The defaults are those of classification."""

    plan_type: ClassVar[type[ImagePlan]] = ImagePlan
    levels_are_of_labels: ClassVar[bool] = True  # else `source` applies --level
    fits_recipes: ClassVar[bool] = True  # whether --fit fits a named recipe to the data
    fits_rules: ClassVar[bool] = False  # whether models of the task may abstain
    starts_at_one_size: ClassVar[bool] = True  # whether `--init auto` may choose a network for images of one size

    def __init__(self, task: Task) -> None:
        self.task = task

    def source(self, source: Source, settings: TrainingSettings) -> Source:
        """Return the source with the targets that the task learns."""
        del settings
        return source

    def with_targets(self, splits: Splits) -> Splits:
        """Return splits whose samples include what the task reads besides images and labels."""
        return splits

    def fault_notes(self, scan: Survey, settings: TrainingSettings) -> tuple[str, ...]:
        """Return notes on faulty targets."""
        del scan, settings
        return ()

    def needs_labels(self, source: Source, settings: TrainingSettings) -> bool:
        """Return whether every image must have a label."""
        del source
        method = method_of_settings(settings)
        return method is None or method_of(method).learns_from == "labels"

    def resolve(self, opened: OpenedImages, epochs: Choice | None = None) -> Resolved:
        """Return the recipe for these images and the cost of its network; `epochs` replaces the recipe's."""
        return resolve(opened, epochs)

    def candidate_rows(self, plan: ImagePlan) -> Sequence[Candidate]:
        """Return the candidates of a race for these images, before those that the user's options exclude."""
        return classification_candidates(plan.recipe, plan.opened.facts())

    def candidates(self, plan: ImagePlan) -> list[Candidate]:
        """Return the candidates that differ in fields which the user has not set."""
        if not isinstance(plan.splits.train, LabeledImages):  # its rows cannot be held out
            return []
        settings, fixed = plan.settings, list(plan.settings.recipe_changes())
        if settings.model or settings.init or any(key.startswith(("model.name", "model.options.")) for key in fixed):
            fixed += ["model.name", "model.options."]
        fixed += ["balance."] if any(key.startswith("balance.") for key in fixed) else []
        return narrowed(self.candidate_rows(plan), fixed)


def plan_images(planner: ImagePlanner, settings: TrainingSettings, device: str) -> ImagePlan:
    """Plan a run on images. Errors in options, recipe and data are raised here, before any work."""
    check_numbers(settings)
    if not planner.fits_rules:
        refuse_unread(settings, RULE_OPTIONS, planner.task.refusal)
    chooses_start = settings.init == AUTOMATIC
    settings = replace(settings, init=named_start(settings.init))
    source = planner.source(_find_source(settings), settings)
    labeled = planner.needs_labels(source, settings)
    if labeled and len(source.train) and np.all(source.train.labels == UNLABELED):
        raise DataError(f"{source.name}: {missing_labels(source.train)}")
    level = settings.level if planner.levels_are_of_labels else None
    options: dict[str, Any] = {"strict": settings.strict, "level": level, "labeled": labeled}
    share = train_share_of_settings(settings)
    whole = planner.with_targets(make_splits(source, **options))
    opened = with_network_of_init(OpenedImages(share_of_train(whole, share), settings, device))
    settings = opened.settings
    resolved = planner.resolve(opened)  # before the scan, so that a wrong name or option is an error at once
    scan = _scan(source, settings) if is_scanned(source) else None
    leaks = _leak_notes(scan, settings) if scan else []
    copies = scan.copies() if scan and source.val is None else []
    if scan and (scan.unreadable or copies or leaks):  # else the splits stay as they are
        readable = scan.readable()
        source = replace(readable, notes=(*readable.notes, *leaks))
        whole = planner.with_targets(make_splits(source, copies=copies, **options))
        opened = opened.changed(splits=share_of_train(whole, share))
    record = _with_settings(starting_record(provenance_of(whole, scan), settings.data, settings.init), settings)
    unplaced = _PlacedRun(opened, resolved, record)

    def in_folder(folder: Path, why: str) -> _PlacedRun:
        return _in_folder(planner, unplaced, folder, why, chooses_start=chooses_start)

    run = placed(settings, record.is_of, in_folder)
    opened, resolved, record = run.opened, run.resolved, run.record
    splits = opened.splits
    notes = (*splits.notes, *resolved.notes, *_too_few(splits), *changes_since(run.folder, record))
    notes += planner.fault_notes(scan, settings) if scan else ()
    unreadable = tuple(scan.unreadable) if scan else ()
    plan = planner.plan_type(
        task=planner.task,
        settings=opened.settings,
        recipe=resolved.recipe,
        choices=resolved.choices,
        folder=run.folder,
        why_folder=run.why,
        record=record,
        left_out=[(bad.place.where, bad.reason) for bad in unreadable],
        notes=notes,
        time_s=run.time_s,
        offer=_offer(run) if chooses_start else "",
        splits=replace(splits, notes=notes),
        cost=resolved.cost,
        opened=opened,
        unreadable=unreadable,
        start=resolved.start,
    )
    return replace(plan, advice=() if run.has_begun else _advice(planner, plan))


def _with_settings(record: Provenance, settings: TrainingSettings) -> Provenance:
    """Return the record with what a later command for the same folder is compared with."""
    return replace(
        record,
        options=options_set(settings),
        corrections=corrections_digest(settings.corrections),
        plugins=plugged_parts(settings),
    )


@dataclass(frozen=True)
class _PlacedRun:
    """A run as it would be in a folder."""

    opened: OpenedImages
    resolved: Resolved
    record: Provenance
    folder: Path = Path()
    why: str = ""  # why it is this folder
    has_begun: bool = False
    time_s: float | None = None


def _in_folder(planner: ImagePlanner, run: _PlacedRun, folder: Path, why: str, *, chooses_start: bool) -> _PlacedRun:
    """Return the run as it would be in a folder; raise OtherRunError if that holds another run."""
    refuse_other_data(folder, run.record)
    begun = read_recipe(folder) if folder.is_dir() else None
    if begun and (decided := _decided_before(begun, run, folder)):
        opened = run.opened.changed(decided=decided)
        run = replace(run, opened=opened, resolved=planner.resolve(opened))
    if chooses_start:
        run = _resumed_start(planner, run, folder) if begun else _cached_start(planner, run)
    opened, resolved, record = run.opened, run.resolved, run.record
    settings, time_s = opened.settings, seconds_of(opened.settings.time)
    if time_s and begun:  # its epochs were planned when it began
        why_epochs = f"auto: as the run in {folder} began; --epochs trains longer"
        epochs, time_s = Choice("schedule.epochs", begun.schedule.epochs, why_epochs), None
        resolved = planner.resolve(opened, epochs)
    if begun and begun.name == resolved.recipe.name:
        recipe, choices = as_begun(begun, resolved.recipe, resolved.choices)
        resolved = replace(resolved, recipe=recipe, choices=choices)
    refuse_other_start(folder, record)
    refuse_other_corrections(folder, record)
    refuse_other_plugins(folder, record)
    same_run(folder, resolved.recipe, any_batch=settings.out is not None)
    if settings.out is None:
        refuse_fewer_options(folder, record)
    return replace(run, resolved=resolved, folder=folder, why=why, has_begun=begun is not None, time_s=time_s)


def _decided_before(begun: Recipe, run: _PlacedRun, folder: Path) -> tuple[Choice, ...]:
    """Return the choices of the race of a resumed run, or its network if `auto` would choose another one today."""
    settings, recipe = run.opened.settings, run.resolved.recipe
    if settings.race and (decided := race_choices(folder)):
        return decided
    if begun.name != recipe.name or begun.model.name == recipe.model.name or base_recipe(settings.recipe, None):
        return ()
    if settings.model or settings.init or "model.name" in settings.changes:
        return ()
    fields: dict[str, Any] = {"model.name": begun.model.name}
    fields |= {f"model.options.{key}": value for key, value in begun.model.options.items()}
    return tuple(Choice(key, value, "auto: as this run began") for key, value in fields.items())


def _started(planner: ImagePlanner, run: _PlacedRun, init: str) -> _PlacedRun:
    """Return the run with these initial weights."""
    opened = run.opened.changed(settings=replace(run.opened.settings, init=init))
    record = replace(starting_record(run.record, opened.settings.data, init), automatic_init=True)
    return replace(run, opened=opened, resolved=planner.resolve(opened), record=record)


def _resumed_start(planner: ImagePlanner, run: _PlacedRun, folder: Path) -> _PlacedRun:
    """Return the run with the weights that `--init auto` chose when it began."""
    before = recorded(folder)
    return _started(planner, run, before.init) if before and before.automatic_init and before.init else run


def _cached_start(planner: ImagePlanner, run: _PlacedRun) -> _PlacedRun:
    """Return the run with the first weights in the caches that suit it, or unchanged if there are none."""
    settings, kind = run.opened.settings, run.opened.facts().device
    if not may_start_from_weights(settings, run.opened.median_side):
        return run
    for name in cached_starts(settings.recipe_changes().get("model.name", settings.model), kind):
        try:
            started = _started(planner, run, name)
        except PatchloomError:  # a damaged file, or a network that patchloom does not have
            continue
        if _suits(planner, started.resolved, kind):
            return started
    return run


def _suits(planner: ImagePlanner, resolved: Resolved, kind: str) -> bool:
    """Return whether the weights can be used at the size of the recipe, by a network that is not too large."""
    start, recipe = resolved.start, resolved.recipe
    if start is None or resolved.cost.multiply_adds > MOST_MULTIPLY_ADDS[kind]:
        return False
    with torch.device("meta"):
        network = make_backbone(recipe)
    if not planner.starts_at_one_size and not network.any_resolution:
        return False
    return start.image_size == recipe.model.image_size or network.resamples


def _offer(run: _PlacedRun) -> str:
    """Return published weights that the user may want to download, if the run is new and starts from random ones."""
    settings, opened = run.opened.settings, run.opened
    if run.has_begun or settings.init or not may_start_from_weights(settings, opened.median_side):
        return ""
    return offered_start(run.resolved.recipe.model.name if settings.model else None, opened.facts().device)


def with_start(planner: ImagePlanner, plan: ImagePlan, init: str) -> ImagePlan:
    """Return the plan of a new run with initial weights, which are downloaded if needed."""
    assert plan.record is not None
    run = _started(planner, _PlacedRun(plan.opened, planner.resolve(plan.opened), plan.record), init)
    return replace(
        plan,
        settings=run.opened.settings,
        opened=run.opened,
        record=run.record,
        recipe=run.resolved.recipe,
        choices=run.resolved.choices,
        cost=run.resolved.cost,
        start=run.resolved.start,
        offer="",
    )


def with_epochs(planner: ImagePlanner, plan: ImagePlan, epochs: Choice) -> ImagePlan:
    """Return the plan with another number of epochs and what depends on it."""
    resolved = planner.resolve(plan.opened, epochs)
    resolved_plan = replace(plan, recipe=resolved.recipe, choices=resolved.choices)
    return replace(resolved_plan, advice=_advice(planner, resolved_plan))


def with_choices(planner: ImagePlanner, plan: ImagePlan, choices: Sequence[Choice]) -> ImagePlan:
    """Return the plan with the choices of a race and what depends on them."""
    opened = plan.opened.changed(decided=tuple(choices))
    resolved = planner.resolve(opened)
    return replace(plan, opened=opened, recipe=resolved.recipe, choices=resolved.choices, cost=resolved.cost)


def held_out(planner: ImagePlanner, plan: ImagePlan, share: float) -> ImagePlan:
    """Return the plan of a run that validates on a share of the training images instead of val."""
    splits = hold_out_of_train(plan.splits, share, plan.recipe.seed)
    opened = plan.opened.changed(splits=splits)
    resolved = planner.resolve(opened)
    assert plan.record is not None
    record = replace(plan.record, train=len(splits.train), val=len(splits.val))
    return replace(plan, opened=opened, splits=splits, recipe=resolved.recipe, choices=resolved.choices, record=record)


def _published_start(plan: ImagePlan) -> list[str]:
    """Return a line on published weights of the network, or of another one for classes, without --init and --recipe."""
    name, settings = plan.recipe.model.name, plan.settings
    if plan.method.head == "classes" and not settings.model and "model.name" not in settings.changes:
        name = pretrained_network(plan.opened.facts().device)
    weights = published(name)
    if settings.init or base_recipe(settings.recipe, settings.model) or not weights:
        return []
    first = weights[0]
    cost = f"{first.size} to fetch, {human(CATALOG[name].multiply_adds)} multiply-adds at {first.image_size} px"
    return [f"init       random; --init {first.tag} fine-tunes {name} as published on {first.trained_on} ({cost})"]


def options_set(settings: TrainingSettings) -> tuple[str, ...]:
    """Return the recipe fields that a command sets; its network and its recipe count as such."""
    named = {"model.name": settings.model, "recipe": None if settings.recipe == "auto" else settings.recipe}
    return tuple(sorted({*settings.recipe_changes(), *(key for key, value in named.items() if value)}))


def _advice(planner: ImagePlanner, plan: ImagePlan) -> tuple[str, ...]:
    """Return what of a named recipe does not suit the data, unless it was fitted to them."""
    settings = plan.settings
    if not planner.fits_recipes or base_recipe(settings.recipe, settings.model) is None:
        return ()
    balance = balance_advice(plan.recipe, plan.opened.facts(), settings.recipe_changes())
    text = "" if settings.fit else advice(plan.recipe, plan.opened.facts(), settings.recipe_changes())
    return tuple(filter(None, (text, balance)))


# The data -------------------------------------------------------------------------------------------------------------


def _find_source(settings: TrainingSettings) -> Source:
    if isinstance(settings, OpenedSettings) and settings.source is not None:
        return settings.source
    try:
        return find_source(settings.data, reading=settings.reading, strict=settings.strict)
    except (DataError, UsageError):
        if not holds_pairs(settings.data_text):
            raise
        text = f"{settings.data_text} holds sentence pairs, not images; learn to translate them with"
        raise UsageError(f"{text} --recipe translation-small (see `patchloom recipes`)") from None


def _scan(source: Source, settings: TrainingSettings) -> Survey:
    """Look at every image once; raise DataError with --strict if one cannot be read."""
    with scan_bar(enabled=place_from(os.environ).rank == 0) as progress:
        scan = survey(source, progress=progress)
    if settings.strict and scan.unreadable:
        raise DataError(
            f"{name_unreadable(scan.unreadable)}; repair or remove them (all: {_check_command(settings)}), "
            "or skip them by training without --strict"
        )
    return scan


def _leak_notes(scan: Survey, settings: TrainingSettings) -> list[str]:
    return [
        f"{later} has {count:,} of {first}'s images, so its score is too good; see {_check_command(settings)}"
        for (first, later), count in scan.leaks().items()
    ]


def _check_command(settings: TrainingSettings) -> str:
    if isinstance(settings.data[0], PythonData):
        return "patchloom.check(data)"
    reading = replace(settings.reading, val=None)  # does not concern single images
    return f"patchloom check {shlex.join(settings.data)}{reading.options()}"


def _too_few(splits: Splits) -> list[str]:
    """Return a note if val is so small that the best weights are chosen by chance."""
    count = int((splits.val.labels >= 0).sum())
    if not 0 < count < ENOUGH_VAL_IMAGES:
        return []
    return [
        f"val has only {plural(count, 'image')}, so one image is {100 / count:.1f} points of accuracy and the best "
        f"weights are chosen partly by chance; add images to val, to {ENOUGH_VAL_IMAGES} or more"
    ]
