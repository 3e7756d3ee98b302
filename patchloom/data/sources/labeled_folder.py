"""A folder of images with one class each: by class folders, by a list of labels, or by file names.

train/rose/*.jpg  val/rose/*.jpg           class folders (`class_folders`), also below a single folder
photos/*.jpg  labels.csv                   a list of labels (`labels_file`), if the folders are not classes
images/rose/*.jpg  meta/train.txt          class folders, and one list per split (Food-101, DTD)
images/  images.txt  train_test_split.txt  the same by image numbers (CUB-200)
jpg/  imagelabels.mat  setid.mat           Flowers-102, and the devkit of Stanford Cars; both need scipy
rose_1.jpg  tulip_2.jpg                    classes in file names, by --label-pattern '{label}_*'
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
from patchloom.data.labels.label_pattern import LabelPattern, read_pattern
from patchloom.data.labels.label_table import says_split
from patchloom.data.labels.taxonomy import FILES as TAXONOMIES
from patchloom.data.labels.taxonomy import Taxonomy
from patchloom.data.reading_options import Reading
from patchloom.data.sources.class_folders import open_folder, split_folders
from patchloom.data.sources.labels_file import SUFFIXES, ListFile, open_list, split_of
from patchloom.data.splits import listings_by_split
from patchloom.data.trees.tree import FolderTree, Tree
from patchloom_runtime.errors import DataError, PatchloomError, UsageError
from patchloom_runtime.images.decode import EXTENSIONS
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable
from patchloom_runtime.untrusted import MOST_BYTES

_LIST = re.compile(r"^(train|training|val|valid|validation|test|testing)(\d*)\.txt$", re.IGNORECASE)
_LIST_FOLDERS = ("", "meta", "labels", "splits", "lists", "split")
_MIN_MATCHED = 0.9  # share of the lines of a list that must match images
_NO_LABELS = ("readme", "license", "licence", "sample_submission", "samplesubmission", "requirements")
_MAX_WRAPPERS = 4  # folders that contain only one folder
_LISTED_FILES = 3  # in a note


def open_classes(root: Path, levels: Taxonomy, reading: Reading, strict: bool = False) -> Source:
    """Open a folder of images with classes."""
    known = _open_flowers(root) or _open_cars(root)
    if known is not None:
        return known
    inner = _unwrapped(root)
    tree = FolderTree(inner)
    source = open_folder(inner, levels, reading.classes)
    labeled = bool(np.any(source.train.labels != UNLABELED))
    listed = find_list(tree) if not labeled or not split_folders(tree)["train"] else None
    if listed is not None and (not labeled or split_of(listed) == "train"):
        certain = not labeled and bool(split_of(listed) or "label" in listed.lower())  # by its name
        try:
            by_list = open_list(ListFile(tree, listed), tree, levels, strict, reading.label_column, reading.names_file)
        except PatchloomError as error:
            if certain:
                raise
            source = replace(source, notes=(*source.notes, f"{printable(listed)} is not a list of labels ({error})"))
        else:
            if certain or _is_better(by_list, source, labeled=labeled):
                return by_list
            source = replace(source, notes=(*source.notes, f"{printable(listed)} was not read as a list of labels"))
    if reading.names is not None:
        raise UsageError(f"--names names class numbers, and {printable(root)} has none; drop the option")
    return _with_listed_splits(source, inner) if labeled and source.val is None and source.test is None else source


def _is_better(by_list: Source, source: Source, *, labeled: bool) -> bool:
    """Return whether a list describes the data better than folders do: it names half of the images, or has splits."""
    if labeled:
        has_splits = by_list.val is not None or by_list.test is not None
        return has_splits and 2 * len(by_list.train.names) <= len(by_list.train)
    named, there = (sum(map(len, of.listings.values())) for of in (by_list, source))
    return 2 * named >= there


def find_list(tree: Tree) -> str | None:
    """Return the labels file at the root of a tree: named like one, a list of train, or the only table."""
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
    """Return the folder with train, val and test below folders that contain one folder each, or else the root."""
    inner = root
    for _ in range(_MAX_WRAPPERS):
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
    """Return the source with the splits of the lists in its folder, or unchanged if there are none."""
    splits, lists = _numbered_splits(root) or _split_lists(root)
    if not splits:
        return source
    listing = source.train
    keys = [_last_two(listing.images.key(row)) for row in listing.rows.tolist()]
    there = set(keys)
    matched = sum(path in there for path in splits)
    if matched < _MIN_MATCHED * len(splits):
        return source
    of_rows = [splits.get(key, "") for key in keys]
    train, val, test, unused = listings_by_split(listing, of_rows)
    lost = of_rows.count("")
    notes = (f"splits from {lists}", *((f"{lost:,} images are in no list; left out",) if lost else unused))
    return replace(source, train=train, val=val, test=test, notes=(*source.notes, *notes))


def _split_lists(root: Path) -> tuple[dict[str, str], str]:
    """Map class folder and stem of each image to its split, and name the lists used: the first of several sets."""
    for folder in _LIST_FOLDERS:
        place = root / folder
        lists = (
            [(match, name) for name in sorted(os.listdir(place)) if (match := _LIST.match(name))]
            if place.is_dir()
            else []
        )
        folds = sorted({match[2] for match, _ in lists}, key=lambda number: (len(number), number))
        if not folds:
            continue
        chosen = [name for match, name in lists if match[2] == folds[0]]
        splits: dict[str, str] = {}
        for name in chosen:
            for line in names_by_line(place / name, MOST_BYTES) or ():
                if line.strip():
                    splits[_last_two(line.strip().split()[0])] = split_of(re.sub(r"\d", "", name))
        more = f" (the first of {len(folds)} such sets)" if len(folds) > 1 else ""
        return splits, ", ".join(posixpath.join(folder, name) for name in chosen) + more
    return {}, ""


def _numbered_splits(root: Path) -> tuple[dict[str, str], str] | None:
    """Do the same with images.txt and train_test_split.txt of CUB-200, whose lines start with an image number."""
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


# Classes in file names ------------------------------------------------------------------------------------------------


def open_by_pattern(tree: Tree, text: str, strict: bool = False) -> Source:
    """Open the images of a tree, with classes from file names by a `label_pattern`.

    Images that do not match are skipped with a note. Folders train, val and test at the root are splits.
    """
    pattern = read_pattern(text)
    images = [path for path in tree.files() if posixpath.splitext(path)[1].lower() in EXTENSIONS]
    if not images:
        raise DataError(f"{tree.where}: no images found")
    labels = {path: label for path in images if (label := pattern.label(path))}
    others = [path for path in images if path not in labels]
    if not labels:
        example = _matched_text(pattern, others[0])
        raise DataError(f"{tree.where}: no name matches --label-pattern {text!r}; one is {example}")
    names = tuple(sorted(set(labels.values())))
    if len(names) == len(labels) > 1:
        raise DataError(
            f"{tree.where}: with --label-pattern {text!r} every image has a class of its own, such as {names[0]!r} of "
            f"{_matched_text(pattern, next(iter(labels)))}; expected a part that several names share"
        )
    notes = [f"classes from file names by {text!r} ({len(names)})"]
    if others:
        listed = ", ".join(_matched_text(pattern, path) for path in others[:_LISTED_FILES])
        listed += ", …" if len(others) > _LISTED_FILES else ""
        unmatched = f"{len(others):,} of {len(images):,} names do not match {text!r}: {listed}"
        if strict:
            raise DataError(f"{tree.where}: {unmatched}")
        notes.append(f"{unmatched}; left out")
    number = {name: i for i, name in enumerate(names)}
    numbers = np.array([number[label] for label in labels.values()], dtype=np.int64)
    whole = Listing(tree.images(list(labels)), np.arange(len(numbers)), numbers, names)
    title = f"{tree.name} (classes from file names)"
    splits = [path.split("/")[0] if "/" in path else "" for path in labels]
    if not any(map(says_split, splits)):
        return Source(title, whole, None, tuple(notes))
    train, val, test, unused = listings_by_split(whole, splits)
    return Source(title, train, val, (*notes, *unused), test=test)


def _matched_text(pattern: LabelPattern, path: str) -> str:
    return printable(path if "/" in pattern.text else posixpath.basename(path))


# MATLAB files ---------------------------------------------------------------------------------------------------------


def _open_flowers(root: Path) -> Source | None:
    """Open Flowers-102: imagelabels.mat has the class of each image number, setid.mat the numbers of each split."""
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
    """Open Stanford Cars: devkit/, cars_train/ and cars_test/."""
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


def _listed(root: Path, rows: Sequence[tuple[str, str, str]], files: str) -> Source:
    """Return a source of rows (path, class, split), which were read from `files`."""
    names = tuple(
        sorted({label for _, label, _ in rows}, key=lambda name: (len(name) if name.isdecimal() else 0, name))
    )
    number = {name: i for i, name in enumerate(names)}
    labels = np.array([number[label] for _, label, _ in rows], dtype=np.int64)
    images = FolderTree(root).images([path for path, _, _ in rows])
    whole = Listing(images, np.arange(len(rows)), labels, names)
    train, val, test, unused = listings_by_split(whole, [split for _, _, split in rows])
    title = f"{printable(root.resolve().name)} (labels file)"
    return Source(title, train, val, (f"classes and splits from {files}", *unused), test=test)


def _matlab(file: Path) -> Mapping[str, Any]:
    """Read the arrays of a .mat file. Nothing in it is executed."""
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise DataError(
            f"{printable(file)} is a MATLAB file: reading it needs scipy (pip install scipy), or pass a list with "
            "--labels FILE (lines of path,label)"
        ) from None
    try:
        content: Mapping[str, Any] = loadmat(file)
    except Exception as error:  # a damaged file may raise anything
        raise DataError(f"{printable(file)}: cannot be read as a .mat file ({error})") from error
    return content
