"""`patchloom prepare wmt14`: official files of a data set into a form that `train` takes."""

from typing import Annotated

import typer


def prepare(
    name: Annotated[str, typer.Argument(metavar="wmt14", help="Which data set.")],
    folder: Annotated[str, typer.Argument(help="Where the official archives lie unpacked, in any folders below it.")],
    pair: Annotated[str, typer.Option(metavar="en-de|en-fr", help="Which languages.")] = "en-de",
    out: Annotated[str | None, typer.Option(help="A new folder; wmt14-PAIR when left out.")] = None,
    val_every: Annotated[
        int | None, typer.Option(help="Make every n-th line of train val, instead of the pair's usual val.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Make train, val and test of the official files of WMT'14, which nothing here downloads."""
    from dataclasses import asdict
    from pathlib import Path

    from patchloom.cli.output import print_json, print_result
    from patchloom.data.text.wmt import prepare_wmt14
    from patchloom_runtime.errors import UsageError, nearest
    from patchloom_runtime.printable import printable

    if name != "wmt14":
        raise UsageError(f"{name!r} is not prepared here; expected wmt14.{nearest(name, ['wmt14'])}")
    target = Path(out or f"wmt14-{pair}")
    done = prepare_wmt14(Path(folder), pair, target, val_every=val_every)
    if as_json:
        print_json({"folder": str(target), **asdict(done)})
        return
    for reason, count in done.left_out.items():
        print(f"left out   {count:,} pairs of train: {reason} (left_out.tsv)")
    told = ", ".join(f"{split} {count:,}" for split, count in done.counts.items())
    print_result(f"{printable(str(target))}: sentence pairs, {told}")
    print(f"next       patchloom train {printable(str(target))} --recipe translation_resmlp")
