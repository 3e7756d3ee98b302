"""`patchloom bench NAME…`: parameters, multiply-adds, throughput and peak memory, measured on this machine."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from patchloom.cli.options import Device, Json, parse_counts
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    names: Annotated[
        list[str],
        Argument("Networks; timm:NAME is a network of timm. Patterns such as 'cait_*' work too.", complete="model"),
    ]
    device: Device = "auto"
    size: Annotated[int, Option("Image size in pixels.")] = 224
    batches: Annotated[
        str,
        Option(
            "Batch sizes; the fastest is reported. largest: the largest that fits in memory.", metavar="N,…|largest"
        ),
    ] = "1,4,16,64"
    limit_mib: Annotated[
        int | None, Option("With --batches largest: memory limit in MiB. Default: the memory of the GPU.", minimum=1)
    ] = None
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Option("Precision.")] = "float32"
    absorb: Annotated[bool, Option("Also measure each network with its affine layers merged into their neighbors.")] = (
        False
    )
    compiled: Annotated[bool, Option("Measure under torch.compile.", name="compile")] = False
    memory: Annotated[
        str | None,
        Option(
            "Measure peak memory at these image sizes instead, at the first batch size: 224,384,512.", metavar="N,…"
        ),
    ] = None
    seconds: Annotated[float, Option("Seconds per network and batch size.")] = 2.0
    as_json: Json = False


def bench(options: BenchOptions) -> None:
    """Measure networks side by side. They take turns, so that noise affects all of them alike.

    patchloom bench resmlp_s12 mixer_s16 timm:resnet18
    """
    from patchloom.models.bench import bench as measure_networks
    from patchloom.models.bench import bench_memory

    shared: dict[str, Any] = {"device": options.device, "dtype": options.dtype}
    if options.memory is not None:
        sizes = parse_counts("--memory", options.memory, "224,384,512")
        batch = parse_counts("--batches", options.batches, "1,16,64")[0]
        peaks = bench_memory(_expand(options.names), sizes, batch=batch, **shared)
        _print_memory(peaks, sizes, batch, options)
        return
    rows = measure_networks(
        _expand(options.names),
        size=options.size,
        batches="largest"
        if options.batches == "largest"
        else parse_counts("--batches", options.batches, "1,16,64 or largest"),
        limit_mib=options.limit_mib,
        absorb=options.absorb,
        compile=options.compiled,
        seconds=options.seconds,
        **shared,
    )
    _print_rows([{"model": row.model, **asdict(row.cost), **asdict(row.speed)} for row in rows], options)


def _expand(names: list[str]) -> list[str]:
    """Return the networks that names and patterns match."""
    from patchloom.cli.models import matching

    return [known for name in names for known in ([name] if name.startswith("timm:") else matching([name]))]


def _print_rows(rows: list[dict[str, Any]], options: BenchOptions) -> None:
    from patchloom.cli.output import print_json
    from patchloom.cli.table import mebibytes, print_table
    from patchloom.models.cost import human

    if options.as_json:
        print_json(rows)
        return
    compiled = ", compiled" if options.compiled else ""
    print_table(
        ["model", "#parameters", "#multiply-adds", "#images/s", "#at batch", "#peak memory"],
        [
            (
                r["model"],
                human(r["parameters"]),
                human(r["multiply_adds"]),
                f"{r['images_per_second']:,.1f}",
                str(r["batch_size"]),
                mebibytes(r["peak_mem_mib"]),
            )
            for r in rows
        ],
        title=f"forward, {options.size}×{options.size}, {options.dtype}, {rows[0]['device']}{compiled}",
    )


def _print_memory(
    peaks: dict[str, dict[int, float | None]], sizes: list[int], batch: int, options: BenchOptions
) -> None:
    """Print peak memory against image size, as in figure 5.3 of the thesis."""
    from patchloom.cli.output import print_json
    from patchloom.cli.table import mebibytes, print_table
    from patchloom.machine import resolve_device

    device = resolve_device(options.device)
    if options.as_json:
        print_json({"batch": batch, "device": device, "dtype": options.dtype, "peak_mem_mib": peaks})
        return
    print_table(
        ["model", *(f"#{size}" for size in sizes)],
        [(name, *(mebibytes(of[size]) for size in sizes)) for name, of in peaks.items()],
        title=f"peak memory of inference by image size, batch {batch}, {options.dtype}, {device}",
    )
