"""Everything an exact resume needs, as named tensors and plain values: what the engine hands to a checkpoint.

The learning rate and the order of the data follow from the step alone, so they are not here. Hyper-parameters
are the recipe's, not the checkpoint's: a run continued with another weight decay uses the new one.
"""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from patchloom.engine.distribution import Processes, unwrap, whole
from patchloom.engine.run import Run
from patchloom.models.from_config import like, load_weights
from patchloom_runtime.errors import CheckpointError, PatchloomError, UsageError

Tensors = dict[str, Tensor]
# What optimisers keep of each parameter.
_KEPT = {
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
    best: float | None = None  # of the run's metric
    best_tie: float | None = None  # of its tie-breaker, where the best weights were judged by one
    best_weights: str = ""  # "model", "ema" or "average"
    best_step: int = 0
    not_better: int = 0  # evaluations since the best
    records: int = 0  # lines of metrics.jsonl
    ended: str = ""  # why, once nothing is left to do
    # Of a run that is fitted to a time budget; 0 in all others:
    total_steps: int = 0  # updates of the whole run
    position: float = 0.0  # place in the schedule, in its steps
    planned_epochs: int = 0  # epochs of the schedule

    def has_ended(self, epochs: int) -> bool:
        """Whether a run of so many epochs has nothing left to do."""
        if self.ended == "finished":
            return epochs <= max(self.epoch, self.planned_epochs)
        return bool(self.ended)


@dataclass(frozen=True)
class Snapshot:
    """A run at the end of a step. `tensors` are the live ones: write them before the next step."""

    tensors: dict[str, Tensors]  # part ("weights", "ema", "optimizer", "random-0", …) → name → tensor
    values: dict[str, Any] = field(default_factory=dict)  # what JSON holds

    @property
    def step(self) -> int:
        """Updates done."""
        return self.values["progress"]["step"]


def capture(run: Run, progress: Progress) -> Snapshot:
    """The run as it stands; called by all ranks together."""
    optimizer_tensors, optimizer_values = optimizer_state(run.optimizer)
    tensors = {
        "weights": weights_of(run.model),
        "optimizer": optimizer_tensors,
        "averages": run.averages.over_ranks(run.processes),
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
        "averaged": run.averages.count,
        "world": run.processes.world,
        "optimizer": optimizer_values,
        "scaler": run.processes.scaler.state_dict() if run.processes.scaler else None,
    }
    return Snapshot({part: named for part, named in tensors.items() if named}, values)


def restore(run: Run, snapshot: Snapshot) -> tuple[Progress, list[str]]:
    """Bring a freshly built run to where the snapshot was taken; the notes say what could not be exact."""
    try:
        return _restored(run, snapshot)
    except PatchloomError:
        raise
    except Exception as error:  # names, shapes and values that no optimiser, scaler or generator of this run has
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"The checkpoint of step {snapshot.step} cannot be used in this run: {reason}. Remove it to go on from the "
            "one before, or give a new folder with --out."
        ) from error


def _restored(run: Run, snapshot: Snapshot) -> tuple[Progress, list[str]]:
    values = snapshot.values
    notes: list[str] = []
    load_weights(unwrap(run.model), snapshot.tensors["weights"], "the checkpoint")
    if run.average:
        kept = snapshot.tensors.get(run.average.name, {})
        notes += run.average.restore(kept, snapshot.tensors["weights"])
    if isinstance(run.objective, nn.Module):
        load_weights(run.objective, snapshot.tensors.get("objective", {}), "the checkpoint's objective")
    load_optimizer_state(run.optimizer, snapshot.tensors.get("optimizer", {}), values["optimizer"])
    run.averages.restore(snapshot.tensors.get("averages", {}), values["averaged"], run.processes.device)
    if run.processes.scaler and values["scaler"]:
        run.processes.scaler.load_state_dict(values["scaler"])
    notes += _restore_random(run.processes, snapshot)
    progress, before, now = Progress(**values["progress"]), values["steps_per_epoch"], run.loader.steps_per_epoch
    if before != now:
        progress.step = progress.epoch * now
        notes.append(f"an epoch had {before} steps and has {now} now: epoch {progress.epoch + 1} starts again")
    return progress, notes


def weights_of(module: nn.Module) -> Tensors:
    """Its state, whole: what is split over ranks is gathered, which all of them do together."""
    return {name: whole(tensor) for name, tensor in unwrap(module).state_dict().items()}


def optimizer_state(optimizer: Optimizer) -> tuple[Tensors, dict[str, Any]]:
    """State as tensors named 'parameter.key' or 'group.number.key', and as plain values of the same names."""
    state = optimizer.state_dict()
    named = {f"{index}.{key}": value for index, keys in state["state"].items() for key, value in keys.items()}
    for number, group in enumerate(state["param_groups"]):
        named |= {f"group.{number}.{key}": group[key] for key in _moving(optimizer, group)}
    # Sorted, because all ranks gather together and a restored state has an order of its own on each.
    tensors = {name: whole(value) for name, value in sorted(named.items()) if isinstance(value, Tensor)}
    plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    return tensors, {"kind": type(optimizer).__name__, "plain": plain}


def load_optimizer_state(optimizer: Optimizer, tensors: Tensors, values: dict[str, Any]) -> None:
    """The inverse of `optimizer_state`, bit for bit, into an optimiser made from the same recipe."""
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
                raise ValueError(f"{name} is no state of {kind}")
            state["param_groups"][int(number)][key] = value
            continue
        if isinstance(value, Tensor) and value.ndim and value.shape != params[int(owner)].shape:
            raise ValueError(f"{name} is {tuple(value.shape)}, expected {tuple(params[int(owner)].shape)}")
        if isinstance(value, Tensor) and value.ndim:
            value = like(params[int(owner)], value)
        state["state"].setdefault(int(owner), {})[key] = value
    for number, kept in state["state"].items():
        if kind in _KEPT and kept.keys() != _KEPT[kind]:
            raise ValueError(f"of parameter {number} {kind} keeps {sorted(_KEPT[kind])}, given {sorted(kept)}")
    optimizer.load_state_dict(state)


def random_state(device: torch.device) -> Tensors:
    """The global generators of this process. Python's and NumPy's 32-bit words are exact in float64."""
    _, words, gauss = random.getstate()
    _, array, position, has_gauss, cached = np.random.get_state()
    state = {
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*array, position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Tensors, device: torch.device) -> None:
    """The inverse of `random_state`."""
    *words, has_gauss, gauss = state["python"].tolist()
    random.setstate((3, tuple(int(word) for word in words), gauss if has_gauss else None))
    *array, position, has_gauss, cached = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(array, np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _restore_random(processes: Processes, snapshot: Snapshot) -> list[str]:
    world = snapshot.values["world"]
    own = snapshot.tensors.get(f"random-{processes.rank}")
    if world == processes.world and own and (("cuda" in own) == (processes.device.type == "cuda")):
        set_random_state(own, processes.device)
        return []
    # Any rank of any number of them gets numbers of its own, the same if the run is continued so again.
    seed = (snapshot.step * 1_000_003 + processes.rank * 7919 + processes.world) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    reason = (
        f"saved by {world} processes, continued by {processes.world}"
        if world != processes.world
        else "saved on another kind of device"
    )
    return [f"{reason}: the order of the data is kept, random numbers of the network start anew"]


def _moving(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """Keys of a group that an optimiser counts in, such as LAMB's step; all others are hyper-parameters."""
    given = {"params", "lr", "lr_scale", "initial_lr", *optimizer.defaults}
    return [key for key in group if key not in given]
