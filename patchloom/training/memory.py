"""Memory is counted before it is taken: what a step needs, what this process may have, and how a batch is cut to fit.

On a GPU a step is tried, since running out is an error there. On a CPU the kernel ends the process without a word, so
the need is measured on a few images, which is linear in their number, and compared with what there is.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from patchloom.engine.batches import len_of, split
from patchloom.engine.distribution import unwrap
from patchloom.engine.run import Run, SampledBatches
from patchloom.models.from_config import is_sharded
from patchloom.models.peak_memory import LiveBytes
from patchloom_runtime.errors import ResourceError, UsageError

GIB = 2**30
USED_SHARE = 0.85  # of what there is: allocators keep some, and other programs want some
TRIED_IMAGES = (2, 4)
# Tensors of a weight's size that come with training: its gradient, the optimiser's scratch, the best weights kept.
BESIDE_WEIGHTS = 3
OPTIMISER_NUMBERS = {"SGD": 1, "AdamW": 2, "Adam": 2, "Lamb": 2}  # that it keeps for each weight from its first step on


@dataclass(frozen=True)
class MemoryNeed:
    """Memory of a step of this process, in bytes, beyond what is taken already."""

    fixed: int  # gradients, optimiser
    data: int  # a batch is prepared whole, however it is cut
    per_image: float  # of a micro-batch

    def bytes(self, images: int, parts: int) -> float:
        """For a batch of `images` in `parts` micro-batches."""
        return self.fixed + self.data + self.per_image * -(-images // parts)


def micro_batches(run: Run, asked: int | None = None) -> int:
    """Into how many micro-batches the batch is cut: as many as asked for, else as memory wants."""
    images = max(1, run.schedule.optim.batch_size // run.processes.world)
    if asked is not None:
        if asked > images:
            raise UsageError(f"--micro-batches is {asked}, more than the {images} images of a batch; give that or less")
        return asked
    if run.processes.device.type == "cuda":
        return _tried(run, images)
    there = available_bytes()
    sharded = any(is_sharded(weight) for weight in run.model.parameters())
    if there is None or sharded or not isinstance(run.loader, SampledBatches):
        return 1
    parts = parts_that_fit(need_of(run), images, int(there * USED_SHARE / run.processes.world))
    return int(max(run.processes.gather(parts)))


def parts_that_fit(need: MemoryNeed, images: int, allowed: int) -> int:
    """The smallest power of two that the batch must be cut into to stay within `allowed` bytes."""
    parts = 1
    while need.bytes(images, parts) > allowed:
        if parts >= images:
            raise _too_much(need, images, allowed)
        parts = min(2 * parts, images)
    return parts


def _too_much(need: MemoryNeed, images: int, allowed: int) -> ResourceError:
    there, alone = allowed / GIB, need.fixed + need.per_image
    if alone > allowed:
        return ResourceError(
            f"not even one image fits in memory: a step needs {alone / GIB:.1f} GiB and {there:.1f} GiB can be had; "
            "use a smaller network (--model), smaller images (--size), or fit the recipe (--fit)"
        )
    return ResourceError(
        f"a batch of {images} images needs {need.bytes(images, images) / GIB:.1f} GiB even one image at a time, and "
        f"{there:.1f} GiB can be had; use a smaller batch (--batch), or fit the recipe (--fit)"
    )


def micro_batch_note(run: Run) -> str:
    """What micro-batches change, if anything."""
    images = run.schedule.optim.batch_size // run.processes.world // run.accumulate
    modules = [unwrap(run.model), *([run.objective] if isinstance(run.objective, nn.Module) else [])]
    normed = any(isinstance(part, _BatchNorm) for module in modules for part in module.modules())
    if normed and not run.eval_mode:
        return f"batch statistics are then those of {images} images"
    return run.objective.micro_batch_note(images) or "same result"


def need_of(run: Run) -> MemoryNeed:
    """Measured on a few images with the uncompiled network; weights, buffers and random numbers stay."""
    network, objective = unwrap(run.model), run.objective
    modules = [network, *([objective] if isinstance(objective, nn.Module) else [])]
    kept = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    activations, counts = [], []
    with left_as_it_was(run):
        network.train(not run.eval_mode)
        for images in TRIED_IMAGES:
            batch = run.loader.sample(images)  # type: ignore[attr-defined]
            live = LiveBytes(kept)
            before = live.bytes
            with live, run.processes.autocast():
                loss = run.objective(network, batch, epoch=0, step=0)["loss"]
            del loss
            counts.append(len_of(batch))
            activations.append(live.peak - before)
    trained = sum(p.nbytes for group in run.optimizer.param_groups for p in group["params"])
    numbers = OPTIMISER_NUMBERS.get(type(run.optimizer).__name__, 0)
    return MemoryNeed(
        fixed=trained * (BESIDE_WEIGHTS + numbers),
        data=run.loader.preparing_bytes(),  # type: ignore[attr-defined]
        per_image=_slope(counts, activations),
    )


def _slope(counts: list[int], values: list[int]) -> float:
    if counts[0] == counts[1]:
        return values[1] / counts[1]
    return (values[1] - values[0]) / (counts[1] - counts[0])


def _tried(run: Run, images: int) -> int:
    """As many parts as a step on the device can be done in."""
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
    """Forward and backward of one micro-batch of the uncompiled network, then everything as it was."""
    network = unwrap(run.model)
    with closing(run.loader.epoch(0)) as batches:  # type: ignore[type-var]
        batch = next(batches)
    # The optimiser will keep two numbers per weight from its first step on.
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
    """Inside, steps may be tried: buffers, gradients, random numbers and what the objective noted are as before."""
    objective: Any = run.objective
    modules = [unwrap(run.model), *([objective] if isinstance(objective, nn.Module) else [])]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    with run.processes.rng_preserved():
        try:
            yield
        finally:
            for module in modules:
                module.zero_grad(set_to_none=True)
            objective.forget()
            with torch.no_grad():
                for buffer, before in zip(buffers, kept, strict=True):
                    buffer.copy_(before)


# What there is --------------------------------------------------------------------------------------------------------


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory this process may still take: of the machine, of its control groups, of its address space; None unknown."""
    found = [_of_machine(proc), *_of_cgroups(proc, cgroups), _of_address_space(proc)]
    return min((max(0, value) for value in found if value is not None), default=None)


def _of_machine(proc: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:  # no Linux: at least what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


# Where limit, use and statistics stand, for versions 2 and 1; files that were read count as used but can be dropped.
_CGROUPS = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _of_cgroups(proc: Path, root: Path) -> Iterator[int]:
    """What the limits of this process's control groups, and of those above them, leave."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except (OSError, ValueError):
        return
    for _, controllers, path in lines:
        version = 2 if not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        top = root if version == 2 else root / "memory"
        # Inside a container the path may be that of the host: then the group is the top one.
        folder = top / path.strip("/")
        for level in [folder, *folder.parents]:
            if level != top and top not in level.parents:
                break
            if (left := _left_in(level, version)) is not None:
                yield left


def _left_in(folder: Path, version: int) -> int | None:
    limit_file, used_file, dropped = _CGROUPS[version]
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    return int(limit) - used + int(statistics.get(dropped, 0))


def _of_address_space(proc: Path) -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return None
    try:
        pages = int((proc / "self" / "statm").read_text().split()[0])
    except (OSError, ValueError):
        return soft
    return soft - pages * resource.getpagesize()
