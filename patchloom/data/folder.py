"""Image files on disk: class folders, train/val folders of them, or any folder with a labels file.

    flowers/rose/*.jpg                      classes are the folders; val is held out from them
    flowers/train/rose/*.jpg, flowers/val/  the same with its own val, and test/ where it has one
    plants/train/flower/rose/*.jpg          classes in folders of coarser classes (see `nesting`)
    photos/**/*.jpg + labels.csv            path,label[,coarse level …][,split]

What is left out (other extensions, pipes, broken links) is counted in the notes. Order follows names, not the
file system.
"""

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from patchloom.data.decode import EXTENSIONS, decode, read_file
from patchloom.data.nesting import Chain, Nesting, find_nesting
from patchloom.data.sets import UNLABELLED, Listing, Pictures, Source, Stamp, file_state
from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES, listings_by_split
from patchloom.data.taxonomy import FILES as TAXONOMY_FILES
from patchloom.data.taxonomy import Taxonomy
from patchloom.errors import DataError, UsageError

SPECIAL_SHOWN = 10
Choice = Literal["innermost", "outermost"] | None


class FilePictures(Pictures):
    """Image files under one root.

    Paths are kept as one block of bytes: a list of millions of strings would be copied into every worker
    process as their reference counts change.
    """

    def __init__(self, root: str | os.PathLike[str], paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self.home = self.root = os.fspath(root)
        self._block = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def _relative(self, index: int) -> str:
        return os.fsdecode(self._block[self._ends[index] : self._ends[index + 1]])

    def _path(self, index: int) -> Path:
        return Path(self.root, self._relative(index))

    def read(self, index: int) -> Image.Image:
        """The picture: decoded, upright, mode RGB."""
        path = self._path(index)
        return decode(path, printable(path))

    def encoded(self, index: int) -> bytes:
        """The file's bytes."""
        path = self._path(index)
        return read_file(path, printable(path))

    def where(self, index: int) -> str:
        """The file's path."""
        return printable(self._path(index))

    def key(self, index: int) -> str:
        """The path below the root, with forward slashes."""
        return self._relative(index).replace(os.sep, "/")

    def stamps(self, rows: Sequence[int]) -> list[Stamp | None]:
        """Path, size and time of each file."""
        found = []
        for row in rows:
            path = self._relative(row)
            state = file_state(os.path.join(self.root, path))
            found.append((os.fsencode(path), *state) if state else None)
        return found


@dataclass
class _Scan:
    """What one walk through a folder found."""

    paths: list[str] = field(default_factory=list)  # below the scanned root
    classes: list[str] = field(default_factory=list)  # of each path; '' above the class folders
    empty: set[str] = field(default_factory=set)
    folders: list[Chain] = field(default_factory=list)  # those that hold images themselves
    bare: list[Chain] = field(default_factory=list)  # those without any image inside
    ignored: Counter[str] = field(default_factory=Counter)  # by extension
    special: list[str] = field(default_factory=list)  # pipes, devices, broken links, empty folders named as pictures


def printable(path: str | os.PathLike[str]) -> str:
    """The path for a message: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def open_folder(root: Path, taxonomy: Taxonomy | None = None, classes: Choice = None) -> Source:
    """A folder of class folders, with train, val and test folders above them or not.

    `classes` says which of nested folders are the classes.
    """
    name = f"{printable(root.name or root)} (class folders)"
    taxonomy = taxonomy or {}
    splits = split_folders(root)
    scans = {split: _scan(root / folder, _fine_names(taxonomy)) for split, folder in splits.items()}
    nesting, said = None, ""
    if classes or not taxonomy:
        held_out = {split: scan.folders for split, scan in scans.items() if split != "train"}
        first = "val" if "val" in held_out else "test"  # test stands for val where there is none
        nesting, said = find_nesting(
            scans["train"].folders, held_out.pop(first, ()), held_out.get("test", ()), choice=classes
        )
    listings: dict[str, Listing] = {}
    notes: tuple[str, ...] = ()
    for split, folder in splits.items():
        if split == "test" and not scans[split].paths:
            notes += (f"{printable(folder)}: no images found; left out",)
            continue
        listings[split], more = _listing(root, folder, scans[split], taxonomy, nesting)
        notes += more
    unused = sorted(printable(one) for one in _folders_in(root).values() if one not in splits.values())
    if splits["train"] and unused:
        notes += (f"beside train, val and test, not used: {', '.join(unused)}",)
    notes += (said,) if said else ()
    return Source(name, listings["train"], listings.get("val"), notes, test=listings.get("test"))


def split_folders(root: Path) -> dict[str, str]:
    """The folders of train, val and test, as far as they are there; train's is '' where `root` has no splits."""
    folders = _folders_in(root)
    names = {"train": TRAIN_NAMES, "val": VAL_NAMES, "test": TEST_NAMES}
    found = {split: next((folders[name] for name in known if name in folders), "") for split, known in names.items()}
    # A folder 'train' of images alone is a class: a picture of a train.
    if not found["train"] or not _folders_in(root / found["train"]):
        return {"train": ""}
    return {split: folder for split, folder in found.items() if folder}


def open_labels_file(
    file: Path, root: Path | None = None, taxonomy: Taxonomy | None = None, strict: bool = False
) -> Source:
    """A csv or tsv with a header: path, label, then coarser levels and `split` if wanted."""
    root = root or file.parent
    if not file.is_file():
        raise UsageError(f"labels file {printable(file)} does not exist; expected a csv or tsv of path,label")
    rows, header = _read_table(file)
    levels = {column: i for i, column in enumerate(header) if i > 1 and column != "split"}
    present = [row for row in rows if (root / row[0]).is_file()]
    notes: tuple[str, ...] = ()
    if len(present) < len(rows):
        first = next(row[0] for row in rows if not (root / row[0]).is_file())
        count = f"{len(rows) - len(present)} of {len(rows)}"
        said = f"{file}: {count} files are not in {root}, the first is {printable(first)}"
        if strict or not present:
            raise DataError(said)
        notes = (f"{said}; left out",)
        rows = present
    pictures = FilePictures(root, [row[0] for row in rows])
    names = tuple(sorted({row[1] for row in rows} - {""}))
    number = {name: i for i, name in enumerate(names)}
    labels = np.array([number.get(row[1], UNLABELLED) for row in rows], dtype=np.int64)
    mappings: dict[str, Mapping[str, str]] = {
        level: _one_coarse_each(file, level, rows, column) for level, column in levels.items()
    }
    mappings.update(taxonomy or {})
    whole = Listing(pictures, np.arange(len(rows)), labels, names, mappings)
    name = f"{printable(file.name)} (labels file)"
    if "split" not in header:
        return Source(name, whole, None, notes)
    train, val, test, unused = listings_by_split(whole, [row[header.index("split")] for row in rows])
    return Source(name, train, val, notes + unused, test=test)


def _folders_in(root: Path) -> dict[str, str]:
    """Lower-case name → name of each folder that is not hidden."""
    return {entry.name.lower(): entry.name for entry in _entries(root) if _is(entry.is_dir)}


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """What is in a folder and not hidden, ordered by name."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from error
    return sorted(visible, key=lambda entry: os.fsencode(entry.name))


def _is(kind: Callable[[], bool]) -> bool:
    """What `DirEntry.is_dir` or `is_file` says; a link that leads to itself is neither."""
    try:
        return kind()
    except OSError:
        return False


def list_classes(root: Path, split: str, taxonomy: Taxonomy) -> tuple[Listing, tuple[str, ...]]:
    """The class folders in `root/split`, and notes on what is left out; folders in them are no classes."""
    return _listing(root, split, _scan(root / split, _fine_names(taxonomy)), taxonomy, None)


def _fine_names(taxonomy: Taxonomy) -> frozenset[str]:
    return frozenset(name for mapping in taxonomy.values() for name in mapping)


def _listing(
    root: Path, split: str, scan: _Scan, taxonomy: Taxonomy, nesting: Nesting | None
) -> tuple[Listing, tuple[str, ...]]:
    if nesting:
        names_of = {folder: nesting.class_of(_chain(folder)) for folder in {os.path.dirname(p) for p in scan.paths}}
        scan.classes = [names_of[os.path.dirname(path)] for path in scan.paths]
        scan.empty = _empty_classes(scan.bare, nesting) - {*scan.classes}
        taxonomy = taxonomy or nesting.levels()
    labelled = {*scan.classes} - {""}
    # Pictures beside nothing but empty folders have no classes; beside class folders they are strays.
    names = tuple(sorted(labelled | scan.empty)) if labelled or not scan.paths else ()
    if not names and not scan.paths:
        found = f"no images found{_ignored(scan.ignored)}"
        raise DataError(f"{printable(root / split)}: {found}; expected class folders of images")
    number = {name: i for i, name in enumerate(names)} | {"": UNLABELLED}
    labels = np.array([number[name] for name in scan.classes], dtype=np.int64)
    rows = np.arange(len(labels))
    label = split or printable(root.name)
    notes = []
    loose = int(np.sum(labels == UNLABELLED))
    if names and loose:
        rows, labels = rows[labels != UNLABELLED], labels[labels != UNLABELLED]
        notes.append(f"{label}: {loose} images beside the class folders; left out")
    if scan.ignored:
        notes.append(f"{label}: not images by their extension{_ignored(scan.ignored)}; left out")
    if scan.special:
        shown = ", ".join(printable(path) for path in scan.special[:SPECIAL_SHOWN])
        shown += ", …" if len(scan.special) > SPECIAL_SHOWN else ""
        notes.append(f"{label}: {len(scan.special)} pipes, devices, empty folders or broken links ({shown}); left out")
    pictures = FilePictures(root, [os.path.join(split, path) for path in scan.paths])
    return Listing(pictures, rows, labels, names, taxonomy), tuple(notes)


def list_images(root: Path) -> list[str]:
    """The path of every image below `root`, for a collection that need not be a data set."""
    return [os.path.join(root, path) for path in _scan(root, frozenset()).paths]


def _scan(root: Path, fine_names: frozenset[str]) -> _Scan:
    """Walk `root` by name; a class is a folder directly in it, or one whose name is in `fine_names`."""
    found = _Scan()

    def walk(folder: str, relative: str, class_name: str, above: tuple[str, ...]) -> int:
        real = os.path.realpath(folder)
        if real in above:  # a link to a folder it lies in
            found.special.append(relative.rstrip(os.sep))
            return 0
        count = directly = 0
        for entry in _entries(folder):
            path = relative + entry.name
            extension = os.path.splitext(entry.name)[1].lower()
            if _is(entry.is_dir):
                own = _class_name(entry.name)
                is_class = not relative or own in fine_names
                inside = walk(entry.path, path + os.sep, own if is_class else class_name, (*above, real))
                if is_class and not inside and own not in found.classes:
                    found.empty.add(own)
                elif not inside and extension in EXTENSIONS:
                    found.special.append(path)
                count += inside
            elif not _is(entry.is_file):
                found.special.append(path)
            elif extension in EXTENSIONS:
                found.paths.append(path)
                found.classes.append(class_name)
                directly += 1
            elif relative or entry.name not in TAXONOMY_FILES:
                found.ignored[extension or "no extension"] += 1
        if relative and (directly or not count):
            (found.folders if directly else found.bare).append(_chain(relative.rstrip(os.sep)))
        return count + directly

    walk(os.fspath(root), "", "", ())
    return found


def _class_name(folder: str) -> str:
    return unicodedata.normalize("NFC", printable(folder))


def _chain(folder: str) -> Chain:
    return tuple(map(_class_name, folder.split(os.sep))) if folder else ()


def _empty_classes(bare: Sequence[Chain], nesting: Nesting) -> set[str]:
    """Of folders without any image inside: the innermost, where they lie in no class."""
    above = {folder[:n] for folder in bare for n in range(1, len(folder))}
    return {
        nesting.classes.get(folder, folder[-1])
        for folder in bare
        if folder not in above and nesting.class_of(folder[:-1]) == ""
    }


def _ignored(counts: Counter[str]) -> str:
    if not counts:
        return ""
    return " (" + ", ".join(f"{count} {extension}" for extension, count in sorted(counts.items())) + ")"


def _read_table(file: Path) -> tuple[list[list[str]], list[str]]:
    """Rows and the lower-case header, which must start with path,label."""
    delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
    try:
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
            rows = [row for row in csv.reader(lines, delimiter=delimiter) if row]
    except (csv.Error, OSError) as error:
        raise DataError(f"{file}: is no table of labels ({error}); expected lines of path,label") from error
    header = [column.strip().lower() for column in rows[0]] if rows else []
    if len(header) < 2 or header[0] not in ("path", "file", "filename", "image") or header[1] not in ("label", "class"):
        raise UsageError(f"{file}: the first line is {','.join(header)!r}, expected 'path,label' (then coarser levels)")
    for line, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise DataError(f"{file}, line {line}: {len(row)} fields, expected {len(header)} ({','.join(header)})")
    return rows[1:], header


def _one_coarse_each(file: Path, level: str, rows: Sequence[Sequence[str]], column: int) -> dict[str, str]:
    mapping: dict[str, str] = {}
    for row in rows:
        fine, coarse = row[1], row[column]
        if not fine or not coarse:
            continue
        if mapping.setdefault(fine, coarse) != coarse:
            raise DataError(
                f"{file}: {fine!r} is both {mapping[fine]!r} and {coarse!r} at level {level!r}; expected one"
            )
    return mapping
