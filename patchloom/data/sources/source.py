"""What the user called their data → `Splits`. A path that exists is always taken as a path.

flowers/                     class folders, with train and val folders or not; a saved Hugging Face data set;
                             a folder of parquet files or of tar shards; pictures with masks, COCO's boxes
                             taxonomy.csv, .json or .yaml beside them: levels above the classes (see `taxonomy`)
photos/labels.csv            path,label[,coarse …][,split]; also photos/ with Reading(labels=…)
flowers.zip  flowers.tar.gz  the same as a folder, read in place (see `archive`)
cifar-*.parquet  a-{000..003}.tar
cats/ dogs/  train/ val/     several, as a list or in one string (see `several`)
digits  shapes:count=2000,size=64
torchvision:cifar10@/data    or cifar10 with root=
hf:user/name
"""

import glob
import math
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.checking.survey import name_unreadable, survey
from patchloom.data.datasets import ClassTable, LabeledImages, Listing, Source, Splits
from patchloom.data.labels.similar_names import tidy
from patchloom.data.labels.taxonomy import Taxonomy, find_taxonomy, level_named, read_taxonomy
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.builtin import open_digits, open_shapes
from patchloom.data.sources.class_folders import list_images, split_folders
from patchloom.data.sources.exclusions import leave_out
from patchloom.data.sources.huggingface import is_saved_dataset, open_huggingface
from patchloom.data.sources.labeled_folder import open_classes
from patchloom.data.sources.labels_file import SUFFIXES as LABELS_FILES
from patchloom.data.sources.labels_file import open_labels_file
from patchloom.data.sources.labels_in_names import open_by_pattern
from patchloom.data.sources.layout import open_layout
from patchloom.data.sources.parquet import open_parquet
from patchloom.data.sources.several_sources import join_sources
from patchloom.data.sources.shards import open_shards
from patchloom.data.sources.torchvision_sets import NAMES as TORCHVISION
from patchloom.data.sources.torchvision_sets import open_torchvision
from patchloom.data.sources.yolo import open_yolo_yaml
from patchloom.data.splits import (
    TEST_NAMES,
    VAL_NAMES,
    coarsen,
    level_of,
    make_splits,
    match,
    usable_classes,
    with_val,
)
from patchloom.data.trees.archive import archive_stem, holds_folders
from patchloom.data.trees.files import FolderTree, ImageFiles
from patchloom.data.trees.open_archive import ARCHIVES, is_archive, open_archive
from patchloom_runtime.errors import DataError, UsageError, nearest, with_near_options
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

Spec = str | os.PathLike[str]
YAML = (".yaml", ".yml")  # of YOLO
MAX_NAMES = 100_000  # that a pattern with braces may stand for


@with_near_options
def open_data(
    spec: Spec | Sequence[Spec],
    *,
    val_fraction: float = 0.2,
    strict: bool = False,
    seed: int = 0,
    root: Spec | None = None,
    level: str | None = None,
    reading: Reading = AS_IT_IS,
    labeled: bool = True,
    download: bool = False,
) -> Splits:
    """Train and val of a data set, over one class table.

    `strict` makes classes of val unknown to train, and classes without pictures, errors instead of notes.
    `level` trains on a coarser level; `reading` says how the data are read: by a labels file, a taxonomy …;
    `labelled=False` accepts pictures without labels; `root` is where torchvision's sets lie, and only `download=True`
    fetches one.

    Where val has to be made, every picture is looked at once (and remembered, see `scan`): those that cannot be read
    are left out, and copies of one picture stay on one side.
    """
    source = find_source(spec, reading=reading, root=root, strict=strict, download=download)
    return split_source(source, val_fraction=val_fraction, strict=strict, seed=seed, level=level, labeled=labeled)


def split_source(source: Source, *, strict: bool = False, level: str | None = None, **splitting: Any) -> Splits:
    """What `open_data` makes of a source; the other options are those of `make_splits`."""
    labeled = splitting.get("labeled", True)
    usable_classes(source, strict=strict, level=level, labeled=labeled)  # before any picture is looked at
    source, copies = _fit_to_split(source)
    return make_splits(source, strict=strict, level=level, copies=copies, **splitting)


def open_for(
    spec: Spec | Sequence[Spec],
    classes: ClassTable,
    *,
    split: str | None = None,
    val_fraction: float = 0.2,
    strict: bool = False,
    seed: int = 0,
    root: Spec | None = None,
    level: str | None = None,
    reading: Reading = AS_IT_IS,
    download: bool = False,
) -> LabeledImages:
    """A data set to evaluate a model on: its labels are matched to the model's `classes` by name.

    `split` is 'train', 'val' (held out as `open_data` would, where there is none), 'test' or 'all'. By default the
    val split where the data have one, else the test split, else everything. Where no `level` is given, it is the one
    that the model's classes are of. Classes the model does not know are left out and named in `.notes`, or are an error
    where `strict`.
    """
    check_split(split)
    source = find_source(spec, reading=reading, root=root, download=download)
    return match_source(source, classes, split=split, val_fraction=val_fraction, strict=strict, seed=seed, level=level)


def check_split(split: str | None) -> None:
    """Raise UsageError if `split` is not the name of a split."""
    if split not in (None, "train", "val", "test", "all"):
        raise UsageError(f"split is {split!r}, expected train, val, test or all")


def match_source(
    source: Source,
    classes: ClassTable,
    *,
    split: str | None = None,
    val_fraction: float = 0.2,
    strict: bool = False,
    seed: int = 0,
    level: str | None = None,
) -> LabeledImages:
    """Return the images of an opened source that a model is evaluated on; the options are those of `open_for`."""
    check_split(split)
    if split == "test" and source.test is None:
        raise UsageError(f"{source.name} has no test split; it has {' and '.join(source.listings)}")
    names = {"": source.train.names} | {level: of.values() for level, of in source.train.levels.items()}
    level = level or level_of(classes.names, names) or None
    if source.val is None and split in ("train", "val"):
        source, copies = _fit_to_split(source)
        made = make_splits(source, val_fraction=val_fraction, seed=seed, level=level, labeled=False, copies=copies)
        chosen = made.train if split == "train" else made.val
        assert isinstance(chosen, LabeledImages)
        listing = Listing(chosen.images, chosen.rows, chosen.labels, chosen.classes.names)
    elif split == "all" and len(source.listings) > 1:
        raise UsageError(f"{source.name} has {' and '.join(source.listings)}; choose one of them")
    else:
        own = source.val if source.val is not None else source.test
        listing = {"train": source.train, "test": source.test}.get(split or "", own) or source.train
        listing = coarsen(listing, level) if level else listing
    matched = match(listing, classes, strict=strict, what=source.name, known_by="the model")
    no_val = "no val split: evaluating "
    no_val += "test" if source.test is not None else "all images (use --split val for the ones held out in training)"
    notes = (
        *source.notes,
        *([no_val] if source.val is None and split is None and not source.is_part else []),
        *matched.notes,
    )
    return replace(matched, notes=notes)


def _fit_to_split(source: Source) -> tuple[Source, list[list[int]]]:
    """What `make_splits` needs to make a val split as `train` does; a source with its own stays as it is."""
    if source.val is not None or not len(source.train):
        return source, []
    seen = survey(source)
    notes = (f"{name_unreadable(seen.unreadable)}; left out",) if seen.unreadable else ()
    return replace(seen.readable(), notes=(*source.notes, *notes)), seen.copies()


def find_source(
    spec: Spec | Sequence[Spec],
    *,
    reading: Reading = AS_IT_IS,
    root: Spec | None = None,
    strict: bool = False,
    download: bool = False,
) -> Source:
    """Decide what `spec` is, one or several, and list it; classes are not matched yet."""
    inside = replace(reading, without=None, val=None)  # these two are said of the whole
    source = _find(spec, inside, root, strict, download)
    if not len(source.train) and source.val is None:
        raise DataError(f"{source.name}: no pictures inside; expected at least one")
    if reading.without is not None:
        source = leave_out(source, Path(os.path.expanduser(reading.without)))
    return tidy(with_val(source, reading.val) if reading.val else source)


def _find(spec: Spec | Sequence[Spec], reading: Reading, root: Spec | None, strict: bool, download: bool) -> Source:
    several = split_specs(spec)
    if len(several) > 1:
        return _find_several(several, reading, root, strict, download)
    given = several[0]
    path = Path(os.path.expanduser(given))
    within = _split_of_a_set(path, reading, strict)
    if within is not None:
        return within
    own = Path(reading.taxonomy) if reading.taxonomy is not None else find_taxonomy(path)
    levels = read_taxonomy(own) if own is not None else {}
    _check_reading(reading, path)
    if reading.names is not None and os.path.isfile(path / reading.names):
        reading = replace(reading, names=path / reading.names)
    if reading.labels is not None and not is_archive(path):
        return open_labels_file(Path(reading.labels), path, levels, strict, reading.label_column, reading.names_file)
    if reading.label_pattern is not None and os.path.isdir(path):
        images = path / reading.images if reading.images is not None else path
        source = open_by_pattern(FolderTree(images), reading.label_pattern, strict)
    elif os.path.isdir(path):
        source = _open_directory(path, levels, reading, strict)
    elif os.path.isfile(path):
        source = _open_file(path, levels, reading, strict)
    elif files := _matching(given):
        return _find_several(files, reading, root, strict, download, printable(path.name))
    elif os.path.lexists(path):
        raise DataError(f"{printable(path)}: neither a file nor a folder, or a link to nothing; expected data")
    else:
        source = _open_named(given, Path(root) if root is not None else None, download)

    def leveled(listing: Listing | None) -> Listing | None:
        return listing and replace(listing, levels={**listing.levels, **levels})

    train = leveled(source.train)
    assert train is not None
    return replace(source, train=train, val=leveled(source.val), test=leveled(source.test))


def split_specs(spec: Spec | Sequence[Spec]) -> list[str]:
    """The files and folders that were given, as a list or, quoted as a shell would, in one string: 'cats/ dogs/'.

    A path that exists, or a name, is one; a string of several is split only where all of its parts exist.
    """
    if not isinstance(spec, str | os.PathLike):
        given = [os.fspath(one) for one in spec]
        if not given:
            raise UsageError("no data were given; expected a folder, a file or a name")
        return given
    whole = os.fspath(spec)
    if " " not in whole or os.path.exists(os.path.expanduser(whole)):
        return [whole]
    try:
        parts = shlex.split(whole)
    except ValueError:
        return [whole]
    return parts if all(os.path.exists(os.path.expanduser(part)) for part in parts) else [whole]


def join_specs(specs: Sequence[Spec]) -> str:
    """Several files and folders as the string that `parts_of` takes apart; one alone stays as it is."""
    given = [os.fspath(spec) for spec in specs]
    return shlex.join(given) if len(given) > 1 else given[0]


def _find_several(
    specs: Sequence[str], reading: Reading, root: Spec | None, strict: bool, download: bool, name: str = ""
) -> Source:
    if reading.labels is not None:
        raise UsageError(f"--labels goes with one folder or archive; {len(specs)} were given")
    paths = [Path(os.path.expanduser(spec)) for spec in specs]
    ends = {path.suffix.lower() for path in paths}
    if ends == {".parquet"} or (ends == {".tar"} and all(map(os.path.isfile, paths)) and not holds_folders(paths[0])):
        shown = ", ".join(printable(path.name) for path in paths[:3]) + (" …" if len(paths) > 3 else "")
        return _open_files(paths, name or shown)
    sources = [find_source(spec, reading=reading, root=root, strict=strict, download=download) for spec in specs]
    return join_sources([printable(archive_stem(path.resolve())) for path in paths], sources)


def _check_reading(reading: Reading, path: Path) -> None:
    """Options that nobody would read are refused."""
    if reading.labels is not None and reading.label_pattern is not None:
        raise UsageError("--labels and --label-pattern both say the classes; give one of them")
    table = reading.labels is not None or path.suffix.lower() in LABELS_FILES or is_archive(path)
    if reading.label_column is not None and not table:
        raise UsageError("--label-column chooses a column of a labels file; give one with --labels")
    folder = {"images": reading.images, "masks": reading.masks, "boxes": reading.boxes, "ignore": reading.ignore}
    if (given := [name for name, value in folder.items() if value is not None]) and not os.path.isdir(path):
        raise UsageError(f"--{given[0]} is about what lies in a folder; given {printable(path)}, which is none")
    if reading.names is not None and not (table or os.path.isdir(path)):
        raise UsageError(f"--names names class numbers of a folder or a labels file; given {printable(path)}")
    if reading.label_pattern is not None and not (os.path.isdir(path) or is_archive(path)):
        raise UsageError(f"--label-pattern reads the names of files in a folder or archive; given {printable(path)}")


def _split_of_a_set(path: Path, reading: Reading, strict: bool) -> Source | None:
    """photos/test, where photos/train is beside it: what is said about photos says its classes; else None."""
    beside = (
        os.path.isdir(path)
        and path.name.lower() in (*VAL_NAMES, *TEST_NAMES)
        and split_folders(FolderTree(path.parent))
    )
    if not beside or not beside["train"]:
        return None
    whole = find_source(path.parent, reading=reading, strict=strict)
    for listing in whole.listings.values():
        inside = np.array([listing.images.key(row).startswith(f"{path.name}/") for row in listing.rows.tolist()])
        if np.any(inside):
            own = replace(listing, rows=listing.rows[inside], labels=listing.labels[inside])
            said = f"{printable(path.name)} of {whole.name}, whose folders and levels say the classes"
            return Source(f"{printable(path.name)} of {whole.name}", own, None, (said,), is_part=True)
    return None


@dataclass(frozen=True)
class LabeledFiles:
    """Image files with their classes, and the levels above these."""

    files: tuple[tuple[str, str], ...]  # path, class; '' for none
    levels: dict[str, dict[str, str]]  # level → {class: coarse class}
    level: str = ""  # the one asked for, or that has most of a model's classes; '' is the classes themselves

    def at(self, level: str) -> list[tuple[str, str]]:
        """The files with their classes at a level; a class that it does not know keeps its name."""
        coarse = self.levels[level] if level else {}
        return [(file, coarse.get(label, label)) for file, label in self.files]


def list_labeled(
    root: Path, classes: Sequence[str], *, reading: Reading = AS_IT_IS, level: str | None = None
) -> LabeledFiles:
    """Every image file below `root` with its class, as training would read it.

    Its level is `level`, or else the one that has most of a model's `classes`.
    """
    files = list_images(root)
    if not files:
        raise DataError(f"{printable(root)}: no images found")
    try:
        source = find_source(root, reading=reading)
    except DataError:
        if reading != AS_IT_IS or level:
            raise
        return LabeledFiles(tuple((file, "") for file in files), {})  # a collection need not be a data set
    known: dict[str, str] = {}
    levels: dict[str, dict[str, str]] = {}
    for listing in source.listings.values():
        if isinstance(listing.images, ImageFiles):
            rows = zip(listing.rows.tolist(), listing.labels.tolist(), strict=True)
            home, key = listing.images.root, listing.images.key
            known |= {os.path.join(home, key(row)): listing.names[n] for row, n in rows if n != UNLABELED}
            for name, of in listing.levels.items():
                levels.setdefault(name, {}).update({own: of[own] for own in listing.names if own in of})
    names = {"": source.train.names} | {name: of.values() for name, of in source.train.levels.items()}
    own = level_named(level, levels) if level else level_of(classes, names) or ""
    of_files = tuple((file, known.get(file, "")) for file in files)
    return LabeledFiles(of_files, levels, own if own in levels else "")


def _open_directory(path: Path, levels: Taxonomy, reading: Reading, strict: bool) -> Source:
    name = printable(path.resolve().name)
    if is_saved_dataset(path):
        return open_huggingface(os.fspath(path))
    for suffix, opener, kind in ((".parquet", open_parquet, "parquet"), (".tar", open_shards, "tar shards")):
        files = sorted(path.glob(f"*{suffix}"))
        if files:
            return opener(files, f"{name} ({kind})")
    return open_layout(path, reading, lambda folder: open_classes(folder, levels, reading, strict))


def _open_file(path: Path, levels: Taxonomy, reading: Reading, strict: bool) -> Source:
    if path.suffix.lower() in LABELS_FILES:
        return open_labels_file(path, None, levels, strict, reading.label_column, reading.names_file)
    if path.suffix.lower() in YAML:
        return open_yolo_yaml(path)
    if is_archive(path):
        return open_archive(path, levels, reading, strict)
    return _open_files([path], printable(path.name))


def _open_files(files: list[Path], name: str) -> Source:
    suffix = files[0].suffix.lower()
    if suffix == ".parquet":
        return open_parquet(files, f"{name} (parquet)")
    if suffix == ".tar":
        return open_shards(files, f"{name} (tar shards)")
    known = ", ".join((".parquet", *ARCHIVES, *LABELS_FILES, *YAML))
    raise UsageError(f"{printable(files[0])} is a {suffix or 'plain'} file; expected one of {known}, or a folder")


def _open_named(given: str, root: Path | None, download: bool) -> Source:
    kind, _, rest = given.partition(":")
    if kind == "hf":
        return open_huggingface(rest)
    if kind == "torchvision" or given.partition("@")[0] in TORCHVISION:
        name, _, place = (rest if kind == "torchvision" else given).partition("@")
        return open_torchvision(name, Path(place).expanduser() if place else root, download=download)
    if kind == "digits" and not rest:
        return open_digits()
    if kind == "shapes":
        return open_shapes(rest)
    raise UsageError(f"{printable(given)} is neither a path nor a known data set.{_nearest_path(given)}")


def _matching(given: str) -> list[str]:
    """The files and folders that a pattern names."""
    if not any(letter in given for letter in "*?[{"):
        return []
    return [found for pattern in _expand_braces(given) for found in sorted(glob.glob(pattern))]


def _expand_braces(pattern: str) -> list[str]:
    """a-{000..003}.tar → a-000.tar … a-003.tar; {x,y} likewise."""
    parts = re.split(r"\{([^{}]+)\}", pattern)
    choices: list[Sequence[str]] = []
    for i, part in enumerate(parts):
        span = re.fullmatch(r"(\d+)\.\.(\d+)", part)
        if i % 2 == 0:
            choices.append([part])
        elif span:
            first, last = span.groups()
            numbers = range(int(first), int(last) + 1)
            _refuse_many(pattern, len(numbers))
            choices.append([f"{n:0{len(first)}d}" for n in numbers])
        else:
            choices.append(part.split(","))
    _refuse_many(pattern, math.prod(map(len, choices)))
    return ["".join(chosen) for chosen in product(*choices)]


def _refuse_many(pattern: str, names: int) -> None:
    if names > MAX_NAMES:
        raise UsageError(f"{printable(pattern)} stands for {names:,} files or more; expected at most {MAX_NAMES:,}")


def _nearest_path(given: str) -> str:
    """What may have been meant: a neighbour of the path in the last folder that exists, or a known name."""
    path = Path(os.path.expanduser(given))
    while not os.path.isdir(path.parent):
        path = path.parent
    known = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        known = [printable(entry.name) for entry in entries]
    if os.sep not in given:
        known += ["digits", "shapes", *TORCHVISION]
    return nearest(printable(path.name), known)
