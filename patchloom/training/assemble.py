"""Assemble a run from its plan: network, batches, objective, optimizer, micro-batches, CUDA graphs, compilation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from patchloom.engine.distribution import Processes
from patchloom.engine.ema import Ema
from patchloom.engine.optimization import Schedule, freeze, head_of, make_optimizer, own_optimizer
from patchloom.engine.rounded_weights import RoundedWeights
from patchloom.engine.run import Run
from patchloom.layers.low_rank import add_low_rank_
from patchloom.layers.matrices import all_matrices
from patchloom.models.compiled import CompiledByBlock
from patchloom.models.cuda_graphs import CapturedNetwork, capture_calls_, capture_method_
from patchloom.models.network import Network
from patchloom.objectives.objective import Objective
from patchloom.plugins import MODULE
from patchloom.recipes.schema import Recipe
from patchloom.runs.checkpoints import CheckpointFolder
from patchloom.runs.upload import uploader_of
from patchloom.tasks.plan import Plan
from patchloom.tasks.task import Judge
from patchloom.training.memory import micro_batch_note, micro_batches
from patchloom_runtime.errors import UsageError

# Networks of more blocks are compiled block by block, for images of at least so many pixels.
MOST_BLOCKS, LARGE_IMAGES = 16, 128
EVALUATIONS = 16  # per run, about; and one at its end

Stores = dict[Any, Any]  # images that an earlier run on the same data decoded


def make_run(
    plan: Plan,
    processes: Processes,
    say: Callable[[str], None],
    stores: Stores | None = None,
    *,
    begins: bool = False,
    compiled: bool | None = None,
) -> tuple[Run, nn.Module, str]:
    """Return the run, its network, and a note on how its batches are made and its steps run.

    The batch is cut into as many micro-batches as the memory requires. `begins` is True for a run that will be trained
    from its first step, False for one that is resumed or only measured. By default it is compiled if the user asks.
    """
    task, recipe, settings = plan.task.training, plan.recipe, plan.settings
    if settings.shard:
        _check_sharding(plan, processes)
    network = _network(plan, processes, say, begins=begins)
    loader, note = task.loader(plan, processes, stores)
    schedule = Schedule(recipe.optim, recipe.schedule, loader.steps_per_epoch)
    objective = task.objective(plan, network, loader, processes)
    average = task.average(plan, network, loader)
    if settings.shard:
        processes.shard(network, *([average.model] if isinstance(average, Ema) else []), *objective.shardable)
    judge = task.judge(plan, processes)
    run = Run(
        model=network,
        objective=objective,
        optimizer=_optimizer(plan, network, objective),
        schedule=schedule,
        loader=loader,
        processes=processes,
        saver=CheckpointFolder(plan.folder, uploader_of(settings.out)),
        average=average,
        clip_norm=recipe.optim.clip_norm,
        clip_each=recipe.optim.clip_each,
        eval_mode=recipe.model.eval_mode,
        frozen=_below_head(network) if recipe.model.frozen_epochs else (),
        frozen_epochs=recipe.model.frozen_epochs,
        rounded=_rounded_weights(network, recipe) if recipe.model.quantized_bits else None,
        evaluators=[judge] if judge else [],
        evaluate_every=max(1, recipe.schedule.epochs // EVALUATIONS),
        metric=judge.metric if judge else None,
        tie_breaker=judge.tie_breaker if judge else None,
        lower_is_better=judge.lower_is_better if judge else False,
        patience=settings.patience,
        after_epoch=_AfterEpoch(task.after_epoch(plan, network, processes), objective, say),
        unit=task.speed_unit,
    )
    _split_batch(run, plan, judge, say)
    run.compiled = bool(plan.settings.compiled if compiled is None else compiled) and processes.device.type != "mps"
    captured = is_captured(plan, run)
    if run.compiled:
        _compile(plan, run, network, captured=captured)
    elif captured:
        _capture(plan, run, network)
    notes = note, "CUDA graphs" if captured else "", "compiled" if run.compiled else ""
    return run, network, ", ".join(filter(None, notes))


def _network(plan: Plan, processes: Processes, say: Callable[[str], None], *, begins: bool) -> Any:
    """Return the network on its device, with equal weights on every rank and without gradients where it is frozen."""
    task, recipe = plan.task.training, plan.recipe
    torch.manual_seed(recipe.seed)
    if processes.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    network: Any = task.network(plan)
    network.to(processes.device)
    if begins:
        task.begin(plan, network, processes, say)
    if recipe.model.trainable == "lora":
        add_low_rank_(network, recipe.model.lora_rank)
    torch.manual_seed(recipe.seed + processes.rank)  # the same weights on every rank, but different drop paths
    freeze(network, "head" if recipe.model.freeze == "backbone" else recipe.model.trainable)
    return network


def _optimizer(plan: Plan, network: nn.Module, objective: Objective) -> Optimizer:
    learned = [objective] if isinstance(objective, nn.Module) else []
    if plan.settings.optimizer is not None:
        return own_optimizer(plan.settings.optimizer, network, plan.recipe.optim, *learned)
    return make_optimizer(network, plan.recipe.optim, *learned)


def _split_batch(run: Run, plan: Plan, judge: Judge | None, say: Callable[[str], None]) -> None:
    """Split batches into as many micro-batches as requested or as the memory requires."""
    run.accumulate = micro_batches(run, plan.settings.micro_batches)
    if run.accumulate == 1:
        return
    batch_size = plan.recipe.optim.batch_size
    why = ":" if plan.settings.micro_batches else " does not fit in memory;"
    say(f"           batch {batch_size}{why} using {run.accumulate} micro-batches, {micro_batch_note(run)}")
    if judge:
        judge.batch_size = -(-batch_size // run.accumulate)


def _below_head(network: nn.Module) -> list[nn.Parameter]:
    head = {parameter for module in head_of(network) for parameter in module.parameters()}
    if not head:
        raise UsageError(
            "model.frozen_epochs is for networks with a classifier, which learns alone at first. Set it to 0."
        )
    return [parameter for parameter in network.parameters() if parameter not in head]


def _rounded_weights(network: nn.Module, recipe: Recipe) -> RoundedWeights:
    model = recipe.model
    if model.trainable == "lora":
        raise UsageError("model.quantized_bits cannot be used with model.trainable lora; drop one of them")
    matrices = [matrix.weight for matrix in all_matrices(network)]
    if not matrices:
        raise UsageError(
            f"model.quantized_bits rounds the matrices A, B and C of ResMLP and its relatives; {model.name} has none"
        )
    return RoundedWeights(matrices, bits=int(model.quantized_bits or 0), share=model.quantized_share, seed=recipe.seed)


def _check_sharding(plan: Plan, processes: Processes) -> None:
    if processes.world == 1:
        raise UsageError("--shard splits weights over several processes; start them with torchrun or srun")
    model = plan.recipe.model
    for key, is_set in (("trainable lora", model.trainable == "lora"), ("quantized_bits", bool(model.quantized_bits))):
        if is_set:
            raise UsageError(f"--shard cannot be used with model.{key}; drop one of them")


def is_captured(plan: Plan, run: Run) -> bool:
    """Return whether passes of the network are captured as CUDA graphs, which hide the launches of small networks.

    Modules of the user are not, because what Python does in them would happen once; nor is gradient checkpointing,
    which handles random numbers in ways that a capture cannot.
    """
    if run.processes.device.type != "cuda" or run.processes.world > 1 or not plan.task.training.captured_method:
        return False
    own_module = (plan.settings.model or "").startswith(MODULE)
    return run.compiled or not (own_module or plan.recipe.model.gradient_checkpointing)


def _capture(plan: Plan, run: Run, network: nn.Module) -> None:
    """Replay CUDA graphs for the network's passes, with the same results to the bit."""
    accumulates, method = run.accumulate > 1, plan.task.training.captured_method
    if method == "forward":
        run.model = CapturedNetwork(network, accumulates=accumulates)
    else:
        capture_method_(network, method, accumulates=accumulates)
    for follower in run.objective.followers:
        capture_calls_(follower)


def compiles_by_block(network: nn.Module, *, captured: bool) -> bool:
    """Return whether to compile a network block by block, because compiling all its blocks takes minutes.

    Without graphs, launches limit the speed with small images, and compiling the whole network is worth the wait.
    """
    if not isinstance(network, Network) or network.gradient_checkpointing:
        return False
    large = len(network.repeated_blocks()) > MOST_BLOCKS and min(network.config.image_size) >= LARGE_IMAGES
    return captured or large


def _compile(plan: Plan, run: Run, network: nn.Module, *, captured: bool) -> None:
    """Compile the network, the copies that follow it, and what its task adds."""
    options = plan.task.training.compile_options
    by_block = compiles_by_block(network, captured=captured)
    compiled: Any = CompiledByBlock(network) if by_block else torch.compile(network, **options)  # type: ignore[arg-type]
    # Every step, also the first after a resume, replays the same graph, so that resuming is exact.
    whole = captured and plan.task.training.captured_method == "forward"
    run.model = CapturedNetwork(compiled, accumulates=run.accumulate > 1) if whole else compiled
    for follower in run.objective.followers:
        follower.compile(mode="reduce-overhead" if captured else None)
    plan.task.training.compile_extras(plan, network)


def release(run: Run) -> None:
    """Free the weights and the graph memory that torch keeps for compiled networks.

    This resets all of torch's compiled functions; those of a caller are compiled again when they are next used.
    """
    if run.compiled:
        torch.compiler.reset()


class _AfterEpoch:
    """Calls the function of the task after an epoch, and warns if the objective has collapsed."""

    def __init__(
        self, task: Callable[[nn.Module, int], None] | None, objective: Objective, say: Callable[[str], None]
    ) -> None:
        self._task, self._objective, self._say = task, objective, say

    def __call__(self, model: nn.Module, epoch: int) -> None:
        if self._task:
            self._task(model, epoch)
        if reason := self._objective.collapsed():
            self._say(f"warning: epoch {epoch}: {reason}")


def silent(line: str) -> None:
    """Print nothing: a `say` for runs that are measured or part of a sweep."""
    del line
