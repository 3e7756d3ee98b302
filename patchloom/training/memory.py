"""The memory of a training step, the memory that is available, and the micro-batches that make the step fit.

On a GPU a step is tried, since running out of memory raises an error there. On a CPU the kernel kills the process, so
the memory per image is measured on a few images and extrapolated.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from patchloom.engine.batches import len_of, split
from patchloom.engine.distribution import unwrap
from patchloom.engine.run import Run, SampledBatches
from patchloom.machine import available_bytes
from patchloom.models.from_config import is_sharded
from patchloom.models.peak_memory import LiveBytes
from patchloom_runtime.errors import ResourceError, UsageError

GIB = 2**30
USED_SHARE = 0.85  # of the available memory; the rest is for allocators and other programs
TRIED_IMAGES = (2, 4)
# Copies of the trained weights: gradients, temporary tensors of the optimizer, the best weights.
WEIGHT_COPIES = 3
OPTIMIZER_STATES = {"SGD": 1, "AdamW": 2, "Adam": 2, "Lamb": 2}  # per weight, from the first step on


@dataclass(frozen=True)
class MemoryNeed:
    """Memory of a step of this process in bytes, in addition to what is already allocated."""

    fixed: int  # gradients and optimizer
    data: int  # the whole batch, which is prepared before it is cut
    per_image: float  # in a micro-batch

    def bytes(self, images: int, parts: int) -> float:
        """Return the bytes for a batch of `images` in `parts` micro-batches."""
        return self.fixed + self.data + self.per_image * -(-images // parts)


def micro_batches(run: Run, fixed: int | None = None) -> int:
    """Return the number of micro-batches per batch: `fixed`, or as many as the memory requires."""
    images = max(1, run.schedule.optim.batch_size // run.processes.world)
    if fixed is not None:
        if fixed > images:
            raise UsageError(f"--micro-batches is {fixed}, expected at most the {images} images of a batch")
        return fixed
    if run.processes.device.type == "cuda":
        return _tried(run, images)
    available = available_bytes()
    sharded = any(is_sharded(weight) for weight in run.model.parameters())
    if available is None or sharded or not isinstance(run.loader, SampledBatches):
        return 1
    parts = parts_that_fit(need_of(run), images, int(available * USED_SHARE / run.processes.world))
    return int(max(run.processes.gather(parts)))


def parts_that_fit(need: MemoryNeed, images: int, allowed: int) -> int:
    """Return the smallest power of two of micro-batches that stays within `allowed` bytes."""
    parts = 1
    while need.bytes(images, parts) > allowed:
        if parts >= images:
            raise _too_much(need, images, allowed)
        parts = min(2 * parts, images)
    return parts


def _too_much(need: MemoryNeed, images: int, allowed: int) -> ResourceError:
    gib, alone = allowed / GIB, need.fixed + need.per_image
    if alone > allowed:
        return ResourceError(
            f"not even one image fits in memory: a step needs {alone / GIB:.1f} GiB and {gib:.1f} GiB are available; "
            "use a smaller network (--model), smaller images (--size), or fit the recipe (--fit)"
        )
    return ResourceError(
        f"a batch of {images} images needs {need.bytes(images, images) / GIB:.1f} GiB even one image at a time, and "
        f"{gib:.1f} GiB are available; use a smaller batch (--batch), or fit the recipe (--fit)"
    )


def micro_batch_note(run: Run) -> str:
    """Return how micro-batches change the result, if at all."""
    images = run.schedule.optim.batch_size // run.processes.world // run.accumulate
    modules = [unwrap(run.model), *([run.objective] if isinstance(run.objective, nn.Module) else [])]
    normed = any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
    if normed and not run.eval_mode:
        return f"batch statistics are then those of {images} images"
    return run.objective.micro_batch_note(images) or "same result"


def need_of(run: Run) -> MemoryNeed:
    """Measure the memory of a few images; weights, buffers and random state stay as they were."""
    network, objective = unwrap(run.model), run.objective
    modules = [network, *([objective] if isinstance(objective, nn.Module) else [])]
    permanent = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    activations, counts = [], []
    with left_as_it_was(run):
        network.train(not run.eval_mode)
        for images in TRIED_IMAGES:
            batch = run.loader.sample(images)  # type: ignore[attr-defined]
            live = LiveBytes(permanent)
            before = live.bytes
            with live, run.processes.autocast():
                loss = run.objective(network, batch, epoch=0, step=0)["loss"]
            del loss
            counts.append(len_of(batch))
            activations.append(live.peak - before)
    trained = sum(p.nbytes for group in run.optimizer.param_groups for p in group["params"])
    states = OPTIMIZER_STATES.get(type(run.optimizer).__name__, 0)
    return MemoryNeed(
        fixed=trained * (WEIGHT_COPIES + states),
        data=run.loader.preparing_bytes(),  # type: ignore[attr-defined]
        per_image=_slope(counts, activations),
    )


def _slope(counts: list[int], values: list[int]) -> float:
    if counts[0] == counts[1]:
        return values[1] / counts[1]
    return (values[1] - values[0]) / (counts[1] - counts[0])


def _tried(run: Run, images: int) -> int:
    """Return the fewest micro-batches with which a step runs on the device."""
    parts = 1
    while parts <= images:
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
    """Run forward and backward passes of one micro-batch and leave everything as it was."""
    network = unwrap(run.model)
    with closing(run.loader.epoch(0)) as batches:  # type: ignore[type-var]
        batch = next(batches)
    # The optimizer will keep two states per weight from its first step on.
    reserved = [torch.empty_like(p) for p in network.parameters() if p.requires_grad for _ in range(2)]
    small = split(batch, parts)[0].to(run.processes.device)
    with left_as_it_was(run):
        try:
            network.train()
            with run.processes.autocast():
                run.objective(network, small, epoch=0, step=0)["loss"].backward()
        finally:
            reserved.clear()


@contextmanager
def left_as_it_was(run: Run) -> Iterator[None]:
    """Restore buffers, gradients, random state and the objective after trial steps."""
    objective: Any = run.objective
    modules = [unwrap(run.model), *([objective] if isinstance(objective, nn.Module) else [])]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    copies = [buffer.clone() for buffer in buffers]
    with run.processes.rng_preserved():
        try:
            yield
        finally:
            for module in modules:
                module.zero_grad(set_to_none=True)
            objective.forget()
            with torch.no_grad():
                for buffer, before in zip(buffers, copies, strict=True):
                    buffer.copy_(before)
