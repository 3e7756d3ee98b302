"""From loader to loop: batches are timed, moved to the device and split into micro-batches."""

import dataclasses
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from patchloom.data.batches.ragged import Boxes
from patchloom.data.batches.sampler import rank_positions
from patchloom.engine.distribution import Processes
from patchloom_runtime.errors import UsageError


class Feed:
    """An iterator over a loader's batches on the device that counts the seconds spent waiting for them."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.waited_s = 0.0

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches on the device.

        Starting a loader draws random numbers, which must not affect the network.
        """
        with self._processes.rng_preserved():
            batch = self._next(batches)
        while batch is not None:
            yield move(batch, self._processes.device)
            batch = self._next(batches)

    def _next(self, batches: Iterator[Any]) -> Any:
        start = time.perf_counter()
        batch = next(batches, None)
        self.waited_s += time.perf_counter() - start
        return batch


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`. Copies from pinned memory are asynchronous."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into `parts` micro-batches of about equal size, by the batch's own `split` method if it has one.

    Examples i and size − 1 − i stay together in mirrored order if the size allows it, so that Mixup with the reversed
    batch pairs the same images as without accumulation.
    """
    if parts == 1:
        return [batch]
    if hasattr(batch, "split") and not isinstance(batch, Tensor):
        return batch.split(parts)
    size = len_of(batch)
    if size < parts:
        raise UsageError(
            f"A batch of {size} cannot be split into {parts} micro-batches. Use --micro-batches {size} or fewer."
        )
    device = next(_tensors(batch)).device
    rows = [_rows(size, part, parts, device) for part in range(parts)]
    return [_mapped(batch, lambda tensor, own=own: tensor[own]) for own in rows]


def len_of(batch: Any) -> int:
    """Return the number of examples: the batch's own `len`, or the length of its first tensor."""
    counts_itself = hasattr(batch, "__len__") and not isinstance(batch, dict | list | tuple)
    return len(batch if counts_itself else next(_tensors(batch)))


@lru_cache(maxsize=64)
def _rows(size: int, part: int, parts: int, device: torch.device) -> Tensor:
    return torch.from_numpy(rank_positions(size, part, parts)).to(device)


def _mapped(batch: Any, change: Any) -> Any:
    if isinstance(batch, Tensor | Boxes):
        return change(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **{name: _mapped(value, change) for name, value in fields.items()})
    if isinstance(batch, dict):
        return {name: _mapped(value, change) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_mapped(value, change) for value in batch)
    return batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
        return
    if dataclasses.is_dataclass(batch):
        batch = [getattr(batch, f.name) for f in dataclasses.fields(batch)]
    for value in batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ():
        yield from _tensors(value)
