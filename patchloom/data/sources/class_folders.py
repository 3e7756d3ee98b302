"""Image files in class folders, with train/val folders of them or not, on disk or in an archive.

    flowers/rose/*.jpg                      classes are the folders; val is held out from them
    flowers/train/rose/*.jpg, flowers/val/  the same with its own val, and test/ where it has one
    plants/train/flower/rose/*.jpg          classes in folders of coarser classes (see `nesting`)

What is left out (other extensions, pipes, broken links) is counted in the notes. Order follows names, not the
file system.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
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

SPECIAL_SHOWN = 10
Choice = Literal["innermost", "outermost"] | None


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
    repeated: list[str] = field(default_factory=list)  # links to folders that are read by another path


def open_folder(root: Path | Tree, taxonomy: Taxonomy | None = None, classes: Choice = None) -> Source:
    """A folder of class folders, with train, val and test folders above them or not.

    `classes` says which of nested folders are the classes.
    """
    tree = root if isinstance(root, Tree) else FolderTree(root)
    name = f"{tree.name} (class folders)"
    taxonomy = taxonomy or {}
    splits = split_folders(tree)
    scans = {split: _scan(tree, folder, _fine_names(taxonomy)) for split, folder in splits.items()}
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
        listings[split], more = _listing(tree, folder, scans[split], taxonomy, nesting)
        notes += more
        labeled = bool(np.any(listings["train"].labels != UNLABELED))
        if split == "val" and labeled and np.all(listings[split].labels == UNLABELED):
            count = len(listings.pop(split))
            notes += (f"{printable(folder)}: {count:,} images in no class folder, so they have no labels; left out",)
    unused = sorted(printable(one) for one in _folders_in(tree).values() if one not in splits.values())
    if splits["train"] and unused:
        notes += (f"beside train, val and test, not used: {', '.join(unused)}",)
    notes += (said,) if said else ()
    return Source(name, listings["train"], listings.get("val"), notes, test=listings.get("test"))


def split_folders(tree: Tree) -> dict[str, str]:
    """The folders of train, val and test, as far as they are there; train's is '' where there are no splits."""
    folders = _folders_in(tree)
    names = {"train": TRAIN_NAMES, "val": VAL_NAMES, "test": TEST_NAMES}

    def named(known: Mapping[str, str]) -> dict[str, str]:
        return {split: next((known[name] for name in of if name in known), "") for split, of in names.items()}

    found = named(folders)
    if not found["train"] or not _folders_in(tree, found["train"]):
        # A folder 'train' of images alone is a class, a picture of a train, unless all others are named as splits too:
        # train2017 and val2017, train and test1.
        plain = {name.rstrip("0123456789"): folder for name, folder in folders.items()}
        found = named(plain)
        others = [folder for folder in folders.values() if folder not in found.values()]
        if not found["train"] or not (found["val"] or found["test"]) or any(_has_images(tree, one) for one in others):
            return {"train": ""}
    return {split: folder for split, folder in found.items() if folder}


def _has_images(tree: Tree, folder: str) -> bool:
    """Whether a folder holds images, or folders that may."""
    entries = tree.entries(folder)
    return any(e.kind == "folder" or os.path.splitext(e.name)[1].lower() in EXTENSIONS for e in entries)


def _folders_in(tree: Tree, folder: str = "") -> dict[str, str]:
    """Lower-case name → name of each folder that is not hidden."""
    return {entry.name.lower(): entry.name for entry in tree.entries(folder) if entry.kind == "folder"}


def list_classes(root: Path, split: str, taxonomy: Taxonomy) -> tuple[Listing, tuple[str, ...]]:
    """The class folders in `root/split`, and notes on what is left out; folders in them are no classes."""
    tree = FolderTree(root)
    return _listing(tree, split, _scan(tree, split, _fine_names(taxonomy)), taxonomy, None)


def _fine_names(taxonomy: Taxonomy) -> frozenset[str]:
    return frozenset(name for mapping in taxonomy.values() for name in mapping)


def _listing(
    tree: Tree, split: str, scan: _Scan, taxonomy: Taxonomy, nesting: Nesting | None
) -> tuple[Listing, tuple[str, ...]]:
    if nesting:
        names_of = {folder: nesting.class_of(_chain(folder)) for folder in {os.path.dirname(p) for p in scan.paths}}
        scan.classes = [names_of[os.path.dirname(path)] for path in scan.paths]
        scan.empty = _empty_classes(scan.bare, nesting) - {*scan.classes}
        taxonomy = taxonomy or nesting.levels()
    labeled = {*scan.classes} - {""}
    # Pictures beside nothing but empty folders have no classes; beside class folders they are strays.
    names = tuple(sorted(labeled | scan.empty)) if labeled or not scan.paths else ()
    if not names and not scan.paths:
        found = f"no images found{_ignored(scan.ignored)}"
        place = os.path.join(tree.where, printable(split)) if split else tree.where
        raise DataError(f"{place}: {found}; expected class folders of images")
    number = {name: i for i, name in enumerate(names)} | {"": UNLABELED}
    labels = np.array([number[name] for name in scan.classes], dtype=np.int64)
    rows = np.arange(len(labels))
    label = split or tree.name
    notes = []
    loose = int(np.sum(labels == UNLABELED))
    if names and loose:
        rows, labels = rows[labels != UNLABELED], labels[labels != UNLABELED]
        notes.append(f"{label}: {loose} images beside the class folders; left out")
    if scan.ignored:
        notes.append(f"{label}: not images by their extension{_ignored(scan.ignored)}; left out")
    for paths, what in (
        (scan.special, "pipes, devices, empty folders or broken links"),
        (scan.repeated, "links to folders that lie in the same data, around them, or are linked twice"),
    ):
        if paths:
            shown = ", ".join(printable(path) for path in paths[:SPECIAL_SHOWN])
            shown += ", …" if len(paths) > SPECIAL_SHOWN else ""
            notes.append(f"{label}: {len(paths)} {what} ({shown}); left out")
    images = tree.images([os.path.join(split, path) for path in scan.paths])
    return Listing(images, rows, labels, names, taxonomy), tuple(notes)


def list_images(root: Path) -> list[str]:
    """The path of every image below `root`, for a collection that need not be a data set."""
    return [os.path.join(root, path) for path in _scan(FolderTree(root), "", frozenset()).paths]


def _scan(tree: Tree, start: str, fine_names: frozenset[str]) -> _Scan:
    """Walk the folder `start` by name; a class is a folder directly in it, or one whose name is in `fine_names`."""
    found = _Scan()
    walked = VisitedFolders(tree.identity, start, tree.where)

    def walk(relative: str, class_name: str, real: str) -> int:
        folder = os.path.join(start, relative)
        count = directly = 0
        ignored = found.ignored.total()
        for entry in tree.entries(folder):
            path = relative + entry.name
            extension = os.path.splitext(entry.name)[1].lower()
            if entry.kind == "folder":
                own = _class_name(entry.name)
                is_class = not relative or own in fine_names
                entered = walked.enter(entry, os.path.join(folder, entry.name), real)
                if entered is None:
                    found.repeated.append(path)
                    continue
                before = found.ignored.total()  # a folder of other files is no empty class
                inside = walk(path + os.sep, own if is_class else class_name, entered)
                if is_class and not inside and own not in found.classes and before == found.ignored.total():
                    found.empty.add(own)
                elif not inside and extension in EXTENSIONS:
                    found.special.append(path)
                count += inside
            elif entry.kind == "other":
                found.special.append(path)
            elif extension in EXTENSIONS:
                found.paths.append(path)
                found.classes.append(class_name)
                directly += 1
            elif relative or entry.name not in TAXONOMY_FILES:
                found.ignored[extension or "without extension"] += 1
        if relative and (directly or (not count and ignored == found.ignored.total())):
            (found.folders if directly else found.bare).append(_chain(relative.rstrip(os.sep)))
        return count + directly

    walk("", "", walked.home)
    return found


def _class_name(folder: str) -> str:
    """Of a folder, whose name may be bytes that are not UTF-8: these are escaped."""
    return unicodedata.normalize("NFC", os.fsencode(folder).decode("utf-8", "backslashreplace"))


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
    return " (" + ", ".join(f"{count:,} {extension}" for extension, count in sorted(counts.items())) + ")"
