"""A zip or tar file of class folders, of train, val and test folders, or of pictures and a labels file."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from patchloom.data.datasets import Source
from patchloom.data.labels.taxonomy import Taxonomy
from patchloom.data.reading import Reading
from patchloom.data.sources.class_folders import open_folder
from patchloom.data.sources.labeled_folder import find_list
from patchloom.data.sources.labels_file import ListFile, open_list, open_listed
from patchloom.data.sources.labels_in_names import open_by_pattern
from patchloom.data.sources.layout import refuse_annotated
from patchloom.data.sources.shards import open_shards
from patchloom.data.trees.archive import ArchiveTree, holds_folders
from patchloom.data.trees.unpack import SUFFIXES as COMPRESSED
from patchloom.data.trees.unpack import is_compressed, plain_tar
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

ARCHIVES = (".zip", ".tar", *COMPRESSED)


def is_archive(file: Path) -> bool:
    """Whether the name is that of a zip or tar file."""
    return file.name.lower().endswith(ARCHIVES)


def open_archive(file: Path, levels: Taxonomy, reading: Reading, strict: bool) -> Source:
    """What an archive holds, decided by its content; WebDataset's shards too."""
    given, note = file, ""
    if not file.name.lower().endswith(".zip") and is_compressed(file):
        file, note = plain_tar(file)
    if file.suffix.lower() == ".tar" and not holds_folders(file) and reading.labels is None:
        source = open_shards([file], f"{printable(given.name)} (tar shards)")
    else:
        source = _open_tree(ArchiveTree(file, given), levels, reading, strict)
    return replace(source, notes=(note, *source.notes)) if note else source


def _open_tree(tree: ArchiveTree, levels: Taxonomy, reading: Reading, strict: bool) -> Source:
    if reading.labels is not None:
        return open_listed(Path(reading.labels), tree, levels, strict, reading.label_column, reading.names_file)
    if reading.label_pattern is not None:
        return open_by_pattern(tree, reading.label_pattern, strict)
    if reading.classes is None:
        refuse_annotated(tree)
    source = open_folder(tree, levels, reading.classes)
    listed = find_list(tree) if np.all(source.train.labels == UNLABELED) else None
    if listed is not None:
        return open_list(ListFile(tree, listed), tree, levels, strict, reading.label_column, reading.names_file)
    return source
