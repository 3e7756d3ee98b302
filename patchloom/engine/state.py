"""Everything that an exact resume needs, as named tensors and plain values for a checkpoint.

The order of the data follows from seed and step, and the learning rate from the step (with a time budget: from
`Progress.position`), so neither is saved. Hyper-parameters come from the recipe, not from the checkpoint: a run
continued with another weight decay uses the new one.
"""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from patchloom.engine.distribution import Processes, unwrap
from patchloom.engine.run import Run
from patchloom.models.from_config import like, load_weights
from patchloom_runtime.errors import CheckpointError, PatchloomError, UsageError

Tensors = dict[str, Tensor]
# State tensors per parameter.
_STATE_KEYS = {
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "Adam": {"step", "exp_avg", "exp_avg_sq"},
    "Lamb": {"exp_avg", "exp_avg_sq"},
    "SGD": {"momentum_buffer"},
    "Adagrad": {"step", "sum"},
}


@dataclass
class Progress:
    """How far a run is."""

    step: int = 0  # updates done
    epoch: int = 0  # epochs done, their evaluation included
    samples: int = 0  # of this epoch, used by all ranks; 0 if the loader has no plan of samples
    best: float | None = None  # value of the run's metric
    best_tie: float | None = None  # value of its tie-breaker, if the best weights have one
    best_weights: str = ""  # "model", "ema" or "average"
    best_step: int = 0
    not_better: int = 0  # evaluations since the best
    records: int = 0  # lines of metrics.jsonl
    ended: str = ""  # why, once nothing is left to do
    # For runs fitted to a time budget or a number of updates; 0 in all others:
    total_steps: int = 0  # updates of the whole run
    position: float = 0.0  # place in the schedule, in its steps
    planned_epochs: int = 0  # epochs of the schedule

    @classmethod
    def of_new_run(cls, steps: int | None, epochs: int) -> "Progress":
        """Return the progress before the first of `steps` updates, or of those of a schedule of `epochs` epochs."""
        return cls(total_steps=steps, planned_epochs=epochs) if steps else cls()

    def has_ended(self, epochs: int) -> bool:
        """Return whether a run of `epochs` epochs has nothing left to do."""
        if self.ended == "finished":
            return epochs <= max(self.epoch, self.planned_epochs)
        return bool(self.ended)


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a step.

    `tensors` are live, and may be sharded over the ranks: write them before the next step.
    """

    tensors: dict[str, Tensors]  # part ("weights", "ema", "optimizer", "random-0", …) → name → tensor
    values: dict[str, Any] = field(default_factory=dict)  # JSON-serializable

    @property
    def step(self) -> int:
        """Return the number of updates done."""
        return self.values["progress"]["step"]


def capture(run: Run, progress: Progress) -> Snapshot:
    """Return the run's current state. All ranks must call this together."""
    optimizer_tensors, optimizer_values = optimizer_state(run.optimizer)
    tensors = {
        "weights": weights_of(run.model),
        "optimizer": optimizer_tensors,
        "averages": run.running_means.over_ranks(run.processes),
    }
    if run.average:
        tensors[run.average.name] = run.average.tensors()
    if isinstance(run.objective, nn.Module):
        tensors["objective"] = weights_of(run.objective)
    for rank, state in enumerate(run.processes.gather(random_state(run.processes.device))):
        tensors[f"random-{rank}"] = state
    values = {
        "progress": asdict(progress),
        "steps_per_epoch": run.loader.steps_per_epoch,
        "samples_per_epoch": run.plan.views_per_epoch if run.plan else 0,
        "averaged": run.running_means.count,  # batches in the running means
        "world": run.processes.world,
        "compiled": run.compiled,
        "optimizer": optimizer_values,
        "scaler": run.processes.scaler.state_dict() if run.processes.scaler else None,
    }
    return Snapshot({part: named for part, named in tensors.items() if named}, values)


def restore(run: Run, snapshot: Snapshot) -> tuple[Progress, list[str]]:
    """Bring a freshly built run to the state of the snapshot. Returns notes on what could not be exact."""
    try:
        return _restored(run, snapshot)
    except PatchloomError:
        raise
    except Exception as error:  # names, shapes and values that do not fit this run's optimizer, scaler or generators
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"The checkpoint of step {snapshot.step} cannot be used in this run: {reason}. "
            "Remove it to resume from the previous one, or choose a new folder with --out."
        ) from error


def _restored(run: Run, snapshot: Snapshot) -> tuple[Progress, list[str]]:
    values = snapshot.values
    notes: list[str] = []
    load_weights(unwrap(run.model), snapshot.tensors["weights"], "the checkpoint")
    if run.average:
        saved = snapshot.tensors.get(run.average.name, {})
        notes += run.average.restore(saved, snapshot.tensors["weights"])
    if isinstance(run.objective, nn.Module):
        load_weights(run.objective, snapshot.tensors.get("objective", {}), "the checkpoint's objective")
    load_optimizer_state(run.optimizer, snapshot.tensors.get("optimizer", {}), values["optimizer"])
    run.running_means.restore(snapshot.tensors.get("averages", {}), values["averaged"], run.processes.device)
    if run.processes.scaler and values["scaler"]:
        run.processes.scaler.load_state_dict(values["scaler"])
    notes += _restore_random(run.processes, snapshot)
    progress = Progress(**values["progress"])
    return progress, [*notes, *_move_to_batches(run, progress, values)]


def _move_to_batches(run: Run, progress: Progress, values: dict[str, Any]) -> list[str]:
    """Express `progress` in the batches of `run`, which may differ in size from the saved ones. Returns notes."""
    plan, before, now = run.plan, values["steps_per_epoch"], run.loader.steps_per_epoch
    if plan and values.get("samples_per_epoch") == plan.views_per_epoch:
        step = progress.epoch * now + plan.step_at(progress.samples)
        if progress.total_steps and before != now:  # fitted to a time budget: as many samples are left as before
            progress.position *= now / before
            progress.total_steps = step + round((progress.total_steps - progress.step) * now / before)
        progress.step = step
        after = (
            f"epoch {progress.epoch + 1} continues after {progress.samples:,} of its {plan.views_per_epoch:,} samples"
        )
        return [] if before == now else [f"an epoch had {before} steps and has {now} now: {after}"]
    if before == now:
        progress.samples = (progress.step - progress.epoch * now) * plan.batch_size if plan else 0
        return []
    progress.step, progress.samples = progress.epoch * now, 0
    return [f"an epoch had {before} steps and has {now} now: epoch {progress.epoch + 1} starts again"]


def weights_of(module: nn.Module) -> Tensors:
    """Return the module's state dict; sharded tensors stay sharded."""
    return dict(unwrap(module).state_dict())


def optimizer_state(optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """Return the state as tensors named 'parameter.key' or 'group.number.key' and as plain values named alike."""
    state = optimizer.state_dict()
    named = {f"{index}.{key}": value for index, keys in state["state"].items() for key, value in keys.items()}
    for number, group in enumerate(state["param_groups"]):
        named |= {f"group.{number}.{key}": group[key] for key in _moving(optimizer, group)}
    # Sorted, because the order of a restored state may differ between ranks.
    tensors = {name: value for name, value in sorted(named.items()) if isinstance(value, Tensor)}
    plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    return tensors, {"kind": type(optimizer).__name__, "plain": plain}


def load_optimizer_state(optimizer: Optimizer, tensors: Tensors, values: dict[str, Any]) -> None:
    """Load the result of `optimizer_state`, bit for bit, into an optimizer of the same recipe."""
    kind = type(optimizer).__name__
    if values["kind"] != kind:
        raise UsageError(
            f"The checkpoint was trained with {values['kind']}, this run uses {kind}. "
            "Continue with the same optim.name, or start a new folder."
        )
    state = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state["state"] = {}
    for name, value in {**tensors, **values["plain"]}.items():
        owner, key = name.split(".", 1)
        if owner == "group":
            number, key = key.split(".", 1)
            if key not in _moving(optimizer, {key: value}) or not isinstance(value, int | float | Tensor):
                raise ValueError(f"{name} is not a state of {kind}")
            state["param_groups"][int(number)][key] = value
            continue
        is_like = isinstance(value, Tensor) and value.ndim and value.shape == params[int(owner)].shape
        if isinstance(value, Tensor) and value.ndim and not is_like and kind in _STATE_KEYS:
            raise ValueError(f"{name} is {tuple(value.shape)}, expected {tuple(params[int(owner)].shape)}")
        if is_like:
            value = like(params[int(owner)], value)
        state["state"].setdefault(int(owner), {})[key] = value
    for number, keys in state["state"].items():
        if kind in _STATE_KEYS and keys.keys() != _STATE_KEYS[kind]:
            raise ValueError(f"parameter {number} has state {sorted(keys)}, {kind} needs {sorted(_STATE_KEYS[kind])}")
    optimizer.load_state_dict(state)


def random_state(device: torch.device) -> Tensors:
    """Return the state of this process's global generators. Python's and NumPy's 32-bit words are exact in float64."""
    _, words, gauss = random.getstate()
    _, array, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*array, position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cpu":
        return state
    return state | {device.type: torch.get_device_module(device).get_rng_state(device)}


def set_random_state(state: Tensors, device: torch.device) -> None:
    """Restore the result of `random_state`."""
    *words, has_gauss, gauss = state["python"].tolist()
    random.setstate((3, tuple(int(word) for word in words), gauss if has_gauss else None))
    *array, position, has_gauss, cached = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(array, np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def _devices(state: Tensors) -> set[str]:
    """Return the kinds of the devices whose generator is in a random state."""
    return set(state) & {"cuda", "mps"}


def _restore_random(processes: Processes, snapshot: Snapshot) -> list[str]:
    world = snapshot.values["world"]
    own = snapshot.tensors.get(f"random-{processes.rank}")
    if world == processes.world and own and _devices(own) == {processes.device.type} - {"cpu"}:
        set_random_state(own, processes.device)
        return []
    # Each rank gets its own numbers, the same whenever the run is continued with this number of ranks.
    seed = (snapshot.step * 1_000_003 + processes.rank * 7919 + processes.world) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    reason = (
        f"saved by {world} processes, continued by {processes.world}"
        if world != processes.world
        else "saved on another kind of device"
    )
    return [f"{reason}: the order of the data is unchanged, but the network's random numbers start over"]


def _moving(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """Return the keys of a group in which an optimizer keeps state, such as LAMB's step.

    Others are hyper-parameters.
    """
    settings = {"params", "lr", "lr_scale", "initial_lr", *optimizer.defaults}
    return [key for key in group if key not in settings]
