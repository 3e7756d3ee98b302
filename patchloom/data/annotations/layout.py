"""Decide how to read a folder: by the annotations that `evidence` finds in it, or by those that options name.

A single set of annotations is read, with a note. Several are a UsageError with a command for each. Without any, the
images have classes, by folders or by a list.
"""

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from patchloom.data.annotations.box_formats import open_cvat, open_label_studio, open_labelme, open_table
from patchloom.data.annotations.coco import open_coco
from patchloom.data.annotations.evidence import (
    IMAGE_NAMES,
    KINDS,
    MASK_END,
    Annotations,
    Evidence,
    annotations_in_archive,
    find_annotations,
    kind_of_file,
    kind_of_folder,
    named_as_masks,
)
from patchloom.data.annotations.instance_masks import open_instances
from patchloom.data.annotations.mask_files import open_masks
from patchloom.data.annotations.paired_files import Pair, files_of_pair
from patchloom.data.annotations.voc import open_voc
from patchloom.data.annotations.yolo import open_yolo
from patchloom.data.datasets import Source
from patchloom.data.labels.label_pattern import suggest_pattern
from patchloom.data.reading_options import Reading
from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES, says_a_split
from patchloom.data.trees.tree import FolderTree, Tree
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import printable

# The decision ---------------------------------------------------------------------------------------------------------


def open_layout(root: Path, reading: Reading, classes: Callable[[Path], Source]) -> Source:
    """Open a folder by its annotations or by the options. `classes` opens a folder of images with classes."""
    title = printable(root.resolve().name)
    if reading.masks is not None or reading.boxes is not None:
        return _open(*_chosen_annotations(root, reading), title, reading)
    if reading.images is not None or reading.classes is not None:
        return _by_classes(_place(root, reading.images or ".", "--images"), reading, classes)
    evidence = Evidence.search(root)
    candidates = find_annotations(evidence)
    if not candidates:
        return _open_without_annotations(evidence, reading, classes, title)
    only = candidates[0]
    if len(candidates) > 1 or _in_class_folders(only) or _boxes_of_classes(evidence, only):
        raise UsageError(question(evidence, candidates))
    note = f"read as {KINDS[only.kind]}: {only.option} (--images DIR reads classes of images instead)"
    source = _open(root, only, title, reading)
    usual = only.pairs and {os.path.basename(only.place).lower()} <= {"masks", "labels", "annotations"}
    return source if usual or only.kind == "coco" else _with_note(source, note)


def _open_without_annotations(
    evidence: Evidence, reading: Reading, classes: Callable[[Path], Source], title: str
) -> Source:
    """Open a folder of masks whose images are in a sibling folder, or else a folder of images with classes."""
    root = evidence.root
    siblings = _images_of_masks(evidence)
    if siblings is None:
        _refuse_unmatched(evidence)
        return _by_classes(root, reading, classes)
    home, annotations = siblings
    folders = ", ".join(dict.fromkeys(os.path.relpath(home / pair.images, root) for pair in annotations.pairs))
    return _with_note(_open(home, annotations, title, reading), f"only masks: their images are in {printable(folders)}")


def _by_classes(root: Path, reading: Reading, classes: Callable[[Path], Source]) -> Source:
    if reading.ignore is not None:
        raise UsageError(
            f"--ignore is a value of masks, and {printable(root)} has none; pass their folder with --masks DIR"
        )
    return classes(root)


def question(evidence: Evidence, candidates: Sequence[Annotations]) -> str:
    """Return the question how to read a folder, with a command for each way."""
    data = shlex.quote(printable(evidence.root))
    ways = [(one.option, KINDS[one.kind]) for one in candidates]
    images = {pair.images for one in candidates for pair in one.pairs}
    if len(images) == 1 and (pattern := _pattern_of(evidence, *images)):
        folder = f" --images {shlex.quote(*images)}" if next(iter(images)) else ""
        ways.insert(0, (f"--label-pattern '{pattern[0]}'{folder}", "classification, by file names"))
    elif _in_class_folders(candidates[0]):
        folders = ", ".join(printable(pair.images) for pair in candidates[0].pairs[:3])
        ways.append(("", f"masks are in the class folders {folders}; for classification move them elsewhere"))
    elif _boxes_of_classes(evidence, candidates[0]):
        ways.append((f"--images {shlex.quote(candidates[0].pairs[0].images or '.')}", "classification, by folders"))
    commands = "; ".join(f"patchloom train {data} {way} ({what})" if way else what for way, what in ways)
    return f"{printable(evidence.root)} can be read in several ways, choose one: {commands}"


def _pattern_of(evidence: Evidence, images: str) -> tuple[str, list[str]] | None:
    """Return a pattern that extracts classes from the names of the images in a folder."""
    return suggest_pattern(evidence.folders[images].images) if images in evidence.folders else None


def _in_class_folders(annotations: Annotations) -> bool:
    """Return whether masks are in the folders of their images, and these folders may be classes."""
    together = {pair.images for pair in annotations.pairs if pair.images == pair.others}
    return annotations.kind == "masks" and len(together) > 1 and not any(map(says_a_split, together))


def _boxes_of_classes(evidence: Evidence, annotations: Annotations) -> bool:
    """Return whether images with boxes are in folders that may be their classes, as in ImageNet."""
    folders = [
        os.path.basename(path)
        for pair in annotations.pairs
        for path, entries in evidence.folders.items()
        if entries.images and path != pair.images and _is_below(path, [pair.images])
    ]
    return (
        annotations.kind in ("voc", "yolo", "labelme") and len({name for name in folders if not says_a_split(name)}) > 1
    )


def _open(root: Path, annotations: Annotations, title: str, reading: Reading) -> Source:
    names = _place(root, reading.names, "--names") if reading.names is not None else None
    if annotations.kind == "masks":
        return open_masks(root, annotations.pairs, title, reading.ignore, names)
    if reading.ignore is not None:
        raise UsageError(f"--ignore is a value of masks; {title} is read as {KINDS[annotations.kind]}")
    if annotations.kind == "yolo":
        return open_yolo(root, annotations.pairs, title, names)
    if names is not None:
        raise UsageError(f"--names names the numbers of masks or of YOLO's classes; {title} has names already")
    if annotations.kind == "objects":
        return open_instances(root, annotations.pairs[0], title)
    if annotations.kind == "voc":
        return open_voc(root, annotations.pairs, title)
    if annotations.kind == "labelme":
        return open_labelme(root, dict(_labelme_files(root, annotations.pairs)), title)
    if annotations.kind == "coco":
        chosen = reading.images
        images = os.path.relpath(_place(root, chosen, "--images"), root) if chosen is not None else None
        return open_coco(root, annotations.files, title, images)
    opener = {"table": open_table, "cvat": open_cvat, "label studio": open_label_studio}[annotations.kind]
    return opener(root, annotations.files, title)


def _with_note(source: Source, note: str) -> Source:
    return replace(source, notes=(note, *source.notes))


def _labelme_files(root: Path, pairs: Sequence[Pair]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    for pair in pairs:
        images, files = files_of_pair(root, pair, (".json",))
        both = [
            (os.path.join(pair.images, images[stem]), os.path.join(pair.others, files[stem]))
            for stem in images
            if stem in files
        ]
        yield pair.images or ".", both


# Annotations that options name ----------------------------------------------------------------------------------------


def _chosen_annotations(root: Path, reading: Reading) -> tuple[Path, Annotations]:
    """Return the annotations that options name, and their root. Raise UsageError if there are none."""
    if reading.masks is not None and reading.boxes is not None:
        raise UsageError("--masks and --boxes are two tasks; pass one of them")
    kind, value = ("masks", reading.masks) if reading.masks is not None else ("boxes", reading.boxes)
    option, place = f"--{kind}", os.fspath(value or "")
    splits = [split for split in (*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES) if "{split}" in place] or [""]
    places = [(split, _place(root, place.replace("{split}", split), option, missing=bool(split))) for split in splits]
    there = [(split, path) for split, path in places if path.exists()]
    if not there:
        raise UsageError(f"{option} {place}: {printable(root)} has no such folder, for any split")
    if all(path.is_file() for _, path in there):
        return _chosen_files(root, [path for _, path in there], option)
    if reading.images is not None:
        home, pairs, kinds = _named_pairs(root, os.fspath(reading.images), there, kind)
    else:
        home, pairs, kinds = _matching_pairs(root, [path for _, path in there], kind)
        if not pairs:
            raise UsageError(
                f"{option} {place}: no images with the names of its files; pass their folder: --images DIR"
            )
    if len(kinds) > 1:
        raise UsageError(f"{option} {place}: holds {len(kinds)} kinds of files; name a folder of one kind")
    if not all(kinds):
        known = "VOC (.xml), YOLO (.txt) or LabelMe (.json)"
        raise UsageError(f"{option} {place}: holds no files of {known}; name a folder of one kind")
    return home, Annotations(kinds.pop(), place, tuple(pairs))


def _named_pairs(
    root: Path, images: str, annotated: Sequence[tuple[str, Path]], kind: str
) -> tuple[Path, list[Pair], set[str]]:
    """Pair the folders of --images with those of --masks or --boxes. Returns their root, the pairs and their kinds."""
    folders = [_place(root, images.replace("{split}", split), "--images") for split, _ in annotated]
    home = _common_root(root, [*folders, *(path for _, path in annotated)])
    pairs, kinds = [], set()
    for folder, (_, path) in zip(folders, annotated, strict=True):
        pairs.append(Pair(_below(folder, home), _below(path, home)))
        kinds.add(kind_of_folder(path) if kind == "boxes" else "masks")
    return home, pairs, kinds


def _matching_pairs(root: Path, annotated: Sequence[Path], kind: str) -> tuple[Path, list[Pair], set[str]]:
    """Search for the images of --masks or --boxes. Returns their root, the pairs and their kinds."""
    home = _common_root(root, annotated)
    candidates = [one for one in find_annotations(Evidence.search(home)) if (one.kind == "masks") == (kind == "masks")]
    wanted = [_below(path, home) for path in annotated]
    inside = [(one.kind, pair) for one in candidates for pair in one.pairs if _is_below(pair.others, wanted)]
    return home, [pair for _, pair in inside], {own for own, _ in inside}


def _common_root(root: Path, paths: Sequence[Path]) -> Path:
    home = Path(os.path.commonpath([root.resolve(), *(path.resolve() for path in paths)]))
    return root if home == root.resolve() else home


def _chosen_files(root: Path, files: Sequence[Path], option: str) -> tuple[Path, Annotations]:
    kinds = {kind_of_file(file) for file in files}
    if option != "--boxes" or kinds == {""} or len(kinds) > 1:
        names = ", ".join(printable(file) for file in files)
        raise UsageError(
            f"{option} {names}: expected a folder, or with --boxes a file of COCO, CVAT or a table of boxes"
        )
    return root, Annotations(kinds.pop(), printable(files[0]), files=tuple(files))


def _images_of_masks(evidence: Evidence) -> tuple[Path, Annotations] | None:
    """Return the images of a folder of masks, in a sibling folder. Raise UsageError if there are none."""
    with_images = [folder for folder, entries in evidence.folders.items() if entries.images]
    if not any(map(MASK_END.search, (part for folder in with_images for part in folder.split(os.sep)))):
        return None
    if not with_images or not all(map(evidence.masks, with_images)):
        return None
    home = evidence.root.resolve().parent
    siblings = [entry.name for entry in FolderTree(home).entries("") if entry.name.lower() in IMAGE_NAMES]
    own = evidence.root.resolve().name
    around = Evidence.search(home, [own, *siblings])
    candidates = [
        Annotations("masks", one.place, pairs)
        for one in find_annotations(around)
        if one.kind == "masks"
        and (
            pairs := tuple(
                pair for pair in one.pairs if _is_below(pair.others, [own]) and _is_below(pair.images, siblings)
            )
        )
    ]
    if len(candidates) == 1:
        return home, candidates[0]
    data = shlex.quote(printable(evidence.root))
    raise UsageError(
        f"{printable(evidence.root)} holds only masks; pass the folder of their images: "
        f"patchloom train {data} --images DIR --masks {shlex.quote(_common(with_images) or '.')} (segmentation)"
    )


def _refuse_unmatched(evidence: Evidence) -> None:
    """Raise DataError for folders that are named like images and their masks while no files match."""
    for pair in named_as_masks([path for path, entries in evidence.folders.items() if entries.images]):
        inside = [entries.images for path, entries in evidence.folders.items() if _is_below(path, [pair.others])]
        lossy = all(name.lower().endswith((".jpg", ".jpeg")) for names in inside for name in names)
        why = "masks are JPEG, which changes their values: save them as PNG" if lossy else (
            "no mask has the name and the size of an image; pass folders that match: --images DIR --masks DIR"
        )  # fmt: skip
        raise DataError(
            f"{printable(evidence.root)}: {pair.images} and {pair.others} are named like images and their masks, and "
            f"{why}, or read classes with --images {shlex.quote(pair.images)}"
        )


def refuse_annotated(tree: Tree) -> None:
    """Raise UsageError if an archive contains masks or boxes, which are read from folders only."""
    if what := annotations_in_archive(tree):
        raise UsageError(
            f"{tree.where} holds {printable(what)}, which are read from folders only; unpack it and pass the folder"
        )


# Paths ----------------------------------------------------------------------------------------------------------------


def _place(root: Path, value: "str | os.PathLike[str]", option: str, *, missing: bool = False) -> Path:
    """Return an existing path, relative to the root or to here. Raise UsageError if there is none, unless `missing`."""
    path = Path(os.path.expanduser(value))
    places = [root / path, path]
    existing = next((place for place in places if place.exists()), None)
    if existing is None and not missing:
        raise UsageError(f"{option} {printable(value)}: no such path below {printable(root)} or in the current folder")
    return existing or places[0]


def _below(path: Path, home: Path) -> str:
    below = os.path.relpath(path.resolve(), home.resolve())
    return "" if below == "." else below


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(not folder or path == folder or path.startswith(folder + os.sep) for folder in folders)


def _common(folders: Sequence[str]) -> str:
    return os.path.commonpath(folders) if folders and all(folders) else ""
