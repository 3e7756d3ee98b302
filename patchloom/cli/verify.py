"""`patchloom verify RUN|INDEX|ARTEFACT`: whether every file is as it was written."""

from typing import Annotated

import typer

from patchloom.cli.verb import completed


def verify(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="RUN|INDEX|ARTIFACT",
            help="Folder of a run, of an index or of what `export` left.",
            autocompletion=completed("run"),
        ),
    ],
    accept: Annotated[
        bool, typer.Option("--accept", help="Take text that was changed by hand, such as class names, for right.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare all files with their checksums: weights, numbers, names, checkpoints. Exit code 4 where one is wrong."""
    from pathlib import Path

    from patchloom.cli.output import print_json, print_result
    from patchloom.tasks.verify import verify as look_through
    from patchloom_runtime.errors import CheckpointError
    from patchloom_runtime.printable import printable

    found = look_through(Path(folder), accepted=accept)
    if as_json:
        told = {"folder": folder, "kind": found.kind, "checked": found.checked, "accepted": found.accepted}
        told |= {"without_checksum": found.without_checksum, "missing": found.missing}
        wrong = [{"file": name, "reason": reason} for name, reason in found.wrong.items()]
        print_json(told | {"wrong": wrong})
    else:
        for name in found.accepted:
            print_result(f"accepted   {name}")
        for reason in found.wrong.values():
            print_result(f"wrong      {printable(reason)}")
        for name in found.missing:
            print(f"note: there is no {name}, or not yet")
        if found.without_checksum:
            names = ", ".join(found.without_checksum)
            print(f"note: from before checksums were kept, so a changed byte would not be noticed: {names}")
        if not found.wrong:
            print_result(f"{printable(folder)}: {len(found.checked)} files, all as they were written")
    if found.wrong:
        raise typer.Exit(CheckpointError.exit_code)
