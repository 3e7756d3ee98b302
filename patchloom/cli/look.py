"""`patchloom look RUN IMAGE…`: what the network saw, answered and looked at."""

import json
from typing import Annotated

import typer


def look(
    run: Annotated[str, typer.Argument(help="Folder of a run, or NAME@FILE for published weights.")],
    images: Annotated[
        list[str] | None, typer.Argument(help="Image files or folders; the run's worst mistakes when left out.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Where the run's data lie now, for its mistakes.")] = None,
    out: Annotated[str | None, typer.Option(help="The page; look.html in the run's folder when left out.")] = None,
    top: Annotated[int, typer.Option(help="Answers an image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers for machines.")] = False,
) -> None:
    """Draw what a model made of pictures: its view, its answers, and the maps its family has."""
    from pathlib import Path

    from patchloom.deployment.look import look_at

    page = Path(out) if out else (Path(run) if Path(run).is_dir() else Path()) / "look.html"
    found = look_at(run, images or [], data=data, out=page, top=top)
    if as_json:
        answers = [{"name": name, "answers": one.answers} for name, _, one in found.looks]
        print(json.dumps({"page": str(found.path), "pictures": answers, "notes": found.notes}, indent=2))
        return
    for note in found.notes:
        print(f"note: {note}")
    for name, detail, one in found.looks:
        told = "  ".join(f"{label} {share:.1%}" for label, share in one.answers[:3])
        print(f"{name}  {told}" + (f"   ({detail})" if detail else ""))
    print(found.path)
