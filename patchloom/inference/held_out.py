"""What a run held out of its own data, where patchloom made its val split."""

from dataclasses import replace
from pathlib import Path

from patchloom.data.datasets import LabeledImages
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source, split_source
from patchloom.runs.config import read_run_files
from patchloom.runs.provenance import provenance_of, read_provenance
from patchloom.runs.run_metadata import recorded_reading
from patchloom_runtime.errors import CheckpointError


def held_out_of(folder: Path, data: str, given: Reading = AS_IT_IS) -> LabeledImages | None:
    """The pictures of `data` that the run in `folder` did not train on, where patchloom made its val split.

    None where the data have a val split of their own, or are not, picture by picture, those of the run.
    """
    try:
        record, files = read_provenance(folder), read_run_files(folder)
    except CheckpointError:
        return None
    if record is None or not files.decides:
        return None
    source = find_source(data, reading=given.filled_from(recorded_reading(folder, data)))
    known = source.train.levels.get(files.level or "", {})
    names = {known.get(name, name) for name in source.train.names}
    # Most other data are told apart before any picture is looked at.
    if source.val is not None or record.train + record.val > len(source.train) or not names >= {*record.classes}:
        return None
    splits = split_source(source, level=files.level)
    if provenance_of(splits).rows != record.rows:
        return None
    assert isinstance(splits.val, LabeledImages)
    said = f"these are the data of the run: its {len(splits.val):,} held-out pictures are evaluated"
    return replace(splits.val, notes=(*source.notes, f"{said}; --split all for every picture"))
