"""Peak memory of inference (CO-1; thesis figures 5.3 and 5.7): weights, images and all that is alive with them.

On a GPU its allocator says it. On a CPU every operation is watched: a tensor counts from the operation that made it
until nothing refers to it any more, views count once. Scratch memory inside a kernel is not seen there.
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


def peak_mem_mib(model: nn.Module, images: Tensor) -> float:
    """Most memory in use while `model` answers `images`, in eval mode and without gradients."""
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
    """Image size → peak memory in MiB of the network that `make` gives for it; None where it does not fit."""
    found: dict[int, float | None] = {}
    for size in sizes:
        try:
            model = make(size).to(device, dtype).eval()
            channels = model.config.channels if isinstance(model, Network) else 3
            found[size] = peak_mem_mib(model, torch.zeros(batch, channels, size, size, device=device, dtype=dtype))
        except torch.OutOfMemoryError:
            found[size] = None
    if all(value is None for value in found.values()):
        raise ResourceError(f"not even {batch} images of {min(sizes)} pixels fit into the memory of {device}")
    return found


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors alive: those given, and every one made inside; `peak` is the most there were at once."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.bytes = 0
        self.peak = 0
        for tensor in tensors:
            self._add(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled inside, and saying so to the compiler would import it: two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it leaves."""
        del types
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        self.bytes -= size


def _allocated(model: nn.Module, images: Tensor) -> int:
    """Bytes taken beyond those in use before: other networks on the device are not this one's memory."""
    before = torch.cuda.memory_allocated(images.device)
    torch.cuda.reset_peak_memory_stats(images.device)
    model(images)
    torch.cuda.synchronize(images.device)
    return torch.cuda.max_memory_allocated(images.device) - before
