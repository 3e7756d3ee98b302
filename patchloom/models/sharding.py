"""Weights sharded over the processes of a run (FSDP2): each holds a part of every tensor, and of what follows it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchloom.models.from_config import is_sharded

# Called by objectives and evaluations in place of `forward`; weights are gathered for them too.
_METHODS = ("features", "head", "both_heads", "vectors", "forward_resampled")


def shard(module: nn.Module) -> None:
    """Shard a module over all processes, in place, block by block: at most one block's weights are gathered at once."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for part in reversed(list(module.modules())):  # blocks inside blocks first
        projector = getattr(part, "projector", None)  # searches and Grafit call it by itself
        for block in part if isinstance(part, nn.ModuleList) else [projector] if projector else ():
            if any(True for _ in block.parameters()):
                fully_shard(block)
    fully_shard(module)
    for method in _METHODS:
        if hasattr(module, method):
            register_fsdp_forward_method(module, method)


def local_parameters(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module, of sharded ones this process's part, which shares their memory."""
    if reshard := getattr(module, "reshard", None):
        reshard()  # after a forward pass without a backward pass, the weights outside of blocks are still gathered
    return [local(parameter) for parameter in module.parameters()]


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor, which shares its memory, and any other tensor as it is."""
    value: Any = tensor
    return value.detach().to_local() if is_sharded(tensor) else tensor


def follow_(mine: Sequence[nn.Module], theirs: Sequence[nn.Module], weight: float) -> None:
    """Move the parameters of `mine` by `weight` towards those of `theirs`: each process its parts, if they are sharded.

    Call it under `torch.no_grad`.
    """
    own = [parameter for module in mine for parameter in local_parameters(module)]
    other = [parameter for module in theirs for parameter in local_parameters(module)]
    torch._foreach_lerp_(own, other, weight)


def tensor_norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norm of each tensor, of sharded ones over all processes; all processes must call this together."""
    tensors = list(tensors)
    norms = torch.stack(torch._foreach_norm([local(tensor) for tensor in tensors]))
    if any(map(is_sharded, tensors)):
        squares = norms.square()
        dist.all_reduce(squares)
        sharded = torch.tensor([is_sharded(tensor) for tensor in tensors], device=norms.device)
        norms = torch.where(sharded, squares.sqrt(), norms)
    return norms
