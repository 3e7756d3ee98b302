"""The options that say how data are read, written once for the verbs that take them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from patchloom.data.reading import Reading

READING = "How the data are read"  # panel of --help-all

Labels = Annotated[
    str | None, typer.Option(help="A table of path,label in any form, for a folder.", rich_help_panel=READING)
]
LabelColumn = Annotated[
    str | None, typer.Option(help="The column of that file that holds the classes.", rich_help_panel=READING)
]
LabelPattern = Annotated[
    str | None, typer.Option(help="The class as a part of the file's name: '{label}_*.jpg'.", rich_help_panel=READING)
]
Taxonomy = Annotated[
    str | None, typer.Option(help="A file of class → coarse class, or imagenet127.", rich_help_panel=READING)
]
Classes = Annotated[
    str | None,
    typer.Option(
        metavar="innermost|outermost", help="Which of nested folders are the classes.", rich_help_panel=READING
    ),
]

Without = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Leave out the training images that a list names.", rich_help_panel=READING),
]


def reading_from(**given: Any) -> "Reading":
    """The options as one value."""
    from patchloom.data.reading import Reading

    return Reading(**given)
