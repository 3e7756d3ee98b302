"""`patchloom verify` and `sign`: compare all files of a run, an index or an artifact with checksums or a signature."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from patchloom.disk import locked
from patchloom.inference.index_files import FILE as INDEX
from patchloom.inference.index_files import IndexMetadata, IndexPart, StoredVectors, read_about, write_about
from patchloom.runs.calibration import FILE as CALIBRATION
from patchloom.runs.checkpoints import checkpoints_of, read_checkpoint
from patchloom.runs.checksums import FILE as CHECKSUMS
from patchloom.runs.checksums import accept as accept_changes
from patchloom.runs.checksums import read_checked, read_checksums
from patchloom.runs.config import read_recipe
from patchloom.runs.metrics import METRICS, metrics_fault
from patchloom.runs.predictions import MOST_BYTES
from patchloom.runs.provenance import PROVENANCE, read_provenance
from patchloom.runs.run_metadata import FILE as RUN_METADATA
from patchloom.runs.run_metadata import read_run_metadata
from patchloom.runs.signature import FILE as SIGNATURE
from patchloom.runs.signature import check_key, check_signature, write_signature
from patchloom.runs.weights import WEIGHTS
from patchloom.tasks.table import task_of_run
from patchloom.tasks.task import Task
from patchloom_runtime.artifacts.artifact import check_file, is_artifact
from patchloom_runtime.artifacts.artifact import load as load_artifact
from patchloom_runtime.artifacts.metadata import metadata_path
from patchloom_runtime.artifacts.metadata import read_about as read_artifact
from patchloom_runtime.engines.engine import ENGINES
from patchloom_runtime.errors import CheckpointError, PatchloomError, ResourceError, UsageError, with_near_options
from patchloom_runtime.untrusted import parse_json, read_plain

# Text files, which a user may edit. Weights and predictions are as they were written, or damaged.
BY_HAND = ("config.json", "labels.json", "recipe.yaml", PROVENANCE, RUN_METADATA, CALIBRATION)


@dataclass
class VerifyReport:
    """The files that were checked, and what is wrong with them."""

    folder: Path
    kind: str  # "run", "translator", "index", "artifact" …
    checked: list[str] = field(default_factory=list)  # files, by their path in the folder
    wrong: dict[str, str] = field(default_factory=dict)  # file → what is wrong
    without_checksum: list[str] = field(default_factory=list)  # written before checksums were kept
    missing: list[str] = field(default_factory=list)  # files that an unfinished run may not have yet
    accepted: list[str] = field(default_factory=list)

    def check(self, name: str, read: Callable[[], object]) -> None:
        """Read a file and note the first error."""
        if name not in self.checked:
            self.checked.append(name)
        try:
            read()
        except ResourceError:
            raise  # not a fault of the file
        except PatchloomError as error:
            self.wrong.setdefault(name, str(error))


@with_near_options
def verify(
    folder: str | os.PathLike[str], *, accept: bool = False, key: str | os.PathLike[str] | None = None
) -> VerifyReport:
    """Check all files of a run, an index or an artifact.

    folder  Run, index or artifact folder.
    accept  Accept text files that were edited by hand, such as class names, before verifying.
    key     File with a public key (PEM): also check the signature of `patchloom sign`. Raises CheckpointError unless
            its private key signed the folder as it is.
    """
    path = Path(folder)
    _check_folder(path)
    if key is None:
        return _verify(path, accept=accept)
    if accept:
        raise UsageError("--accept and --key exclude each other: accept the changes, then sign the folder again")
    check_key(Path(key), private=False)
    check_signature(path, Path(key))
    report = _verify(path, accept=False)
    report.checked.append(SIGNATURE)
    return report


@with_near_options
def sign(folder: str | os.PathLike[str], *, key: str | os.PathLike[str]) -> VerifyReport:
    """Sign all files of a run, an index or an artifact, in `model.sig`. `verify` with the public key checks it.

    Raises CheckpointError if a file is damaged.

    folder  Run, index or artifact folder.
    key     File with a private elliptic-curve key (PEM).
    """
    path = Path(folder)
    _check_folder(path)
    check_key(Path(key), private=True)
    with locked(path):
        report = _verify(path, accept=False)
        if report.wrong:
            raise CheckpointError(f"{folder} is not signed: {next(iter(report.wrong.values()))}")
        write_signature(path, Path(key))
    return report


def _check_folder(folder: Path) -> None:
    if not is_artifact(folder) and not any(os.path.isfile(folder / name) for name in (INDEX, "config.json")):
        raise UsageError(
            f"{folder} is not a run, index or artifact folder: it has no config.json, {INDEX} or artifact.json"
        )


def _verify(folder: Path, *, accept: bool) -> VerifyReport:
    if is_artifact(folder):
        return _verify_artifact(folder, accept=accept)
    if os.path.isfile(folder / INDEX):
        return _verify_index(folder, accept=accept)
    edited: list[str] = []
    if accept:
        with locked(folder):
            edited = [name for name in BY_HAND if (folder / name).is_file() and _differs(folder, name)]
            accept_changes(folder, edited)
    report = _verify_run(folder)
    report.accepted = edited
    return report


def _differs(folder: Path, name: str) -> bool:
    """Return whether the file does not have the recorded checksum."""
    try:
        read_checked(folder, name)
        return name not in read_checksums(folder)
    except CheckpointError:
        return True


def _verify_run(folder: Path) -> VerifyReport:
    report = VerifyReport(folder, "run")
    report.check(CHECKSUMS, lambda: read_checksums(folder))
    known = {} if CHECKSUMS in report.wrong else read_checksums(folder)
    task = _task_of(folder)
    own = task.model.readers(folder) if task else {}
    present = [name for name in dict.fromkeys((*BY_HAND, *own)) if os.path.lexists(folder / name)]
    if not os.path.lexists(folder / CHECKSUMS):
        report.checked.remove(CHECKSUMS)
    for name in dict.fromkeys([*present, *(name for name in known if os.path.lexists(folder / name))]):
        report.check(name, partial(read_checked, folder, name, MOST_BYTES))
    report.missing = [name for name in known if not os.path.lexists(folder / name)]
    report.without_checksum = [name for name in present if name not in known]
    report.check("recipe.yaml", lambda: read_recipe(folder))
    report.check("config.json", lambda: task_of_run(folder))
    report.kind = task.noun if task else "run"
    for name, read in own.items() if not report.wrong.keys() & {"config.json", "labels.json", "recipe.yaml"} else ():
        if os.path.lexists(folder / name):
            report.check(name, read)
    if os.path.lexists(folder / WEIGHTS):
        # Load them into their network, unless a file that describes it is wrong.
        if task and not report.wrong.keys() & {"config.json", "labels.json", "recipe.yaml", *own}:
            report.check(WEIGHTS, lambda: task.model.load_network(folder))
    else:
        report.missing.append(WEIGHTS)
    report.check(RUN_METADATA, lambda: read_run_metadata(folder))
    report.check(PROVENANCE, lambda: read_provenance(folder))
    if os.path.lexists(folder / METRICS) or not os.path.lexists(folder / RUN_METADATA):
        report.check(METRICS, lambda: _read_metrics(folder))
    else:
        report.missing.append(METRICS)
    for path in reversed(checkpoints_of(folder)):
        report.check(str(path.relative_to(folder)), partial(read_checkpoint, path))
    report.checked = [name for name in report.checked if name in report.wrong or os.path.lexists(folder / name)]
    return report


def _task_of(folder: Path) -> Task | None:
    """Return the task of the run; None if config.json or recipe.yaml cannot be read."""
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


def _verify_index(folder: Path, *, accept: bool) -> VerifyReport:
    report = VerifyReport(folder, "index")
    if accept:
        with locked(folder):
            about = read_about(folder, accepted=True)
            before = read_plain(folder / INDEX)
            write_about(folder, about)
            report.accepted = [INDEX] if read_plain(folder / INDEX) != before else []
    report.check(INDEX, lambda: read_about(folder))
    if INDEX in report.wrong:
        return report
    about = read_about(folder)
    if "own_sha256" not in parse_json(read_plain(folder / INDEX)):
        report.without_checksum = [INDEX]
    stored = StoredVectors(folder, about)
    for part in about.parts:
        report.check(f"{part.name}.npy", partial(_read_vectors, stored, part))
        report.check(part.rows_file, partial(stored.rows_of, part))
    if about.lists is not None:
        report.check(f"{about.lists.name}.faiss", partial(stored.compare_lists, about.lists))
    if not report.wrong:
        report.check(INDEX, partial(_count_labels, stored, about))
    return report


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


def _verify_artifact(folder: Path, *, accept: bool) -> VerifyReport:
    if accept:
        raise UsageError(f"--accept applies to runs and indexes; {folder} is an artifact: export it again instead")
    report, name = VerifyReport(folder, "artifact"), metadata_path(folder).name
    report.check(name, lambda: read_artifact(folder))
    if name in report.wrong:
        return report
    about = read_artifact(folder)
    for file in about.files:
        report.check(file, partial(check_file, folder, about, file))
    if not report.wrong and find_spec(ENGINES[about.to].package):
        report.check(name, lambda: load_artifact(folder, threads=1))
    return report
