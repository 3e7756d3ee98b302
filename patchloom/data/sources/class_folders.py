"""Image files in class folders, on disk or in an archive.

    flowers/rose/*.jpg                      one folder per class; val is held out from train
    flowers/train/rose/*.jpg, flowers/val/  the same with a val split, and test/ if it exists
    plants/train/flower/rose/*.jpg          classes in folders of coarser classes (see `nested_folders`)

Notes count the files that are left out (other extensions, pipes, broken links). Files are ordered by name.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from patchloom.data.datasets import Listing, Source
from patchloom.data.labels.nested_folders import Chain, Nesting, find_nesting
from patchloom.data.labels.taxonomy import FILES as TAXONOMY_FILES
from patchloom.data.labels.taxonomy import Taxonomy
from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES
from patchloom.data.trees.tree import FolderTree, Tree
from patchloom_runtime.errors import DataError
from patchloom_runtime.folders import VisitedFolders
from patchloom_runtime.images.decode import EXTENSIONS
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

LISTED_FILES = 10  # in a note
Choice = Literal["innermost", "outermost"] | None


@dataclass
class FolderScan:
    """The content of a folder."""

    paths: list[str] = field(default_factory=list)  # below the scanned root
    classes: list[str] = field(default_factory=list)  # one per path; '' above the class folders
    empty: set[str] = field(default_factory=set)
    folders: list[Chain] = field(default_factory=list)  # with images directly inside
    bare: list[Chain] = field(default_factory=list)  # without any image inside
    ignored: Counter[str] = field(default_factory=Counter)  # by extension
    special: list[str] = field(default_factory=list)  # pipes, devices, broken links, empty folders named like images
    repeated: list[str] = field(default_factory=list)  # links to folders that are read by another path


def open_folder(root: Path | Tree, taxonomy: Taxonomy | None = None, classes: Choice = None) -> Source:
    """Open a folder of class folders, or of train, val and test folders with class folders.

    `classes` chooses which nested folders are the classes.
    """
    tree = root if isinstance(root, Tree) else FolderTree(root)
    name = f"{tree.name} (class folders)"
    taxonomy = taxonomy or {}
    splits = split_folders(tree)
    scans = {split: _scan(tree, folder, _fine_names(taxonomy)) for split, folder in splits.items()}
    nesting, note = None, ""
    if classes or not taxonomy:
        held_out = {split: scan.folders for split, scan in scans.items() if split != "train"}
        first = "val" if "val" in held_out else "test"  # test is used as val if there is none
        nesting, note = find_nesting(
            scans["train"].folders, held_out.pop(first, ()), held_out.get("test", ()), choice=classes
        )
    listings: dict[str, Listing] = {}
    notes: tuple[str, ...] = ()
    for split, folder in splits.items():
        if split == "test" and not scans[split].paths:
            notes += (f"{printable(folder)}: no images found; left out",)
            continue
        listings[split], more = _listing(tree, folder, scans[split], taxonomy, nesting)
        notes += more
        labeled = bool(np.any(listings["train"].labels != UNLABELED))
        if split == "val" and labeled and np.all(listings[split].labels == UNLABELED):
            count = len(listings.pop(split))
            notes += (f"{printable(folder)}: {count:,} images in no class folder, so they have no labels; left out",)
    unused = sorted(printable(one) for one in _folders_in(tree).values() if one not in splits.values())
    if splits["train"] and unused:
        notes += (f"folders other than train, val and test, not used: {', '.join(unused)}",)
    notes += (note,) if note else ()
    return Source(name, listings["train"], listings.get("val"), notes, test=listings.get("test"))


def split_folders(tree: Tree) -> dict[str, str]:
    """Return the existing folders of train, val and test; {'train': ''} if there are no splits."""
    folders = _folders_in(tree)
    names = {"train": TRAIN_NAMES, "val": VAL_NAMES, "test": TEST_NAMES}

    def named(known: Mapping[str, str]) -> dict[str, str]:
        return {split: next((known[name] for name in of if name in known), "") for split, of in names.items()}

    chosen = named(folders)
    if not chosen["train"] or not _folders_in(tree, chosen["train"]):
        # A folder 'train' that contains only images may be a class, unless all others are named like splits too:
        # train2017 and val2017, train and test1.
        plain = {name.rstrip("0123456789"): folder for name, folder in folders.items()}
        chosen = named(plain)
        others = [folder for folder in folders.values() if folder not in chosen.values()]
        if (
            not chosen["train"]
            or not (chosen["val"] or chosen["test"])
            or any(_has_images(tree, one) for one in others)
        ):
            return {"train": ""}
    return {split: folder for split, folder in chosen.items() if folder}


def _has_images(tree: Tree, folder: str) -> bool:
    """Return whether a folder contains images or folders."""
    entries = tree.entries(folder)
    return any(e.kind == "folder" or os.path.splitext(e.name)[1].lower() in EXTENSIONS for e in entries)


def _folders_in(tree: Tree, folder: str = "") -> dict[str, str]:
    """Map the lower-case names of visible folders to their names."""
    return {entry.name.lower(): entry.name for entry in tree.entries(folder) if entry.kind == "folder"}


def list_classes(root: Path, split: str, taxonomy: Taxonomy) -> tuple[Listing, tuple[str, ...]]:
    """List the class folders in `root/split`, with notes on files left out. Folders inside them are not classes."""
    tree = FolderTree(root)
    return _listing(tree, split, _scan(tree, split, _fine_names(taxonomy)), taxonomy, None)


def _fine_names(taxonomy: Taxonomy) -> frozenset[str]:
    return frozenset(name for mapping in taxonomy.values() for name in mapping)


def _listing(
    tree: Tree, split: str, scan: FolderScan, taxonomy: Taxonomy, nesting: Nesting | None
) -> tuple[Listing, tuple[str, ...]]:
    if nesting:
        names_of = {folder: nesting.class_of(_chain(folder)) for folder in {os.path.dirname(p) for p in scan.paths}}
        scan.classes = [names_of[os.path.dirname(path)] for path in scan.paths]
        scan.empty = _empty_classes(scan.bare, nesting) - {*scan.classes}
        taxonomy = taxonomy or nesting.levels()
    labeled = {*scan.classes} - {""}
    # Images next to class folders are strays; next to empty folders only, they are unlabeled.
    names = tuple(sorted(labeled | scan.empty)) if labeled or not scan.paths else ()
    if not names and not scan.paths:
        ignored = _ignored(scan.ignored)
        place = os.path.join(tree.where, printable(split)) if split else tree.where
        raise DataError(f"{place}: no images found{ignored}; expected class folders of images")
    number = {name: i for i, name in enumerate(names)} | {"": UNLABELED}
    labels = np.array([number[name] for name in scan.classes], dtype=np.int64)
    rows = np.arange(len(labels))
    label = split or tree.name
    notes = []
    loose = int(np.sum(labels == UNLABELED))
    if names and loose:
        rows, labels = rows[labels != UNLABELED], labels[labels != UNLABELED]
        notes.append(f"{label}: {loose} images outside of the class folders; left out")
    notes += skipped_notes(scan, label)
    images = tree.images([os.path.join(split, path) for path in scan.paths])
    return Listing(images, rows, labels, names, taxonomy), tuple(notes)


def skipped_notes(scan: FolderScan, label: str) -> list[str]:
    """Return notes on the entries of a folder that are not images. `label` names the folder."""
    notes = []
    if scan.ignored:
        notes.append(f"{label}: not images by their extension{_ignored(scan.ignored)}; left out")
    for paths, what in (
        (scan.special, "pipes, devices, empty folders or broken links"),
        (scan.repeated, "links to folders that are inside the data, contain it, or are linked twice"),
    ):
        if paths:
            listed = ", ".join(printable(path) for path in paths[:LISTED_FILES])
            listed += ", …" if len(paths) > LISTED_FILES else ""
            notes.append(f"{label}: {len(paths)} {what} ({listed}); left out")
    return notes


def list_images(root: Path) -> list[str]:
    """Return the paths of all images below `root`, which need not be a dataset."""
    return [os.path.join(root, path) for path in _scan(FolderTree(root), "", frozenset()).paths]


def _scan(tree: Tree, start: str, fine_names: frozenset[str]) -> FolderScan:
    scan = FolderScan()
    for path, class_name in walk_images(tree, start, fine_names, scan):
        scan.paths.append(path)
        scan.classes.append(class_name)
    return scan


def walk_images(tree: Tree, start: str, fine_names: frozenset[str], scan: FolderScan) -> Iterator[tuple[str, str]]:
    """Yield the path below `start` and the class of every image, and note in `scan` what else is there.

    A class is a folder directly inside `start`, or one whose name is in `fine_names`.
    """
    visited = VisitedFolders(tree.identity, start, tree.where)
    filled: set[str] = set()  # classes with images

    def walk(relative: str, class_name: str, real: str) -> Generator[tuple[str, str], None, int]:
        folder = os.path.join(start, relative)
        count = directly = 0
        ignored = scan.ignored.total()
        for entry in tree.entries(folder):
            path = relative + entry.name
            extension = os.path.splitext(entry.name)[1].lower()
            if entry.kind == "folder":
                own = _class_name(entry.name)
                is_class = not relative or own in fine_names
                entered = visited.enter(entry, os.path.join(folder, entry.name), real)
                if entered is None:
                    scan.repeated.append(path)
                    continue
                before = scan.ignored.total()  # a folder of other files is not an empty class
                inside = yield from walk(path + os.sep, own if is_class else class_name, entered)
                if is_class and not inside and own not in filled and before == scan.ignored.total():
                    scan.empty.add(own)
                elif not inside and extension in EXTENSIONS:
                    scan.special.append(path)
                count += inside
            elif entry.kind == "other":
                scan.special.append(path)
            elif extension in EXTENSIONS:
                yield path, class_name
                filled.add(class_name)
                directly += 1
            elif relative or entry.name not in TAXONOMY_FILES:
                scan.ignored[extension or "without extension"] += 1
        if relative and (directly or (not count and ignored == scan.ignored.total())):
            (scan.folders if directly else scan.bare).append(_chain(relative.rstrip(os.sep)))
        return count + directly

    yield from walk("", "", visited.home)


def _class_name(folder: str) -> str:
    """Return the name of a folder as a class name, with bytes that are not UTF-8 escaped."""
    return unicodedata.normalize("NFC", os.fsencode(folder).decode("utf-8", "backslashreplace"))


def _chain(folder: str) -> Chain:
    return tuple(map(_class_name, folder.split(os.sep))) if folder else ()


def _empty_classes(bare: Sequence[Chain], nesting: Nesting) -> set[str]:
    """Return the innermost folders without images that are not inside a class."""
    above = {folder[:n] for folder in bare for n in range(1, len(folder))}
    return {
        nesting.classes.get(folder, folder[-1])
        for folder in bare
        if folder not in above and nesting.class_of(folder[:-1]) == ""
    }


def _ignored(counts: Counter[str]) -> str:
    if not counts:
        return ""
    return " (" + ", ".join(f"{count:,} {extension}" for extension, count in sorted(counts.items())) + ")"
