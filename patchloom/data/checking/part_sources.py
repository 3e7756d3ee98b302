"""What the parts of a large check are made of: tar shards, parquet files, or slices of a folder of image files.

Each is opened without the others, so that any number of machines can share the work. A slice consists of consecutive
files of a walk through the folder, in the order of their names. Where one ends depends on the names next to it alone:
files that come or go change the slices they are in, not all that follow. No list of all files is ever held.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from patchloom.data.buckets.remote_file import AnyFile, RemoteFile
from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import file_state
from patchloom.data.labels.similar_names import tidy
from patchloom.data.sources.class_folders import FolderScan, skipped_notes, split_folders, walk_images
from patchloom.data.sources.source import find_source, list_shards, open_shard
from patchloom.data.sources.specs import Data, split_specs
from patchloom.data.splits import group_by_split, name_files
from patchloom.data.trees.tree import FolderTree, below
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

SLICE_FILES = 4096  # of a slice, on average
_LONGEST = 4  # a slice has at most as many times that


@dataclass(frozen=True)
class ShardSource:
    """A tar shard or parquet file. `split` comes from its name and those of the others."""

    file: AnyFile
    split: str

    @property
    def name(self) -> str:
        """A short name, from which that of the part is made."""
        return os.path.splitext(self.file.name)[0]

    @cached_property
    def identity(self) -> str:
        """A text that changes with the content."""
        if isinstance(self.file, RemoteFile):
            return f"{self.file.url}\0{self.file.state}"
        return f"{self.file}\0{file_state(self.file)}"

    def open(self) -> Source:
        """List its images."""
        return tidy(open_shard(self.file))


@dataclass(frozen=True)
class SliceSource:
    """Consecutive image files of a folder."""

    root: Path
    split: str
    paths: Sequence[str]  # below the root
    classes: Sequence[str]  # one per path, '' for none

    @property
    def name(self) -> str:
        """A short name, from which that of the part is made."""
        return self.split

    @cached_property
    def identity(self) -> str:
        """A text that changes with the content."""
        states = hashlib.sha256()
        for path in self.paths:
            states.update(f"{path}\0{file_state(self.root / path)}\0".encode("utf-8", "surrogateescape"))
        return f"{self.root}\0{states.hexdigest()}"

    def open(self) -> Source:
        """List its images."""
        names = tuple(sorted({*self.classes} - {""}))
        number = {name: i for i, name in enumerate(names)} | {"": UNLABELED}
        labels = np.array([number[name] for name in self.classes], dtype=np.int64)
        images = FolderTree(self.root).images(self.paths)
        return tidy(Source(self.root.name, Listing(images, np.arange(len(labels)), labels, names)))


PartSource = ShardSource | SliceSource


@dataclass
class PartSources:
    """All shards or slices of a dataset. `notes` and `empty_classes` are known once all slices were listed."""

    name: str
    shards: Sequence[ShardSource]
    folder: Path | None  # of image files, if there are no shards
    notes: list[str] = field(default_factory=list)
    empty_classes: set[str] = field(default_factory=set)

    def listed(self, part: tuple[int, int] = (1, 1)) -> Iterator[PartSource]:
        """Yield all of them, or one of several shares."""
        number, count = part
        if self.folder is None:
            yield from self.shards[number - 1 :: count]
            return
        for one in self._slices(self.folder):
            # Not the digest that ends slices, of which only some values begin one.
            first = hashlib.blake2b(os.fsencode(one.paths[0]), digest_size=8).digest()
            if int.from_bytes(first, "big") % count == number - 1:
                yield one

    def _slices(self, root: Path) -> Iterator[SliceSource]:
        tree = FolderTree(root)
        self.notes.clear()
        for split, folder in split_folders(tree).items():
            scan = FolderScan()
            has_classes = any(name for _, name in walk_images(tree, folder, frozenset(), FolderScan()))
            paths: list[str] = []
            classes: list[str] = []
            left_out = 0
            for path, name in walk_images(tree, folder, frozenset(), scan):
                if has_classes and not name:
                    left_out += 1
                    continue
                path = os.path.join(folder, path)
                ends = zlib.crc32(os.fsencode(path)) % SLICE_FILES == 0 or len(paths) == _LONGEST * SLICE_FILES
                if paths and ends:
                    yield SliceSource(root, split, tuple(paths), tuple(classes))
                    paths, classes = [], []
                paths.append(path)
                classes.append(name)
            if paths:
                yield SliceSource(root, split, tuple(paths), tuple(classes))
            label = folder or tree.name
            if left_out:
                self.notes.append(f"{label}: {left_out} images outside of the class folders; left out")
            self.notes += skipped_notes(scan, label)
            if any(len(chain) > 1 for chain in scan.folders):
                self.notes.append(f"{label}: nested folders; the classes are the outermost ones")
            self.empty_classes |= scan.empty if has_classes else set()


def list_part_sources(data: Data) -> PartSources:
    """Find the shards of data, or the folder of image files that they are."""
    specs = split_specs(data)
    listed = [list_shards(spec) for spec in specs]
    # Absolute, so that parts do not depend on how a path is written.
    shards = [Path(os.path.abspath(one)) if isinstance(one, Path) else one for files in listed for one in files]
    name = ", ".join(printable(Path(os.path.expanduser(spec)).name) for spec in specs[:3])
    if not shards:
        folder = Path(os.path.abspath(os.path.expanduser(specs[0])))
        if len(specs) > 1 or not folder.is_dir():
            find_source(specs[0])  # names a path that does not exist
            raise UsageError(
                f"{printable(specs[0])}: --out checks tar shards, parquet files or one folder of images; drop --out"
            )
        return PartSources(f"{printable(folder.name)} (class folders)", (), folder)
    if not all(listed):
        files = next(spec for spec, own in zip(specs, listed, strict=True) if not own)
        raise UsageError(f"{printable(files)} has no shards, and other data have; check them separately")
    by_name = name_files(shards)
    splits = group_by_split(list(by_name))
    kind = "parquet" if shards[0].name.lower().endswith(".parquet") else "tar shards"
    notes = [f"not used: {', '.join(splits.unused)}"] if splits.unused else []
    sources = [
        ShardSource(by_name[each], split) for split in ("train", "val", "test") for each in getattr(splits, split)
    ]
    if not sources:
        raise DataError(f"{name}: no shards")
    return PartSources(f"{name} ({kind})", sources, None, notes)


def one_file(root: Path, where: str) -> Listing | None:
    """Return the listing of one image file, by its location; None if it is not in the folder."""
    inside = below(root, where)
    if inside is None:
        return None
    return Listing(FolderTree(root).images([inside]), np.zeros(1, np.int64), np.full(1, UNLABELED), ())
