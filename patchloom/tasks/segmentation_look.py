"""`patchloom look` at a segmentation run: answers over pictures, a map per class, and what it takes for what."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from patchloom.data.pictures.given import pictures_in
from patchloom.deployment.segmenter import Segmented, Segmenter, load_segmenter
from patchloom.errors import DataError, UsageError
from patchloom.inspection.mask_overlays import coloured, overlaid
from patchloom.judging.look_page import LookPage
from patchloom.pages.page import write_page
from patchloom.pages.sections import gallery_section
from patchloom.runs.record import read_run_record
from patchloom.runs.segmentation import read_segmented
from patchloom.tasks.pages import Asked
from patchloom.tasks.segmentation_report import confused_section, images_of, legend, of_one_height

OF_VAL, PICTURES = 8, 100  # shown at most of val, and of pictures that were given
LARGEST_SIDE = 1024  # of a picture whose maps of all classes are drawn


def look_at_segmented(
    folder: Path, paths: Sequence[str] = (), *, data: str | None = None, out: Path, top: int = 5
) -> LookPage:
    """Draw the pictures at `paths`; without any, those of val that were answered worst."""
    segmenter = load_segmenter(folder)
    notes: list[str] = []
    sections: list[Any] = []
    wanted: list[tuple[str, str, Any]]
    if paths:
        files = [*pictures_in(paths)]
        if len(files) > PICTURES:
            notes.append(f"the first {PICTURES} of {len(files)} pictures are shown")
        wanted = [(one.name, "", one.read) for one in files[:PICTURES]]
    else:
        wanted, sections = _worst(folder, data)
    looks: list[tuple[str, str, Any]] = []
    for number, (name, detail, read) in enumerate(wanted):
        try:
            answer, strips, seen = _drawn(segmenter, name, read(), top)
        except DataError as error:
            notes.append(str(error))
            continue
        looks.append((name, detail, answer))
        colours = legend(segmenter.labels, seen)
        sections.append(gallery_section(f"picture-{number}", name, detail or answer.in_words(), strips, colours))
    if not looks:
        raise DataError(
            f"none of {len(wanted)} pictures can be read; the first: {notes[0] if notes else 'there is none'}"
        )
    title = f"What {folder.name} {'saw' if paths else 'got most wrong'}"
    write_page(out, "gallery.html.j2", title=title, notes=notes, sections=sections)
    return LookPage(out, looks, notes)


def _worst(folder: Path, data: str | None) -> tuple[list[tuple[str, str, Any]], list[Any]]:
    """Pictures of val with the least mean IoU, and a table of the classes that are confused most."""
    kept, record = read_segmented(folder), read_run_record(folder)
    place = data or (record.data if record else None)
    if place is None:
        raise UsageError(f"{folder} did not record where its data lie; say it with --data")
    images, report = images_of(folder, Asked(data=data), place, kept), kept.report
    order = np.argsort(report.image_miou, kind="stable")[:OF_VAL]
    wanted: list[tuple[str, str, Any]] = [
        (
            images.where(int(report.index[at])),
            f"mean IoU {report.image_miou[at]:.1f} %",
            lambda row=int(report.index[at]): images.read(row),
        )
        for at in order.tolist()
    ]
    return wanted, confused_section(report)


def _drawn(
    segmenter: Segmenter, name: str, picture: Image.Image, top: int
) -> tuple[Segmented, list[tuple[list[Image.Image], str]], set[int]]:
    """The picture under its answer, how likely each of its commonest classes is at every pixel, and all its classes."""
    shown = picture.copy()
    shown.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    pixels = torch.from_numpy(np.array(shown)).permute(2, 0, 1).to(segmenter.device)
    likely = segmenter.maps.probabilities(pixels).cpu().numpy()  # (K, H, W)
    numbers, labels = likely.argmax(axis=0), segmenter.labels
    shares = np.bincount(numbers.ravel(), minlength=len(labels)) / numbers.size
    common = np.argsort(-shares, kind="stable")[:top]
    answers = [(labels[k], float(shares[k])) for k in common if shares[k]]
    maps = [Image.fromarray(np.round(255 * likely[k]).astype(np.uint8)) for k in common]
    told = "how likely at every pixel, white is certain: " + ", ".join(labels[k] for k in common)
    strips = [
        (
            of_one_height([shown, coloured(numbers, len(labels)), overlaid(shown, numbers, len(labels))]),
            "the picture, the answer, and one over the other",
        ),
        (of_one_height(maps), told),
    ]
    return Segmented(name, answers), strips, set(np.flatnonzero(shares).tolist())
