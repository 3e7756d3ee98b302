"""`patchloom look` at a segmentation run: predicted and true masks, a map per class, confused classes."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from patchloom.data.datasets import ImageSet
from patchloom.report.page import write_page
from patchloom.report.pictures.overlays import color_mask, overlay_mask
from patchloom.report.sections import gallery_section
from patchloom.runs.run_metadata import data_path, read_run_metadata
from patchloom.tasks.images.look_page import LookPage, across
from patchloom.tasks.report import ReportSettings
from patchloom.tasks.segmentation.data import open_masks
from patchloom.tasks.segmentation.model import (
    ExportedSegmenter,
    Segmented,
    Segmenter,
    load_segmenter,
    open_exported_segmenter,
)
from patchloom.tasks.segmentation.page import confused_section, images_of, legend, of_one_height, true_numbers
from patchloom.tasks.segmentation.run_files import read_segmented
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.errors import DataError, PatchloomError, UsageError, at_least
from patchloom_runtime.images.inputs import iterate_images
from patchloom_runtime.printable import plural

COUNT = 12  # images shown at most
LARGEST_SIDE = 1024  # of an image whose maps of all classes are drawn


class SegmentationLookRequest(NamedTuple):
    """An image to look at, not yet read."""

    name: str
    detail: str
    read: Callable[[], tuple[Image.Image, np.ndarray | None]]  # with its true class indices, if known


def look_at_segmented(
    folder: Path, paths: Sequence[str] = (), *, data: str | None = None, out: Path, top: int = 5, count: int = COUNT
) -> LookPage:
    """Draw masks on up to `count` images, spread over `paths`; without paths, on the worst val images."""
    at_least("count", count, 1)
    exported = is_artifact(folder)
    if exported and not paths:
        raise UsageError(f"{folder} is an artifact and keeps no val predictions: patchloom look {folder} IMAGE…")
    segmenter: Segmenter = open_exported_segmenter(folder) if exported else load_segmenter(folder)
    notes: list[str] = []
    if exported:
        notes.append("an artifact gives no probabilities per pixel; the run that it was exported from does")
    sections: list[Any] = []
    if paths:
        wanted = _requests(segmenter, folder, paths, data, count, notes)
        title = f"Predictions of {folder.name} on {plural(len(wanted), 'image')}"
    else:
        wanted, sections = _worst(segmenter, folder, data, count)
        title = f"Val images that {folder.name} got most wrong"
    looks: list[tuple[str, str, Any]] = []
    for number, one in enumerate(wanted):
        try:
            picture, truth = one.read()
            prediction, strips, present = _drawn(segmenter, one.name, picture, truth, top)
        except DataError as error:
            notes.append(str(error))
            continue
        looks.append((one.name, one.detail, prediction))
        colors = legend(segmenter.labels, present)
        detail = one.detail or prediction.in_words()
        sections.append(gallery_section(f"picture-{number}", one.name, detail, strips, colors))
    if not looks:
        first = notes[0] if notes else "there is none"
        raise DataError(f"none of the {plural(len(wanted), 'image')} can be read; the first: {first}")
    write_page(out, "gallery.html.j2", title=title, notes=notes, sections=sections)
    return LookPage(out, looks, notes)


def _requests(
    segmenter: Segmenter, folder: Path, paths: Sequence[str], data: str | None, count: int, notes: list[str]
) -> list[SegmentationLookRequest]:
    """Return the images of files and folders, with true masks for those in folders of masks or in the run's data."""
    wanted: list[SegmentationLookRequest] = []
    groups: list[str] = []
    masked = {
        os.path.realpath(images.where(row)): (images, row) for images in _sets(folder, data) for row in _rows(images)
    }
    for path in paths:
        images = _opened(path, folder) if os.path.isdir(path) else None
        if images is not None:
            own = [
                SegmentationLookRequest(images.where(row), "", partial(_sampled, images, row, segmenter))
                for row in _rows(images)
            ]
        else:
            own = []
            for one in iterate_images([path]):
                known = masked.get(os.path.realpath(one.name))
                read = partial(_sampled, *known, segmenter) if known else partial(_unmasked, one.read)
                own.append(SegmentationLookRequest(one.name, "", read))
        wanted += own
        groups += [os.path.dirname(one.name) for one in own]
    chosen = across(wanted, groups, count)
    if len(chosen) < len(wanted):
        notes.append(f"{len(chosen)} of {len(wanted):,} images are shown; --count shows more")
    return chosen


def _sets(folder: Path, data: str | None) -> Iterator[ImageSet]:
    """Yield the splits of the run's data that can be opened; they only supply true masks."""
    try:
        record = read_run_metadata(folder)
    except PatchloomError:
        record = None
    place = data or (record.data if record else None)
    for split in ("train", "val", "test") if place else ():
        if (images := _opened(str(place), folder, split)) is not None:
            yield images


def _opened(place: str, folder: Path, split: str | None = None) -> ImageSet | None:
    try:
        return open_masks(place, split, None if is_artifact(folder) else folder)[0]
    except PatchloomError:
        return None


def _rows(images: ImageSet) -> range:
    return range(len(images))


def _sampled(images: ImageSet, row: int, segmenter: Segmenter) -> tuple[Image.Image, np.ndarray]:
    sample = images.sample(row)
    return sample.image, true_numbers(sample, images, segmenter.labels)


def _unmasked(read: Callable[[], Image.Image]) -> tuple[Image.Image, None]:
    return read(), None


def _worst(
    segmenter: Segmenter, folder: Path, data: str | None, count: int
) -> tuple[list[SegmentationLookRequest], list[Any]]:
    """Return the val images with the lowest mean IoU, and a table of the most confused classes."""
    val, record = read_segmented(folder), read_run_metadata(folder)
    place = data_path(folder, record, data)
    images, report = images_of(folder, ReportSettings(data=data), place, val), val.report
    wanted = []
    for at in np.argsort(report.image_miou, kind="stable")[:count].tolist():
        row = int(report.index[at])
        detail = f"mean IoU {report.image_miou[at]:.1f} %"
        wanted.append(SegmentationLookRequest(images.where(row), detail, partial(_sampled, images, row, segmenter)))
    return wanted, confused_section(report)


def _drawn(
    segmenter: Segmenter, name: str, picture: Image.Image, truth: np.ndarray | None, top: int
) -> tuple[Segmented, list[tuple[list[Image.Image], str | list[str]]], set[int]]:
    """Return the prediction, strips of the image, its masks and probability maps, and all classes in them."""
    small = picture.copy()
    small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    likely, labels = None, segmenter.labels
    if isinstance(segmenter, ExportedSegmenter):
        numbers = segmenter.numbers(small)
    else:
        pixels = torch.from_numpy(np.array(small)).permute(2, 0, 1).to(segmenter.device)
        likely = segmenter.maps.probabilities(pixels).cpu().numpy()  # (K, H, W)
        numbers = likely.argmax(axis=0)
    shares = np.bincount(numbers.ravel(), minlength=len(labels)) / numbers.size
    common = [int(k) for k in np.argsort(-shares, kind="stable")[:top] if shares[k]]
    classes = [(labels[k], float(shares[k])) for k in common]
    present = set(np.flatnonzero(shares).tolist())
    row = {"image": small}
    if truth is not None:
        row["true mask"] = color_mask(truth, len(labels)).resize(small.size, Image.Resampling.NEAREST)
        present |= set(np.unique(truth).tolist())
    row["predicted mask"] = color_mask(numbers, len(labels))
    row["prediction over the image"] = overlay_mask(small, numbers, len(labels))
    strips: list[tuple[list[Image.Image], str | list[str]]] = [(of_one_height(list(row.values())), list(row))]
    if likely is not None:
        maps = [Image.fromarray(np.round(255 * likely[k]).astype(np.uint8)) for k in common]
        captions = [
            f"probability of {labels[k]}" + ("" if place else " (white: 100 %)") for place, k in enumerate(common)
        ]
        strips.append((of_one_height(maps), captions))
    return Segmented(name, classes), strips, present
