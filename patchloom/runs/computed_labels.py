"""Labels that a network gave to training images: one number per image, in JSON, computed once per run.

Computing them again when the run is resumed could give other labels, since a GPU does not always add in the same order.
"""

import json
from pathlib import Path

import numpy as np

from patchloom.disk import atomic_write
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain


def write_labels(path: Path, labels: np.ndarray) -> None:
    """Write class numbers atomically."""
    atomic_write(path, json.dumps(labels.tolist()).encode())


def read_labels(path: Path, images: int, classes: int) -> list[int]:
    """Return the class numbers of a resumed run, checked against the number of images and classes."""
    try:
        labels = parse_json(read_plain(path))
        check_shape(labels, list[int])
        if not all(0 <= label < classes for label in labels):
            raise ValueError(f"it has labels outside 0 … {classes - 1:,}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Remove the folder to start again.") from error
    if len(labels) != images:
        raise CheckpointError(
            f"{path} is for {len(labels)} images, there are {images} now. Pass a new folder with --out."
        )
    return labels
