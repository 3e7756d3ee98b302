"""Open the data that a user names. `find_source` decides what it is and lists it; `open_data` also makes the splits.

    flowers/                     class folders, with or without train and val folders; a saved Hugging Face dataset;
                                 a folder of parquet files or of tar shards; images with masks or boxes;
                                 taxonomy.csv, .json or .yaml in it: levels above the classes (see `taxonomy`)
    photos/labels.csv            path,label[,coarse …][,split]; also photos/ with Reading(labels=…)
    flowers.zip  flowers.tar.gz  the same as a folder, read in place (see `archives`)
    cifar-*.parquet  a-{000..003}.tar
    cats/ dogs/  train/ val/     several, as a list or in one string (see `several_sources`)
    s3://bucket/flowers/         tar shards or parquet files in a bucket: also gs://, az:// and https:// (see `buckets`)
    digits  shapes:count=2000,size=64
    torchvision:cifar10@/data    or cifar10 with root=
    hf:user/name

Python code may pass a Dataset, arrays, a list of (image, target), a table or a dict of splits (see `python_objects`).
An existing path is always taken as a path.

A new format is a file next to this one whose function returns a `Source`, and a branch of `_open_directory`,
`_open_file` or `_open_named`. docs/internals/tour.md has all steps.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.annotations.layout import open_layout
from patchloom.data.annotations.yolo import open_yolo_yaml
from patchloom.data.buckets.remote_file import AnyFile, RemoteFolder, remote_file
from patchloom.data.checking.survey import is_scanned, name_unreadable, survey
from patchloom.data.datasets import ClassTable, LabeledImages, Listing, Source, Splits
from patchloom.data.labels.similar_names import tidy
from patchloom.data.labels.taxonomy import Taxonomy, find_taxonomy, read_taxonomy
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.archives import ARCHIVES, is_archive, open_archive
from patchloom.data.sources.builtin import open_digits, open_shapes
from patchloom.data.sources.class_folders import split_folders
from patchloom.data.sources.corrections import correct
from patchloom.data.sources.exclusions import leave_out
from patchloom.data.sources.huggingface import is_saved_dataset, open_huggingface
from patchloom.data.sources.labeled_folder import find_list, open_by_pattern, open_classes
from patchloom.data.sources.labels_file import SUFFIXES as LABELS_FILES
from patchloom.data.sources.labels_file import open_labels_file
from patchloom.data.sources.parquet import open_parquet
from patchloom.data.sources.python_objects import PREFIX, Examples, PythonData
from patchloom.data.sources.several_sources import join_sources
from patchloom.data.sources.shards import check_shard_folder, open_shards
from patchloom.data.sources.specs import Data, Spec, expand_braces, is_url, matching_paths, nearest_path, split_specs
from patchloom.data.sources.torchvision_sets import NAMES as TORCHVISION
from patchloom.data.sources.torchvision_sets import open_torchvision
from patchloom.data.splits import (
    TEST_NAMES,
    VAL_NAMES,
    coarsen,
    level_of,
    listings_by_split,
    make_splits,
    match,
    usable_classes,
    with_val,
)
from patchloom.data.trees.archive import archive_stem, holds_folders
from patchloom.data.trees.tree import FolderTree
from patchloom_runtime.errors import DataError, UsageError, with_near_options
from patchloom_runtime.printable import printable

YAML = (".yaml", ".yml")  # of YOLO
IN_BUCKETS = (".parquet", ".tar")


@with_near_options
def open_data(
    spec: Data,
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
    """Open a dataset as train, val and test splits over one class table.

    If a val split has to be made, every image is read once (and remembered, see `scan`): unreadable ones are left out,
    and copies of one image stay on one side.

    Args:
        spec: A path, a name or a pattern, several of them, or Python objects (see `python_objects`).
        val_fraction: Share of train to hold out if there is no val split.
        strict: Raise errors, instead of adding notes, for classes of val unknown to train and for empty classes.
        seed: Seed of the held-out split.
        root: Folder of torchvision's datasets.
        level: Train on this coarser level of labels.
        reading: How to read the data: a labels file, a taxonomy …
        labeled: False accepts images without labels.
        download: Download torchvision's datasets if they are missing.
    """
    source = find_source(spec, reading=reading, root=root, strict=strict, download=download)
    return split_source(source, val_fraction=val_fraction, strict=strict, seed=seed, level=level, labeled=labeled)


def split_source(source: Source, *, strict: bool = False, level: str | None = None, **splitting: Any) -> Splits:
    """Split a source as `open_data` does. The other options are those of `make_splits`."""
    labeled = splitting.get("labeled", True)
    usable_classes(source, strict=strict, level=level, labeled=labeled)  # before any image is read
    source, copies = _scan_to_split(source)
    return make_splits(source, strict=strict, level=level, copies=copies, **splitting)


def open_for(
    spec: Data,
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
    """Open a dataset to evaluate a model on, with labels matched to the model's `classes` by name.

    Classes that the model does not know are left out and named in `.notes`, or are an error with `strict`.

    Args:
        spec: A path, a name or a pattern, several of them, or Python objects (see `python_objects`).
        classes: The model's classes.
        split: 'train', 'val' (held out as by `open_data` if there is none), 'test' or 'all'. By default val, or else
            test, or else everything.
        val_fraction: Share of train to hold out if there is no val split.
        strict: Raise an error for classes that the model does not know.
        seed: Seed of the held-out split.
        root: Folder of torchvision's datasets.
        level: Level of the labels (default: the one with most of the model's classes).
        reading: How to read the data.
        download: Download torchvision's datasets if they are missing.
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
    names = {"": source.train.names} | {level: of.values() for level, of in source.train.levels.items()}
    level = level or level_of(classes.names, names) or None
    if source.val is None and split in ("train", "val"):
        source, copies = _scan_to_split(source)
        made = make_splits(source, val_fraction=val_fraction, seed=seed, level=level, labeled=False, copies=copies)
        chosen = made.train if split == "train" else made.val
        assert isinstance(chosen, LabeledImages)
        listing = Listing(chosen.images, chosen.rows, chosen.labels, chosen.classes.names, targets=chosen.targets)
    else:
        listing = _chosen_listing(source, split)
        listing = coarsen(listing, level) if level else listing
    matched = match(listing, classes, strict=strict, what=source.name, known_by="the model")
    notes = source.notes
    if source.val is None and split is None and not source.is_part:
        everything = "all images (use --split val for the ones held out in training)"
        notes += (f"no val split: evaluating {'test' if source.test is not None else everything}",)
    return replace(matched, notes=(*notes, *matched.notes))


def _chosen_listing(source: Source, split: str | None) -> Listing:
    has = " and ".join(source.listings)
    if split == "test" and source.test is None:
        raise UsageError(f"{source.name} has no test split; it has {has}")
    if split == "all" and len(source.listings) > 1:
        raise UsageError(f"{source.name} has {has}; choose one of them")
    held_out = source.val if source.val is not None else source.test
    return {"train": source.train, "test": source.test}.get(split or "", held_out) or source.train


def _scan_to_split(source: Source) -> tuple[Source, list[list[int]]]:
    """Return the readable images and the copies that `make_splits` needs to make a val split, if there is none."""
    if source.val is not None or not len(source.train) or not is_scanned(source):
        return source, []
    scanned = survey(source)
    notes = (f"{name_unreadable(scanned.unreadable)}; left out",) if scanned.unreadable else ()
    return replace(scanned.readable(), notes=(*source.notes, *notes)), scanned.copies()


def find_source(
    spec: Data,
    *,
    reading: Reading = AS_IT_IS,
    root: Spec | None = None,
    strict: bool = False,
    download: bool = False,
) -> Source:
    """Decide what `spec` is, one dataset or several, and list its images. Classes are not matched yet."""
    inside = replace(reading, exclude=None, corrections=None, val=None)  # these apply to the whole dataset
    opening = _Opening(inside, Path(root) if root is not None else None, strict, download)
    source = _find(spec, opening)
    if not len(source.train) and source.val is None:
        raise DataError(f"{source.name}: no images inside; expected at least one")
    if reading.corrections is not None:
        source = correct(source, Path(os.path.expanduser(reading.corrections)))
    if reading.exclude is not None:
        source = leave_out(source, Path(os.path.expanduser(reading.exclude)))
    return tidy(with_val(source, reading) if reading.val else source)


@dataclass(frozen=True)
class _Opening:
    """The options of `find_source`."""

    reading: Reading
    root: Path | None
    strict: bool
    download: bool

    def find_source(self, spec: Spec) -> Source:
        return find_source(spec, reading=self.reading, root=self.root, strict=self.strict, download=self.download)


def _find(spec: Data, opening: _Opening) -> Source:
    specs = split_specs(spec)
    if len(specs) > 1:
        return _find_several(specs, opening)
    name, reading, strict = specs[0], opening.reading, opening.strict
    if isinstance(name, PythonData):
        return _open_objects(name, opening)
    if is_url(name):
        return _open_bucket(name, opening)
    path = Path(os.path.expanduser(name))
    if (part := _open_split_folder(path, opening)) is not None:
        return part
    taxonomy = Path(reading.taxonomy) if reading.taxonomy is not None else find_taxonomy(path)
    levels = read_taxonomy(taxonomy) if taxonomy is not None else {}
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
    elif files := matching_paths(name):
        return _find_several(files, opening, printable(path.name))
    elif os.path.lexists(path):
        raise DataError(f"{printable(path)}: neither a file nor a folder, or a link to nothing; expected data")
    else:
        source = _open_named(name, opening.root, opening.download)
    return _with_levels(source, levels)


def _open_bucket(url: str, opening: _Opening) -> Source:
    """Open a folder of shards or parquet files in a bucket, one of its files, or those that braces in a name mean."""
    reading = opening.reading
    if unread := [name for name in reading.chosen() if name != "taxonomy"]:
        option = unread[0].replace("_", "-")
        raise UsageError(f"--{option} describes local files, and {printable(url)} is in a bucket; drop it")
    levels = read_taxonomy(Path(reading.taxonomy)) if reading.taxonomy is not None else {}
    name = printable(url.rstrip("/").rpartition("/")[2])
    if url.lower().endswith(IN_BUCKETS):
        files: list[AnyFile] = [remote_file(one) for one in expand_braces(url)]
        return _with_levels(_open_files(files, name), levels)
    listed = RemoteFolder(url.rstrip("/")).files()
    for suffix in IN_BUCKETS:
        if files := [file for file in listed if file.name.lower().endswith(suffix)]:
            check_shard_folder(listed, printable(url))
            return _with_levels(_open_files(files, name), levels)
    raise UsageError(
        f"{printable(url)}: {len(listed):,} files, none of them {' or '.join(IN_BUCKETS)}; "
        f"`patchloom pack FOLDER --out {printable(url)}` writes such shards"
    )


def list_shards(spec: Spec) -> list[AnyFile]:
    """Return the tar shards or parquet files that a spec names, without opening them; none for other data."""
    name = os.fspath(spec)
    if is_url(name):
        if name.lower().endswith(IN_BUCKETS):
            return [remote_file(one) for one in expand_braces(name)]
        listed: Sequence[AnyFile] = RemoteFolder(name.rstrip("/")).files()
    else:
        path = Path(os.path.expanduser(name))
        if os.path.isfile(path):
            suffix = path.suffix.lower()
            return [path] if suffix == ".parquet" or (suffix == ".tar" and not holds_folders(path)) else []
        if not os.path.isdir(path) or is_saved_dataset(path):
            return []
        listed = [file for file in sorted(path.iterdir()) if file.suffix in (*IN_BUCKETS, ".json")]
    for suffix in IN_BUCKETS:
        if files := [file for file in listed if file.name.lower().endswith(suffix)]:
            check_shard_folder(listed, printable(name))
            return files
    if is_url(name):
        raise UsageError(f"{printable(name)}: {len(listed):,} files, none of them {' or '.join(IN_BUCKETS)}")
    return []


def open_shard(shard: AnyFile, reading: Reading = AS_IT_IS) -> Source:
    """Open one tar shard or parquet file of a dataset."""
    levels = read_taxonomy(Path(reading.taxonomy)) if reading.taxonomy is not None else {}
    return _with_levels(_open_files([shard], shard.name), levels)


def _open_objects(data: PythonData, opening: _Opening) -> Source:
    """Open Python objects. A split that is a path must have one split itself."""
    reading = opening.reading
    read = ("label_column", "taxonomy")
    if unread := [name for name in reading.chosen() if name not in read]:
        raise UsageError(f"{unread[0]} describes files, and the data are Python objects; drop it")
    levels = read_taxonomy(Path(reading.taxonomy)) if reading.taxonomy is not None else {}
    listings: dict[str, Listing] = {}
    notes: list[str] = []
    names: list[str] = []
    for split, part in data.splits.items():
        if isinstance(part, Examples):
            listings[split] = part.listing(reading.label_column)
            notes += part.notes
            names.append(part.name)
            continue
        source = opening.find_source(part)
        if len(source.listings) > 1:
            raise UsageError(f"{source.name} has {' and '.join(source.listings)}; expected the images of {split} alone")
        listings[split] = source.train
        notes += source.notes
        names.append(source.name)
    val, test = listings.get("val"), listings.get("test")
    whole = data.splits["train"]
    if len(listings) == 1 and isinstance(whole, Examples) and (rows := whole.split_names()) is not None:
        listings["train"], val, test, more = listings_by_split(listings["train"], rows)
        notes += more
    title = ", ".join(dict.fromkeys(names))
    return _with_levels(Source(title, listings["train"], val, tuple(dict.fromkeys(notes)), test=test), levels)


def _with_levels(source: Source, levels: Taxonomy) -> Source:
    def leveled(listing: Listing | None) -> Listing | None:
        return listing and replace(listing, levels={**listing.levels, **levels})

    train = leveled(source.train)
    assert train is not None
    return replace(source, train=train, val=leveled(source.val), test=leveled(source.test))


def _find_several(specs: Sequence[str], opening: _Opening, name: str = "") -> Source:
    if opening.reading.labels is not None:
        raise UsageError(f"--labels works with one folder or archive; {len(specs)} were given")
    kinds = {os.path.splitext(spec)[1].lower() for spec in specs}
    if all(map(is_url, specs)) and len(kinds) == 1 and kinds < set(IN_BUCKETS):
        names = ", ".join(printable(spec.rpartition("/")[2]) for spec in specs[:3]) + (" …" if len(specs) > 3 else "")
        return _open_files([remote_file(one) for spec in specs for one in expand_braces(spec)], names)
    paths = [Path(os.path.expanduser(spec)) for spec in specs]
    ends = {path.suffix.lower() for path in paths}
    if ends == {".parquet"} or (ends == {".tar"} and all(map(os.path.isfile, paths)) and not holds_folders(paths[0])):
        names = ", ".join(printable(path.name) for path in paths[:3]) + (" …" if len(paths) > 3 else "")
        return _open_files(paths, name or names)
    sources = [opening.find_source(spec) for spec in specs]
    return join_sources([printable(archive_stem(path.resolve())) for path in paths], sources)


def _check_reading(reading: Reading, path: Path) -> None:
    """Raise UsageError for options that do not apply to the data."""
    if reading.labels is not None and reading.label_pattern is not None:
        raise UsageError("--labels and --label-pattern both define the classes; pass one of them")
    table = reading.labels is not None or path.suffix.lower() in LABELS_FILES or is_archive(path)
    if reading.label_column is not None and not table and not (os.path.isdir(path) and find_list(FolderTree(path))):
        raise UsageError("--label-column chooses a column of a labels file; pass one with --labels")
    folder = {"images": reading.images, "masks": reading.masks, "boxes": reading.boxes, "ignore": reading.ignore}
    if (used := [name for name, value in folder.items() if value is not None]) and not os.path.isdir(path):
        raise UsageError(f"--{used[0]} describes the content of a folder, and {printable(path)} is not a folder")
    if reading.names is not None and not (table or os.path.isdir(path)):
        raise UsageError(f"--names names class numbers of a folder or a labels file, and {printable(path)} is neither")
    if reading.label_pattern is not None and not (os.path.isdir(path) or is_archive(path)):
        raise UsageError(f"--label-pattern reads file names in a folder or archive, and {printable(path)} is neither")


def _open_split_folder(path: Path, opening: _Opening) -> Source | None:
    """Open a folder such as photos/test with the classes of photos, if photos/train exists; else return None."""
    is_split = os.path.isdir(path) and path.name.lower() in (*VAL_NAMES, *TEST_NAMES)
    if not is_split or not split_folders(FolderTree(path.parent))["train"]:
        return None
    whole = find_source(path.parent, reading=opening.reading, strict=opening.strict)
    for listing in whole.listings.values():
        inside = np.array([listing.images.key(row).startswith(f"{path.name}/") for row in listing.rows.tolist()])
        if np.any(inside):
            part = listing.subset(inside)
            name = f"{printable(path.name)} of {whole.name}"
            return Source(name, part, None, (f"{name}, whose folders and levels define the classes",), is_part=True)
    return None


def _open_directory(path: Path, levels: Taxonomy, reading: Reading, strict: bool) -> Source:
    name = printable(path.resolve().name)
    if is_saved_dataset(path):
        return open_huggingface(os.fspath(path))
    for suffix, opener, kind in ((".parquet", open_parquet, "parquet"), (".tar", open_shards, "tar shards")):
        files = sorted(path.glob(f"*{suffix}"))
        if files:
            if suffix == ".tar":
                check_shard_folder([*files, *path.glob("*.json")], printable(path))
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


def _open_files(files: Sequence[AnyFile], name: str) -> Source:
    suffix = os.path.splitext(files[0].name)[1].lower()
    if suffix == ".parquet":
        return open_parquet(files, f"{name} (parquet)")
    if suffix == ".tar":
        return open_shards(files, f"{name} (tar shards)")
    known = ", ".join((".parquet", *ARCHIVES, *LABELS_FILES, *YAML))
    raise UsageError(f"{printable(str(files[0]))} is a {suffix or 'plain'} file; expected one of {known}, or a folder")


def _open_named(name: str, root: Path | None, download: bool) -> Source:
    kind, _, rest = name.partition(":")
    if kind == "hf":
        return open_huggingface(rest)
    if kind == "torchvision" or name.partition("@")[0] in TORCHVISION:
        dataset, _, place = (rest if kind == "torchvision" else name).partition("@")
        return open_torchvision(dataset, Path(place).expanduser() if place else root, download=download)
    if kind == "digits" and not rest:
        return open_digits()
    if kind == "shapes":
        return open_shapes(rest)
    if name.startswith(PREFIX):
        raise UsageError(
            f"{name} names Python objects, which are not stored; pass them again from Python, such as "
            "patchloom.evaluate(run, data)"
        )
    hint = nearest_path(name, ["digits", "shapes", *TORCHVISION])
    raise UsageError(f"{printable(name)} is neither a path nor a known dataset.{hint}")
