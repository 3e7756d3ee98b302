"""Peak memory of inference (CO-1; thesis figures 5.3 and 5.7): weights, images and activations.

On a GPU, the allocator measures it. On a CPU, every operation is observed: a tensor counts from its creation until
nothing refers to it, and views count once. Scratch memory inside a CPU kernel is not included.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from patchloom.models.network import Network
from patchloom_runtime.errors import ResourceError

MIB = 2**20
PROBES = 3  # batch sizes that `largest_batch` tries between two powers of two


def peak_mem_mib(model: nn.Module, images: Tensor) -> float:
    """Return the peak memory of a forward pass without gradients, in MiB. `model` must be in eval mode."""
    live = LiveBytes([*model.parameters(), *model.buffers(), images])
    with torch.no_grad():
        if images.device.type == "cuda":
            return (live.bytes + _allocated(model, images)) / MIB
        with live:
            model(images)
    return live.peak / MIB


def memory_by_size(
    make: Callable[[int], nn.Module],
    sizes: Sequence[int],
    *,
    batch: int = 1,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[int, float | None]:
    """Return the peak memory in MiB by image size, for the networks `make(size)`; None if out of memory."""
    peaks: dict[int, float | None] = {}
    for size in sizes:
        try:
            model = make(size).to(device, dtype).eval()
            channels = model.config.channels if isinstance(model, Network) else 3
            peaks[size] = peak_mem_mib(model, torch.zeros(batch, channels, size, size, device=device, dtype=dtype))
        except torch.OutOfMemoryError:
            peaks[size] = None
    if all(value is None for value in peaks.values()):
        raise ResourceError(f"{batch} images of {min(sizes)} pixels do not fit into the memory of {device}")
    return peaks


def largest_batch(model: nn.Module, shape: Sequence[int], limit_mib: float | None = None) -> int:
    """Return the largest batch of inputs of `shape` whose inference fits into the memory, to an eighth; 0 if none does.

    The size is doubled until a batch does not fit, then halfway sizes are tried. With `limit_mib`, a batch fits if its
    peak memory is at most that; a CPU needs it, since its memory may be swapped instead of being full.
    """
    weights = next(model.parameters())

    def fits(batch: int) -> bool:
        try:
            peak = peak_mem_mib(model, torch.zeros(batch, *shape, device=weights.device, dtype=weights.dtype))
        except torch.OutOfMemoryError:
            return False
        return limit_mib is None or peak <= limit_mib

    if not fits(1):
        return 0
    largest = 1
    while fits(2 * largest):
        largest *= 2
    step = largest // 2
    for _ in range(PROBES):
        if step and fits(largest + step):
            largest += step
        step //= 2
    return largest


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors: `tensors`, and all that are created inside. `peak` is the maximum."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.bytes = 0
        self.peak = 0
        for tensor in tensors:
            self._add(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default would import the compiler, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        size = storage.nbytes()
        self._storages.add(storage)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        self.bytes -= size


def _allocated(model: nn.Module, images: Tensor) -> int:
    """Return the bytes allocated beyond those in use before, which may belong to other networks."""
    before = torch.cuda.memory_allocated(images.device)
    torch.cuda.reset_peak_memory_stats(images.device)
    model(images)
    torch.cuda.synchronize(images.device)
    return torch.cuda.max_memory_allocated(images.device) - before
