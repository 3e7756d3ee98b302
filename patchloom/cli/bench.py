"""`patchloom bench NAME…`: parameters, multiply-adds, throughput and peak memory, measured here and now."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from torch import nn


def bench(
    names: Annotated[
        list[str],
        typer.Argument(help="Names or patterns; 'timm:NAME' is timm's network.", autocompletion=completed("model")),
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")] = "auto",
    size: Annotated[int, typer.Option(help="Image size in pixels.")] = 224,
    batch: Annotated[str, typer.Option(help="Batch sizes tried; the fastest is reported.")] = "1,4,16,64",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Precision.")] = "float32",
    absorb: Annotated[bool, typer.Option(help="Also measure each network with its affine parts absorbed.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure under torch.compile.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(help="Measure peak memory at these image sizes instead: 224,384,512; at the first of --batch."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Seconds per network and batch size.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Measure networks side by side: they take turns, so noise hits all alike."""
    import torch

    from patchloom.cli.output import print_json
    from patchloom.cli.table import mebibytes, print_table, whole_numbers
    from patchloom.machine import resolve_device
    from patchloom.models.cost import cost, human, measure
    from patchloom.models.network import Network
    from patchloom.models.network import absorb as absorbed

    batch_sizes = whole_numbers("--batch", batch, "1,16,64")
    device = resolve_device(device)
    if memory is not None:
        sizes = whole_numbers("--memory", memory, "224,384,512")
        _print_memory(names, sizes, batch_sizes[0], device, dtype, as_json)
        return
    networks: dict[str, nn.Module] = {}
    for name in names:
        for label, network in _networks(name, size):
            networks[label] = network.eval()
            if absorb and isinstance(network, Network):
                networks[f"{label} absorbed"] = absorbed(network)
    costs = {label: cost(network, size) for label, network in networks.items()}
    if compiled:
        networks = {label: torch.compile(network) for label, network in networks.items()}  # type: ignore[misc]
    speeds = measure(
        networks,
        device=device,
        dtype=getattr(torch, dtype),
        image_size=size,
        batch_sizes=batch_sizes,
        seconds=seconds,
    )
    rows: list[dict[str, Any]] = [
        {"model": label, **asdict(costs[label]), **asdict(speeds[label])} for label in networks
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ["model", "#parameters", "#multiply-adds", "#images/s", "#at batch", "#peak memory"],
        [
            (
                r["model"],
                human(r["parameters"]),
                human(r["multiply_adds"]),
                f"{r['images_per_second']:.1f}",
                str(r["batch_size"]),
                mebibytes(r["peak_mem_mib"]),
            )
            for r in rows
        ],
        title=f"forward, {size}×{size}, {dtype}, {rows[0]['device']}{', compiled' if compiled else ''}",
    )


def _print_memory(names: list[str], sizes: list[int], batch: int, device: str, dtype: str, as_json: bool) -> None:
    """Peak memory against image size: thesis figure 5.3."""
    import torch

    from patchloom.cli.output import print_json
    from patchloom.cli.table import mebibytes, print_table
    from patchloom.models.peak_memory import memory_by_size

    found: dict[str, dict[int, float | None]] = {}
    for name in names:
        for label, _ in _networks(name, sizes[0]):

            def make(size: int, label: str = label) -> "nn.Module":
                return _networks(label, size)[0][1]

            found[label] = memory_by_size(make, sizes, batch=batch, device=device, dtype=getattr(torch, dtype))
    if as_json:
        print_json({"batch": batch, "device": device, "dtype": dtype, "peak_mem_mib": found})
        return
    print_table(
        ["model", *(f"#{size}" for size in sizes)],
        [(label, *(mebibytes(of[size]) for size in sizes)) for label, of in found.items()],
        title=f"peak memory of inference by image size, batch {batch}, {dtype}, {device}",
    )


def _networks(name: str, size: int) -> "list[tuple[str, nn.Module]]":
    from patchloom.cli.models import matching
    from patchloom.models.registry import create_model

    if not name.startswith("timm:"):
        return [(found, create_model(found, image_size=size)) for found in matching([name])]
    import timm

    from patchloom_runtime.errors import UsageError, nearest

    short = name.removeprefix("timm:")
    if not timm.is_model(short):
        raise UsageError(f"timm has no network {short!r}.{nearest(short, timm.list_models())}")
    try:
        return [(name, timm.create_model(short, img_size=size))]
    except TypeError:  # a network for any size
        return [(name, timm.create_model(short))]
