"""One process or many, any device, any precision: everything the loop needs, in one class.

Processes are started by torchrun or srun and connect in `rendezvous`. Gradients are averaged by DDP or, for sharded
weights, by FSDP2; mixed precision is torch's autocast with a gradient scaler for fp16.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from patchloom.engine.optimization import clip_each_
from patchloom.engine.rendezvous import ANSWER_WITHIN_S, lost_ranks, meet, place_from
from patchloom.machine import device_kind
from patchloom.models.from_config import is_sharded
from patchloom.models.sharding import shard
from patchloom_runtime.errors import PatchloomError, ResourceError, UsageError

T = TypeVar("T")
_BROKEN = ("onnection", "Timed out waiting")  # in messages of gloo
Precision = Literal["auto", "bf16", "fp16", "fp32"]


class Processes:
    """This process among those of the run: its rank, device and precision, and the collective operations."""

    def __init__(
        self,
        precision: Precision = "auto",
        *,
        device: str | torch.device | None = None,
        answer_within_s: float = ANSWER_WITHIN_S,
    ) -> None:
        place = place_from(os.environ)
        kind = device_kind(device)

        self.rank, self.world, self._place = place.rank, place.world, place
        self._store: dist.Store | None = None
        self.device = torch.device("cuda", place.local_rank) if kind == "cuda" else torch.device(device or kind)
        self.precision = _resolve_precision(precision, self.device)
        if kind == "mps" and self.world > 1:
            raise UsageError(f"{self.device} trains in one process, not in {self.world}. Use --device cpu.")
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1 and not dist.is_initialized():
            self._store = meet(place, "nccl" if kind == "cuda" else "gloo", answer_within_s)
        self.scaler = torch.amp.GradScaler("cuda") if self.precision == "fp16" else None
        self._sharded: tuple[nn.Module, ...] = ()

    @property
    def is_main(self) -> bool:
        """Return whether this process does the work that is done once, such as writing files."""
        return self.rank == 0

    def shard(self, *modules: nn.Module) -> None:
        """Shard weights, gradients and optimizer state over the ranks (FSDP2), in place.

        All ranks start from the values of rank 0. Call before making the optimizer, and once.
        """
        for module in modules:
            self.same_on_all_(module)
            shard(module)
        self._sharded = modules

    def same_on_all_(self, module: nn.Module, *, buffers_only: bool = False) -> None:
        """Give all ranks the parameters and buffers of rank 0, in place."""
        if self.world == 1:
            return
        for tensor in [*([] if buffers_only else module.parameters()), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return `module` on this rank's device, with gradients averaged over the ranks."""
        module = module.to(self.device)
        if self.world == 1 or self._sharded or not any(p.requires_grad for p in module.parameters()):
            return module
        return DistributedDataParallel(module, device_ids=[self.device.index] if self.device.type == "cuda" else None)

    @contextmanager
    def no_sync(self, prepared: nn.Module) -> Iterator[None]:
        """Keep gradients on their rank: for all but the last of accumulated micro-batches."""
        if isinstance(prepared, DistributedDataParallel):
            with prepared.no_sync():
                yield
            return
        for module in self._sharded:
            module.set_requires_gradient_sync(False)  # type: ignore[operator]
        yield
        for module in self._sharded:
            module.set_requires_gradient_sync(True)  # type: ignore[operator]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the run's autocast context."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.precision == "bf16" else torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`."""
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def update(self, optimizer: Optimizer, clip_norm: float | None, clip_each: float | None = None) -> None:
        """Clip the gradients (all together, or each tensor's), update the weights and clear the gradients."""
        if self.scaler:
            self.scaler.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if clip_each is not None:
            clip_each_(params, clip_each)
        if clip_norm is not None:
            # True is for sharded weights; it raises on MPS.
            nn.utils.clip_grad_norm_(params, clip_norm, foreach=None if self.device.type == "mps" else True)
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def sum_(self, values: Tensor) -> Tensor:
        """Sum `values` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Concatenate the rows of all ranks on every rank. Each rank must pass the same number of rows."""
        if self.world == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.world)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 and return its result on every rank. If it fails, all ranks raise the same error."""
        result: Any = None
        if self.is_main:
            try:
                result = work()
            except (PatchloomError, OSError) as error:
                result = error
        result = self.from_main(result)
        if isinstance(result, Exception):
            raise result
        return result

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def ranks_watched(self) -> Iterator[None]:
        """Raise ResourceError naming the lost ranks if a connection breaks, or an exchange takes too long, in here."""
        try:
            yield
        except RuntimeError as error:
            broken = isinstance(error, dist.DistError) or any(words in str(error) for words in _BROKEN)
            if self._store is None or not broken:
                raise
            gone = lost_ranks(self._store, self._place)
            who = f"rank{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone))}" if gone else "a rank"
            raise ResourceError(
                f"{who} of {self.world} stopped, so rank {self.rank} cannot continue. See the output of that process; "
                "the same command resumes from the last checkpoint."
            ) from error

    def rng_states(self) -> list[Tensor]:
        """Return the states of the generators that a network draws from."""
        if self.device.type == "cpu":
            return [torch.get_rng_state()]
        return [torch.get_rng_state(), torch.get_device_module(self.device).get_rng_state(self.device)]

    def set_rng_states(self, states: list[Tensor]) -> None:
        """Restore the result of `rng_states`."""
        torch.set_rng_state(states[0])
        if self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states[1], self.device)

    @contextmanager
    def rng_preserved(self) -> Iterator[None]:
        """Undo the effect of random numbers drawn inside this context on those drawn after it."""
        states = self.rng_states()
        try:
            yield
        finally:
            self.set_rng_states(states)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the network inside torch.compile's wrapper."""
    return getattr(model, "_orig_mod", model)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. Sharded tensors are gathered, so all ranks must call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def _resolve_precision(precision: Precision, device: torch.device) -> Precision:
    if precision == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "fp32"
    if precision == "fp16" and device.type != "cuda":
        raise UsageError(f"precision fp16 needs a CUDA device, but the device is {device}. Use bf16 or fp32.")
    if precision == "bf16" and device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
        return "fp32"
    return precision
