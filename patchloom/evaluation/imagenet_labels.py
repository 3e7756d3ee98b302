"""The three test labelings of ImageNet.

val    50,000 images with one label each: an ordinary dataset, which needs nothing from here.
ReaL   the same images with all labels that people consider correct (arXiv 2006.07159): real.json lists them in the
       order of ILSVRC2012_val_00000001.JPEG …; images without labels are not counted.
V2     10,000 new images (arXiv 1902.10811) in folders "0" … "999". The names are class indices: sorted as text, as
       folders usually are, "10" would be class 2.
Class indices are positions in the sorted list of WordNet ids, as in every published network.
"""

import os
import re
from collections.abc import Sequence

import numpy as np

from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.sources.source import find_source
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.untrusted import check_shape, parse_json, read_plain

_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})")


def read_real_labels(path: str | os.PathLike[str]) -> list[tuple[int, ...]]:
    """Read the correct classes of each val image, in the order of the file names."""
    try:
        lists = parse_json(read_plain(path))
        check_shape(lists, list[list[int]])
        return [tuple(labels) for labels in lists]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Pass the path of ReaL's real.json.") from error
    except ValueError as error:
        raise DataError(f"{path} is not a list of class-index lists, one per image: {error}") from error


def real_labels_of(names: Sequence[str], real_labels: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return ReaL's labels for images in another order, identified by their file names or paths."""
    ordered = []
    for name in names:
        match = _VAL_NAME.search(name)
        if not match or not 1 <= int(match[1]) <= len(real_labels):
            raise DataError(
                f"{name} is not one of the {len(real_labels)} images that ReaL labels. "
                "Names must be those of ImageNet's val: ILSVRC2012_val_00000001.JPEG and so on."
            )
        ordered.append(real_labels[int(match[1]) - 1])
    return ordered


def real_accuracy(predictions: Sequence[int] | np.ndarray, real_labels: Sequence[Sequence[int]]) -> float:
    """Return the percentage of labeled images whose prediction is one of the labels; both in the same order."""
    if len(predictions) != len(real_labels):
        raise UsageError(
            f"got {len(predictions)} predictions and the labels of {len(real_labels)} images, expected one "
            "prediction per image. Select the labels with real_labels_of."
        )
    right = [int(p) in labels for p, labels in zip(predictions, real_labels, strict=True) if len(labels)]
    if not right:
        raise DataError("None of the images has a ReaL label, so there is no accuracy.")
    return 100 * sum(right) / len(right)


def open_v2(path: str | os.PathLike[str], classes: ClassTable) -> LabeledImages:
    """Open ImageNet-V2 with the model's `classes`: the folder's name is the class index."""
    listing = find_source(path).train
    numbers = np.array([_class_number(name, len(classes)) for name in listing.names], np.int64)
    return LabeledImages(listing.images, listing.rows, numbers[listing.labels], classes)


def _class_number(folder: str, count: int) -> int:
    if not re.fullmatch(r"[0-9]+", folder) or int(folder) >= count:
        raise DataError(
            f'The folder "{folder}" is not a class index below {count}. ImageNet-V2 has folders 0 to 999; '
            "evaluate a dataset with folders named by class like val."
        )
    return int(folder)
