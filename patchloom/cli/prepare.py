"""`patchloom prepare wmt14`: the old name of examples/prepare_wmt14.py."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from patchloom.cli.options import Json
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    name: Annotated[str, Argument("Dataset.", metavar="wmt14")]
    folder: Annotated[str, Argument("Folder with the unpacked official archives.")]
    pair: Annotated[str, Option("Language pair.", metavar="en-de|en-fr")] = "en-de"
    out: Annotated[str | None, Option("New folder. Default: wmt14-PAIR.")] = None
    val_every: Annotated[
        int | None, Option("Take every N-th line of train as val, instead of the pair's usual val.", metavar="N")
    ] = None
    as_json: Json = False


def prepare(options: PrepareOptions) -> None:
    """Write train, val and test from the official files of WMT'14, which patchloom does not download."""
    from patchloom.cli.output import print_json, print_result
    from patchloom.data.text.wmt import prepare_wmt14
    from patchloom_runtime.errors import UsageError, nearest
    from patchloom_runtime.printable import printable

    if options.name != "wmt14":
        raise UsageError(f"{options.name!r} cannot be prepared; expected wmt14.{nearest(options.name, ['wmt14'])}")
    print("note: `patchloom prepare wmt14` is now `python examples/prepare_wmt14.py`", file=sys.stderr)
    out = Path(options.out or f"wmt14-{options.pair}")
    prepared = prepare_wmt14(Path(options.folder), options.pair, out, val_every=options.val_every)
    if options.as_json:
        print_json({"folder": str(out), **asdict(prepared)})
        return
    for reason, count in prepared.left_out.items():
        print(f"left out   {count:,} pairs of train: {reason} (left_out.tsv)")
    counts = ", ".join(f"{split} {count:,}" for split, count in prepared.counts.items())
    print_result(f"{printable(str(out))}: sentence pairs, {counts}")
    print(f"Next: patchloom train {printable(str(out))} --recipe translation_resmlp")
