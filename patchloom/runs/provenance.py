"""`data.json` and `left_out.tsv`: what a run trains and validates on, its initial weights, and its skipped files."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from patchloom.data.checking.survey import Survey
from patchloom.data.datasets import LabeledImages, Splits
from patchloom.disk import atomic_write
from patchloom.runs.checksums import read_checked, write_checked
from patchloom_runtime.errors import CheckpointError
from patchloom_runtime.printable import table_cell
from patchloom_runtime.untrusted import check_shape, parse_json

PROVENANCE = "data.json"
LEFT_OUT = "left_out.tsv"
_SHAPE = {
    "classes": list[str],
    "train": int,
    "val": int,
    "rows": str,
    "contents": str,
    "place?": str | None,
    "init?": str | None,
    "init_weights?": str,
    "automatic_init?": bool,
    "options?": list[str],
    "corrections?": str | None,
    "plugins?": dict[str, str],
}


@dataclass(frozen=True)
class Provenance:
    """The data and the initial weights of a run, by digest.

    With recipe.train_share, these are the data before the share is taken.
    """

    classes: tuple[str, ...]
    train: int  # images
    val: int
    rows: str  # digest of image names and classes or other targets, in order
    contents: str  # digest of the image files, or the fingerprint of images that are not files; '' if there is none
    place: str | None = None  # absolute path or spec of the data; None if it was not stored
    init: str | None = None  # value of --init, '' for none; None if it was not stored
    init_weights: str = ""  # digest of the initial weights
    automatic_init: bool = False  # whether `--init auto` chose `init`
    options: tuple[str, ...] = ()  # recipe fields that the command set
    corrections: str | None = None  # digest of what --corrections changes, '' for none; None if it was not stored
    plugins: dict[str, str] = field(default_factory=dict)  # what the user plugged in → its name and digest

    def is_of(self, other: "Provenance") -> bool:
        """Return whether both have the same data: the same path, or the same images wherever they are."""
        same = (self.rows, self.contents) == (other.rows, other.contents)
        return same or (self.place is not None and self.place == other.place)


def provenance_of(splits: Splits, survey: Survey | None = None) -> Provenance:
    """Return the provenance of a run on `splits`. `survey` has the digests of the files."""
    rows = hashlib.sha256()
    for images in (splits.train, splits.val):
        for i, label in enumerate(images.labels.tolist()):
            line = f"{images.key(i)}\0{'' if label < 0 else images.classes.names[label]}\n"
            rows.update(line.encode("utf-8", "surrogateescape"))
            if images.targets is not None:
                rows.update(images.targets.values[i].tobytes())
        rows.update(b"\0")
    digests = b"".join(digest for split in ("train", "val") for digest in survey.digests(split)) if survey else b""
    contents = hashlib.sha256(digests).hexdigest() if survey else _fingerprints(splits)
    return Provenance(tuple(splits.classes.names), len(splits.train), len(splits.val), rows.hexdigest(), contents)


def _fingerprints(splits: Splits) -> str:
    """Return the fingerprints of images that are not scanned."""
    stores = [images.images for images in (splits.train, splits.val) if isinstance(images, LabeledImages)]
    return " ".join(dict.fromkeys(filter(None, (store.fingerprint for store in stores))))


def read_provenance(folder: Path) -> Provenance | None:
    """Return the provenance of a run, or None if it has none. Raise CheckpointError if it is damaged."""
    path = folder / PROVENANCE
    if not os.path.lexists(path):
        return None
    try:
        values = parse_json(read_checked(folder, PROVENANCE).decode("utf-8", "surrogateescape"))
        check_shape(values, _SHAPE)
        known = Provenance.__dataclass_fields__
        values = {name: value for name, value in values.items() if name in known}  # newer versions may have more
        lists = {name: tuple(values.get(name, ())) for name in ("classes", "options")}
        return Provenance(**(values | lists))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or remove it.") from error


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Write `data.json` unless the run has one, as when it is resumed."""
    if not (folder / PROVENANCE).exists():
        text = json.dumps(asdict(provenance), indent=1, ensure_ascii=False) + "\n"
        write_checked(folder, {PROVENANCE: text.encode("utf-8", "surrogateescape")})


def write_left_out(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write `left_out.tsv` with one (name, reason) per unreadable file, or remove it if there are none."""
    lines = [f"{table_cell(name)}\t{table_cell(reason)}\n" for name, reason in files]
    if lines:
        atomic_write(folder / LEFT_OUT, "".join(["file\treason\n", *lines]).encode("utf-8", "surrogateescape"))
    else:
        (folder / LEFT_OUT).unlink(missing_ok=True)
