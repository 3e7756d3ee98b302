"""`patchloom prune RUN DATA`: accuracy with pruned and rounded matrices; with --out, the pruned network."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from patchloom.cli.options import Batch, Device, DryRun, Json, Split, Workers, keywords, parse_counts
from patchloom.options import Argument, Option

if TYPE_CHECKING:
    from patchloom.tasks.classification.pruning import Pruned, Pruning


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    run: Annotated[str, Argument("Run of a classifier.", complete="run")]
    data: Annotated[
        str | None, Argument("Images to evaluate on, with the classes of the run. Optional with --out.")
    ] = None
    shares: Annotated[
        str | None,
        Option("Shares of each matrix to set to zero, smallest weights first: 0.5,0.9.", metavar="S,…"),
    ] = None
    bits: Annotated[str | None, Option("Bits to round each weight to: 8,4,2.", metavar="N,…")] = None
    matrices: Annotated[
        str, Option("Matrices to change: A mixes patches, B and C are the layers of the channel MLP.")
    ] = "ABC"
    out: Annotated[
        str | None, Option("Run folder to save the network to, with one share, one number of bits or both.")
    ] = None
    page: Annotated[str | None, Option("HTML page. Default: RUN/prune.html.")] = None
    split: Split = None
    device: Device = "auto"
    dry_run: DryRun = False
    batch: Batch = 64
    workers: Workers = 0
    as_json: Json = False


def prune(options: PruneOptions) -> None:
    """Measure how the accuracy falls if small weights are set to zero or weights are rounded. Nothing is trained.

    patchloom prune runs/photos photos/

    patchloom prune runs/photos photos/ --matrices A --shares 0.8 --bits 8 --out runs/sparse
    """
    from patchloom.cli.output import print_json
    from patchloom.tasks.classification.pruning import prune as prune_run
    from patchloom.tasks.classification.pruning import write_pruning_page

    shares = _parse_shares(options.shares) if options.shares is not None else None
    bits = parse_counts("--bits", options.bits, "8,4,2") if options.bits is not None else None
    if options.dry_run:
        _print_plan(options, shares, bits)
        return
    pruning = prune_run(**keywords(options, "shares", "bits", "page", "dry_run"), shares=shares, bits=bits)
    page = Path(options.page) if options.page else None
    if page is None and not options.as_json and not options.out:
        page = Path(options.run, "prune.html") if Path(options.run).is_dir() else Path("prune.html")
    if page and pruning.data is not None:
        write_pruning_page(pruning, page)
    if options.as_json:
        print_json(pruning.to_dict())
    else:
        _print(pruning, page)


def _parse_shares(text: str) -> list[float]:
    from patchloom_runtime.errors import UsageError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--shares takes numbers with commas, such as 0.5,0.9; got {text!r}") from None


def _print_plan(options: PruneOptions, shares: list[float] | None, bits: list[int] | None) -> None:
    from patchloom.cli.output import print_json, print_result
    from patchloom.tasks.classification.pruning import BITS, SHARES

    if shares is None and bits is None:
        shares, bits = list(SHARES), list(BITS)
    if options.as_json:
        print_json({"shares": shares, "bits": bits, "matrices": options.matrices, "out": options.out})
        return
    zeros = f"shares {', '.join(f'{share:g}' for share in shares)}" if shares else ""
    rounding = f"bits {', '.join(map(str, bits))}" if bits else ""
    target = f", saved to {options.out}" if options.out else ""
    print_result(f"matrices {options.matrices}: {'; '.join(filter(None, (zeros, rounding)))}{target}")
    print("Nothing was measured.   Next: the same command without --dry-run")


def _print(pruning: "Pruning", page: Path | None) -> None:
    from patchloom.cli.output import print_result
    from patchloom.cli.table import print_table

    for note in pruning.notes:
        print(f"note: {note}")
    if pruning.out is not None:
        point = pruning.points[0]
        if pruning.data is not None:
            print_result(f"top-1 {pruning.whole.values['top1']:.2f} % as trained, {point.values['top1']:.2f} % now")
        _print_zeros(point)
        print_result(f"{pruning.out}")
        runs = f"{shlex.quote(pruning.run)} {shlex.quote(str(pruning.out))}"
        print(f"Next: patchloom compare {runs} {pruning.data or 'DATA'}")
        return
    for kind, title in (("share", "smallest weights set to zero"), ("bits", "rounded")):
        if any(getattr(point, kind) is not None for point in pruning.points):
            print_table(*pruning.table(kind), title=title)
    print_result(f"{page}")


def _print_zeros(point: "Pruned") -> None:
    from patchloom.cli.table import print_table

    rows = [
        (str(m.layer), m.letter, m.name, f"{m.weights:,}", f"{m.zeros:,}", f"{m.share:.2f}") for m in point.matrices
    ]
    print_table(["#layer", "matrix", "weight", "#numbers", "#zeros", "#zeros, %"], rows)
