"""`patchloom.bench`: cost and speed of networks, measured side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import timm
import torch
from torch import nn

from patchloom.machine import device_kind, resolve_device
from patchloom.models.cost import Cost, Speed, cost, measure, measure_largest
from patchloom.models.network import Network
from patchloom.models.network import absorb as absorb_affine
from patchloom.models.peak_memory import memory_by_size
from patchloom.models.registry import create_model
from patchloom_runtime.errors import UsageError, nearest, with_near_options

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class BenchRow:
    """Cost and speed of one network."""

    model: str
    cost: Cost
    speed: Speed


@with_near_options
def bench(
    names: Sequence[str],
    *,
    device: str = "auto",
    size: int = 224,
    batches: Sequence[int] | Literal["largest"] = (1, 4, 16, 64),
    limit_mib: int | None = None,
    dtype: Dtype = "float32",
    absorb: bool = False,
    compile: bool = False,  # noqa: A002
    seconds: float = 2.0,
) -> list[BenchRow]:
    """Measure networks side by side. They take turns, so that noise affects all of them alike.

    names      Networks; 'timm:NAME' is a network of timm.
    device     'cpu', 'cuda', 'cuda:1' or 'mps'; 'auto' uses a GPU if there is one.
    size       Image size in pixels.
    batches    Batch sizes; the fastest is reported. 'largest': the largest that fits in memory.
    limit_mib  With --batches largest: memory limit in MiB. Default: the memory of the GPU.
    dtype      Precision. One of 'float32', 'bfloat16' or 'float16'.
    absorb     Also measure each network with its affine layers merged into their neighbors.
    compile    Measure under torch.compile.
    seconds    Seconds per network and batch size.
    """
    device = resolve_device(device)
    if batches != "largest" and limit_mib is not None:
        raise UsageError("limit_mib is for batches='largest'; drop it for listed batch sizes")
    if batches == "largest" and device_kind(device) != "cuda" and (limit_mib is None or compile):
        raise UsageError(
            f"on {device}, the largest batch needs limit_mib, such as 1000, and networks that are not compiled"
        )
    networks: dict[str, nn.Module] = {}
    for name in names:
        network = networks[name] = make_network(name, size).eval()
        if absorb and isinstance(network, Network):
            networks[f"{name} absorbed"] = absorb_affine(network)
    costs = {name: cost(network, size) for name, network in networks.items()}
    if compile:
        networks = {name: torch.compile(network) for name, network in networks.items()}  # type: ignore[misc]
    shared: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype), "image_size": size, "seconds": seconds}
    if batches == "largest":
        speeds = measure_largest(networks, limit_mib=limit_mib, **shared)
    else:
        speeds = measure(networks, batch_sizes=list(batches), **shared)
    return [BenchRow(name, costs[name], speeds[name]) for name in networks]


def bench_memory(
    names: Sequence[str], sizes: Sequence[int], *, batch: int = 1, device: str = "auto", dtype: Dtype = "float32"
) -> dict[str, dict[int, float | None]]:
    """Return the peak memory of inference in MiB by network and image size; None if it did not fit."""
    peaks = {}
    for name in names:

        def make(size: int, name: str = name) -> nn.Module:
            return make_network(name, size)

        peaks[name] = memory_by_size(
            make, list(sizes), batch=batch, device=resolve_device(device), dtype=getattr(torch, dtype)
        )
    return peaks


def make_network(name: str, size: int) -> nn.Module:
    """Create a network of patchloom, or of timm for 'timm:NAME'."""
    if not name.startswith("timm:"):
        return create_model(name, image_size=size)
    short = name.removeprefix("timm:")
    if not timm.is_model(short):
        raise UsageError(f"timm has no network {short!r}.{nearest(short, timm.list_models())}")
    try:
        network: nn.Module = timm.create_model(short, img_size=size)
    except TypeError:  # a network that takes any size
        network = timm.create_model(short)
    return network
