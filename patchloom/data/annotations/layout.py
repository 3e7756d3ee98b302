"""How a folder is read: the one decision on what `evidence` found in it, or on what the options name.

One set of annotations is read, and a note says so. Several are a UsageError with a command for each. Without any,
images have classes: by their folders, or by a list (`classes`).
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
from patchloom.data.reading import Reading
from patchloom.data.splits import TEST_NAMES, TRAIN_NAMES, VAL_NAMES, says_a_split
from patchloom.data.trees.tree import FolderTree, Tree
from patchloom_runtime.errors import DataError, UsageError
from patchloom_runtime.printable import printable

# The decision ---------------------------------------------------------------------------------------------------------


def open_layout(root: Path, reading: Reading, classes: Callable[[Path], Source]) -> Source:
    """The folder as its annotations say, or as the options do; `classes` opens one whose images have classes."""
    title = printable(root.resolve().name)
    if reading.masks is not None or reading.boxes is not None:
        return _open(*_given(root, reading), title, reading)
    if reading.images is not None or reading.classes is not None:
        return _by_classes(_place(root, reading.images or ".", "--images"), reading, classes)
    evidence = Evidence.of(root)
    found = find_annotations(evidence)
    if not found:
        beside = _images_beside(evidence)
        if beside is None:
            _refuse_unmatched(evidence)
            return _by_classes(root, reading, classes)
        shown = ", ".join(dict.fromkeys(os.path.relpath(beside[0] / pair.images, root) for pair in beside[1].pairs))
        return _noted(_open(*beside, title, reading), f"masks alone: their images are in {printable(shown)}")
    if len(found) > 1 or _in_class_folders(found[0]) or _boxes_of_classes(evidence, found[0]):
        raise UsageError(question(evidence, found))
    said = f"read as {KINDS[found[0].kind]}: {found[0].option} (--images DIR reads classes of images instead)"
    source = _open(root, found[0], title, reading)
    usual = found[0].pairs and {os.path.basename(found[0].place).lower()} <= {"masks", "labels", "annotations"}
    return source if usual or found[0].kind == "coco" else _noted(source, said)


def _by_classes(root: Path, reading: Reading, classes: Callable[[Path], Source]) -> Source:
    if reading.ignore is not None:
        raise UsageError(f"--ignore is a value of masks, and {printable(root)} has none; say where with --masks DIR")
    return classes(root)


def question(evidence: Evidence, found: Sequence[Annotations]) -> str:
    """What data could be, with a command for each."""
    data = shlex.quote(printable(evidence.root))
    ways = [(one.option, KINDS[one.kind]) for one in found]
    images = {pair.images for one in found for pair in one.pairs}
    if len(images) == 1 and (pattern := _pattern_of(evidence, *images)):
        told = f" --images {shlex.quote(*images)}" if next(iter(images)) else ""
        ways.insert(0, (f"--label-pattern '{pattern[0]}'{told}", "classification, by file names"))
    elif _in_class_folders(found[0]):
        folders = ", ".join(printable(pair.images) for pair in found[0].pairs[:3])
        ways.append(("", f"masks lie in the class folders {folders}; for classification keep them elsewhere"))
    elif _boxes_of_classes(evidence, found[0]):
        ways.append((f"--images {shlex.quote(found[0].pairs[0].images or '.')}", "classification, by folders"))
    commands = "; ".join(f"patchloom train {data} {way} ({what})" if way else what for way, what in ways)
    return f"{printable(evidence.root)} can be read in several ways, choose one: {commands}"


def _pattern_of(evidence: Evidence, images: str) -> tuple[str, list[str]] | None:
    """A pattern by which the names of a folder's images are classes."""
    return suggest_pattern(evidence.folders[images].images) if images in evidence.folders else None


def _in_class_folders(found: Annotations) -> bool:
    """Whether each image has its mask in the same folder, and these folders are classes."""
    together = {pair.images for pair in found.pairs if pair.images == pair.others}
    return found.kind == "masks" and len(together) > 1 and not any(map(says_a_split, together))


def _boxes_of_classes(evidence: Evidence, found: Annotations) -> bool:
    """Whether images with boxes lie in folders that may be their classes, as ImageNet's do."""
    folders = [
        os.path.basename(path)
        for pair in found.pairs
        for path, entries in evidence.folders.items()
        if entries.images and path != pair.images and _lies_in(path, [pair.images])
    ]
    return found.kind in ("voc", "yolo", "labelme") and len({name for name in folders if not says_a_split(name)}) > 1


def _open(root: Path, found: Annotations, title: str, reading: Reading) -> Source:
    names = _place(root, reading.names, "--names") if reading.names is not None else None
    if found.kind == "masks":
        return open_masks(root, found.pairs, title, reading.ignore, names)
    if reading.ignore is not None:
        raise UsageError(f"--ignore is a value of masks; {title} is read by {KINDS[found.kind]}")
    if found.kind == "yolo":
        return open_yolo(root, found.pairs, title, names)
    if names is not None:
        raise UsageError(f"--names names the numbers of masks or of YOLO's classes; {title} has names")
    if found.kind == "objects":
        return open_instances(root, found.pairs[0], title)
    if found.kind == "voc":
        return open_voc(root, found.pairs, title)
    if found.kind == "labelme":
        return open_labelme(root, dict(_labelme_files(root, found.pairs)), title)
    if found.kind == "coco":
        given = reading.images
        images = os.path.relpath(_place(root, given, "--images"), root) if given is not None else None
        return open_coco(root, found.files, title, images)
    opener = {"table": open_table, "cvat": open_cvat, "label studio": open_label_studio}[found.kind]
    return opener(root, found.files, title)


def _noted(source: Source, note: str) -> Source:
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


# What is given --------------------------------------------------------------------------------------------------------


def _given(root: Path, reading: Reading) -> tuple[Path, Annotations]:
    """The annotations that options name, and the root they lie below; a UsageError where nothing fits them."""
    if reading.masks is not None and reading.boxes is not None:
        raise UsageError("--masks and --boxes are two tasks; give one of them")
    kind, given = ("masks", reading.masks) if reading.masks is not None else ("boxes", reading.boxes)
    option, place = f"--{kind}", os.fspath(given or "")
    splits = [split for split in (*TRAIN_NAMES, *VAL_NAMES, *TEST_NAMES) if "{split}" in place] or [""]
    places = [(split, _place(root, place.replace("{split}", split), option, missing=bool(split))) for split in splits]
    there = [(split, path) for split, path in places if path.exists()]
    if not there:
        raise UsageError(f"{option} {place}: no such folder below {printable(root)} for any split")
    if all(path.is_file() for _, path in there):
        return _given_files(root, [path for _, path in there], option)
    pairs, kinds = [], set()
    home = Path(os.path.commonpath([root.resolve(), *(path.resolve() for _, path in there)]))
    if reading.images is not None:
        images = [_place(root, os.fspath(reading.images).replace("{split}", split), "--images") for split, _ in there]
        home = Path(os.path.commonpath([home, *(path.resolve() for path in images)]))
        home = root if home == root.resolve() else home
        for image, (_, path) in zip(images, there, strict=True):
            pairs.append(Pair(_below(image, home), _below(path, home)))
            kinds.add(kind_of_folder(path) if kind == "boxes" else "masks")
    else:
        home = root if home == root.resolve() else home
        evidence = Evidence.of(home)
        found = [one for one in find_annotations(evidence) if (one.kind == "masks") == (kind == "masks")]
        wanted = [_below(path, home) for _, path in there]
        inside = [(one.kind, pair) for one in found for pair in one.pairs if _lies_in(pair.others, wanted)]
        pairs, kinds = [pair for _, pair in inside], {own for own, _ in inside}
        if not pairs:
            raise UsageError(f"{option} {place}: no images with the names of its files; say where with --images DIR")
    if len(kinds) != 1 or not all(kinds):
        told = (
            f"{len(kinds)} kinds of files"
            if len(kinds) > 1
            else "no files of VOC (.xml), YOLO (.txt) or LabelMe (.json)"
        )
        raise UsageError(f"{option} {place}: holds {told}; name a folder of one kind")
    return home, Annotations(kinds.pop(), place, tuple(pairs))


def _given_files(root: Path, files: Sequence[Path], option: str) -> tuple[Path, Annotations]:
    kinds = {kind_of_file(file) for file in files}
    if option != "--boxes" or kinds == {""} or len(kinds) > 1:
        shown = ", ".join(printable(file) for file in files)
        raise UsageError(
            f"{option} {shown}: expected a folder, or with --boxes a file of COCO, CVAT or a table of boxes"
        )
    return root, Annotations(kinds.pop(), printable(files[0]), files=tuple(files))


def _images_beside(evidence: Evidence) -> tuple[Path, Annotations] | None:
    """The images of a folder that holds masks alone, in a folder beside it; a UsageError where there are none."""
    with_images = [folder for folder, entries in evidence.folders.items() if entries.images]
    if not any(map(MASK_END.search, (part for folder in with_images for part in folder.split(os.sep)))):
        return None
    if not with_images or not all(map(evidence.masks, with_images)):
        return None
    home = evidence.root.resolve().parent
    beside = [entry.name for entry in FolderTree(home).entries("") if entry.name.lower() in IMAGE_NAMES]
    own = evidence.root.resolve().name
    around = Evidence.of(home, [own, *beside])
    found = [
        Annotations("masks", one.place, pairs)
        for one in find_annotations(around)
        if one.kind == "masks"
        and (
            pairs := tuple(pair for pair in one.pairs if _lies_in(pair.others, [own]) and _lies_in(pair.images, beside))
        )
    ]
    if len(found) == 1:
        return home, found[0]
    data = shlex.quote(printable(evidence.root))
    raise UsageError(
        f"{printable(evidence.root)} holds masks alone; say where their images are: "
        f"patchloom train {data} --images DIR --masks {shlex.quote(_common(with_images) or '.')} (segmentation)"
    )


def _refuse_unmatched(evidence: Evidence) -> None:
    """A DataError for folders that are named as images and their masks, where no file of the one fits the other."""
    for pair in named_as_masks([path for path, entries in evidence.folders.items() if entries.images]):
        inside = [entries.images for path, entries in evidence.folders.items() if _lies_in(path, [pair.others])]
        lossy = all(name.lower().endswith((".jpg", ".jpeg")) for names in inside for name in names)
        why = "masks are JPEG, which changes their values: save them as PNG" if lossy else (
            "no mask has the name and the size of an image; say which belong together with --images DIR --masks DIR"
        )  # fmt: skip
        raise DataError(
            f"{printable(evidence.root)}: {pair.images} and {pair.others} are named as images and their masks, and "
            f"{why}, or read classes with --images {shlex.quote(pair.images)}"
        )


def refuse_annotated(tree: Tree) -> None:
    """A UsageError where an archive holds masks or boxes, which are read from folders alone."""
    if what := annotations_in_archive(tree):
        raise UsageError(f"{tree.where} holds {printable(what)}; they are read from folders: unpack it and give that")


# Paths ----------------------------------------------------------------------------------------------------------------


def _place(root: Path, given: "str | os.PathLike[str]", option: str, *, missing: bool = False) -> Path:
    """A path below the root, or else as it is; a UsageError where nothing is there, unless `missing` will do."""
    path = Path(os.path.expanduser(given))
    places = [root / path, path]
    found = next((place for place in places if place.exists()), None)
    if found is None and not missing:
        raise UsageError(
            f"{option} {printable(given)}: neither below {printable(root)} nor from here is there such a path"
        )
    return found or places[0]


def _below(path: Path, home: Path) -> str:
    below = os.path.relpath(path.resolve(), home.resolve())
    return "" if below == "." else below


def _lies_in(path: str, folders: Iterable[str]) -> bool:
    return any(not folder or path == folder or path.startswith(folder + os.sep) for folder in folders)


def _common(folders: Sequence[str]) -> str:
    return os.path.commonpath(folders) if folders and all(folders) else ""
