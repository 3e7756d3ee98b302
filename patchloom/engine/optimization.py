"""Optimizers, parameter groups, frozen layers, gradient clipping and learning-rate schedules."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from patchloom.engine.eager_optimizers import SGD, Adagrad, Adam, AdamW
from patchloom.engine.lamb import Lamb
from patchloom.layers.attention import Attend
from patchloom.layers.low_rank import LowRank
from patchloom.layers.norms import Affine, L2Norm
from patchloom.models.sharding import local, tensor_norms
from patchloom.recipes.parts import OptimPart, SchedulePart
from patchloom_runtime.errors import UsageError

NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, Affine, L2Norm)
Trainable = Literal["all", "attention", "head", "head_and_norm", "lora"]


def freeze(model: nn.Module, trainable: Trainable) -> int:
    """Freeze all but the classifiers and, by `trainable`, attention, the last norm or LoRA; return the trainable count.

    The classifiers always learn: they are new whenever the rest is kept.
    """
    if trainable != "all":
        learning = head_of(model)
        if trainable == "attention":
            attention = [m for m in model.modules() if isinstance(m, Attend)]
            if not attention:
                raise UsageError(
                    f"model.trainable is attention, but {_name(model)} has no attention layers. "
                    "Set model.trainable to head or all."
                )
            learning = [*learning, *attention]
        if trainable == "head_and_norm":
            learning = [*learning, _last_norm(model)]
        if trainable == "lora":
            learning = [*learning, *(module for module in model.modules() if isinstance(module, LowRank))]
        model.requires_grad_(False)
        for module in learning:
            module.requires_grad_(True)
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters by weight decay: by the network's own rule, else only matrices decay."""
    own_rule: Any = getattr(model, "parameter_groups", None)
    if own_rule:
        groups = own_rule(weight_decay)
    else:
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        ]
    groups = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, optim: OptimPart, *others: nn.Module) -> Optimizer:
    """Return the recipe's optimizer for `model` and `others` that learn with it (an objective's heads).

    Move the model to its device first: the kernels are chosen by it.
    """
    groups = [g for module in (model, *others) for g in parameter_groups(module, optim.weight_decay)]
    if optim.layer_decay < 1:
        groups = _with_rate_scales(groups, model, optim.layer_decay)
    if not groups:
        raise UsageError(f"No weight of {_name(model)} is trainable. Set model.trainable to all.")
    if optim.name == "lamb":
        return Lamb(groups, lr=optim.peak_lr, betas=optim.betas)
    devices = {p.device.type for group in groups for p in group["params"]}
    speed = {"fused": True} if devices == {"cuda"} else {"foreach": True}
    if optim.name == "sgd":
        return SGD(groups, optim.peak_lr, optim.momentum, nesterov=optim.nesterov, **speed)
    if optim.name == "adagrad":
        # torch's fused Adagrad supports CPUs only.
        return Adagrad(groups, optim.peak_lr, foreach=True)
    make: Any = {"adamw": AdamW, "adam": Adam}[optim.name]
    return make(groups, optim.peak_lr, optim.betas, **speed)


def own_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer], model: nn.Module, optim: OptimPart, *others: nn.Module
) -> Optimizer:
    """Return the optimizer that a user's function makes of the trainable parameters.

    Its learning rates are the peaks of the schedule.
    """
    optimizer = make([p for module in (model, *others) for p in module.parameters() if p.requires_grad])
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"the optimizer function returns a {type(optimizer).__name__}; expected a torch Optimizer")
    for group in optimizer.param_groups:
        group["lr_scale"] = group["lr"] / optim.peak_lr
    return optimizer


def _with_rate_scales(groups: list[dict[str, Any]], model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Split the groups by the network's learning-rate scale per parameter."""
    rule: Any = getattr(model, "rate_scales", None)
    if rule is None:
        raise UsageError(f"optim.layer_decay is {decay:g}, but {_name(model)} defines no layer order. Set it to 1.")
    scales = rule(decay)
    cut: dict[tuple[int, float], list[nn.Parameter]] = {}
    for number, group in enumerate(groups):
        for parameter in group["params"]:
            cut.setdefault((number, scales.get(parameter, 1.0)), []).append(parameter)
    return [groups[number] | {"params": params, "lr_scale": scale} for (number, scale), params in cut.items()]


def set_rates(optimizer: Optimizer, lr: float, weight_decay: float | None = None) -> None:
    """Set every group's learning rate (times its `lr_scale`, if any) and weight decay for this step.

    Groups without weight decay (biases, norms) stay without.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if weight_decay is not None and group.get("weight_decay"):
            group["weight_decay"] = weight_decay


@torch.no_grad()
def clip_each_(parameters: Iterable[Tensor], max_norm: float) -> None:
    """Clip the gradient norm of each parameter tensor separately (DINO).

    One layer's large gradient then does not slow down the others. The host does not wait for the device.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        factors = (max_norm / (tensor_norms(grads) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(grad) for grad in grads], list(factors.unbind()))


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay as pure functions of the step, so a resumed run has nothing to restore.

    Step 0 uses `warmup_lr`; the first step after warm-up uses the peak. Cosine, linear and poly decay start there and
    would reach `min_lr` one step after the last, as timm's cosine with `warmup_prefix` does. DeiT's code counts the
    decay from step 0 instead and so jumps by 0.07 % of the peak after its 5 warm-up epochs of 300.
    The inverse square root follows Vaswani et al.: peak · √(warm-up steps / step).
    """

    optim: OptimPart
    schedule: SchedulePart
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Return the number of updates of the whole run."""
        return self.schedule.epochs * self.steps_per_epoch

    @property
    def warmup_steps(self) -> int:
        """Return the number of warm-up updates."""
        return self.schedule.warmup_steps or self.schedule.warmup_epochs * self.steps_per_epoch

    def lr(self, step: float) -> float:
        """Return the learning rate of update `step`, counted from 0. A time budget may ask between two steps."""
        part, peak, warmup = self.schedule, self.optim.peak_lr, self.warmup_steps
        if step < warmup:
            return part.warmup_lr + (peak - part.warmup_lr) * step / warmup
        if part.decay == "constant":
            return peak
        if part.decay == "inverse_sqrt":
            return peak * math.sqrt(max(1, warmup) / max(1, step))
        if part.decay == "step":
            drops = sum(step >= epoch * self.steps_per_epoch for epoch in part.step_epochs)
            return peak * part.step_factor**drops
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        left = (1 - done) ** part.power if part.decay == "poly" else _LEFT[part.decay](done)
        return part.min_lr + (peak - part.min_lr) * left

    def weight_decay(self, step: float) -> float | None:
        """Return the weight decay of update `step` along a cosine (DINO), or None if it is constant."""
        start, end = self.optim.weight_decay, self.optim.weight_decay_end
        if end is None:
            return None
        return end + (start - end) * _LEFT["cosine"](step / self.total_steps)


_LEFT: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
}


def head_of(model: nn.Module) -> list[nn.Module]:
    """Return the classifiers of a network."""
    names = getattr(model, "classifiers", None)
    if names is None:
        raise UsageError(
            f"{_name(model)} does not name its classifiers. Set model.trainable to all, "
            "or freeze it with requires_grad_(False)."
        )
    return [model.get_submodule(name) for name in names()]


def _last_norm(model: nn.Module) -> nn.Module:
    """Return the last norm before the classifiers and the projector."""
    after = [
        module for head in (*head_of(model), getattr(model, "projector", None)) if head for module in head.modules()
    ]
    norms = [module for module in model.modules() if isinstance(module, NORMS) and module not in after]
    if not norms:
        raise UsageError(
            f"model.trainable is head_and_norm, but {_name(model)} has no norm. Set model.trainable to head."
        )
    return norms[-1]


def _name(model: nn.Module) -> str:
    return getattr(getattr(model, "config", None), "name", "") or type(model).__name__
