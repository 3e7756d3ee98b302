"""Standard datasets in torchvision's layout, with the splits that papers use.

    torchvision:cifar10@/data      /data/cifar-10-batches-py/…, as torchvision.datasets.CIFAR10(root="/data") has it

torchvision finds, verifies and (only on request) downloads them; their files are then read like any others.
"""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from patchloom.data.datasets import Listing, Source
from patchloom.data.images.image_store import ArrayImages
from patchloom.data.sources.class_folders import list_classes
from patchloom.data.trees.tree import ImageFiles
from patchloom_runtime.errors import DataError, UsageError, nearest

# name → (class in torchvision.datasets, its train splits, its test split)
_BY_PATH: dict[str, tuple[str, tuple[str, ...], str]] = {
    # 2,040 and 6,149 images, as in the transfer experiments of DeiT and ResMLP.
    "flowers102": ("Flowers102", ("train", "val"), "test"),
    "stanford_cars": ("StanfordCars", ("train",), "test"),
    "food101": ("Food101", ("train",), "test"),
    "oxford_pets": ("OxfordIIITPet", ("trainval",), "test"),
}
_CIFAR = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}
_FOLDERS = {"imagenet": ("train", "val"), "inaturalist": ("2021_train", "2021_valid")}
_INATURALIST_LEVELS = ("kingdom", "phylum", "class", "order", "family", "genus")
NAMES = tuple(sorted((*_BY_PATH, *_CIFAR, *_FOLDERS)))


def open_torchvision(name: str, root: Path | None, *, download: bool = False) -> Source:
    """Open the dataset `name` in `root`. It is downloaded only with `download`."""
    if name not in NAMES:
        raise UsageError(f"no torchvision dataset {name!r}; known are {', '.join(NAMES)}.{nearest(name, NAMES)}")
    if root is None:
        raise UsageError(f"{name} needs its folder: torchvision:{name}@/path/to/root, or root=")
    if not root.is_dir() and not download:
        raise UsageError(f"{name}: {root} is not a folder; expected torchvision's copy of the dataset in it")
    title = f"{name} (torchvision)"
    if name in _FOLDERS:
        return Source(title, *_folder_splits(name, root))
    if name in _CIFAR:
        return Source(title, _cifar(name, root, True, download), test=_cifar(name, root, False, download))
    _, train_splits, test_split = _BY_PATH[name]
    test = _by_path(name, root, (test_split,), download)
    return Source(title, _by_path(name, root, train_splits, download), test=test)


def _construct(name: str, class_name: str, root: Path, download: bool, **options: Any) -> Any:
    from torchvision import datasets

    try:
        return getattr(datasets, class_name)(root, download=download, **options)
    except ImportError:
        raise UsageError(f"{name} needs scipy to read its labels; pip install 'patchloom[digits]'") from None
    except (RuntimeError, OSError) as error:
        cause = str(error).splitlines()[0]
        raise UsageError(
            f"{name} is not complete in {root} ({cause}); allow the download once (download=True), "
            f"or fetch it yourself as torchvision.datasets.{class_name} describes"
        ) from error


def _folder_splits(name: str, root: Path) -> tuple[Listing, Listing, tuple[str, ...]]:
    """Open datasets of plain class folders. The folder names of iNaturalist contain its taxonomy."""
    splits = _FOLDERS[name]
    for split in splits:
        if not (root / split).is_dir():
            raise UsageError(
                f"{name} is not complete in {root}: no folder {split}; "
                f"expected {' and '.join(splits)}, each with one folder per class"
            )
    (train, notes), (val, val_notes) = (list_classes(root, split, {}) for split in splits)
    if name == "inaturalist":
        levels = _inaturalist_levels(train.names)
        train, val = replace(train, levels=levels), replace(val, levels=levels)
    return train, val, notes + val_notes


def _inaturalist_levels(folders: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the levels in '00001_kingdom_phylum_…'. A genus in two kingdoms (Prunella) is named by its path."""
    pieces = {folder: folder.split("_") for folder in folders}
    levels = {}
    for i, level in enumerate(_INATURALIST_LEVELS, start=1):
        known = {folder: words[1 : i + 1] for folder, words in pieces.items() if len(words) > i}
        paths = Counter(path[-1] for path in {tuple(path) for path in known.values()})
        levels[level] = {folder: path[-1] if paths[path[-1]] == 1 else "_".join(path) for folder, path in known.items()}
    return levels


def _cifar(name: str, root: Path, train: bool, download: bool) -> Listing:
    dataset = _construct(name, _CIFAR[name], root, download, train=train)
    labels = np.array(dataset.targets, dtype=np.int64)
    names = tuple(dataset.classes)
    split = "train" if train else "test"
    levels = {}
    if name == "cifar100":
        # torchvision drops the 20 superclasses. It has just verified the checksums of these files.
        folder = root / dataset.base_folder
        coarse = _unpickle(folder / split)["coarse_labels"]
        coarse_names = _unpickle(folder / dataset.meta["filename"])["coarse_label_names"]
        levels["coarse"] = {names[f]: coarse_names[c] for f, c in {*zip(dataset.targets, coarse, strict=True)}}
    return Listing(ArrayImages(dataset.data, f"{name} {split}"), np.arange(len(labels)), labels, names, levels)


class _ArraysOnly(pickle.Unpickler):
    """Unpickler for CIFAR's files: dicts and lists of numbers and names. Anything else could run code."""

    allowed = frozenset(
        {
            ("_codecs", "encode"),
            ("numpy", "dtype"),
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy._core.numeric", "_frombuffer"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few globals that numpy arrays need."""
        if (module, name) not in self.allowed:
            raise DataError(f"would call {module}.{name}, which no dataset needs. Refused; download the dataset again")
        return super().find_class(module, name)


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return dict(_ArraysOnly(file, encoding="latin1").load())
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _by_path(name: str, root: Path, splits: Sequence[str], download: bool) -> Listing:
    class_name = _BY_PATH[name][0]
    options = {} if name == "oxford_pets" else {"loader": _path_itself}
    parts = [_construct(name, class_name, root, download, split=split, **options) for split in splits]
    names = tuple(str(label) for label in parts[0].classes)
    levels = {}
    if name == "oxford_pets":
        pairs = [pair for part in parts for pair in zip(part._images, part._labels, strict=True)]
        species = {*zip(parts[0]._labels, parts[0]._bin_labels, strict=True)}
        levels["species"] = {names[breed]: parts[0].bin_classes[kind] for breed, kind in species}
    else:
        pairs = [part[i] for part in parts for i in range(len(part))]
    images = ImageFiles(root, [str(Path(path).relative_to(root)) for path, _ in pairs])
    labels = np.array([label for _, label in pairs], dtype=np.int64)
    return Listing(images, np.arange(len(labels)), labels, names, levels)


def _path_itself(path: str | Path) -> str | Path:
    return path
