"""From a plan to the objects of a run: network, teacher, loaders, optimiser, and the parts a batch must be cut into."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from PIL import Image
from torch import nn

from patchloom.build import (
    compares_views,
    initialise,
    make_network,
    make_objective,
    make_teacher,
    make_views,
    tells_classes,
)
from patchloom.checkpoint import Folder, Preprocessing, refuse_bad
from patchloom.data.device import BeforeCrop, DeviceLoader, Store, make_loader
from patchloom.data.loader import Loader, cores
from patchloom.data.sets import ImageSet
from patchloom.data.views import ViewLoader, make_view_loader
from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.ema import Ema
from patchloom.engine.optimisation import Schedule, freeze, make_optimizer
from patchloom.engine.run import Objective, Run
from patchloom.errors import CheckpointError, DataError, UsageError
from patchloom.inspection.epoch_pictures import EpochPictures
from patchloom.models.network import Network
from patchloom.recipes.schema import Recipe
from patchloom.training.clusters import clustered
from patchloom.training.evaluators import ClassEvaluator, NeighbourEvaluator
from patchloom.training.memory import cut_in_words, micro_batches
from patchloom.training.plan import Plan, TrainingSettings

# torch.compile takes about a minute; it pays where the run is longer.
COMPILE_FROM_STEPS = 1500
COMPILE_FROM_S = 600.0  # of a planned time
# A run is evaluated about this often, and at the end.
EVALUATIONS = 16
EPOCH_PICTURES = 4


Stores = dict[BeforeCrop, Store]


def make_run(
    plan: Plan, processes: Processes, say: Callable[[str], None], stores: Stores | None = None
) -> tuple[Run, Network, str]:
    """The objects of the run; the batch is cut into as many micro-batches as the device's memory asks for.

    Images decoded for an earlier run on the same data are taken from `stores`.
    """
    recipe, settings = plan.recipe, plan.settings
    torch.manual_seed(recipe.seed)
    if processes.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    network = make_network(recipe, len(plan.splits.classes))
    network.gradient_checkpointing = recipe.model.gradient_checkpointing
    if settings.init:
        initialise(network, settings.init, keep_head=plan.start is None or plan.start.keeps(plan.splits.classes.names))
        refuse_bad(dict(network.state_dict()), settings.init, CheckpointError)
    network.to(processes.device)
    if settings.shard:
        if processes.world == 1:
            raise UsageError("--shard splits weights over several processes; start them with torchrun or srun")
        if compares_views(recipe):
            raise UsageError(
                f"--shard cannot be used with {recipe.objective.method}: it keeps a whole copy of the network"
            )
        processes.shard(network)
    torch.manual_seed(recipe.seed + processes.rank)  # the same weights on every rank, other drop paths
    freeze(network, recipe.model.trainable)
    teacher = (
        make_teacher(recipe.objective.teacher, plan.splits).to(processes.device) if recipe.objective.teacher else None
    )
    workers = worker_count(settings)
    images = plan.splits.train
    if recipe.objective.method == "clusterfit":
        images = clustered(plan, processes, workers)
    loader, note = _make_loader(plan, images, processes, workers, stores)
    schedule = Schedule(recipe.optim, recipe.schedule, loader.steps_per_epoch)
    compiles = settings.compiled
    if compiles is None:
        long = schedule.total_steps >= COMPILE_FROM_STEPS and (plan.time_s or COMPILE_FROM_S) >= COMPILE_FROM_S
        compiles = processes.device.type == "cuda" and long
    if compiles and teacher:
        teacher.compile()
    objective = make_objective(
        recipe,
        network,
        processes,
        labels=images.labels,
        steps_per_epoch=loader.steps_per_epoch,
        teacher=teacher,
    )
    learned = [objective] if isinstance(objective, nn.Module) else []
    evaluator = _make_evaluator(plan, processes, workers)
    run = Run(
        model=network,
        objective=objective,
        optimizer=make_optimizer(network, recipe.optim, *learned),
        schedule=schedule,
        loader=loader,
        processes=processes,
        saver=Folder(plan.folder),
        average=Ema(network, recipe.optim.ema_decay) if recipe.optim.ema_decay else None,
        clip_norm=recipe.optim.clip_norm,
        clip_each=recipe.optim.clip_each,
        eval_mode=recipe.model.eval_mode,
        evaluators=[evaluator] if evaluator else [],
        evaluate_every=max(1, recipe.schedule.epochs // EVALUATIONS),
        metric=evaluator.metric if evaluator else None,
        tie_breaker=evaluator.tie_breaker if evaluator else None,
        patience=settings.patience,
        after_epoch=_AfterEpoch(_epoch_pictures(plan, network, processes), objective, say),
    )
    run.accumulate = micro_batches(run, settings.micro_batches)
    if run.accumulate > 1:
        cut = f"using {run.accumulate} micro-batches, {cut_in_words(run, recipe.objective.method)}"
        why = "" if settings.micro_batches else " does not fit in memory;"
        say(f"           batch {recipe.optim.batch_size}{why or ':'} {cut}")
        if evaluator:
            evaluator.batch_size = -(-recipe.optim.batch_size // run.accumulate)
    if compiles:
        _compile(run, network, recipe.views.local_size if recipe.views.local else None)
    return run, network, note + (", compiled" if compiles else "")


def runs_as_graphs(run: Run) -> bool:
    """Whether what is compiled may be recorded as CUDA graphs: launches are what bounds a small network.

    What a graph leaves lives until the next backward pass, so gradients of micro-batches cannot be added up.
    """
    return run.processes.device.type == "cuda" and run.processes.world == 1 and run.accumulate == 1


def _compile(run: Run, network: Network, local_size: int | None) -> None:
    """Compile the network and what runs beside it: followers, and small views of a fixed-size network."""
    mode = "reduce-overhead" if runs_as_graphs(run) else None
    run.model = torch.compile(network, mode=mode)  # type: ignore[assignment]
    for follower in getattr(run.objective, "followers", ()):
        follower.compile(mode=mode)
    if local_size and not network.any_resolution:
        device = next(network.parameters()).device
        with torch.no_grad():  # once uncompiled: what it prepares is then there
            network.forward_resampled(torch.zeros(1, network.config.channels, local_size, local_size, device=device))
        network.forward_resampled = torch.compile(network.forward_resampled, mode=mode)  # type: ignore[method-assign]


def release(run: Run) -> None:
    """Give back what compiled networks keep: their weights, and the memory of graphs, which is that of a training step.

    torch keeps them as long as the process lives. It forgets all that is compiled; what a caller compiled before is
    compiled again when it is next used.
    """
    if unwrap(run.model) is not run.model:
        torch.compiler.reset()


def _make_loader(
    plan: Plan, images: ImageSet, processes: Processes, workers: int, stores: Stores | None
) -> tuple[Loader | DeviceLoader | ViewLoader, str]:
    """Batches of images, or of views of them where the recipe compares views; and how they are made."""
    recipe, settings = plan.recipe, plan.settings
    shared: dict[str, Any] = {
        "batch_size": recipe.optim.batch_size,
        "seed": recipe.seed,
        "device": processes.device,
        "workers": workers,
        "rank": processes.rank,
        "world": processes.world,
        "skip_broken": not settings.strict,
        "timeout_s": settings.worker_timeout,
        "stores": stores,
    }
    if compares_views(recipe):
        return make_view_loader(images, make_views(recipe), **shared)
    return make_loader(images, recipe.augment, recipe.model.image_size, **shared)


def _make_evaluator(plan: Plan, processes: Processes, workers: int) -> ClassEvaluator | NeighbourEvaluator | None:
    """What judges the network: its own decisions, else its neighbours; nothing without labels."""
    if tells_classes(plan.recipe):
        return ClassEvaluator(plan, processes, workers)
    labelled = all(bool((images.labels >= 0).any()) for images in (plan.splits.train, plan.splits.val))
    return NeighbourEvaluator(plan, processes, workers) if labelled else None


class _AfterEpoch:
    """Draws pictures where they were asked for, and says when an objective that can collapse has."""

    def __init__(self, pictures: EpochPictures | None, objective: Objective, say: Callable[[str], None]) -> None:
        self._pictures, self._say = pictures, say
        self._collapsed = getattr(objective, "collapsed", None)

    def __call__(self, model: nn.Module, epoch: int) -> None:
        if self._pictures:
            self._pictures(model, epoch)
        if self._collapsed and (reason := self._collapsed()):
            self._say(f"warning: epoch {epoch}: {reason}")


def preprocessing_of(recipe: Recipe, network: Network) -> Preprocessing:
    """How pictures are shown to the network once it is trained."""
    size = recipe.test.image_size
    shape = network.config.image_size if size is None else (size, size)
    return Preprocessing(network.pixel_mean, network.pixel_std, shape, recipe.test.crop_ratio)


def _epoch_pictures(plan: Plan, network: Network, processes: Processes) -> EpochPictures | None:
    """What draws the network every few epochs, with pictures from all over the val split, where it was asked for."""
    if plan.settings.pictures is None:
        return None
    return EpochPictures(
        plan.folder / "pictures",
        _spread(plan.splits.val, EPOCH_PICTURES),
        plan.splits.classes.names,
        preprocessing=preprocessing_of(plan.recipe, network),
        every=plan.settings.pictures,
        last=plan.recipe.schedule.epochs,
        is_main=processes.is_main,
    )


def _spread(pictures: ImageSet, count: int) -> list[Image.Image]:
    """So many pictures from all over the set; one that cannot be read is left out, as it is in training."""
    found = []
    for place in range(min(count, len(pictures))):
        with suppress(DataError):
            found.append(pictures.read(place * len(pictures) // count))
    return found


def worker_count(settings: TrainingSettings) -> int:
    """Processes that prepare pictures: as many as asked for, else the cores, up to 8."""
    return settings.workers if settings.workers is not None else min(8, cores())
