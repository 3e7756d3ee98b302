"""Options of commands, declared once on the fields of a settings dataclass.

    epochs: Annotated[int | None, Option("Passes over the data.")] = None

`patchloom.cli` builds each command from such a class, and the Python function of the same name takes the same names.
The classes are in `tasks/settings.py` for `train`, in `data/reading_options.py` for how data are read, and else in
`cli/<verb>.py`. This module is light: nothing here imports torch or typer.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, ParamSpec, TypeVar

from patchloom_runtime.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

# Panels of --help-all. An option without a panel is shown by --help too.
MODEL, RUN, DATA, READING = "Model and recipe", "Run", "Data", "Reading the data"
IMAGES, HARDWARE, OUTPUT = "Images", "Hardware", "Output"


@dataclass(frozen=True)
class Option:
    """How the command line shows and reads one field of a settings class."""

    help: str
    name: str = ""  # of the option, if it is not the field's
    metavar: str | None = None
    panel: str | None = None
    complete: Literal["model", "recipe", "run"] | None = None  # what a shell completes
    minimum: float | None = None
    maximum: float | None = None
    environment: str | None = None  # variable that holds the value


@dataclass(frozen=True)
class Argument(Option):
    """A positional argument; a tuple field takes one or more words."""


def keywords_of(settings: type, *, omit: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show the fields of a settings class as keywords of a function that passes its `**options` to that class."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        kind = inspect.Parameter.KEYWORD_ONLY
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(field.name, kind, default=field.default, annotation=field.type)
            for field in fields(settings)
            if field.name not in omit
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return decorate


def renamed(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function accept old keywords (old=new) for one release, with a DeprecationWarning."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*values: P.args, **options: P.kwargs) -> R:
            for old, new in names.items():
                if old in options:
                    message = f"{function.__name__}({old}=…) is now {function.__name__}({new}=…)"
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
                    options[new] = options.pop(old)
            return function(*values, **options)

        return call

    return decorate


def part_of(text: str) -> tuple[int, int]:
    """Return '3/8' as (3, 8): the number of a share, counted from 1, and of all shares."""
    numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise UsageError(f"--part is {text!r}, expected the number of a share and of all shares, such as 3/8")
    return int(numbers[1]), int(numbers[2])


def share_of(value: str | float, name: str) -> float:
    """Return '5%', '0.05' or 0.05 as a share. Raises UsageError unless it is above 0 and below 1."""
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise UsageError(f"{name} is {text}, expected a share such as 5% or 0.05")
    return share
