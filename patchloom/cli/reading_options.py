"""The options that say how data are read, written once for the verbs that take them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from patchloom.data.reading import Reading

Labels = Annotated[str | None, typer.Option(help="A labels file (path,label) for the folder.")]
LabelColumn = Annotated[str | None, typer.Option(help="The column of that file that holds the classes.")]
LabelPattern = Annotated[str | None, typer.Option(help="The class as a part of the file's name: '{label}_*.jpg'.")]
Taxonomy = Annotated[str | None, typer.Option(help="A file of class → coarse class.")]
Classes = Annotated[
    str | None, typer.Option(metavar="innermost|outermost", help="Which of nested folders are the classes.")
]


def reading_from(**given: Any) -> "Reading":
    """The options as one value."""
    from patchloom.data.reading import Reading

    return Reading(**given)
