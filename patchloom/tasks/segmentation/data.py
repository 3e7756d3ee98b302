"""Images with masks, for evaluation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from patchloom.data.annotations.mask_classes import of_masks
from patchloom.data.datasets import LabeledImages
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source, split_source
from patchloom.runs.config import read_recipe, read_run_files
from patchloom.runs.run_metadata import recorded_reading
from patchloom_runtime.errors import UsageError


def open_masks(
    data: str, split: str | None, folder: Path | None = None, reading: Reading = AS_IT_IS
) -> tuple[LabeledImages, list[str]]:
    """Open a split with masks and return it with notes; by default val, or the images held out in training."""
    if split not in (None, "train", "val", "test", "all"):
        raise UsageError(f"split is {split!r}, expected train, val, test or all")
    recipe = read_recipe(folder) if folder else None
    level = read_run_files(folder).level if folder else None
    reduced = bool(recipe and recipe.segment.reduce_zero_label)
    reading = reading.filled_from(recorded_reading(folder, data)) if folder else reading
    source = of_masks(find_source(data, reading=reading), reduce_zero_label=reduced, level=level)
    if split == "test" and source.test is None:
        raise UsageError(f"{source.name} has no test split; it has {' and '.join(source.listings)}")
    if split == "all":
        if len(source.listings) > 1:
            raise UsageError(f"{source.name} has {' and '.join(source.listings)}; choose one of them")
        source = replace(source, val=source.train)
    splits = split_source(source, labeled=False)
    chosen: Any = {"train": splits.train, "test": splits.test}.get(str(split)) or splits.val
    return chosen.with_parts("mask"), list(splits.notes)
