"""How a data set is read where it could be read in several ways: the options that `train`, `check`, `evaluate`, `index`
and `report` share, and that a run remembers.
"""

import os
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from patchloom_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the user says about their data beside where they lie; all left out, the data speak for themselves."""

    labels: str | os.PathLike[str] | None = None  # a labels file (path,label) for a folder of images
    label_column: str | None = None  # which column of it holds the classes
    label_pattern: str | None = None  # the class as a part of the file's name: '{label}_*.jpg'
    taxonomy: str | os.PathLike[str] | None = None  # a file of class → coarser classes
    classes: Literal["innermost", "outermost"] | None = None  # which of nested folders are the classes
    images: str | os.PathLike[str] | None = None  # the folder of the images; alone, it is read by classes
    masks: str | os.PathLike[str] | None = None  # the folder of their masks
    boxes: str | os.PathLike[str] | None = None  # the folder, or the file, of their boxes
    ignore: int | None = None  # the value of masks that stands for 'not labelled'
    names: str | os.PathLike[str] | None = None  # a file of names for the numbers of classes
    without: str | os.PathLike[str] | None = None  # a list of training pictures that are left out
    # held-out: images of train, so that the data's own val, or test, stays unseen; test: the test images.
    # By default the data's val split, or images held out of train if there is none.
    val: Literal["held-out", "test"] | None = None

    def __post_init__(self) -> None:
        if self.ignore is not None and (type(self.ignore) is not int or not 0 <= self.ignore <= 255):
            raise UsageError(f"ignore is {self.ignore!r}, expected a value of masks from 0 to 255")
        if self.classes not in (None, "innermost", "outermost"):
            raise UsageError(f"classes is {self.classes!r}, expected innermost or outermost (of nested folders)")
        if self.val not in (None, "held-out", "test"):
            raise UsageError(f"val is {self.val!r}, expected held-out (images of train) or test (the test images)")

    @property
    def names_file(self) -> Path | None:
        """The file of names, from the current folder."""
        return Path(os.path.expanduser(self.names)) if self.names is not None else None

    @classmethod
    def of(cls, settings: object) -> "Reading":
        """What settings say that have a field of each of these names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def given(self) -> dict[str, str | int]:
        """Name → value of what is not left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value if isinstance(value, int) else os.fspath(value)
            for name, value in values.items()
            if value is not None
        }

    def options(self) -> str:
        """As the command line takes them, each with a space before it; '' where nothing is given."""
        return "".join(f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in self.given().items())

    def filled_from(self, other: "Reading") -> "Reading":
        """What is given here, and of the rest what is given there."""
        return Reading(**(other.given() | self.given()))  # type: ignore[arg-type]


AS_IT_IS = Reading()
