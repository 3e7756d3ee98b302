"""LAMB (arXiv 1904.00962) with multi-tensor (foreach) kernels.

The update rule is that of apex's FusedLAMB and timm's Lamb without their built-in gradient clipping: Adam's step plus
weight decay, scaled per decaying tensor by |weights|/|step|. timm's Lamb updates one tensor at a time, which keeps a
GPU waiting for kernel launches (measured in benchmarks/LOG.md); that is why this one exists.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from patchloom.engine.eager_optimizers import Eager
from patchloom.models.sharding import local, tensor_norms


class Lamb(Eager):
    """Layer-wise adaptive moments for large batches."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads: Any = [p.grad for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        group["step"] = group.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        spread = torch._foreach_sqrt(second)
        torch._foreach_div_(spread, (1 - beta2 ** group["step"]) ** 0.5)
        torch._foreach_add_(spread, group["eps"])
        change = torch._foreach_div(first, 1 - beta1 ** group["step"])
        torch._foreach_div_(change, spread)
        if group["weight_decay"]:
            torch._foreach_add_(change, params, alpha=group["weight_decay"])
            torch._foreach_mul_([local(each) for each in change], _trust(params, change))
        torch._foreach_add_(params, change, alpha=-group["lr"])


def _trust(params: list[Tensor], change: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    """Return |weights|/|change| per tensor, or 1 if either norm is zero."""
    weight, length = tensor_norms(params), tensor_norms(change)
    ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
    return list(ratio.unbind())
