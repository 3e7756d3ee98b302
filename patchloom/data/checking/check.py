"""`check(DATA)`: read a whole dataset before training and report what is wrong with it.

Problems are whatever would be skipped, mislabeled or counted twice: files that cannot be read, classes without training
images, the same image in train and val or under two labels. The data is never written to.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from patchloom.data.annotations.faults import NO_OBJECTS
from patchloom.data.checking.check_report import CheckReport, Group, OddImage
from patchloom.data.checking.overlap import against as compare_with
from patchloom.data.checking.scan_cache import ImageScan
from patchloom.data.checking.survey import ImageLocation, Survey, find_copies, survey
from patchloom.data.datasets import Progress, Source
from patchloom.data.labels.unlabeled import task_of_data
from patchloom.data.reading import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source
from patchloom.data.sources.specs import Data, as_spec
from patchloom.data.text.sentences import SentenceSplit, check_sentences, find_sentences
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable

STRIP_RATIO = 8  # long side divided by the short side, from which an image is odd
TINY_SHARE = 0.25  # of the median short side, below which an image is odd
_MODES = {
    "CMYK": ("CMYK", "converted to RGB"),
    "YCbCr": ("YCbCr", "converted to RGB"),
    "LAB": ("Lab", "converted to RGB"),
    "P": ("palette", "converted to RGB, transparent parts laid over white"),
    "RGBA": ("alpha", "laid over white"),
    "LA": ("alpha", "laid over white"),
    "La": ("alpha", "laid over white"),
    "PA": ("alpha", "laid over white"),
    "I": ("32-bit", "0…65535 becomes 0…255 where all fit, else the smallest…largest"),
    "F": ("floats", "0…1 becomes 0…255 where all fit, else the smallest…largest"),
}


@with_near_options
def check(
    spec: Data,
    *,
    reading: Reading = AS_IT_IS,
    against: Data | None = None,
    workers: int | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> CheckReport:
    """Read all images of a dataset, as `open_data` would open it, or all its sentence pairs.

    spec      Folder, or any other data that `train` takes.
    reading   How to read the data (`patchloom.Reading`).
    against   Test set to compare with: list the training images that it also contains, or nearly. It is compared by its
              test split (or val, or all).
    workers   Processes that read images. Default: one per core.
    cache     Read only the files that changed since the last check. Results are stored outside the data.
    progress  Called with the number of images done and their total.
    """
    spec = as_spec(spec)
    sentences = find_sentences(Path(os.path.expanduser(spec))) if reading.labels is None else []
    if sentences and against is not None:
        raise UsageError(f"--against compares images, and {printable(spec)} holds sentence pairs")
    if sentences:
        return _sentence_report(printable(Path(os.path.expanduser(spec)).resolve().name), sentences)
    source = find_source(spec, reading=reading)
    other = find_source(against) if against is not None else None
    scanned = survey(source, workers=workers, cache=cache, progress=progress)
    readable = [i for i, scan in enumerate(scanned.scans) if not scan.error]
    places, scans = [scanned.places[i] for i in readable], [scanned.scans[i] for i in readable]
    copies = find_copies(scans, places, scanned.listings)
    task, annotated = _annotations(source)
    return CheckReport(
        name=source.name,
        task=task,
        annotated=annotated,
        splits={split: len(listing) for split, listing in scanned.listings.items()},
        classes=_classes(scanned),
        widths=_spread([scan.width for scan in scans]),
        heights=_spread([scan.height for scan in scans]),
        unreadable=scanned.unreadable,
        odd=tuple(_odd_images(places, scans)),
        duplicates=_locations(copies.equal, places),
        near_duplicates=_locations(copies.similar, places),
        faults=(*source.faults, *(fault for fault in scanned.annotation_faults() if fault.kind != NO_OBJECTS)),
        notes=source.notes,
        decoded=scanned.decoded,
        against=compare_with(scanned, other, workers=workers, cache=cache, progress=progress) if other else None,
        listings=scanned.listings,
    )


def _sentence_report(name: str, splits: Sequence[SentenceSplit]) -> CheckReport:
    result = check_sentences(splits)

    def place(number: int, row: int) -> ImageLocation:
        return ImageLocation(splits[number].where(row), splits[number].name, "", row)

    return CheckReport(
        name=f"{name} (sentence pairs)",
        unit="pair",
        splits={split.name: count for split, count in zip(splits, result.counts, strict=True)},
        classes={},
        widths=None,
        heights=None,
        unreadable=(),
        odd=tuple(OddImage(place(number, row), "uneven sides", lengths) for number, row, lengths in result.uneven),
        duplicates=tuple(tuple(place(*pair) for pair in group) for group in result.duplicates),
        near_duplicates=(),
        faults=result.faults,
        notes=(),
        decoded=sum(result.counts),
        listings={},
    )


def _annotations(source: Source) -> tuple[str, tuple[str, ...]]:
    """Return the task that the data suggest, and the class names of its masks or boxes."""
    task, images = task_of_data(source)[0], source.train.images
    ignored = images.mask_ignore if task == "segment" else None
    names = images.object_names if task == "detect" else images.mask_names
    return task, tuple(name for number, name in enumerate(names) if number != ignored)


def _locations(groups: Sequence[Sequence[int]], places: Sequence[ImageLocation]) -> tuple[Group, ...]:
    return tuple(tuple(places[i] for i in group) for group in groups)


def _classes(scanned: Survey) -> dict[str, dict[str, int]]:
    """Count readable images per class and split, including empty classes. Masks, boxes and numbers have no classes."""
    listings = scanned.readable().listings
    learned = scanned.source.train.learned
    if not any(listing.is_classified for listing in listings.values()) and (not learned or learned.kind == "numbers"):
        return {}
    names = sorted({name for listing in listings.values() for name in listing.names})
    counts = {
        split: dict(zip(listing.names, listing.counts.tolist(), strict=True)) for split, listing in listings.items()
    }
    return {name: {split: own.get(name, 0) for split, own in counts.items()} for name in names}


def _odd_images(places: Sequence[ImageLocation], scans: Sequence[ImageScan]) -> Iterator[OddImage]:
    usual_side = median(min(scan.width, scan.height) for scan in scans) if scans else 0
    for place, scan in zip(places, scans, strict=True):
        yield from (OddImage(place, kind, read_as) for kind, read_as in _oddities(scan, usual_side))
        yield from (OddImage(place, fault.kind, fault.detail) for fault in scan.faults if fault.kind == NO_OBJECTS)


def _oddities(scan: ImageScan, usual_side: float) -> Iterator[tuple[str, str]]:
    """Yield (kind, how `decode` reads it). `usual_side` is the median short side of the dataset, in pixels."""
    if scan.mode in _MODES:
        yield _MODES[scan.mode]
    if scan.mode.startswith("I;"):
        yield "16-bit", "0…65535 becomes 0…255"
    if scan.rotated:
        yield "EXIF rotation", "turned upright"
    if scan.animated:
        yield "animated", "the first frame"
    short, long = sorted((scan.width, scan.height))
    size = f"{scan.width}×{scan.height}"
    if long >= STRIP_RATIO * short:
        yield "strip", f"{size}, of which a square crop shows {short / long:.0%}"
    elif short < TINY_SHARE * usual_side:
        yield "tiny", f"{size}, enlarged; the median short side is {usual_side:g}"


def _spread(values: Sequence[int]) -> tuple[int, int, int] | None:
    return (min(values), int(median(values)), max(values)) if values else None
