"""`pictures/branch_norms.json`: how much each residual branch adds, at some epochs of the training.

{"format": 1, "epochs": {"10": {"tokens": [0.21, …], "channels": [0.30, …]}}}: ‖branch‖ / ‖main‖, one number per layer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from patchloom.disk import atomic_write
from patchloom.runs.files import FORMAT, json_bytes, parsed, read_whole, refuse_format
from patchloom_runtime.errors import CheckpointError

FILE = "pictures/branch_norms.json"
_SHAPE = {"format": int, "epochs": dict[str, dict[str, list[float | None]]]}

Norms = Mapping[str, Sequence[float | None]]  # branch → ratio at each layer; None if it is not finite


def read_branch_norms(run: Path) -> dict[int, Norms]:
    """Return the norms by epoch, in order. Empty if the run was trained without `--pictures`."""
    path = run / FILE
    if not path.exists():
        return {}
    values = parsed(read_whole(path), path, _SHAPE)
    refuse_format(values, path)
    if odd := [epoch for epoch in values["epochs"] if not epoch.isdecimal()]:
        raise CheckpointError(f"{path} is damaged: {odd[0]!r} is not an epoch.")
    return {int(epoch): values["epochs"][epoch] for epoch in sorted(values["epochs"], key=int)}


def add_branch_norms(run: Path, epoch: int, norms: Norms) -> None:
    """Add an epoch. Later epochs, of a run that was resumed before them, are dropped, and so is a damaged file."""
    try:
        before = read_branch_norms(run)
    except CheckpointError:
        before = {}
    epochs = {str(at): dict(of) for at, of in before.items() if at < epoch} | {str(epoch): dict(norms)}
    atomic_write(run / FILE, json_bytes({"format": FORMAT, "epochs": epochs}))
