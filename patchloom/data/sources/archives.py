"""Zip and tar files of class folders, of train, val and test folders, of images with a labels file, or of shards.

flowers.zip      rose/1.jpg tulip/2.jpg …            read in place
flowers.tar.gz   train/rose/1.jpg val/rose/2.jpg …   read from an uncompressed copy
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from patchloom.data.annotations.layout import refuse_annotated
from patchloom.data.datasets import Source
from patchloom.data.labels.taxonomy import Taxonomy
from patchloom.data.reading_options import Reading
from patchloom.data.sources.class_folders import open_folder
from patchloom.data.sources.labeled_folder import find_list, open_by_pattern
from patchloom.data.sources.labels_file import ListFile, open_list, open_listed
from patchloom.data.sources.shards import open_shard_copy
from patchloom.data.trees.archive import ArchiveTree, holds_folders
from patchloom.data.trees.compressed_tar import SUFFIXES as COMPRESSED
from patchloom.data.trees.compressed_tar import is_compressed, plain_tar
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import printable

ARCHIVES = (".zip", ".tar", *COMPRESSED)


def is_archive(file: Path) -> bool:
    """Return whether the file name is that of a zip or tar file."""
    return file.name.lower().endswith(ARCHIVES)


def open_archive(file: Path, levels: Taxonomy, reading: Reading, strict: bool) -> Source:
    """Open an archive as what its content suggests, WebDataset shards included."""
    content, note = file, ""
    if not file.name.lower().endswith(".zip") and is_compressed(file):
        content, note = plain_tar(file)
    if content.suffix.lower() == ".tar" and not holds_folders(content) and reading.labels is None:
        source = open_shard_copy(content, file, f"{printable(file.name)} (tar shards)")
    else:
        source = _open_tree(ArchiveTree(content, file), levels, reading, strict)
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
