"""What a run decided about each image of its val split, kept in its folder: `predictions.safetensors`.

24 bytes an image: place in the set, label, prediction, rank of the label, confidence and loss. With them runs are
compared image by image without their data or a GPU. A fingerprint of the images tells whether two runs saw the same.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from patchloom.data.sets import ImageSet
from patchloom.engine.checksums import read_checked, write_checked
from patchloom.errors import CheckpointError, UsageError
from patchloom.evaluation.classification import ClassificationReport

FILE = "predictions.safetensors"
FORMAT = 1
_WHOLE = ("index", "labels", "predictions", "ranks")
_REAL = ("confidence", "losses")


@dataclass(frozen=True, eq=False)
class Predictions:
    """A report, and which images it is about."""

    report: ClassificationReport
    fingerprint: str


def fingerprint(pictures: ImageSet) -> str:
    """Equal for two sets with the same images, by name, in the same order and with the same labels.

    Names are those within the data set, so a set that moves to another folder stays the same. Pixels are not read.
    """
    digest = hashlib.sha256()
    names = (*pictures.classes.names, "")  # an unlabelled image has number −1
    for i, label in enumerate(pictures.labels.tolist()):
        digest.update(json.dumps([pictures.key(i), names[label]]).encode())
    return digest.hexdigest()


def save_predictions(folder: Path, predictions: Predictions) -> Path:
    """Write the file of a run folder, whole or not at all."""
    report = predictions.report
    columns = {name: getattr(report, name).astype(np.int32) for name in _WHOLE}
    columns |= {name: getattr(report, name).astype(np.float32) for name in _REAL}
    about = {
        "format": FORMAT,
        "fingerprint": predictions.fingerprint,
        "classes": report.classes,
        "topk": report.topk,
    }
    # One key: safetensors writes several in an order that changes from file to file.
    write_checked(folder, {FILE: save(columns, {"patchloom": json.dumps(about)})})
    return folder / FILE


def load_predictions(folder: Path) -> Predictions:
    """What `save_predictions` wrote; a UsageError where the run has none."""
    path = folder / FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} keeps no decisions ({FILE}): it was not trained to its end by this version. "
            "Give the data too: patchloom evaluate RUN… DATA"
        )
    try:
        data = read_checked(folder, FILE)
        columns = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["patchloom"]
        about = json.loads(header)
        if about["format"] > FORMAT:
            raise CheckpointError(f"{path} was written by a newer patchloom. Update patchloom.")
        whole = [columns[name].astype(np.int64) for name in _WHOLE]
        real = [columns[name] for name in _REAL]
        report = ClassificationReport(tuple(about["classes"]), tuple(about["topk"]), *whole, *real)
        return Predictions(report, str(about["fingerprint"]))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Evaluate the run on its data instead.") from error
