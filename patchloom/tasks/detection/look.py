"""`patchloom look` for detectors: detections in images, or the val images with the most mistakes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom.report.page import write_page
from patchloom.report.pictures.overlays import draw_objects
from patchloom.report.sections import gallery_section
from patchloom.tasks.detection.drawings import CAPTION, confused_section, draw_with_truth, objects_text, worst_first
from patchloom.tasks.detection.model import (
    ImageDetections,
    ObjectDetector,
    detected_objects,
    draw_detections,
    load_object_detector,
    open_exported_detector,
)
from patchloom.tasks.detection.page import images_of
from patchloom.tasks.detection.run_files import VAL, read_val
from patchloom.tasks.images.look_page import LookPage, across
from patchloom.tasks.report import ReportSettings
from patchloom_runtime.artifacts.artifact import is_artifact
from patchloom_runtime.artifacts.detector import DEFAULT_MIN_SCORE
from patchloom_runtime.errors import DataError, UsageError, at_least
from patchloom_runtime.images.inputs import iterate_images
from patchloom_runtime.printable import plural

COUNT = 12  # images shown at most
FEW = 0.1  # lowest score of objects that are drawn if none is likely
UNSURE = f"Nothing has a score of {DEFAULT_MIN_SCORE:.0%} or more; the most likely objects are drawn."


def look_at_detected(
    folder: Path, paths: Sequence[str] = (), *, data: str | None = None, out: Path, top: int = 5, count: int = COUNT
) -> LookPage:
    """Draw detections on up to `count` images, spread over `paths`; without paths, on the worst val images."""
    at_least("count", count, 1)
    notes: list[str] = []
    looks, sections = _detected(folder, paths, top, count, notes) if paths else _worst(folder, data, count)
    title = f"Val images that {folder.name} got most wrong"
    if paths:
        title = f"Objects that {folder.name} detects in {plural(len(looks), 'image')}"
    write_page(out, "gallery.html.j2", title=title, notes=notes, sections=sections)
    return LookPage(out, looks, notes)


def _detected(
    folder: Path, paths: Sequence[str], top: int, count: int, notes: list[str]
) -> tuple[list[tuple[str, str, Any]], list[Any]]:
    """Return images next to their detections."""
    detector = open_exported_detector(folder) if is_artifact(folder) else load_object_detector(folder)
    files = [*iterate_images(paths)]
    chosen = across(files, [os.path.dirname(one.name) for one in files], count)
    if len(chosen) < len(files):
        notes.append(f"{len(chosen)} of {len(files):,} images are shown; --count shows more")
    looks: list[tuple[str, str, Any]] = []
    sections = []
    for number, one in enumerate(chosen):
        try:
            picture = one.read()
        except DataError as error:
            notes.append(str(error))
            continue
        answer, detail = _answer(detector, one.name, picture, top)
        looks.append((one.name, detail, answer))
        drawn = draw_objects(picture, [draw_detections(each, detector.labels) for each in answer.objects])
        row = [draw_objects(picture, []), drawn]  # of one size
        sections.append(gallery_section(f"picture-{number}", one.name, detail, [(row, answer.in_words())]))
    if not looks:
        first = notes[0] if notes else "there is none"
        raise DataError(f"none of the {plural(len(files), 'image')} can be read; the first: {first}")
    return looks, sections


def _answer(detector: ObjectDetector, name: str, picture: Image.Image, top: int) -> tuple[ImageDetections, str]:
    """Return the objects with high scores; if there are none, the `top` most likely ones and a note."""
    size = picture.height, picture.width
    objects = detector.predict(picture, min_score=FEW)
    sure = [one for one in objects if one.score >= DEFAULT_MIN_SCORE]
    if sure or not objects:
        return ImageDetections(name, sure, size), ""
    return ImageDetections(name, objects[:top], size), UNSURE


def _worst(folder: Path, data: str | None, count: int) -> tuple[list[tuple[str, str, Any]], list[Any]]:
    """Return the val images with the lowest scores, and a table of the most confused classes."""
    if is_artifact(folder):
        raise UsageError(f"{folder} is an artifact and keeps no val predictions: patchloom look {folder} IMAGE…")
    val = read_val(folder)
    if val is None:
        raise UsageError(f"{folder} has no {VAL} with its val predictions; pass the images to look at")
    report = val.report
    images = images_of(folder, ReportSettings(data=data), report)
    if images is None:
        raise UsageError(f"{folder} does not record its data path; pass --data DATA")
    places = {images.key(i): i for i in range(len(images))}
    if missing := [name for name in val.names if name not in places]:
        raise DataError(
            f"{len(missing):,} of the {len(val.names):,} images that the run was validated on, first {missing[0]}, "
            "are not in these data; pass --data DATA"
        )
    scores, order = worst_first(report)
    looks: list[tuple[str, str, Any]] = []
    sections = [*confused_section(report)]
    for number, i in enumerate(order[:count]):
        name, detail = val.names[i], f"{scores[i]:.0%} right; {objects_text(report, i)}"
        row = draw_with_truth(images.read(places[name]), report, i)
        looks.append((name, detail, ImageDetections(name, detected_objects(report.detections[i], report.classes))))
        sections.append(gallery_section(f"picture-{number}", name, CAPTION if not number else "", [(row, detail)]))
    return looks, sections
