"""What the user called their data → `Splits`. A path that exists is always taken as a path.

flowers/                     class folders, with train and val folders or not; a saved Hugging Face data set;
                             a folder of parquet files or of tar shards
photos/labels.csv            path,label[,coarse …][,split]; also photos/ with labels=
cifar-*.parquet  a-{000..003}.tar
digits  shapes:count=2000,size=64
torchvision:cifar10@/data    or cifar10 with root=
hf:user/name
"""

import glob
import os
import re
from itertools import product
from pathlib import Path

from patchloom.data.builtin import BUILTIN
from patchloom.data.folder import open_folder, open_labels_file, printable
from patchloom.data.huggingface import is_saved_dataset, open_huggingface
from patchloom.data.parquet import open_parquet
from patchloom.data.sets import ClassTable, PictureSet, Source, Splits
from patchloom.data.shards import open_shards
from patchloom.data.splits import at_level, class_table, make_splits, match, read_taxonomy
from patchloom.data.torchvision_sets import NAMES as TORCHVISION
from patchloom.data.torchvision_sets import open_torchvision
from patchloom.errors import UsageError, nearest

Spec = str | os.PathLike[str]


def open_data(
    spec: Spec,
    *,
    val_fraction: float = 0.2,
    strict: bool = False,
    seed: int = 0,
    root: Spec | None = None,
    level: str | None = None,
    labels: Spec | None = None,
    taxonomy: Spec | None = None,
    labelled: bool = True,
    download: bool = False,
) -> Splits:
    """Train and val of a data set, over one class table.

    `strict` makes classes of val unknown to train, and classes without pictures, errors instead of notes.
    `level` trains on a coarser level; `labels` is a labels file for the folder `spec`; `taxonomy` a file of
    class → coarse class; `labelled=False` accepts pictures without labels; `root` is where torchvision's sets
    lie, and only `download=True` fetches one.
    """
    source = find_source(spec, root=root, labels=labels, taxonomy=taxonomy, strict=strict, download=download)
    return make_splits(
        source, val_fraction=val_fraction, strict=strict, seed=seed, level=level, labelled=labelled
    )


def open_for(
    spec: Spec,
    classes: ClassTable,
    *,
    split: str | None = None,
    val_fraction: float = 0.2,
    strict: bool = False,
    seed: int = 0,
    root: Spec | None = None,
    level: str | None = None,
    labels: Spec | None = None,
    taxonomy: Spec | None = None,
    download: bool = False,
) -> PictureSet:
    """A data set to evaluate a model on: its labels are matched to the model's `classes` by name.

    `split` is 'train', 'val' (held out as `open_data` would, where there is none) or 'all'. By default the val
    split where the data have one, else everything. Classes the model does not know are left out and named in
    `.notes`, or are an error where `strict`.
    """
    if split not in (None, "train", "val", "all"):
        raise UsageError(f"split is {split!r}, expected train, val or all")
    source = find_source(spec, root=root, labels=labels, taxonomy=taxonomy, strict=False, download=download)
    if source.val is None and split in ("train", "val"):
        made = make_splits(source, val_fraction=val_fraction, seed=seed, level=level, labelled=False)
        chosen = made.train if split == "train" else made.val
        assert isinstance(chosen, PictureSet)
    elif split == "all" and source.val is not None:
        raise UsageError(f"{source.name} has train and val; choose one of them")
    else:
        listing = source.train if split == "train" or source.val is None else source.val
        chosen = match(listing, class_table(listing)[0])
        chosen = at_level(chosen, level) if level else chosen
    return _renumber(chosen, classes, source.name, strict)
