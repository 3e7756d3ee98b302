"""What a run will be: the user's settings, the data and the recipe they lead to. What can be wrong is found here."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from patchloom.build import Choice, base_recipe, facts_of, is_run, make_network, reads_labels, resolve_recipe
from patchloom.checkpoint import epochs_begun, read_recipe
from patchloom.data.archive import archive_stem
from patchloom.data.archives import is_archive
from patchloom.data.labels_file import split_of
from patchloom.data.loader import WORKER_TIMEOUT_S
from patchloom.data.pairs import holds_pairs
from patchloom.data.reading import Reading
from patchloom.data.scan_bar import scan_bar
from patchloom.data.sets import UNLABELLED, Splits
from patchloom.data.source import find_source, parts_of
from patchloom.data.splits import make_splits
from patchloom.data.survey import Unreadable, is_made_in_memory, name_unreadable, survey
from patchloom.data.unlabelled import missing_labels
from patchloom.deployment.data_record import DataRecord, record_of
from patchloom.engine.rendezvous import place_from
from patchloom.errors import DataError, UsageError, at_least
from patchloom.inspection.cost import Cost, cost, human
from patchloom.models.network import Network
from patchloom.models.weights_file import check_weights_file
from patchloom.recipes.fit import advice, misfits
from patchloom.recipes.parts import GrafitPart
from patchloom.recipes.schema import Recipe, difference, flatten, override
from patchloom.training.data_record import (
    LEFT_OUT,
    began_with,
    changes_since,
    default_folder,
    refuse_other_data,
    refuse_other_start,
)
from patchloom.training.start import Start, find_start

# One picture of a smaller val split is more than two points of accuracy.
ENOUGH_TO_CHOOSE_BY = 50


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What a user can say about a run beside the recipe; only `data` has no default."""

    data: str
    model: str | None = None
    recipe: str | Recipe = "auto"
    out: str | None = None
    teacher: str | None = None
    init: str | None = None
    epochs: int | None = None
    size: int | None = None
    batch: int | None = None
    micro_batches: int | None = None  # None: as many as the memory asks for
    fit: bool = False  # a named recipe is fitted to the data and the machine
    time: str | None = None  # into which the whole schedule is planned
    stop_after: str | None = None  # when to stop and save
    patience: int | None = None
    pictures: int | None = None  # epochs between pictures of the network; None draws none
    changes: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    workers: int | None = None
    worker_timeout: float = WORKER_TIMEOUT_S
    compiled: bool | None = None
    shard: bool = False
    level: str | None = None
    labels: str | None = None  # these five: how the data are read, see `Reading`
    label_column: str | None = None
    label_pattern: str | None = None
    taxonomy: str | None = None
    classes: Literal["innermost", "outermost"] | None = None
    strict: bool = False
    trackers: tuple[str, ...] = ()

    @property
    def reading(self) -> Reading:
        """How the data are read."""
        return Reading.of(self)

    def recipe_changes(self) -> dict[str, Any]:
        """The options that are recipe fields, under their dotted keys."""
        short = {"schedule.epochs": self.epochs, "model.image_size": self.size, "optim.batch_size": self.batch}
        changes: dict[str, Any] = {key: value for key, value in short.items() if value is not None}
        if self.teacher:
            changes["objective.teacher"] = self.teacher
            changes.setdefault("objective.distillation", "hard")
        return changes | self.changes


@dataclass(frozen=True)
class Plan:
    """A run that could start now."""

    splits: Splits
    recipe: Recipe
    choices: list[Choice]
    folder: Path
    cost: Cost
    settings: TrainingSettings
    record: DataRecord
    left_out: Sequence[Unreadable]
    start: Start | None = None  # the run whose weights it starts from
    why_folder: str = ""  # where it is not runs/NAME
    advice: tuple[str, ...] = ()  # what of a named recipe does not suit the data
    time_s: float | None = None  # into which the run is to be planned; None: its epochs are known

    def lines(self, *, dry_run: bool = False) -> list[str]:
        """The plan for a person, with the reason of each automatic choice."""
        r, s = self.recipe, self.splits
        given = shlex.quote(self.settings.data) + self.settings.reading.options()
        tested = f"patchloom evaluate {shlex.quote(str(self.folder))} {shlex.quote(self.settings.data)} --split test"
        listed = f"all: patchloom check {given}" if dry_run else f"all in {self.folder / LEFT_OUT}"
        lines = [
            f"data       {s.name}: {len(s.train):,} images to train on, {len(s.val):,} to validate, "
            + (f"{len(s.classes)} classes" if len(s.classes) else "no labels"),
            *([f"           {len(s.test):,} to test later: {tested}"] if s.test is not None and len(s.classes) else []),
            *([f"left out   {name_unreadable(self.left_out)}; {listed}"] if self.left_out else []),
            *(f"           note: {note}" for note in s.notes),
            f"model      {r.model.name} at {r.model.image_size} px: {human(self.cost.parameters)} parameters, "
            f"{human(self.cost.multiply_adds)} multiply-adds",
            *([f"init       {self.start.told(r, s.classes.names)}"] if self.start else []),
            f"recipe     {r.name}: {r.schedule.epochs} epochs, {r.optim.name} at {r.optim.peak_lr:.2g}, "
            f"batch {r.optim.batch_size}",
            *(f"           note: {line}" for line in self.advice),
        ]
        lines += [f"           {c.key} = {c.value}   ({c.why})" for c in self.choices]
        return [*lines, f"folder     {self.folder}{f'   ({self.why_folder})' if self.why_folder else ''}"]


def make_plan(settings: TrainingSettings, device: str) -> Plan:
    """Everything that can be wrong is found here, before any work."""
    check_numbers(settings)
    try:
        source = find_source(settings.data, reading=settings.reading, strict=settings.strict)
    except (DataError, UsageError):
        if not holds_pairs(settings.data):
            raise
        told = f"{settings.data} holds sentence pairs, not images; learn to translate them with"
        raise UsageError(f"{told} --recipe translation-small (see `patchloom recipes`)") from None
    labelled = _reads_labels(settings)
    if labelled and len(source.train) and np.all(source.train.labels == UNLABELLED):
        raise DataError(f"{source.name}: {missing_labels(source.train)}")
    seen, look = None, f"patchloom check {shlex.quote(settings.data)}{settings.reading.options()}"
    chosen: dict[str, Any] = {"strict": settings.strict, "level": settings.level, "labelled": labelled}
    if not is_made_in_memory(source):
        # A wrong name or option is said at once, not after all pictures have been looked at.
        _resolve(make_splits(source, **chosen), settings, device)
        with scan_bar(shown=place_from(os.environ).rank == 0) as progress:
            seen = survey(source, progress=progress)
        if settings.strict and seen.unreadable:
            raise DataError(
                f"{name_unreadable(seen.unreadable)}; repair or remove them (all: {look}), "
                "or leave them out by training without --strict"
            )
        source = seen.readable()
        leaks = [
            f"{later} has {count:,} of {first}'s pictures, so its score is too good; see {look}"
            for (first, later), count in seen.leaks().items()
        ]
        source = replace(source, notes=(*source.notes, *leaks))
    copies = seen.copies() if seen and source.val is None else ()
    splits = make_splits(source, copies=copies, **chosen)
    recipe, choices, network, start = _resolve(splits, settings, device)
    record = began_with(record_of(splits, seen), settings.data, settings.init)
    folder, why = Path(settings.out or ""), ""
    if not settings.out:
        folder, why = default_folder(folder_name(settings.data), settings.init, record.is_of)
    refuse_other_data(folder, record)
    begun = read_recipe(folder) if folder.is_dir() else None
    time_s = seconds_of(settings.time)
    if time_s and begun:  # its epochs were planned when it began
        why_epochs = f"auto: as the run in {folder} began; --epochs goes on for longer"
        epochs, time_s = Choice("schedule.epochs", begun.schedule.epochs, why_epochs), None
        recipe, choices, network, start = _resolve(splits, settings, device, epochs)
    if begun and begun.name == recipe.name:
        recipe, choices = _as_begun(begun, recipe, choices)
    same_run(folder, recipe)
    refuse_other_start(folder, record)
    notes = (*splits.notes, *network.notes, *_too_few(splits), *changes_since(folder, record))
    plan = Plan(
        replace(splits, notes=notes),
        recipe,
        choices,
        folder,
        cost(network),
        settings,
        record,
        seen.unreadable if seen else (),
        start,
        why,
        time_s=time_s,
    )
    return replace(plan, advice=() if begun else _advice(plan, device))


def _too_few(splits: Splits) -> list[str]:
    """A note where the best weights would be chosen by chance."""
    count = int((splits.val.labels >= 0).sum())
    if not 0 < count < ENOUGH_TO_CHOOSE_BY:
        return []
    return [
        f"val has {count} picture{'s' * (count != 1)}: one of them is {100 / count:.1f} points, too few to choose by; "
        f"give val at least {ENOUGH_TO_CHOOSE_BY}, or take its score and the weights it keeps for a guess"
    ]


def planned_for(plan: Plan, epochs: Choice, device: str) -> Plan:
    """The same run with so many epochs, and with what follows from them."""
    recipe, choices, _, _ = _resolve(plan.splits, plan.settings, device, epochs)
    planned = replace(plan, recipe=recipe, choices=choices)
    return replace(planned, advice=_advice(planned, device))


def _advice(plan: Plan, device: str) -> tuple[str, ...]:
    """What of a named recipe does not suit the data, where it was not fitted to them."""
    settings = plan.settings
    if settings.fit or base_recipe(settings.recipe, settings.model) is None:
        return ()
    found = misfits(plan.recipe, facts_of(plan.splits, device, settings.init is not None))
    return (advice(plan.recipe, found),) if found else ()


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


def _resolve(
    splits: Splits, settings: TrainingSettings, device: str, epochs: Choice | None = None
) -> tuple[Recipe, list[Choice], Network, Start | None]:
    """The recipe for these data, the choices made for it, its network without weights, and the run it starts from.

    `epochs` are those that a planned time leads to, as if they had been given.
    """
    changes = settings.recipe_changes() | ({epochs.key: epochs.value} if epochs else {})
    start = find_start(settings.init, settings.recipe, changes.get("model.name", settings.model))
    taken = start.fields(settings.recipe) if start else {}
    recipe, choices = resolve_recipe(
        splits,
        recipe=settings.recipe,
        model=start.model if start and not start.is_bound(settings.recipe) else settings.model,
        changes=taken | changes,
        device=device,
        pretrained=settings.init is not None,
        fit=settings.fit,
    )
    if start:
        choices = start.named(choices, [*changes, *(["model.name"] if settings.model else [])])
    if epochs:
        choices = [epochs if choice.key == epochs.key else choice for choice in choices]
    part = recipe.objective
    if part.distillation != "none" and not part.teacher:
        raise UsageError(f"recipe {recipe.name} distils ({part.distillation}) but names no teacher; give --teacher")
    if part.teacher and not is_run(part.teacher) and Path(part.teacher).is_dir():
        raise UsageError(f"{part.teacher} is not the folder of a run: it has no config.json")
    if settings.init and not is_run(settings.init) and not Path(settings.init).is_file():
        raise UsageError(f"--init {settings.init}: no such run or file")
    for given in (settings.init, (part.teacher or "").partition("@")[2]):
        if given and Path(given).is_file():
            check_weights_file(Path(given))
    if part.method == "clusterfit":
        _check_clusters(recipe.grafit, len(splits.train))
    with torch.device("meta"):
        network = make_network(recipe, len(splits.classes))
    if recipe.views.local and part.method != "dino" and not network.any_resolution:
        raise UsageError(
            f"{recipe.model.name} takes images of one size, and objective.method {part.method} has no way to show it "
            "smaller views. Set views.local to 0."
        )
    if recipe.views.local and part.method == "dino" and recipe.dino.small_views == "resample" and not network.resamples:
        raise UsageError(
            f"{recipe.model.name} takes images of one size, and its weights cannot be resampled for smaller views. "
            "Show it resized ones with --set dino.small_views=resize, or set that to none."
        )
    return recipe, choices, network, start


def learns_to_translate(settings: TrainingSettings) -> bool:
    """Whether the method is translation; that of `auto` is not."""
    return _method(settings) == "translation"


def _reads_labels(settings: TrainingSettings) -> bool:
    """Whether the method learns from labels; that of `auto` does."""
    method = _method(settings)
    return method is None or reads_labels(method)


def _method(settings: TrainingSettings) -> str | None:
    """The objective.method as the user changed it; None where `auto` chooses the recipe."""
    base = base_recipe(settings.recipe, settings.model)
    return None if base is None else str(settings.changes.get("objective.method", base.objective.method))


def _check_clusters(part: GrafitPart, images: int) -> None:
    if part.clusters_of is None or not is_run(part.clusters_of):
        raise UsageError(
            f"clusterfit learns clusters of another run's features; given {part.clusters_of}, expected the folder of "
            "a run: --set grafit.clusters_of=RUN"
        )
    if part.clusters > images:
        raise UsageError(f"grafit.clusters is {part.clusters}, more than the {images} images. Lower it.")


def check_numbers(settings: TrainingSettings) -> None:
    """Refuse counts that are too small."""
    given = (
        ("workers", settings.workers, 0),
        ("patience", settings.patience, 1),
        ("pictures", settings.pictures, 1),
        ("micro-batches", settings.micro_batches, 1),
    )
    for name, value, least in given:
        if value is not None:
            at_least(f"--{name}", value, least)
    seconds_of(settings.stop_after, "--stop-after")
    if seconds_of(settings.time) and "schedule.epochs" in settings.recipe_changes():
        raise UsageError("--time plans the epochs, and --epochs gives them; give one of the two (or --stop-after)")
    if settings.fit and settings.recipe == "auto":
        raise UsageError("--fit fits a named recipe to the data, and auto always is fitted; leave it out")
    if not settings.worker_timeout > 0:
        raise UsageError(f"--worker-timeout is {settings.worker_timeout:g}, expected seconds above 0")


def same_run(folder: Path, recipe: Recipe) -> None:
    """A folder with another run in it is an error that lists what differs, unless it only goes on for longer."""
    if folder.is_file():
        raise UsageError(f"{folder} is a file; give --out a folder")
    before = read_recipe(folder)
    changed = difference(before, recipe) if before else {}
    changed.pop("schedule.epochs", None)
    if changed:
        shown = ", ".join(f"{key} {old} → {new}" for key, (old, new) in list(changed.items())[:4])
        raise UsageError(
            f"{folder} holds a run with other settings ({shown}); give them as before (--set field=value), "
            "or a new folder with --out"
        )
    begun = epochs_begun(folder)
    if before and recipe.schedule.epochs < begun:
        raise UsageError(
            f"{folder} is already trained for {begun} epochs and cannot be taken back to {recipe.schedule.epochs}; "
            f"give --epochs {begun} or more, or a new folder with --out"
        )


def folder_name(data: str) -> str:
    """Where a run on `data` goes, below runs/; splits given one by one are named by the folder they lie in."""
    parts = [Path(part).expanduser() for part in parts_of(data)]
    stems = [Path(part.name).stem if not is_archive(part) else archive_stem(part) for part in parts]
    if len(parts) > 1 and all(map(split_of, stems)):
        stems = [parts[0].resolve().parent.name]
    more = f"-and-{len(stems) - 3}-more" if len(stems) > 3 else ""
    stem = "-".join(stems[:3]) + more if parts[0].exists() else data
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"


def seconds_of(text: str | None, option: str = "--time") -> float | None:
    """'90s', '30m', '2h' or '2h30m' in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    if not text.strip() or match is None or not any(match.groups()):
        raise UsageError(f"{option} takes hours, minutes or seconds, such as 2h, 30m or 90s; given {text!r}")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if not total:
        raise UsageError(f"{option} is {text!r}, expected more than no time")
    return total
