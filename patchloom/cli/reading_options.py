"""The options that say how data are read, written once for the verbs that take them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

READING = "How the data are read"  # panel of --help-all
_TEXT = str | None


def _option(kind: Any, help_text: str, metavar: str | None = None) -> Any:
    return Annotated[kind, typer.Option(help=help_text, metavar=metavar, rich_help_panel=READING)]


# The fields of `patchloom.data.reading.Reading`, in its order.
OPTIONS = {
    "labels": _option(_TEXT, "A table of path,label in any form, for a folder."),
    "label_column": _option(_TEXT, "The column of that file that holds the classes."),
    "label_pattern": _option(_TEXT, "The class as a part of the file's name: '{label}_*.jpg'."),
    "taxonomy": _option(_TEXT, "File of levels above the classes (csv, json, yaml), or imagenet127."),
    "classes": _option(_TEXT, "Which of nested folders are the classes.", "innermost|outermost"),
    "images": _option(_TEXT, "The folder of the images, below DATA; alone: read it by classes.", "DIR"),
    "masks": _option(_TEXT, "The folder of their masks: '{split}annot' names one per split.", "DIR"),
    "boxes": _option(_TEXT, "The folder of their boxes (VOC, YOLO, LabelMe), or a file (COCO, csv …).", "PATH"),
    "ignore": _option(int | None, "The value in masks that is not labelled.", "VALUE"),
    "names": _option(_TEXT, "Names for class numbers: a name per line, or YOLO's yaml.", "FILE"),
    "without": _option(
        _TEXT, "Leave out the training images that a list names, as `check A --against B` writes one.", "LIST"
    ),
    "val": _option(
        _TEXT,
        "Validate on images held out of train (default without a val split), or on the test images.",
        "held-out|test",
    ),
}


def reads_data(*, leave_out: Sequence[str] = ("without", "val")) -> Callable[..., Callable[..., None]]:
    """The function of a verb with these options, but for some, in place of its parameter `reading`."""
    kinds = {name: kind for name, kind in OPTIONS.items() if name not in leave_out}
    options = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
        for name, kind in kinds.items()
    ]

    def with_options(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**given: Any) -> None:
            from patchloom.data.reading import Reading

            reading = Reading(**{name: given.pop(name) for name in kinds})
            function(**given, reading=reading)

        signature = inspect.signature(function)
        parameters = [
            parameter
            for own in signature.parameters.values()
            for parameter in (options if own.name == "reading" else [own])
        ]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {name: of for name, of in function.__annotations__.items() if name != "reading"} | kinds
        return run

    return with_options
