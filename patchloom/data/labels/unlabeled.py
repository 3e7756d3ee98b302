"""Messages about images without a class, and the task that data suggest."""

import posixpath
from collections.abc import Sequence

import numpy as np

from patchloom.data.datasets import Listing, Source, name_some
from patchloom.data.images.image_store import ImageStore
from patchloom.data.labels.label_pattern import read_pattern, suggest_pattern
from patchloom_runtime.images.samples import UNLABELED
from patchloom_runtime.printable import plural

# The task of images with such annotations or targets, as --task names it.
OTHER_TASKS = {"masks": "segment", "boxes": "detect"}
TASKS_OF_TARGETS = {"labels": "multilabel", "numbers": "regress"}
_SAMPLED_NAMES = 2_000  # from which a pattern is suggested


def missing_labels(listing: Listing) -> str:
    """Return why these images cannot be classified and what to do, to follow the name of the data."""
    images = listing.images
    bare = np.flatnonzero(listing.labels == UNLABELED)
    if listing.learned is not None:
        several = {"labels": "several labels per image", "numbers": "numbers instead of classes"}
        return (
            f"these data have {several[listing.learned.kind]} ({name_some(listing.names, limit=3)}), which --task "
            f"{TASKS_OF_TARGETS[listing.learned.kind]} learns; classification needs one class per image: choose "
            "another column with --label-column, or name numbers with --names FILE"
        )
    for what, task in OTHER_TASKS.items():
        if what in _annotations(images):
            return (
                f"these are images with {what}, which --task {task} learns; classification needs one class per image: "
                "a folder for each class, or --labels FILE"
            )
    some = len(bare) < len(listing)
    where = f", the first is {images.where(int(listing.rows[bare[0]]))}" if some else ""
    teacher = "" if some else "--teacher RUN, whose classes are then learned, or "
    names = [posixpath.basename(images.key(int(row))) for row in listing.rows]
    return (
        f"{len(bare):,} of {len(listing):,} images have no label{where}; expected a folder for each class, or "
        f"--labels FILE (lines of path,label), or --label-pattern {_pattern(names)}, or {teacher}--recipe dino, which "
        "learns without labels"
    )


def task_of_data(source: Source) -> tuple[str, str]:
    """Return the task that data suggest, as --task names it, and the reason; '' for plain classification."""
    images, targets = source.train.images, source.train.learned
    if targets is not None:
        why = {"labels": "images have several labels each", "numbers": "labels are numbers"}
        return TASKS_OF_TARGETS[targets.kind], why[targets.kind]
    has = [what for what in OTHER_TASKS if what in _annotations(images)]
    if not has:
        return "classify", ""
    if source.train.is_classified:
        others = " or ".join(OTHER_TASKS[what] for what in has)
        return "classify", f"images have labels (they have {' and '.join(has)} too: --task {others})"
    if "boxes" in has:
        return "detect", "images have boxes" + (" (they have masks too: --task segment)" if "masks" in has else "")
    return "segment", "images have masks"


def task_and_annotations(source: Source) -> tuple[str, tuple[str, ...]]:
    """Return the task that data suggest, as --task names it, and the class names of its masks or boxes."""
    task, images = task_of_data(source)[0], source.train.images
    ignored = images.mask_ignore if task == "segment" else None
    names = images.object_names if task == "detect" else images.mask_names
    return task, tuple(name for number, name in enumerate(names) if number != ignored)


def _annotations(images: ImageStore) -> set[str]:
    masks = bool(images.mask_names) or images.mask_ignore is not None
    return ({"masks"} if masks else set()) | ({"boxes"} if images.object_names else set())


def _pattern(names: Sequence[str]) -> str:
    suggestion = suggest_pattern(names[:: -(-len(names) // _SAMPLED_NAMES)])  # spread over the sorted listing
    if suggestion is None:
        return "'{label}_*' (the class in the file's name)"
    pattern, _ = suggestion
    classes = sorted({label for name in names if (label := read_pattern(pattern).label(name))})
    return f"'{pattern}' (which gives {plural(len(classes), 'class')}, such as {name_some(classes, limit=3)})"
