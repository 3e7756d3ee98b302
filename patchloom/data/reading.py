"""How a data set is read where it could be read in several ways: the options that `train`, `check`, `evaluate`, `index`
and `report` share, and that a run remembers.
"""

import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the user says about their data beside where they lie; all left out, the data speak for themselves."""

    labels: str | os.PathLike[str] | None = None  # a labels file (path,label) for a folder of images
    label_column: str | None = None  # which column of it holds the classes
    label_pattern: str | None = None  # the class as a part of the file's name: '{label}_*.jpg'
    taxonomy: str | os.PathLike[str] | None = None  # a file of class → coarser classes
    classes: Literal["innermost", "outermost"] | None = None  # which of nested folders are the classes
