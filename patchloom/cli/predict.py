"""`patchloom predict RUN IMAGE…`: names, not numbers."""

import json
from typing import Annotated

import typer


def predict(
    run: Annotated[str, typer.Argument(help="Folder of a run.")],
    images: Annotated[list[str], typer.Argument(help="Image files, folders or videos.")],
    top: Annotated[int, typer.Option(help="Answers an image.")] = 3,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Every N-th frame of videos; by default one per second, of animations all."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto takes a GPU if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Classify images; one that cannot be read is named and the others go on."""
    from patchloom.deployment.classifier import load
    from patchloom.printable import printable

    classifier = load(run, device=device)
    unreadable = 0
    for answer in classifier.predict_files(images, top=top, every=every):
        unreadable += answer.error is not None
        if as_json:
            print(json.dumps({"path": answer.path, "answers": answer.answers, "error": answer.error}))
        elif answer.error:
            print(printable(f"{answer.path}  unreadable: {answer.error}"))
        else:
            told = "  ".join(f"{name} {share:.1%}" for name, share in answer.answers)
            print(printable(f"{answer.path}  {told}"))
    if unreadable:
        raise typer.Exit(3)
