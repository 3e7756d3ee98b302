"""Images with a class each, in a folder: by class folders, by a list of labels in it, or by both.

train/rose/*.jpg  val/rose/*.jpg           class folders (`folder`), also below folders that hold nothing else
photos and train.csv, labels.csv           a list of labels (`labels_file`) where folders are no classes
images/rose/*.jpg  meta/train.txt          class folders, and lists that say train, val and test (Food-101, DTD)
images/  images.txt  train_test_split.txt  the same by numbers (CUB-200)
jpg/  imagelabels.mat  setid.mat           Flowers-102, and the devkit of Stanford Cars: need scipy
"""

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import Listing, Source
from patchloom.data.labels.class_names import FILES as CLASS_NAMES
from patchloom.data.labels.class_names import names_by_line
from patchloom.data.labels.taxonomy import FILES as TAXONOMIES
from patchloom.data.labels.taxonomy import Taxonomy
from patchloom.data.reading import Reading
from patchloom.data.sources.class_folders import open_folder, split_folders
from patchloom.data.sources.labels_file import SUFFIXES, ListFile, open_list, split_of
from patchloom.data.splits import listings_by_split
from patchloom.data.trees.files import FolderTree
from patchloom.data.trees.tree import Tree
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from patchloom_runtime.images.decode import EXTENSIONS
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import MOST_BYTES

_LIST = re.compile(r"^(train|training|val|valid|validation|test|testing)(\d*)\.txt$", re.IGNORECASE)
_LIST_FOLDERS = ("", "meta", "labels", "splits", "lists", "split")
_NAMED = 0.9  # share of the lines of a list that name images
_NO_LABELS = ("readme", "license", "licence", "sample_submission", "samplesubmission", "requirements")
_MOST_WRAPPERS = 4


def open_classes(root: Path, levels: Taxonomy, reading: Reading, strict: bool = False) -> Source:
    """The folder as images with classes."""
    known = _open_flowers(root) or _open_cars(root)
    if known is not None:
        return known
    inner = _unwrapped(root)
    tree = FolderTree(inner)
    source = open_folder(inner, levels, reading.classes)
    labeled = bool(np.any(source.train.labels != UNLABELED))
    listed = find_list(tree) if not labeled or not split_folders(tree)["train"] else None
    if listed is not None and (not labeled or split_of(listed) == "train"):
        sure = not labeled and bool(split_of(listed) or "label" in listed.lower())  # by its name
        try:
            by_list = open_list(ListFile(tree, listed), tree, levels, strict, reading.label_column, reading.names_file)
        except PatchloomError as error:
            if sure:
                raise
            source = replace(source, notes=(*source.notes, f"{printable(listed)} is no list of labels ({error})"))
        else:
            if sure or _tells_more(by_list, source, labeled=labeled):
                return by_list
            source = replace(source, notes=(*source.notes, f"{printable(listed)} was not taken for a list of labels"))
    if reading.names is not None:
        raise UsageError(f"--names names class numbers, and {printable(root)} has none; leave it out")
    return _with_listed_splits(source, inner) if labeled and source.val is None and source.test is None else source


def _tells_more(by_list: Source, source: Source, *, labeled: bool) -> bool:
    """Whether a list is rather to be believed than the folders: it names half of the images, or says splits too."""
    if labeled:
        has_splits = by_list.val is not None or by_list.test is not None
        return has_splits and 2 * len(by_list.train.names) <= len(by_list.train)
    named, there = (sum(map(len, of.listings.values())) for of in (by_list, source))
    return 2 * named >= there


def find_list(tree: Tree) -> str | None:
    """The labels file at the top of a tree: called labels or so, a list of train, or the only table."""
    taken = (*CLASS_NAMES, *TAXONOMIES)
    tables = [
        entry.name
        for entry in tree.entries("")
        if entry.kind == "file"
        and posixpath.splitext(entry.name)[1].lower() in SUFFIXES
        and entry.name.lower() not in taken
        and not entry.name.lower().startswith(_NO_LABELS)
    ]
    by_name = [name for name in tables if "label" in name.lower() or "annot" in name.lower()]
    by_split = [name for name in tables if split_of(name) == "train"]
    return next(iter([*by_name, *by_split, *(tables if len(tables) == 1 else [])]), None)


def _unwrapped(root: Path) -> Path:
    """The folder with train, val and test below folders that hold one folder each; the root where there is none."""
    inner = root
    for _ in range(_MOST_WRAPPERS):
        entries = FolderTree(inner).entries("")
        folders = [entry.name for entry in entries if entry.kind == "folder"]
        images = any(os.path.splitext(entry.name)[1].lower() in EXTENSIONS for entry in entries if entry.kind == "file")
        if len(folders) != 1 or images:
            return root
        inner = inner / folders[0]
        if split_folders(FolderTree(inner))["train"]:
            return inner
    return root


# Class folders with lists of splits -----------------------------------------------------------------------------------


def _with_listed_splits(source: Source, root: Path) -> Source:
    """The source with the splits that lists in its folder say; as it is where there are none."""
    splits, said = _numbered_splits(root) or _split_lists(root)
    if not splits:
        return source
    listing = source.train
    keys = [_last_two(listing.images.key(row)) for row in listing.rows.tolist()]
    there = set(keys)
    named = sum(path in there for path in splits)
    if named < _NAMED * len(splits):
        return source
    of_rows = [splits.get(key, "") for key in keys]
    train, val, test, unused = listings_by_split(listing, of_rows)
    lost = of_rows.count("")
    notes = (f"splits from {said}", *((f"{lost:,} images are in no list; left out",) if lost else unused))
    return replace(source, train=train, val=val, test=test, notes=(*source.notes, *notes))


def _split_lists(root: Path) -> tuple[dict[str, str], str]:
    """Class folder and stem of each image → its split, and the lists that say so: of several sets, the first."""
    for folder in _LIST_FOLDERS:
        place = root / folder
        lists = (
            [(found, name) for name in sorted(os.listdir(place)) if (found := _LIST.match(name))]
            if place.is_dir()
            else []
        )
        folds = sorted({found[2] for found, _ in lists}, key=lambda number: (len(number), number))
        if not folds:
            continue
        chosen = [name for found, name in lists if found[2] == folds[0]]
        splits: dict[str, str] = {}
        for name in chosen:
            for line in names_by_line(place / name, MOST_BYTES) or ():
                if line.strip():
                    splits[_last_two(line.strip().split()[0])] = split_of(re.sub(r"\d", "", name))
        more = f" (the first of {len(folds)} such sets)" if len(folds) > 1 else ""
        return splits, ", ".join(posixpath.join(folder, name) for name in chosen) + more
    return {}, ""


def _numbered_splits(root: Path) -> tuple[dict[str, str], str] | None:
    """The same by CUB's images.txt and train_test_split.txt, whose lines begin with an image's number."""
    tables: list[dict[str, str]] = []
    for name in ("images.txt", "train_test_split.txt"):
        lines = names_by_line(root / name, MOST_BYTES)
        if lines is None:
            return None
        tables.append({row[0]: row[1] for line in lines if len(row := line.split()) == 2})
    images, in_train = tables
    of = {"1": "train", "0": "test"}
    splits = {_last_two(path): of[in_train[i]] for i, path in images.items() if in_train.get(i) in of}
    return splits, "images.txt and train_test_split.txt"


def _last_two(path: str) -> str:
    stem, extension = posixpath.splitext(path.replace("\\", "/"))
    return "/".join((stem if extension.lower() in EXTENSIONS else path).split("/")[-2:])


# MATLAB's files -------------------------------------------------------------------------------------------------------


def _open_flowers(root: Path) -> Source | None:
    """Flowers-102: the class of each image by its number, and the numbers of each split."""
    if not (root / "imagelabels.mat").is_file() or not (root / "setid.mat").is_file() or not (root / "jpg").is_dir():
        return None
    labels, sets = _matlab(root / "imagelabels.mat"), _matlab(root / "setid.mat")
    try:
        numbers = np.asarray(labels["labels"]).reshape(-1).astype(int)
        splits = {"train": sets["trnid"], "val": sets["valid"], "test": sets["tstid"]}
        rows = [
            (f"jpg/image_{i:05d}.jpg", str(numbers[i - 1]), split)
            for split, of in splits.items()
            for i in np.asarray(of).reshape(-1).astype(int).tolist()
        ]
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"{printable(root / 'setid.mat')}: expected labels, trnid, valid and tstid ({error})"
        ) from error
    return _listed(root, rows, "imagelabels.mat and setid.mat")


def _open_cars(root: Path) -> Source | None:
    """Stanford Cars: devkit/, cars_train/ and cars_test/."""
    kit = root / "devkit"
    if not (kit / "cars_train_annos.mat").is_file() or not (root / "cars_train").is_dir():
        return None
    meta, rows = _matlab(kit / "cars_meta.mat"), []
    files = {"train": kit / "cars_train_annos.mat"}
    for place in (kit, root):
        if (place / "cars_test_annos_withlabels.mat").is_file():
            files["test"] = place / "cars_test_annos_withlabels.mat"
    try:
        names = [str(np.asarray(name).reshape(-1)[0]) for name in np.asarray(meta["class_names"]).reshape(-1)]
        for split, file in files.items():
            for entry in np.asarray(_matlab(file)["annotations"]).reshape(-1):
                number = int(np.asarray(entry["class"]).reshape(-1)[0])
                rows.append((f"cars_{split}/{np.asarray(entry['fname']).reshape(-1)[0]}", names[number - 1], split))
    except (KeyError, ValueError, IndexError) as error:
        raise DataError(f"{printable(kit)}: expected the devkit of Stanford Cars ({error})") from error
    return _listed(root, rows, ", ".join(posixpath.relpath(file, root) for file in files.values()))


def _listed(root: Path, rows: Sequence[tuple[str, str, str]], said: str) -> Source:
    """Path, class and split of each image."""
    names = tuple(
        sorted({label for _, label, _ in rows}, key=lambda name: (len(name) if name.isdecimal() else 0, name))
    )
    number = {name: i for i, name in enumerate(names)}
    labels = np.array([number[label] for _, label, _ in rows], dtype=np.int64)
    images = FolderTree(root).images([path for path, _, _ in rows])
    whole = Listing(images, np.arange(len(rows)), labels, names)
    train, val, test, unused = listings_by_split(whole, [split for _, _, split in rows])
    title = f"{printable(root.resolve().name)} (labels file)"
    return Source(title, train, val, (f"classes and splits from {said}", *unused), test=test)


def _matlab(file: Path) -> Mapping[str, Any]:
    """The arrays of a .mat file; nothing in it is executed."""
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(
            f"{printable(file)} is a file of MATLAB: reading it needs scipy (pip install scipy), or give a list with "
            "--labels FILE (lines of path,label)"
        ) from None
    try:
        content: Mapping[str, Any] = loadmat(file)
    except Exception as error:  # whatever a damaged file makes of it
        raise DataError(f"{printable(file)}: cannot be read as a .mat file ({error})") from error
    return content
