"""`patchloom prune RUN DATA`: accuracy with matrices pruned and rounded; with --out, the network that is left."""

from typing import TYPE_CHECKING, Annotated

import typer

from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.tasks.classification.pruning import Pruned, Pruning


def prune(
    run: Annotated[str, typer.Argument(help="A run that names classes.", autocompletion=completed("run"))],
    data: Annotated[
        str | None, typer.Argument(help="Images with its classes; may be left out where --out saves the network.")
    ] = None,
    shares: Annotated[
        str | None,
        typer.Option(
            metavar="S,…", help="Set these shares of each matrix to zero, the smallest weights first: 0.5,0.9."
        ),
    ] = None,
    bits: Annotated[str | None, typer.Option(metavar="N,…", help="Round each weight to so many bits: 8,4,2.")] = None,
    matrices: Annotated[
        str, typer.Option(help="Which: A mixes patches, B and C are the layers of the channel MLP.")
    ] = "ABC",
    out: Annotated[
        str | None, typer.Option(help="Save the network with one share, one number of bits or both, as this run.")
    ] = None,
    page: Annotated[str | None, typer.Option(help="Where to write the page; RUN/prune.html when left out.")] = None,
    split: Annotated[
        str | None, typer.Option(help="train, val, test or all; by default val, or what the run held out.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines, with the zeros of each matrix; a page only with --page.")
    ] = False,
) -> None:
    """Measure accuracy against zeros and bits of the matrices A, B and C of a trained network; nothing is trained.

    patchloom prune runs/photos photos/

    patchloom prune runs/photos photos/ --matrices A --shares 0.8 --bits 8 --out runs/sparse
    """
    from pathlib import Path

    from patchloom.cli.output import print_json
    from patchloom.cli.table import whole_numbers
    from patchloom.tasks.classification.pruning import prune as measure
    from patchloom.tasks.classification.pruning import write_pruning_page

    found = measure(
        run,
        data,
        shares=_shares(shares) if shares is not None else None,
        bits=whole_numbers("--bits", bits, "8,4,2") if bits is not None else None,
        matrices=matrices,
        out=out,
        split=split,
        batch=batch,
        device=device,
    )
    target = Path(page) if page else None
    if target is None and not as_json and not out:
        target = Path(run, "prune.html") if Path(run).is_dir() else Path("prune.html")
    if target and found.data is not None:
        write_pruning_page(found, target)
    if as_json:
        print_json(found.to_dict())
    else:
        _show(found, target)


def _shares(text: str) -> list[float]:
    from patchloom_runtime.errors import UsageError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--shares takes numbers with commas, such as 0.5,0.9; given {text!r}") from None


def _show(found: "Pruning", page: object) -> None:
    import shlex

    from patchloom.cli.output import print_result
    from patchloom.cli.table import print_table

    for note in found.notes:
        print(f"note: {note}")
    if found.out is not None:
        point = found.points[0]
        if found.data is not None:
            print_result(f"top-1 {found.whole.values['top1']:.2f} % as trained, {point.values['top1']:.2f} % now")
        _show_zeros(point)
        print_result(f"{found.out}")
        print(f"Next: patchloom evaluate {shlex.quote(found.run)} {shlex.quote(str(found.out))} {found.data or 'DATA'}")
        return
    for kind, title in (("share", "smallest weights set to zero"), ("bits", "rounded")):
        if any(getattr(point, kind) is not None for point in found.points):
            print_table(*found.table(kind), title=title)
    print_result(f"{page}")


def _show_zeros(point: "Pruned") -> None:
    """How much of each matrix is zero."""
    from patchloom.cli.table import print_table

    rows = [
        (str(m.layer), m.letter, m.name, f"{m.weights:,}", f"{m.zeros:,}", f"{m.share:.2f}") for m in point.matrices
    ]
    print_table(["#layer", "matrix", "weight", "#numbers", "#zeros", "#zeros, %"], rows)
