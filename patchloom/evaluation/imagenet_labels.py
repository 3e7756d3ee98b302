"""The three ways ImageNet is labelled for testing.

val    50,000 images, one label each: an ordinary set, nothing is needed from here.
ReaL   the same images with all labels that people find right (arXiv 2006.07159): real.json lists them in the order
       of ILSVRC2012_val_00000001.JPEG …; images without any are not counted.
V2     10,000 new images (arXiv 1902.10811) in folders "0" … "999". The names are class numbers: sorted as text,
       as folders usually are, "10" would be class 2.
Class numbers are places in the sorted list of WordNet ids, as in every published network.
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
    """The right classes of each image of val, in the order of their file names."""
    try:
        lists = parse_json(read_plain(path))
        check_shape(lists, list[list[int]])
        return [tuple(labels) for labels in lists]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}. Give the path of ReaL's real.json.") from error
    except ValueError as error:
        raise DataError(f"{path} is not a list with a list of class numbers for each image: {error}") from error


def real_labels_of(names: Sequence[str], real_labels: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """ReaL's labels of images that lie in another order, told by their file names or paths."""
    ordered = []
    for name in names:
        found = _VAL_NAME.search(name)
        if not found or not 1 <= int(found[1]) <= len(real_labels):
            raise DataError(
                f"{name} is not one of the {len(real_labels)} images that ReaL labels. "
                "Their names are those of ImageNet's val: ILSVRC2012_val_00000001.JPEG and so on."
            )
        ordered.append(real_labels[int(found[1]) - 1])
    return ordered


def real_accuracy(predictions: Sequence[int] | np.ndarray, real_labels: Sequence[Sequence[int]]) -> float:
    """Percent of the images with labels whose prediction is one of them; both in the same order."""
    if len(predictions) != len(real_labels):
        raise UsageError(
            f"{len(predictions)} predictions and the labels of {len(real_labels)} images were given, expected one "
            "prediction per image. Choose the labels with real_labels_of."
        )
    right = [int(p) in labels for p, labels in zip(predictions, real_labels, strict=True) if len(labels)]
    if not right:
        raise DataError("None of the images has a ReaL label, so there is no accuracy.")
    return 100 * sum(right) / len(right)


def open_v2(path: str | os.PathLike[str], classes: ClassTable) -> LabeledImages:
    """ImageNet-V2 as a set of the model's `classes`: the folder's name is the class number."""
    listing = find_source(path).train
    numbers = np.array([_class_number(name, len(classes)) for name in listing.names], np.int64)
    return LabeledImages(listing.images, listing.rows, numbers[listing.labels], classes)


def _class_number(folder: str, count: int) -> int:
    if not re.fullmatch(r"[0-9]+", folder) or int(folder) >= count:
        raise DataError(
            f'The folder "{folder}" is not a class number below {count}. ImageNet-V2 has folders 0 to 999; '
            "a set with folders named by class is evaluated like val."
        )
    return int(folder)
