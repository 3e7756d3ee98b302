"""Whether a run goes on with the data it began with. Names and labels are compared, never the pictures themselves."""

import hashlib
import json
from pathlib import Path
from typing import Any

from patchloom.checkpoint import atomic_write
from patchloom.data.sets import ImageSet, Splits
from patchloom.errors import DataError

NAMES_SHOWN = 3


def remember_data(folder: Path, splits: Splits) -> None:
    """Write `data.json`, for `changes_of` to compare with."""
    atomic_write(folder / "data.json", (json.dumps(_print_of(splits), indent=1, ensure_ascii=False) + "\n").encode())


def changes_of(folder: Path, splits: Splits) -> list[str]:
    """Notes on what changed since the run began; other classes are a DataError, since the outputs would mix them up."""
    try:
        before = json.loads((folder / "data.json").read_bytes())
        changed = [name for name in ("train", "val") if before[name] != _print_of(splits)[name]]
        classes = list(before["classes"])
        counts = ", ".join(f"{name} {before[name]['pictures']} → {len(getattr(splits, name))}" for name in changed)
    except (OSError, ValueError, KeyError, TypeError):
        return ["data.json, which says what the run began with, cannot be read: not compared with the data"]
    if classes != list(splits.classes.names):
        raise DataError(
            f"{folder} was trained on {_some(classes)}, the data now have {_some(splits.classes.names)}; "
            "restore the data, or give a new folder with --out"
        )
    if not changed:
        return []
    return [f"the data changed since the run began ({counts} pictures): it is not exactly the run without that"]


def _print_of(splits: Splits) -> dict[str, Any]:
    return {
        "classes": list(splits.classes.names),
        "train": _print_of_set(splits.train),
        "val": _print_of_set(splits.val),
    }


def _print_of_set(dataset: ImageSet) -> dict[str, Any]:
    digest = hashlib.sha256()
    for i, label in enumerate(dataset.labels.tolist()):
        digest.update(f"{dataset.key(i)}\0{label}\n".encode("utf-8", "surrogateescape"))
    return {"pictures": len(dataset), "sha256": digest.hexdigest()}


def _some(names: Any) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{len(names)} classes ({shown}{', …' if len(names) > NAMES_SHOWN else ''})"
