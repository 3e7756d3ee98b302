"""`patchloom.train`: from a data set to a trained classifier. Plan, run, resume, evaluate, report."""

import json
import os
import re
import time as clock
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patchloom.build import (
    Choice,
    initialise,
    is_run,
    make_evaluation_loader,
    make_network,
    make_objective,
    make_teacher,
    resolve_recipe,
)
from patchloom.checkpoint import (
    Folder,
    Preprocessing,
    find_checkpoint,
    load_network,
    locked,
    read_run_files,
    write_run_files,
)
from patchloom.data.device import make_loader
from patchloom.data.loader import ImageBatch
from patchloom.data.sets import ImageSet, Splits
from patchloom.data.source import open_data
from patchloom.deployment.classifier import Classifier
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.ema import Ema
from patchloom.engine.loop import Outcome
from patchloom.engine.loop import train as run_loop
from patchloom.engine.optimisation import Schedule, freeze, make_optimizer
from patchloom.engine.records import open_records
from patchloom.engine.run import Run
from patchloom.errors import NumericalError, ResourceError, UsageError
from patchloom.evaluation.classification import ClassificationReport, evaluate
from patchloom.inspection.cost import Cost, cost, human
from patchloom.models.network import Network
from patchloom.recipes.schema import Recipe, difference

# torch.compile takes about a minute; it pays where the run is longer.
COMPILE_FROM_STEPS = 1500
# A run is evaluated about this often, and at the end.
EVALUATIONS = 16
MEASURED_STEPS = 5
WORST_SHOWN = 24
FILES_SHOWN = 4


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
    time: str | None = None
    patience: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    workers: int | None = None
    compiled: bool | None = None
    level: str | None = None
    labels: str | None = None
    strict: bool = False
    trackers: tuple[str, ...] = ()

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

    def lines(self) -> list[str]:
        """The plan for a person, with the reason of each automatic choice."""
        r, s = self.recipe, self.splits
        lines = [
            f"data       {s.name}: {len(s.train):,} images to train on, {len(s.val):,} to validate, "
            f"{len(s.classes)} classes",
            *(f"           note: {note}" for note in s.notes),
            f"model      {r.model.name} at {r.model.image_size} px: {human(self.cost.parameters)} parameters, "
            f"{human(self.cost.multiply_adds)} multiply-adds",
            f"recipe     {r.name}: {r.schedule.epochs} epochs, {r.optim.name} at {r.optim.peak_lr:.2g}, "
            f"batch {r.optim.batch_size}",
        ]
        lines += [f"           {c.key} = {c.value}   ({c.why})" for c in self.choices]
        return [*lines, f"folder     {self.folder}"]


@dataclass(frozen=True)
class Trained:
    """What a finished command leaves: the folder, the numbers, the classifier."""

    folder: Path
    outcome: Outcome | None
    metrics: dict[str, float]

    @property
    def classifier(self) -> Classifier:
        """The trained model with labels and preprocessing."""
        from patchloom.deployment.classifier import load

        return load(self.folder)

    def summary(self) -> dict[str, Any]:
        """For machines."""
        return {"folder": str(self.folder), "ended": self.outcome.ended if self.outcome else None, **self.metrics}


def train(data: str, **settings: Any) -> Trained:
    """Train a classifier on `data`; the options are those of `patchloom train` (see `TrainingSettings`)."""
    known = set(TrainingSettings.__dataclass_fields__)
    for name in settings:
        if name not in known:
            from patchloom.errors import nearest

            raise UsageError(f"train has no option {name!r}.{nearest(name, sorted(known))}")
    return run_training(TrainingSettings(data=data, **settings))


def run_training(settings: TrainingSettings, *, dry_run: bool = False, say: Callable[[str], None] = print) -> Trained:
    """The whole of `patchloom train`: plan it, say it, do it, report it."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    time_limit_s = seconds_of(settings.time)
    plan = make_plan(settings, device)
    processes = Processes(plan.recipe.precision, device=device)
    say = say if processes.is_main else silent
    for line in plan.lines():
        say(line)
    with ExitStack() as stack:
        stack.callback(processes.close)
        if not dry_run and processes.is_main:
            stack.enter_context(locked(plan.folder))
        run, network, note = make_run(plan, processes, say)
        stack.callback(run.loader.close)  # type: ignore[attr-defined]
        say(f"machine    {_machine(processes)}; {note}")
        if dry_run:
            say(_measured(run, plan))
            say("Nothing was trained.   Next: the same command without --dry-run")
            return Trained(plan.folder, None, {})
        return _train_and_report(plan, run, network, time_limit_s, say)


def _train_and_report(
    plan: Plan, run: Run, network: Network, time_limit_s: float | None, say: Callable[[str], None]
) -> Trained:
    found = find_checkpoint(plan.folder)
    for note in found.notes if found else []:
        say(f"note: {note}")
    if found:
        say(f"going on with {plan.folder} from step {found.snapshot.step} of {run.schedule.total_steps}")
    elif run.processes.is_main:
        write_run_files(
            plan.folder, network, _preprocessing(plan.recipe, network), plan.recipe, plan.splits.classes.names
        )
    run.records = open_records(plan.folder, is_main=run.processes.is_main, trackers=plan.settings.trackers)
    started = clock.perf_counter()
    try:
        outcome = run_loop(replace(run, time_limit_s=time_limit_s), found.snapshot if found else None)
    except NumericalError as error:
        raise _with_files(error, plan.splits.train) from error
    seconds = clock.perf_counter() - started
    metrics: dict[str, float] = {}
    if run.processes.is_main:
        report = final_report(plan, run.processes)
        metrics = dict(report)
        say(
            f"{outcome.ended} after {_minutes(seconds)}: top-1 {metrics['top1']:.2f} % "
            f"({outcome.progress.best_weights or 'model'}, step {outcome.progress.best_step})"
        )
        page = _write_report(plan, report, outcome, seconds)
        say(f"{page}")
        say(f"Next: patchloom predict {plan.folder} IMAGE…   |   patchloom evaluate {plan.folder} {plan.settings.data}")
    return Trained(plan.folder, outcome, metrics)


# Planning -----------------------------------------------------------------------------------------------------------


def make_plan(settings: TrainingSettings, device: str) -> Plan:
    """Everything that can be wrong is found here, before any work."""
    splits = open_data(settings.data, strict=settings.strict, level=settings.level, labels=settings.labels)
    recipe, choices = resolve_recipe(
        splits,
        recipe=settings.recipe,
        model=settings.model,
        changes=settings.recipe_changes(),
        device=device,
        pretrained=settings.init is not None,
    )
    part = recipe.objective
    if part.distillation != "none" and not part.teacher:
        raise UsageError(f"recipe {recipe.name} distils ({part.distillation}) but names no teacher; give --teacher")
    if part.teacher and not is_run(part.teacher) and Path(part.teacher).is_dir():
        raise UsageError(f"{part.teacher} is not the folder of a run: it has no config.json")
    if settings.init and not is_run(settings.init) and not Path(settings.init).is_file():
        raise UsageError(f"--init {settings.init}: no such run or file")
    with torch.device("meta"):
        network = make_network(recipe.model, len(splits.classes))
    folder = Path(settings.out) if settings.out else Path("runs") / _folder_name(settings.data)
    _same_run(folder, recipe)
    return Plan(splits, recipe, choices, folder, cost(network), settings)


def _same_run(folder: Path, recipe: Recipe) -> None:
    """A folder with another run in it is an error that lists what differs, unless it only goes on for longer."""
    if not (folder / "recipe.yaml").is_file():
        if folder.is_file():
            raise UsageError(f"{folder} is a file; give --out a folder")
        return
    before = read_run_files(folder).recipe
    changed = difference(before, recipe) if before else {}
    changed.pop("schedule.epochs", None)
    if changed:
        shown = ", ".join(f"{key} {old} → {new}" for key, (old, new) in list(changed.items())[:4])
        raise UsageError(f"{folder} holds a run with other settings ({shown}); give a new folder with --out")


def _folder_name(data: str) -> str:
    stem = Path(data).stem if Path(data).exists() else data
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"


def seconds_of(text: str | None) -> float | None:
    """'90s', '30m', '2h' or '2h30m' in seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    if not text.strip() or match is None or not any(match.groups()):
        raise UsageError(f"--time takes hours, minutes or seconds, such as 2h, 30m or 90s; given {text!r}")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


# Putting the run together -------------------------------------------------------------------------------------------


def make_run(plan: Plan, processes: Processes, say: Callable[[str], None]) -> tuple[Run, Network, str]:
    """The objects of the run; the batch is cut into as many parts as the device's memory asks for."""
    recipe, settings = plan.recipe, plan.settings
    torch.manual_seed(recipe.seed)
    if processes.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    network = make_network(recipe.model, len(plan.splits.classes))
    if settings.init:
        initialise(network, settings.init)
    network.to(processes.device)
    torch.manual_seed(recipe.seed + processes.rank)  # the same weights on every rank, other drop paths
    freeze(network, recipe.model.trainable)
    teacher = (
        make_teacher(recipe.objective.teacher, plan.splits).to(processes.device) if recipe.objective.teacher else None
    )
    workers = settings.workers if settings.workers is not None else _workers()
    loader, note = make_loader(
        plan.splits.train,
        recipe.augment,
        recipe.model.image_size,
        batch_size=recipe.optim.batch_size,
        seed=recipe.seed,
        device=processes.device,
        workers=workers,
        rank=processes.rank,
        world=processes.world,
        skip_broken=not settings.strict,
    )
    schedule = Schedule(recipe.optim, recipe.schedule, loader.steps_per_epoch)
    compiles = settings.compiled
    if compiles is None:
        compiles = processes.device.type == "cuda" and schedule.total_steps >= COMPILE_FROM_STEPS
    objective = make_objective(recipe, network, teacher)
    model: nn.Module = torch.compile(network) if compiles else network  # type: ignore[assignment]
    run = Run(
        model=model,
        objective=objective,
        optimizer=make_optimizer(network, recipe.optim),
        schedule=schedule,
        loader=loader,
        processes=processes,
        saver=Folder(plan.folder),
        ema=Ema(network, recipe.optim.ema_decay) if recipe.optim.ema_decay else None,
        clip_norm=recipe.optim.clip_norm,
        eval_mode=recipe.model.eval_mode,
        evaluators=[_Evaluator(plan, processes, workers)],
        evaluate_every=max(1, recipe.schedule.epochs // EVALUATIONS),
        metric="top1",
        patience=settings.patience,
    )
    run.accumulate = parts_that_fit(run)
    if run.accumulate > 1:
        say(f"           batch {recipe.optim.batch_size} does not fit at once: {run.accumulate} parts, the same result")
    return run, network, note + (", compiled" if compiles else "")


class _Evaluator:
    """Top-1 and the rest on the val split, which is decoded once."""

    def __init__(self, plan: Plan, processes: Processes, workers: int) -> None:
        self._plan, self._processes, self._workers = plan, processes, workers
        self._batches: Any = None

    def __call__(self, model: nn.Module) -> Iterable[tuple[str, float]]:
        return self.report(model)

    def report(self, model: nn.Module) -> ClassificationReport:
        """The whole evaluation; every rank does all of it, so that none waits for another's."""
        plan, network = self._plan, unwrap(model)
        if self._batches is None:
            self._batches = make_evaluation_loader(
                plan.splits.val,
                plan.recipe.test.image_size or plan.recipe.model.image_size,
                plan.recipe.test.crop_ratio,
                batch_size=plan.recipe.optim.batch_size,
                device=self._processes.device,
                workers=self._workers,
            )
        return evaluate(
            network,
            self._batches.epoch(0),
            classes=plan.splits.classes.names,
            pixel_mean=network.pixel_mean,  # type: ignore[arg-type]
            pixel_std=network.pixel_std,  # type: ignore[arg-type]
        )


def parts_that_fit(run: Run) -> int:
    """Into how many micro-batches the batch must be cut for the device's memory; weights and random numbers stay."""
    if run.processes.device.type != "cuda":
        return 1
    parts, largest = 1, max(1, run.schedule.optim.batch_size // run.processes.world)
    while parts <= largest:
        try:
            _trial_step(run, parts)
            return int(max(run.processes.gather(parts)))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            parts *= 2
    raise ResourceError(
        f"not even one image fits into the memory of {run.processes.device}; use a smaller model or size"
    )


def _trial_step(run: Run, parts: int) -> None:
    """Forward and backward of one micro-batch of the uncompiled network, then everything as it was."""
    network = unwrap(run.model)
    kept = {name: buffer.clone() for name, buffer in network.named_buffers()}
    batch: ImageBatch = next(iter(run.loader.epoch(0)))
    part = slice(0, -(-len(batch) // parts))
    small = ImageBatch(batch.images[part], batch.labels[part], batch.index[part]).to(run.processes.device)
    with run.processes.randomness_kept():
        try:
            network.train()
            with run.processes.autocast():
                run.objective(network, small, epoch=0, step=0)["loss"].backward()
        finally:
            network.zero_grad(set_to_none=True)
            for name, buffer in network.named_buffers():
                buffer.copy_(kept[name])


def _measured(run: Run, plan: Plan) -> str:
    """Time and memory of the run, from a few steps on a copy of the weights that is thrown away."""
    device = run.processes.device
    batches = iter(run.loader.epoch(0))
    network = unwrap(run.model).train()
    seconds = []
    for _ in range(min(MEASURED_STEPS, run.loader.steps_per_epoch)):
        before = clock.perf_counter()
        batch = next(batches).to(device)
        with run.processes.autocast():
            run.objective(network, batch, epoch=0, step=0)["loss"].backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock.perf_counter() - before)
    step = sorted(seconds)[len(seconds) // 2]
    speed = plan.recipe.optim.batch_size / step
    memory = f", {torch.cuda.max_memory_allocated(device) / 2**20:,.0f} MiB" if device.type == "cuda" else ""
    return (
        f"time       about {_minutes(step * run.schedule.total_steps)} for {run.schedule.total_steps:,} steps "
        f"(measured on {len(seconds)}: {speed:,.0f} images/s{memory})"
    )


# The end ------------------------------------------------------------------------------------------------------------


def final_report(plan: Plan, processes: Processes) -> ClassificationReport:
    """The best weights of the folder on the val split."""
    network, _ = load_network(plan.folder)
    with processes.autocast():
        return _Evaluator(plan, processes, _workers()).report(network.to(processes.device))


def _write_report(plan: Plan, report: ClassificationReport, outcome: Outcome, seconds: float) -> Path:
    """`report.html`: curves, confusion, mistakes, what the patches listen to, the resolved recipe, the cost."""
    from patchloom.inspection.report import RecipeRow, Summary, recipe_rows, write_report

    network, _ = load_network(plan.folder)
    why = {choice.key: choice.why for choice in plan.choices}
    records = [json.loads(line) for line in (plan.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    page = plan.folder / "report.html"
    write_report(
        page,
        title=f"{plan.recipe.model.name} on {plan.splits.name}",
        summary=Summary(
            model=plan.recipe.model.name,
            data=plan.splits.name,
            top1=report.top(1),
            weights="ema" if outcome.progress.best_weights == "ema" else "model",
            epochs=outcome.progress.epoch,
            seconds=seconds,
            command=f"patchloom train {plan.settings.data} --recipe {plan.folder / 'recipe.yaml'} --out NEW-FOLDER",
            next_command=f"patchloom predict {plan.folder} IMAGE",
        ),
        curves=records,
        confusion=report.confusion,
        class_names=report.classes,
        per_class=report.class_accuracy,
        mistakes=[(plan.splits.val.read(mistake.index), mistake) for mistake in report.worst(WORST_SHOWN)],
        pictures=_pictures(network),
        recipe=[RecipeRow(row.key, row.value, why.get(row.key, row.why)) for row in recipe_rows(plan.recipe)],
        cost=plan.cost,
        notes=plan.splits.notes,
    )
    return page


def _pictures(network: Network) -> list[tuple[str, Any, str]]:
    """What the network's patches listen to, where it has a picture of that."""
    from patchloom.inspection.interactions import interaction_picture, sparsity_chart, token_unit_picture
    from patchloom.models.mixer import Mixer
    from patchloom.models.resmlp import ResMLP

    if isinstance(network, ResMLP) and network.config.communication == "linear":
        return [
            (
                "Patch interactions",
                interaction_picture(network),
                "Rows of each layer's matrix across patches, one small image for each of the central patches.",
            ),
            ("Sparsity", sparsity_chart(network), "Share of weights below 5 % of the layer's largest."),
        ]
    if isinstance(network, Mixer) and not network.config.untied and network.config.groups == 1:
        return [("Token-mixing units", token_unit_picture(network), "Weights of hidden units over the patches.")]
    return []


def _with_files(error: NumericalError, pictures: ImageSet) -> NumericalError:
    """The same error with the files of the batch that made it."""
    shown = [pictures.where(int(i)) for i in list(getattr(error, "index", None) or [])[:FILES_SHOWN]]
    return NumericalError(f"{error} Files of that batch: {', '.join(shown)} …") if shown else error


def _preprocessing(recipe: Recipe, network: Network) -> Preprocessing:
    size = recipe.test.image_size
    shape = network.config.image_size if size is None else (size, size)
    return Preprocessing(network.pixel_mean, network.pixel_std, shape, recipe.test.crop_ratio)


def _workers() -> int:
    """Processes that prepare pictures, where the user did not say: the cores, up to 8."""
    return min(8, os.cpu_count() or 1)


def _machine(processes: Processes) -> str:
    device = processes.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{processes.world} × {name}, {processes.precision}"


def _minutes(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def silent(line: str) -> None:
    """Say nothing."""
    del line
