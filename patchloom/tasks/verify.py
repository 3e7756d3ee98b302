"""Everything a run, an index or an artifact holds, compared with its checksums, and read as whoever uses it would."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from patchloom.disk import locked
from patchloom.inference.index_files import FAISS, IndexMetadata, IndexPart, StoredVectors, read_about, write_about
from patchloom.inference.index_files import FILE as INDEX
from patchloom.runs.checkpoints import checkpoints_of, read_checkpoint
from patchloom.runs.checksums import FILE as CHECKSUMS
from patchloom.runs.checksums import accept, read_checked, read_checksums
from patchloom.runs.config import read_recipe
from patchloom.runs.metrics import METRICS, metrics_fault
from patchloom.runs.predictions import MOST_BYTES
from patchloom.runs.provenance import PROVENANCE, read_provenance
from patchloom.runs.run_metadata import FILE as RUN_METADATA
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.runs.weights import WEIGHTS
from patchloom.tasks.table import task_of_run
from patchloom.tasks.task import Task
from patchloom_runtime.artifacts.artifact import check_file, is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.artifacts.metadata import metadata_path
from patchloom_runtime.artifacts.metadata import read_about as read_artifact
from patchloom_runtime.engines.engine import ENGINES
from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError
from patchloom_runtime.untrusted import parse_json, read_plain

# What a person may change on purpose: text. Numbers and weights are as they were computed, or damaged.
BY_HAND = ("config.json", "labels.json", "recipe.yaml", PROVENANCE, RUN_METADATA)


@dataclass
class VerifyReport:
    """What was looked at, and what is wrong with it."""

    folder: Path
    kind: str  # "run", "translator", "index", "artifact" …
    checked: list[str] = field(default_factory=list)  # files, by their path in the folder
    wrong: dict[str, str] = field(default_factory=dict)  # file → what is wrong
    without_checksum: list[str] = field(default_factory=list)  # written before checksums were kept
    missing: list[str] = field(default_factory=list)  # what a run that goes on may not have yet
    accepted: list[str] = field(default_factory=list)

    def look(self, name: str, read: Callable[[], object]) -> None:
        """Read a file; what keeps it from being read is noted once."""
        if name not in self.checked:
            self.checked.append(name)
        try:
            read()
        except ResourceError:
            raise  # which is no fact about the file
        except PatchloomError as error:
            self.wrong.setdefault(name, str(error))


def verify(folder: Path, *, accepted: bool = False) -> VerifyReport:
    """Look at everything in a run, an index or an artifact; `accepted` takes text as it is for right first."""
    if is_artifact(folder):
        return _verify_artifact(folder, accepted=accepted)
    if os.path.isfile(folder / INDEX):
        return _verify_index(folder, accepted=accepted)
    if not os.path.isfile(folder / "config.json"):
        raise UsageError(
            f"{folder} is neither the folder of a run nor an index or artifact: it has no config.json, {INDEX} or "
            "artifact.json"
        )
    taken: list[str] = []
    if accepted:
        with locked(folder):
            taken = [name for name in BY_HAND if (folder / name).is_file() and _differs(folder, name)]
            accept(folder, taken)
    found = _verify_run(folder)
    found.accepted = taken
    return found


def _differs(folder: Path, name: str) -> bool:
    """Whether there is no checksum of the file as it is."""
    try:
        read_checked(folder, name)
        return name not in read_checksums(folder)
    except CheckpointError:
        return True


def _verify_run(folder: Path) -> VerifyReport:
    found = VerifyReport(folder, "run")
    found.look(CHECKSUMS, lambda: read_checksums(folder))
    known = {} if CHECKSUMS in found.wrong else read_checksums(folder)
    task = _task_of(folder)
    own = task.model.readers(folder) if task else {}
    kept = [name for name in dict.fromkeys((*BY_HAND, *own)) if os.path.lexists(folder / name)]
    if not os.path.lexists(folder / CHECKSUMS):
        found.checked.remove(CHECKSUMS)
    for name in dict.fromkeys([*kept, *(name for name in known if os.path.lexists(folder / name))]):
        found.look(name, partial(read_checked, folder, name, MOST_BYTES))
    found.missing = [name for name in known if not os.path.lexists(folder / name)]
    found.without_checksum = [name for name in kept if name not in known]
    found.look("recipe.yaml", lambda: read_recipe(folder))
    found.look("config.json", lambda: task_of_run(folder))
    found.kind = task.noun if task else "run"
    for name, read in own.items() if not found.wrong.keys() & {"config.json", "labels.json", "recipe.yaml"} else ():
        if os.path.lexists(folder / name):
            found.look(name, read)
    if os.path.lexists(folder / WEIGHTS):
        # Into the network they belong to; where that is not known, what is wrong has been said of another file.
        if task and not found.wrong.keys() & {"config.json", "labels.json", "recipe.yaml", *own}:
            found.look(WEIGHTS, lambda: task.model.load_network(folder))
    else:
        found.missing.append(WEIGHTS)
    found.look(RUN_METADATA, lambda: read_run_metadata(folder))
    found.look(PROVENANCE, lambda: read_provenance(folder))
    if os.path.lexists(folder / METRICS) or not os.path.lexists(folder / RUN_METADATA):
        found.look(METRICS, lambda: _read_metrics(folder))
    else:
        found.missing.append(METRICS)
    for path in reversed(checkpoints_of(folder)):
        found.look(str(path.relative_to(folder)), partial(read_checkpoint, path))
    found.checked = [name for name in found.checked if name in found.wrong or os.path.lexists(folder / name)]
    return found


def _task_of(folder: Path) -> Task | None:
    """The task of the run; None where its config, or its recipe, cannot tell."""
    try:
        return task_of_run(folder)
    except ResourceError:
        raise
    except PatchloomError:
        return None


def _read_metrics(folder: Path) -> None:
    if fault := metrics_fault(folder):
        raise CheckpointError(fault)


# An index -----------------------------------------------------------------------------------------------------------


def _verify_index(folder: Path, *, accepted: bool) -> VerifyReport:
    found = VerifyReport(folder, "index")
    if accepted:
        with locked(folder):
            about = read_about(folder, accepted=True)
            before = read_plain(folder / INDEX)
            write_about(folder, about)
            found.accepted = [INDEX] if read_plain(folder / INDEX) != before else []
    found.look(INDEX, lambda: read_about(folder))
    if INDEX in found.wrong:
        return found
    about = read_about(folder)
    if "own_sha256" not in parse_json(read_plain(folder / INDEX)):
        found.without_checksum = [INDEX]
    stored = StoredVectors(folder, about)
    for part in about.parts:
        found.look(f"{part.name}.npy", partial(_read_vectors, stored, part))
        found.look(f"{part.name}.json", partial(stored.rows_of, part))
    if not about.exact:
        found.look(FAISS, stored.faiss_file)
    if not found.wrong:
        found.look(INDEX, partial(_count_labels, stored, about))
    return found


def _read_vectors(stored: StoredVectors, part: IndexPart) -> None:
    if not stored.all_rows(part).isfinite().all():
        raise CheckpointError(f"{stored.folder / part.name}.npy holds numbers that are not finite")


def _count_labels(stored: StoredVectors, about: IndexMetadata) -> None:
    counted: Counter[str] = Counter()
    for part in about.parts:
        rows = stored.rows_of(part)
        counted.update(rows[at].label for at in part.valid_rows().tolist() if rows[at].label)
    if counted != Counter(about.labels):
        raise CheckpointError(f"{stored.folder / INDEX} counts other labels than its parts have")


# An artifact --------------------------------------------------------------------------------------------------------


def _verify_artifact(folder: Path, *, accepted: bool) -> VerifyReport:
    if accepted:
        raise UsageError(f"--accept applies to runs and indexes; {folder} is an artifact: export it again instead")
    report, name = VerifyReport(folder, "artifact"), metadata_path(folder).name
    report.look(name, lambda: read_artifact(folder))
    if name in report.wrong:
        return report
    about = read_artifact(folder)
    for file in about.files:
        report.look(file, partial(check_file, folder, about, file))
    if not report.wrong and find_spec(ENGINES[about.to].package):
        report.look(name, lambda: load_artifact(folder, threads=1))
    return report
