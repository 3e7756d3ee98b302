"""A run whose weights were changed after its training, as a run of its own that remembers its data."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from patchloom.runs.checksums import read_checked, write_checked
from patchloom.runs.predictions import Predictions, save_predictions
from patchloom.runs.provenance import RECORD
from patchloom.runs.published import new_folder
from patchloom.runs.run_metadata import METRICS, read_run_metadata, write_run_metadata


def write_modified_run(
    source: Path, out: Path, save: Callable[[Path], None], note: str, decided: Predictions | None = None
) -> None:
    """Have `save` write the model into a new folder, and add what the run `source` knew of its data and training.

    `note` says what was changed; `decided` is what the changed network decides about the val images.
    """
    with new_folder(out) as folder:
        save(folder)
        if (source / RECORD).is_file():
            write_checked(folder, {RECORD: read_checked(source, RECORD)})
        if (record := read_run_metadata(source)) is not None:
            write_run_metadata(folder, replace(record, notes=[*record.notes, note]))
        if (source / METRICS).is_file():
            shutil.copyfile(source / METRICS, folder / METRICS)
        if decided is not None:
            save_predictions(folder, decided)
