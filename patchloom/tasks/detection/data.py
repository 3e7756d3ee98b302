"""Images with objects, for training and evaluation."""

from collections.abc import Sequence
from pathlib import Path

from patchloom.data.datasets import ImageSet, LabeledImages
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import open_data
from patchloom.runs.run_metadata import read_run_metadata, recorded_reading
from patchloom_runtime.errors import DataError, UsageError


def open_objects(
    folder: Path | None, data: str, split: str | None, classes: Sequence[str], reading: Reading = AS_IT_IS
) -> tuple[LabeledImages, list[str]]:
    """Open a split whose objects are numbered by a model's classes, and return it with notes."""
    if split not in (None, "train", "val", "test"):
        raise UsageError(f"--split is {split!r}, expected train, val or test")
    if folder is not None:
        reading = reading.filled_from(recorded_reading(folder, data))
    splits = open_data(data, labeled=False, reading=reading)
    images = getattr(splits, split or "val")
    if images is None:
        raise UsageError(f"{splits.name} has no test split; it has train and val")
    assert isinstance(images, LabeledImages)
    if not images.images.object_names:
        raise DataError(f"{splits.name} has no boxes to compare predictions with; pass annotated data")
    if folder is None:  # an artifact does not record its level: use that of its classes
        level = next((name for name, (names, _) in images.classes.levels.items() if set(classes) <= {*names}), None)
    else:
        level = metadata.level if (metadata := read_run_metadata(folder)) else None
    numbered = number_objects(images, tuple(classes), level)
    unknown = [
        name for name, number in zip(images.images.object_names, numbered.categories or (), strict=False) if number < 0
    ]
    if len(unknown) == len(images.images.object_names):
        raise DataError(f"{splits.name}: none of its classes is one of {', '.join(classes[:5])}")
    notes = [f"the run does not know {', '.join(unknown[:5])}: their objects do not count"] if unknown else []
    return numbered, notes


def number_objects(images: ImageSet, classes: tuple[str, ...], level: str | None) -> LabeledImages:
    """Return the images with objects numbered by `classes`."""
    assert isinstance(images, LabeledImages)
    coarse: dict[str, str] = {}
    if level is not None and level in images.classes.levels:
        names, numbers = images.classes.levels[level]
        coarse = {fine: names[number] for fine, number in zip(images.classes.names, numbers, strict=True)}
    return images.with_object_names(classes, coarse)
