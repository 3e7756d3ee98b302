"""`checkpoints/`: the state for an exact resume, and the saver that the engine uses.

`capture` in `engine/state.py` lists what a checkpoint holds. It is written into a hidden folder, synced and renamed.
Of sharded tensors each process writes its parts, and any number of processes can read them. The manifest, with the
SHA-256 of every file, is written last. An interrupted write leaves the previous checkpoint unchanged. Nothing is
pickled.
"""

import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from patchloom.disk import (
    Lock,
    atomic_write,
    disk_errors,
    make_folder,
    plain_name,
    rename,
    sync_folder,
    temporary_path,
    write_new,
)
from patchloom.engine.distribution import Processes
from patchloom.engine.state import Progress, Snapshot
from patchloom.models.from_config import is_sharded
from patchloom.runs.files import FORMAT, json_bytes, parsed, read_whole, refuse_format, refuse_shape
from patchloom.runs.sharded import join_shards, save_gathered_weights, shards_of, write_shards
from patchloom.runs.upload import Uploader
from patchloom.runs.weights import MOST_WEIGHTS, WEIGHTS, packed, refuse_bad, save_weights, unpacked
from patchloom_runtime.errors import CheckpointError

KEPT = 2
_STATE = {
    "progress": {
        "step": int,
        "epoch": int,
        "samples?": int,
        "best?": float | None,
        "best_tie?": float | None,
        "best_weights": str,
        "best_step?": int,
        "not_better?": int,
        "records?": int,
        "ended": str,
    },
    "steps_per_epoch": int,
    "samples_per_epoch?": int,
    "averaged": float,
    "world": int,
    "optimizer": {"kind": str, "plain": dict},
    "scaler": dict | None,
}
_RANDOM = {"python": 627, "numpy": 627}  # length of the generators' states
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest intact checkpoint, and the reasons for skipping newer ones."""

    path: Path
    snapshot: Snapshot
    notes: list[str]


class CheckpointFolder:
    """A run folder as the engine's saver."""

    def __init__(self, path: Path, uploader: Uploader | None = None) -> None:
        self.path, self.uploader = path, uploader
        self._lock: Lock | None = None

    def save(self, snapshot: Snapshot, processes: Processes) -> None:
        save_checkpoint(self.path, snapshot, processes)
        if self.uploader and processes.is_main:
            self.uploader.start()

    def save_weights(self, weights: dict[str, Tensor], about: dict[str, Any], processes: Processes) -> None:
        self._let_go_of_weights()  # Windows does not replace an open file
        try:
            if any(map(is_sharded, weights.values())):
                save_gathered_weights(self.path, weights, about, processes)
            else:
                save_weights(self.path, weights, about)
        finally:
            self._hold_weights()

    def guard(self, lock: Lock, write_files: Callable[[], None]) -> None:
        """Prepare `restore`, which writes the folder again if somebody removes or renames it."""
        self._lock, self._write_files = lock, write_files
        self._hold_weights()

    def restore(self) -> str:
        """Write a removed or renamed folder again, as far as possible. Returns a warning, or '' if it is in place."""
        if self._lock is None or not self._lock.is_gone():
            return ""
        self._lock.take()
        self._write_files()
        path = self.path / WEIGHTS
        weights = self._lock.open_file
        if weights and not path.exists():
            weights.seek(0)
            atomic_write(path, weights.read())
            self._hold_weights()
        return (
            f"warning: {self.path} was removed or renamed while this run was writing to it. The run continues and "
            "writes what it still has into a new folder of that name."
        )

    def _hold_weights(self) -> None:
        """Keep the weights file open, so that its contents survive the removal of its name."""
        self._let_go_of_weights()
        if self._lock:
            with suppress(OSError):
                self._lock.open_file = (self.path / WEIGHTS).open("rb", buffering=0)

    def _let_go_of_weights(self) -> None:
        if self._lock and self._lock.open_file:
            self._lock.open_file.close()
            self._lock.open_file = None


def save_checkpoint(folder: Path, snapshot: Snapshot, processes: Processes | None = None) -> Path:
    """Write a checkpoint, then remove all but the newest two. Returns its folder.

    If tensors are sharded, all processes call this together and each writes its own parts. Nothing counts before the
    manifest is there and the folder is renamed, so a process that dies leaves the previous checkpoint.
    """
    shards = shards_of(snapshot.tensors)
    if not shards or processes is None:
        return _finish(folder, snapshot, _begin(folder), {})
    temporary = processes.on_main(lambda: _begin(folder))
    try:
        with disk_errors(folder / "checkpoints"):
            digests = write_shards(temporary, shards, processes)
    except BaseException:
        if processes.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    shapes = {name: list(tensor.shape) for name, tensor in shards.items()}
    tensors = {
        part: {name: tensor for name, tensor in named.items() if f"{part}/{name}" not in shards}
        for part, named in snapshot.tensors.items()
    }
    rest = {part: named for part, named in tensors.items() if named}
    whole = Snapshot(rest, snapshot.values | {"shards": len(digests), "sharded": shapes})
    return processes.on_main(lambda: _finish(folder, whole, temporary, digests))


def _begin(folder: Path) -> Path:
    """Return a new temporary folder for a checkpoint."""
    parent = folder / "checkpoints"
    with disk_errors(parent):
        make_folder(parent)
        _remove_unfinished(parent)
        temporary = temporary_path(parent / "step-new")
        temporary.mkdir()
    return temporary


def _finish(folder: Path, snapshot: Snapshot, temporary: Path, digests: dict[str, str]) -> Path:
    """Write the tensors that are not sharded, the values and the manifest, and rename the folder."""
    parent = folder / "checkpoints"
    with disk_errors(parent):
        try:
            for part, tensors in snapshot.tensors.items():
                refuse_bad(tensors, f"{part} at step {snapshot.step}")
            for part, tensors in snapshot.tensors.items():
                digests[f"{part}.safetensors"] = write_new(temporary / f"{part}.safetensors", packed(tensors))
            digests["state.json"] = write_new(temporary / "state.json", json_bytes(snapshot.values))
            write_new(temporary / "manifest.json", _manifest(digests))
            sync_folder(temporary)
            target = _free_name(parent, snapshot.step)
            rename(temporary, target)
            _rename_old(folder, target)
            sync_folder(parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _remove_unfinished(parent)
    return target


def _rename_old(folder: Path, newest: Path) -> None:
    """Rename all but the newest two to temporary names, so that an interrupted removal leaves no partial checkpoint."""
    # Sorted by time of writing: a damaged checkpoint of a later step must not displace those of the resumed run.
    others = sorted((p for p in checkpoints_of(folder) if p != newest), key=_written_at, reverse=True)
    for old in others[KEPT - 1 :]:
        if old.is_dir() and not old.is_symlink():  # links are not ours
            rename(old, temporary_path(old))


def load_checkpoint(path: Path) -> Snapshot:
    """Read a checkpoint. Every file is compared with the manifest before it is used."""
    packed = read_whole(path / "manifest.json")
    manifest = parsed(packed, path / "manifest.json", {"format": int, "sha256": dict[str, str]})
    refuse_format(manifest, path / "manifest.json")
    digests = manifest["sha256"]
    if not all(map(str.isascii, (*digests, *digests.values()))) or packed != _manifest(digests):
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: its checksum is not its own.")
    contents = {}
    for name, digest in digests.items():
        plain_name(name, path / "manifest.json")
        contents[name] = read_whole(path / name, MOST_WEIGHTS)
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise CheckpointError(f"{path / name} is damaged: its checksum is not that of the manifest.")
    if "state.json" not in contents:
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: it names no state.json.")
    values = parsed(contents.pop("state.json"), path / "state.json", dict)
    tensors = {name.removesuffix(".safetensors"): unpacked(data, path / name) for name, data in contents.items()}
    if "sharded" in values:
        refuse_shape(values, {"shards": int, "sharded": dict[str, list[int]]}, path / "state.json")
        join_shards(tensors, values["sharded"], min(values["shards"], len(digests)), path)
    for part, named in tensors.items():
        refuse_bad(named, str(path / f"{part}.safetensors"), CheckpointError)
    return Snapshot(tensors, values)


def read_checkpoint(path: Path) -> Snapshot:
    """Read a checkpoint and check that its values and tensors have the shapes that a training run needs."""
    snapshot = load_checkpoint(path)
    _check_state(snapshot.values, path / "state.json")
    if "weights" not in snapshot.tensors:
        raise CheckpointError(f"{path / 'manifest.json'} is damaged: it names no weights.safetensors.")
    for part, named in snapshot.tensors.items():
        _check_part(part, named, path / f"{part}.safetensors")
    return snapshot


def find_checkpoint(folder: Path, read: Callable[[Path], Snapshot] = load_checkpoint) -> LatestCheckpoint | None:
    """Return the newest intact checkpoint, or None if there is none. Raise CheckpointError if all are damaged.

    To resume a run, pass `read=read_checkpoint`, which also skips checkpoints of another shape.
    """
    notes: list[str] = []
    for path in checkpoints_of(folder):
        try:
            return LatestCheckpoint(path, read(path), notes)
        except CheckpointError as error:
            notes.append(f"skipped {path.name}: {error}")
    if notes:
        raise CheckpointError(
            f"No checkpoint in {folder / 'checkpoints'} can be read. {' '.join(notes)} "
            "Restore one from a backup, or remove the folder to start again."
        )
    return None


def epochs_begun(folder: Path) -> int:
    """Return the number of epochs that the newest readable checkpoint has begun; 0 without a checkpoint.

    A run that is fitted to a time budget may begin more epochs than planned; the planned number is then returned.
    """
    values = _newest_state(folder)
    if not values:
        return 0
    begun = -(-values["progress"]["step"] // values["steps_per_epoch"])
    return min(begun, values["progress"].get("planned_epochs") or begun)


def lines_written(folder: Path) -> int:
    """Return the number of lines in `metrics.jsonl` at the newest readable checkpoint; 0 without a checkpoint."""
    return int(newest_progress(folder).get("records", 0))


def newest_progress(folder: Path) -> dict[str, Any]:
    """Return the fields of `Progress` in the newest readable checkpoint; empty without a checkpoint."""
    progress: dict[str, Any] = _newest_state(folder).get("progress", {})
    return progress


def _newest_state(folder: Path) -> dict[str, Any]:
    for path in checkpoints_of(folder):
        try:
            values: dict[str, Any] = parsed(read_whole(path / "state.json"), path / "state.json", dict)
            _check_state(values, path / "state.json")
            return values
        except CheckpointError:
            continue
    return {}


def checkpoints_of(folder: Path) -> list[Path]:
    """Return the checkpoint folders of a run, newest first."""
    try:
        names = os.listdir(folder / "checkpoints")
    except OSError:
        return []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), int(match[2] or 1)), reverse=True)
    return [folder / "checkpoints" / match[0] for match in matches]


def _check_state(values: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if `state.json` lacks a field or its counts contradict each other."""
    refuse_shape(values, _STATE, path)
    progress, steps = values["progress"], values["steps_per_epoch"]
    if unknown := progress.keys() - {field.name for field in dataclasses.fields(Progress)}:
        raise CheckpointError(f"{path} is damaged: progress has an unknown field {min(unknown)!r}.")
    counts = [progress.get(name, 0) for name in ("step", "epoch", "samples", "best_step", "not_better", "records")]
    fits = steps > 0 and progress["epoch"] * steps <= progress["step"] <= (progress["epoch"] + 1) * steps
    fits &= progress.get("samples", 0) <= values.get("samples_per_epoch", 0)
    if min(counts) < 0 or values["averaged"] < 0 or values["world"] < 1 or not fits:
        raise CheckpointError(f"{path} is damaged: its counts of steps and epochs contradict each other.")


def _check_part(part: str, tensors: dict[str, Tensor], path: Path) -> None:
    """Check the tensors whose shapes are the same in every run. The others are checked against the network."""
    for name, tensor in tensors.items():
        expected = (_RANDOM.get(name),) if part.startswith("random-") and name in _RANDOM else ()
        if (part == "averages" or expected) and (tensor.shape != expected or not tensor.is_floating_point()):
            raise CheckpointError(f"{path} is damaged: {name} is {tuple(tensor.shape)}, expected {expected}.")
    if part.startswith("random-") and not tensors.keys() >= {*_RANDOM, "torch"}:
        raise CheckpointError(f"{path} is damaged: it lacks the state of a random generator.")


def _remove_unfinished(parent: Path) -> None:
    """Delete the temporary folders of killed saves and of replaced checkpoints. Links are kept."""
    for path in parent.glob(".step-*.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _written_at(path: Path) -> int:
    return path.lstat().st_mtime_ns


def _free_name(parent: Path, step: int) -> Path:
    """Return an unused name. A step is saved twice if a resumed run stops before the next step."""
    path, number = parent / f"step-{step:08d}", 2
    while path.exists():
        path, number = parent / f"step-{step:08d}-{number}", number + 1
    return path


def _manifest(digests: dict[str, str]) -> bytes:
    """Return `manifest.json`: the checksums of the other files and its own."""
    own = hashlib.sha256(json_bytes([FORMAT, digests])).hexdigest()
    return json_bytes({"format": FORMAT, "sha256": digests, "own_sha256": own})
