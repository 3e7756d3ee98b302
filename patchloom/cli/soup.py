"""`patchloom soup RUN… --data DATA --out RUN`: the mean of the weights of several runs."""

import shlex
from dataclasses import dataclass
from typing import Annotated

from patchloom.cli.options import Batch, Device, Json, Split, Workers, keywords
from patchloom.options import Argument, Option


@dataclass(frozen=True, kw_only=True)
class SoupOptions:
    runs: Annotated[list[str], Argument("Runs of one network, fine-tuned from the same weights.", complete="run")]
    data: Annotated[str, Option("Images on which runs are selected. Do not use the final test set.")]
    out: Annotated[str, Option("Run folder to write.")]
    uniform: Annotated[bool, Option("Save the mean of all runs instead of the greedy soup.")] = False
    split: Split = None
    device: Device = "auto"
    batch: Batch = 64
    workers: Workers = 0
    as_json: Json = False


def soup(options: SoupOptions) -> None:
    """Average the weights of those runs of one network that together score best, and save the result as a run.

    patchloom soup runs/a runs/b runs/c --data photos/ --out runs/soup
    """
    from patchloom.cli.output import print_json, print_result
    from patchloom.cli.table import print_table
    from patchloom.tasks.classification.soup import soup as make_soup

    result = make_soup(**keywords(options))
    if options.as_json:
        print_json(result.to_dict())
        return
    for note in result.notes:
        print(f"note: {note}")
    rows = [(name, f"{top1:.2f}", "yes" if name in result.used else "no") for name, top1 in result.top1.items()]
    rows += [("mean of all", f"{result.uniform_top1:.2f}", ""), ("soup", f"{result.soup_top1:.2f}", "")]
    print_table(["run", "#top-1, %", "in the soup"], rows, title=f"{result.images:,} images")
    print_result(f"{result.out}")
    runs = shlex.join([*options.runs, options.out])
    print(f"Next: patchloom compare {runs} TEST   (TEST: images that were not used to select runs)")
