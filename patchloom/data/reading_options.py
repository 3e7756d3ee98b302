"""Options for reading a dataset, which `train`, `check`, `evaluate`, `index` and `report` share and a run records."""

import os
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from patchloom.options import READING, Option
from patchloom_runtime.errors import UsageError

MIN_FOLDS, MAX_FOLDS = 2, 100  # of cross-validation
_SPLITS = ("held-out", "test")  # values of --val besides folds
PathText: TypeAlias = str | os.PathLike[str] | None


def _option(text: str, metavar: str | None = None) -> Option:
    return Option(text, metavar=metavar, panel=READING)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read a dataset. Every field is optional and inferred from the data by default."""

    labels: Annotated[PathText, _option("Table with the columns path and label, for a folder of images.")] = None
    label_column: Annotated[str | None, _option("Column of the labels file that holds the classes.")] = None
    label_pattern: Annotated[str | None, _option("Class as a part of the file name: '{label}_*.jpg'.")] = None
    taxonomy: Annotated[
        PathText, _option("File of levels above the classes (csv, json, yaml), or imagenet127.", "FILE")
    ] = None
    classes: Annotated[
        Literal["innermost", "outermost"] | None,
        _option("Which of nested folders are the classes.", "innermost|outermost"),
    ] = None
    images: Annotated[PathText, _option("Image folder below DATA; alone, it is read by class folders.", "DIR")] = None
    masks: Annotated[PathText, _option("Mask folder; '{split}annot' names one per split.", "DIR")] = None
    boxes: Annotated[
        PathText, _option("Folder of boxes (VOC, YOLO, LabelMe), or a file (COCO, CVAT, csv).", "PATH")
    ] = None
    ignore: Annotated[int | None, _option("Mask value that means unlabeled.", "VALUE")] = None
    names: Annotated[
        PathText, _option("File of class names, one per line, or YOLO's yaml, for numbered classes.", "FILE")
    ] = None
    exclude: Annotated[
        PathText, _option("List of training images to exclude, as `check A --against B` writes it.", "LIST")
    ] = None
    corrections: Annotated[
        PathText, _option("Labels to change and images to drop, as the page of `audit` writes them.", "FILE")
    ] = None
    # 'held-out' and folds validate on images of train and keep the data's own val, or test, unseen.
    val: Annotated[
        str | None,
        _option(
            "Validate on images held out of train (default without a val split), on fold 2 of 5 of train, or on test.",
            "held-out|2/5|test",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.ignore is not None and (type(self.ignore) is not int or not 0 <= self.ignore <= 255):
            raise UsageError(f"ignore is {self.ignore!r}, expected a value of masks from 0 to 255")
        if self.classes not in (None, "innermost", "outermost"):
            raise UsageError(f"classes is {self.classes!r}, expected innermost or outermost (of nested folders)")
        if self.val is not None and self.val not in _SPLITS:
            _read_fold(self.val)

    @property
    def names_file(self) -> Path | None:
        """Path of the names file, relative to the current folder."""
        return Path(os.path.expanduser(self.names)) if self.names is not None else None

    @property
    def fold(self) -> tuple[int, int] | None:
        """Fold of train to validate on, counted from 1, and the number of folds; None if `val` is not a fold."""
        return None if self.val is None or self.val in _SPLITS else _read_fold(self.val)

    @classmethod
    def from_settings(cls, settings: object) -> "Reading":
        """Return the reading of settings that have fields with these names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def chosen(self) -> dict[str, str | int]:
        """Return the fields that are not None, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value if isinstance(value, int) else os.fspath(value)
            for name, value in values.items()
            if value is not None
        }

    def options(self) -> str:
        """Return the command-line options, each with a space before it, or '' if there are none."""
        return "".join(
            f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in self.chosen().items()
        )

    def filled_from(self, other: "Reading") -> "Reading":
        """Return a copy with the unset fields taken from `other`."""
        return Reading(**(other.chosen() | self.chosen()))  # type: ignore[arg-type]


def _read_fold(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", str(text))
    number, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not (MIN_FOLDS <= count <= MAX_FOLDS and 1 <= number <= count):
        raise UsageError(
            f"val is {text!r}, expected held-out (images of train), test (the test images) or a fold such as 2/5, of "
            f"{MIN_FOLDS} to {MAX_FOLDS} folds"
        )
    return number, count


AS_IT_IS = Reading()
