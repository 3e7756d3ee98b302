"""The plan of a run, and the checks and folder names that all tasks share."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from patchloom.data.datasets import Source
from patchloom.data.sources.archives import is_archive
from patchloom.data.sources.labels_file import split_of
from patchloom.data.sources.specs import join_specs
from patchloom.data.trees.archive import archive_stem
from patchloom.engine.callbacks import EVENTS
from patchloom.options import share_of
from patchloom.plugins import MODULE, SEVERAL, identity, metrics_by_name, module_named, name_of
from patchloom.recipes.choices import Choice, base_recipe
from patchloom.recipes.parts import fields_of
from patchloom.recipes.schema import Recipe, difference
from patchloom.recipes.values import read_value
from patchloom.runs.checkpoints import epochs_begun, newest_progress
from patchloom.runs.config import read_recipe
from patchloom.runs.provenance import Provenance
from patchloom.runs.upload import local_folder
from patchloom.tasks.provenance import OtherRunError, default_folder
from patchloom.tasks.settings import TrainingSettings
from patchloom.tasks.task import Task
from patchloom_runtime.errors import UsageError, at_least
from patchloom_runtime.printable import plural

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OpenedSettings(TrainingSettings):
    """Settings after the task is chosen, with the reason and the source, if it was opened for the choice."""

    why_task: str = ""
    source: Source | None = None


AUTOMATIC, SCRATCH = "auto", "none"  # values of --init that name no weights

# Settings that are about the labels of whole images.
LABEL_OPTIONS = ("teacher", "pictures", "preview", "labels", "label_column", "label_pattern", "classes")


_OF_BATCH = ("optim.batch_size", "optim.lr", "optim.lr_reference_batch")  # what a batch size changes in a recipe
RULE_OPTIONS = ("max_error", "negatives")  # about when a classifier abstains


class TrainingExamples(Protocol):
    """The training samples, by index."""

    def where(self, index: int, /) -> str:
        """Return the file of one sample."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is ready to start. Each task adds the data it opened."""

    task: Task
    settings: TrainingSettings
    recipe: Recipe
    choices: list[Choice]
    folder: Path
    why_folder: str = ""  # why it is not runs/NAME
    record: Provenance | None = None  # of the data and initial weights; for text, known after `prepare`
    left_out: Sequence[tuple[str, str]] = ()  # file and reason of each unusable sample
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()  # fields of a named recipe that do not suit the data
    time_s: float | None = None  # time to plan the run into; None if its epochs are known
    offer: str = ""  # published weights that could be downloaded and fine-tuned instead, if --init is auto

    @property
    def examples(self) -> "TrainingExamples":
        """The training samples, which know the file of each."""
        raise NotImplementedError

    @property
    def data_name(self) -> str:
        """The name of the data in reports."""
        raise NotImplementedError

    def data_lines(self, *, dry_run: bool) -> list[str]:
        """Return the lines of the plan on the data and the network."""
        raise NotImplementedError

    def data_facts(self) -> dict[str, Any]:
        """Return the facts about the data for `--dry-run --json`."""
        raise NotImplementedError

    def model_facts(self) -> dict[str, Any]:
        """Return further facts about the network for `--dry-run --json`."""
        return {}

    def lines(self, *, dry_run: bool = False) -> list[str]:
        """Return the plan as text, with the reason of each automatic choice."""
        r = self.recipe
        unit = self.task.training.batch_unit
        counted = unit if unit != "images" else ""
        optimizer = f"{r.optim.name} at {r.optim.peak_lr:.2g}" if self.settings.optimizer is None else "own optimizer"
        recipe = (
            f"recipe     {r.name}: {plural(r.schedule.epochs, 'epoch')}, {optimizer}, "
            f"batch {r.optim.batch_size:{',' if counted else ''}}{f' {counted}' if counted else ''}"
        )
        chosen = self.settings
        why = chosen.why_task if isinstance(chosen, OpenedSettings) else ""
        return [
            *([f"task       {chosen.task}: {why}"] if why else []),
            *self.data_lines(dry_run=dry_run),
            recipe,
            *(f"           note: {line}" for line in self.advice),
            *(f"           {c.key} = {c.value}   ({c.why})" for c in self.choices if not _replaces(chosen, c.key)),
            *([f"plug-ins   {', '.join(_plugin_names(self.settings))}"] if plugged_parts(self.settings) else []),
            f"folder     {self.folder}{f'   ({self.why_folder})' if self.why_folder else ''}",
        ]


# Recipe fields that a plugged-in part replaces, by their beginnings; a transform leaves mixing to the recipe.
_REPLACED = {
    "transform": (
        *("augment.crop", "augment.flip", "augment.policy", "augment.color", "augment.erasing"),
        "augment.blur",
    ),
    "loss": ("objective.loss", "objective.smoothing"),
    "optimizer": ("optim.name", "optim.lr", "optim.weight_decay", "optim.betas", "optim.momentum"),
}


def _replaces(settings: TrainingSettings, key: str) -> bool:
    return any(getattr(settings, part) is not None and key.startswith(keys) for part, keys in _REPLACED.items())


def _plugin_names(settings: TrainingSettings) -> list[str]:
    named = ((kind.partition(" ")[0], name.partition(" ")[0]) for kind, name in plugged_parts(settings).items())
    return [f"{kind} {name.rpartition('.')[2]}" for kind, name in named]


def method_of_settings(settings: TrainingSettings) -> str | None:
    """Return objective.method from --set or the recipe; None if `auto` chooses the recipe."""
    base = base_recipe(settings.recipe, settings.model)
    return None if base is None else str(settings.changes.get("objective.method", base.objective.method))


def named_start(init: str | None) -> str | None:
    """Return the weights that --init names; None for auto and none."""
    return None if init in (AUTOMATIC, SCRATCH) else init


def train_share_of_settings(settings: TrainingSettings) -> float:
    """Return the share of the training images that are used, from --set or the recipe; all by default."""
    base = base_recipe(settings.recipe, settings.model)
    share = settings.changes.get("train_share", base.train_share if base else 1.0)
    return float(read_value("train_share", share, fields_of(Recipe)["train_share"]))


def plugged_parts(settings: TrainingSettings) -> dict[str, str]:
    """Return what the user plugs in, by setting: its qualified name and a digest of its code."""
    parts: dict[str, Any] = {
        kind: getattr(settings, kind) for kind in ("transform", "batch_transform", "loss", "optimizer")
    }
    if settings.model and settings.model.startswith(MODULE):
        parts["model"] = module_named(settings.model)
    parts |= {f"metric {name}": each for name, each in metrics_by_name(settings.metrics).items()}
    parts |= {f"callback {number}": each for number, each in enumerate(settings.callbacks, 1)}
    plugged = {kind: identity(part) for kind, part in parts.items() if part is not None}
    return plugged | ({"select": settings.select} if settings.select else {})


def check_parts(settings: TrainingSettings, task: Task) -> None:
    """Raise UsageError for parts that cannot be called, or that the task does not use."""
    for name in plugged_parts(settings):
        kind = name.partition(" ")[0]
        if kind not in task.training.plugins:
            raise UsageError(f"{SEVERAL.get(kind, kind)} cannot be plugged into {task.name}; drop it")
    for kind in ("transform", "batch_transform", "loss", "optimizer"):
        part = getattr(settings, kind)
        if part is not None and not callable(part):
            raise UsageError(f"{kind} is of type {type(part).__name__}; expected a function")
    for callback in settings.callbacks:
        if not any(hasattr(callback, event) for event in EVENTS):
            raise UsageError(f"the callback {name_of(callback)} has no method {', '.join(EVENTS)}; define at least one")


def chosen_folder(
    settings: TrainingSettings,
    is_ours: Callable[[Provenance], bool],
    taken: Mapping[Path, str] = MappingProxyType({}),
) -> tuple[Path, str]:
    """Return the run folder, --out or one named after the data, and why it is not runs/NAME.

    `taken` maps folders of other runs to the reason why they cannot be used.
    """
    if settings.out:
        return local_folder(settings.out), ""
    return default_folder(folder_name(settings.data), settings.init, is_ours, taken)


def refuse_unread(settings: TrainingSettings, unread: Sequence[str], why: str) -> None:
    """Raise UsageError for settings that a task does not read."""
    defaults = {each.name: each.default for each in fields(TrainingSettings)}
    for name in unread:
        if getattr(settings, name) != defaults[name]:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def refuse_fit(settings: TrainingSettings) -> None:
    """Raise UsageError for --fit in tasks whose `auto` is the fitted form of the published recipe."""
    if settings.fit:
        raise UsageError(
            f"--fit: auto is the form of {settings.recipe} that is fitted to data and machine; drop --recipe and "
            "--fit, and set the fields to keep with --model and --set"
        )


def check_numbers(settings: TrainingSettings) -> None:
    """Raise UsageError for numbers that are out of range."""
    counts = (
        ("workers", settings.workers, 0),
        ("patience", settings.patience, 1),
        ("pictures", settings.pictures, 1),
        ("micro-batches", settings.micro_batches, 1),
    )
    for name, value, least in counts:
        if value is not None:
            at_least(f"--{name}", value, least)
    seconds_of(settings.stop_after, "--stop-after")
    if settings.max_error is not None:
        share_of(settings.max_error, "--max-error")
    if seconds_of(settings.time) and "schedule.epochs" in settings.recipe_changes():
        raise UsageError("--time plans the epochs, and --epochs sets them; pass one of the two (or --stop-after)")
    if settings.fit and settings.recipe == "auto":
        raise UsageError("--fit fits a named recipe to the data, and auto is always fitted; drop --fit")
    if settings.preview and settings.transform is not None:
        raise UsageError(
            "--preview draws the recipe's augmentation, which your transform replaces; drop one of the two"
        )
    if not settings.worker_timeout > 0:
        raise UsageError(f"--worker-timeout is {settings.worker_timeout:g}, expected seconds above 0")


def placed(settings: TrainingSettings, is_ours: Callable[[Provenance], bool], make: Callable[[Path, str], T]) -> T:
    """Call `make` with --out, or with the first default folder that holds no other run, and return its result."""
    taken: dict[Path, str] = {}
    while True:
        folder, why = chosen_folder(settings, is_ours, taken)
        try:
            return make(folder, why)
        except OtherRunError as error:
            if settings.out is not None:
                raise
            taken[folder] = error.reason


def same_run(folder: Path, recipe: Recipe, *, any_batch: bool = False) -> None:
    """Raise OtherRunError if the folder holds a run with another recipe, except for more epochs.

    With `any_batch`, a run that has not ended may also continue with another batch size and the learning rate for it.
    """
    if folder.is_file():
        raise UsageError(f"{folder} is a file; pass a folder as --out")
    before = read_recipe(folder)
    changed = difference(before, recipe) if before else {}
    changed.pop("schedule.epochs", None)
    if any_batch and "optim.batch_size" in changed and not newest_progress(folder).get("ended"):
        changed = {key: values for key, values in changed.items() if key not in _OF_BATCH}
    if changed:
        changes = ", ".join(f"{key} {old} → {new}" for key, (old, new) in list(changed.items())[:4])
        raise OtherRunError(
            f"{folder} holds a run with other settings ({changes})",
            "repeat the command that began it, or pass another folder with --out",
        )
    begun = epochs_begun(folder)
    if before and recipe.schedule.epochs < begun:
        raise OtherRunError(
            f"{folder} is already trained for {plural(begun, 'epoch')} and cannot be taken back to "
            f"{recipe.schedule.epochs}",
            f"pass --epochs {begun} or more, or another folder with --out",
        )


def folder_name(data: Sequence[str]) -> str:
    """Return the name of the run folder below runs/; splits that are given one by one are named by their folder."""
    parts = [Path(part).expanduser() for part in data]
    stems = [Path(part.name).stem if not is_archive(part) else archive_stem(part) for part in parts]
    if len(parts) > 1 and all(map(split_of, stems)):
        stems = [parts[0].resolve().parent.name]
    more = f"-and-{len(stems) - 3}-more" if len(stems) > 3 else ""
    stem = "-".join(stems[:3]) + more if parts[0].exists() else join_specs(data)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"


def seconds_of(text: str | None, option: str = "--time") -> float | None:
    """Return '90s', '30m', '2h' or '2h30m' in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    if not text.strip() or match is None or not any(match.groups()):
        raise UsageError(f"{option} takes hours, minutes or seconds, such as 2h, 30m or 90s; got {text!r}")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    total = hours * 3600 + minutes * 60 + seconds
    if not total:
        raise UsageError(f"{option} is {text!r}, expected more than 0")
    return total
