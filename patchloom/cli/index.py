"""`patchloom index RUN IMAGES… --out INDEX`: a collection to search by pictures."""

from typing import TYPE_CHECKING, Annotated

import typer

from patchloom.cli.reading_options import reads_data
from patchloom.cli.verb import completed

if TYPE_CHECKING:
    from patchloom.data.reading import Reading


@reads_data(leave_out=["images", "masks", "boxes", "ignore", "names", "without", "val"])
def index(
    run: Annotated[
        str, typer.Argument(help="Folder of a run, resmlp_s12:in1k, or hub:user/name.", autocompletion=completed("run"))
    ],
    images: Annotated[list[str], typer.Argument(help="Image files or folders, labelled as `train` reads them.")],
    out: Annotated[str, typer.Option(help="Folder of the index; one that is there already grows.")],
    reading: "Reading",
    batch: Annotated[int, typer.Option(help="Images at a time.")] = 64,
    workers: Annotated[int, typer.Option(help="Processes that read images.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    exact: Annotated[bool, typer.Option("--exact", help="Beyond a million files too: no faiss.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Drop files that are gone from these folders.")] = False,
    trunk: Annotated[
        bool, typer.Option("--trunk", help="By the vectors before the projector, where the run has one.")
    ] = False,
    level: Annotated[
        str | None, typer.Option(help="Level at which labels are shown; that of the run by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done for machines.")] = False,
) -> None:
    """Embed images for `patchloom search`; the same command resumes after a stop, or adds what is new or changed."""
    from patchloom.cli.output import print_json, print_result
    from patchloom.data.checking.scan import scan_bar
    from patchloom.data.labels.taxonomy import FINEST
    from patchloom.inference.index_build import index as build

    with scan_bar(what="embedding") as progress:
        built = build(
            run,
            images,
            out=out,
            batch=batch,
            workers=workers,
            device=device,
            exact=exact,
            prune=prune,
            trunk=trunk,
            reading=reading,
            level=level,
            progress=progress,
        )
    about = built.index.about
    levels = {name or FINEST: len(about.labels_at(name)) for name in ("", *about.levels)}
    if as_json:
        counts = {"files": len(about), "embedded": built.embedded, "unchanged": built.unchanged}
        counts |= {"gone": built.gone}
        told = {
            "labels": built.index.labels,
            "level": about.level or FINEST,
            "levels": levels,
            "exact": about.exact,
            "unreadable": list(built.unreadable.values()),
        }
        print_json({"index": out} | counts | told)
        return
    for fault in built.unreadable.values():
        print_result(f"left out: {fault}")
    how = "exact search" if about.exact else "search by faiss, approximate"
    labels = f", {len(built.index.labels):,} labels" if about.labels else ""
    if about.levels:
        labels += f" at level {about.level or FINEST} (of {', '.join(f'{name}: {n:,}' for name, n in levels.items())})"
    gone = f", {built.gone:,} gone" if prune else ""
    print_result(f"{built.embedded:,} embedded, {built.unchanged:,} unchanged{gone}")
    print_result(f"{out}: {len(about):,} files{labels}, vectors of {about.dimension}, {how}")
