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
from patchloom.data.checking.large_check import check_in_parts
from patchloom.data.checking.oddities import odd_kinds
from patchloom.data.checking.overlap import against as compare_with
from patchloom.data.checking.scan_cache import ImageScan
from patchloom.data.checking.survey import ImageLocation, Survey, find_copies, survey
from patchloom.data.datasets import Progress
from patchloom.data.labels.unlabeled import task_and_annotations
from patchloom.data.reading_options import AS_IT_IS, Reading
from patchloom.data.sources.source import find_source
from patchloom.data.sources.specs import Data, as_spec
from patchloom.data.text.sentences import SentenceSplit, check_sentences, find_sentences
from patchloom_runtime.errors import UsageError, with_near_options
from patchloom_runtime.printable import printable


@with_near_options
def check(
    spec: Data,
    *,
    reading: Reading = AS_IT_IS,
    against: Data | None = None,
    workers: int | None = None,
    cache: bool = True,
    out: str | os.PathLike[str] | None = None,
    part: str | None = None,
    join: bool = False,
    progress: Progress | None = None,
) -> CheckReport:
    """Read all images of a dataset, as `open_data` would open it, or all its sentence pairs.

    spec      Folder, or any other data that `train` takes.
    reading   How to read the data (`patchloom.Reading`).
    against   Test set to compare with: list the training images that it also contains, or nearly. It is compared by its
              test split (or val, or all).
    workers   Processes that read images. Default: one per core.
    cache     Read only the files that changed since the last check. Results are stored outside the data.
    out       Check in parts, with bounded memory: folder, or address in a bucket, for the parts and the report. The
              data are tar shards, parquet files or class folders. The report has the first problems of each kind; CSV
              files in `out` list all.
    part      Scan one of several shares of the data, such as 3/8, for `join`. The report only counts its images.
    join      Join the parts that were made with `part`; make none.
    progress  Called with the number of images done and their total; of parts with `out`.
    """
    if out is not None:
        _refuse_unread(reading, against)
        return check_in_parts(spec, out=os.fspath(out), part=part, join=join, workers=workers, progress=progress)
    if part is not None or join:
        raise UsageError("--part and --join need --out, the folder of the parts")
    spec = as_spec(spec)
    if sentences := _sentences(spec, reading, against):
        return _sentence_report(printable(Path(os.path.expanduser(spec)).resolve().name), sentences)
    source = find_source(spec, reading=reading)
    other = find_source(against) if against is not None else None
    scanned = survey(source, workers=workers, cache=cache, progress=progress)
    readable = [i for i, scan in enumerate(scanned.scans) if not scan.error]
    places, scans = [scanned.places[i] for i in readable], [scanned.scans[i] for i in readable]
    copies = find_copies(scans, places, scanned.listings)
    task, annotated = task_and_annotations(source)
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


def _refuse_unread(reading: Reading, against: Data | None) -> None:
    """Raise UsageError for options that a check in parts does not read."""
    if against is not None:
        raise UsageError("--against compares data in memory; drop --out")
    for name in reading.chosen():
        raise UsageError(f"--{name.replace('_', '-')} is not read with --out; drop one of the two")


def _sentences(spec: str, reading: Reading, against: Data | None) -> Sequence[SentenceSplit]:
    sentences = find_sentences(Path(os.path.expanduser(spec))) if reading.labels is None else []
    if sentences and against is not None:
        raise UsageError(f"--against compares images, and {printable(spec)} holds sentence pairs")
    return sentences


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
        yield from (OddImage(place, kind, read_as) for kind, read_as in odd_kinds(scan, usual_side))
        yield from (OddImage(place, fault.kind, fault.detail) for fault in scan.faults if fault.kind == NO_OBJECTS)


def _spread(values: Sequence[int]) -> tuple[int, int, int] | None:
    return (min(values), int(median(values)), max(values)) if values else None
