"""The images that models of labels or numbers are evaluated on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.data.datasets import ClassTable, LabeledImages, Source
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source, match_source
from patchloom.runs.run_metadata import is_same_data, read_run_metadata


def open_targets(
    data: str,
    names: Sequence[str],
    with_targets: Callable[[Source], Source],
    *,
    split: str | None,
    folder: Path | None,
    reading: Reading = AS_IT_IS,
) -> LabeledImages:
    """Open the images of a split with the targets that `with_targets` reads, matched by name with those of a model.

    Without a split, these are val, or the images that the run in `folder` held out of these data, or else all.
    """
    metadata = read_run_metadata(folder) if folder is not None else None
    is_own = metadata is not None and is_same_data(data, metadata.data)
    if metadata is not None and is_own:
        reading = reading.filled_from(metadata.reading)
    source = with_targets(find_source(data, reading=reading))
    if split is None and is_own and source.val is None and not source.is_part:
        split = "val"
    images = match_source(source, ClassTable(tuple(names)), split=split)
    return replace(images, notes=tuple(dict.fromkeys(images.notes)))
