"""Readers of pictures with classes: in folders, archives, shards and tables, with levels above the classes."""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.datasets import Listing
from patchloom.data.labels.taxonomy import read_taxonomy
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data
from patchloom.evaluation.imagenet_labels import read_real_labels
from patchloom_runtime.errors import DataError
from tests.reliability.readers.reader import CLASSES, Reader, checked, copy, made, pixels, png


def _rows(listing: Listing) -> Iterator[tuple[Any, ...]]:
    for row, label in zip(listing.rows.tolist(), listing.labels.tolist(), strict=True):
        try:
            picture = hashlib.sha256(listing.images.read(row).tobytes()).hexdigest()
        except DataError:
            picture = "unreadable"
        yield listing.images.key(row), listing.names[label] if label >= 0 else "", picture


def look_through(seeds: Path, folder: Path, *, name: str) -> Any:
    """What `check` and training make of data; what `check` calls a problem is as good as refused."""
    os.environ["XDG_CACHE_HOME"] = str(folder.parent / "seen")
    report = check(str(folder / name), workers=1, cache=False)
    told = report.problems()
    splits = open_data(str(folder / name))
    rows = {split: list(_rows(listing)) for split, listing in report.listings.items()}
    if told:
        raise DataError("; ".join(told))
    shown = {key: value for key, value in report.to_dict().items() if key not in ("decoded", "near_duplicates")}
    return shown, rows, splits.train.labels.tolist(), splits.classes


def make_labels(seeds: Path, folder: Path) -> None:
    """A table beside pictures."""
    rows = ["path,label,coarse_label,split"]
    for number in range(8):
        Image.fromarray(pixels(number)).save(folder / f"{number}.png")
        rows.append(
            f"{number}.png,{CLASSES[number % 2]},{'warm' if number % 2 else 'cold'},{'val' if number > 5 else 'train'}"
        )
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")


def make_parquet(seeds: Path, folder: Path) -> None:
    """A table of pictures, with names of classes and a level."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = 8
    columns: dict[str, Any] = {
        "image": [{"bytes": png(number), "path": f"{number}.png"} for number in range(count)],
        "label": [number % 2 for number in range(count)],
        "coarse_label": [number % 2 for number in range(count)],
        "split": ["train" if number < 6 else "val" for number in range(count)],
    }
    told = {"label_names": list(CLASSES), "coarse_label_names": ["cold", "warm"]}
    pq.write_table(
        pa.table(columns).replace_schema_metadata({"dataset_info": json.dumps(told)}), folder / "data.parquet"
    )


def _members(folders: bool) -> Iterator[tuple[str, bytes]]:
    for number in range(6):
        if folders:
            yield f"{CLASSES[number % 2]}/{number}.png", png(number)
        else:
            yield f"{number:04}.png", png(number)
            label = CLASSES[number % 2]
            yield (
                (f"{number:04}.json", json.dumps({"label": label}).encode())
                if number > 3
                else (f"{number:04}.cls", label.encode())
            )


def make_tar(seeds: Path, folder: Path, *, name: str, folders: bool = False) -> None:
    """Shards, or an archive of class folders."""
    with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w", format=tarfile.USTAR_FORMAT) as archive:
        for member, data in _members(folders):
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def make_zip(seeds: Path, folder: Path) -> None:
    """An archive of class folders."""
    with zipfile.ZipFile(folder / "data.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in _members(True):
            archive.writestr(zipfile.ZipInfo(member), data)


def make_taxonomy(seeds: Path, folder: Path) -> None:
    """Class folders with a taxonomy in each of its forms."""
    copy("data", seeds, folder)
    table = {"family": {"blue": "cold", "red": "warm"}, "order": {"blue": "colour", "red": "colour"}}
    (folder / "levels.json").write_text(json.dumps(table))
    (folder / "levels.yaml").write_text("family:\n  blue: cold\n  red: warm\norder:\n  blue: colour\n  red: colour\n")
    (folder / "levels.csv").write_text("class,family,order\nblue,cold,colour\nred,warm,colour\n")


def read_taxonomies(seeds: Path, folder: Path) -> Any:
    """The levels that data get by each of the files."""
    found = []
    for name in ("levels.json", "levels.yaml", "levels.csv"):
        splits = open_data(str(folder / "data"), reading=Reading(taxonomy=folder / name), level="family")
        found.append((read_taxonomy(folder / name), splits.classes, splits.train.labels.tolist()))
    return found


def make_real(seeds: Path, folder: Path) -> None:
    """ReaL's labels."""
    (folder / "real.json").write_text(json.dumps([[1], [2, 3], [], [4]]))


def make_corrections(seeds: Path, folder: Path) -> None:
    """Corrections of a table beside pictures."""
    make_labels(seeds, folder)
    (folder / "corrections.csv").write_text(
        f"path,action,label\n0.png,relabel,{CLASSES[1]}\n1.png,drop,\n2.png,keep,\n"
    )


def read_corrected(seeds: Path, folder: Path) -> Any:
    """The corrected rows of each split."""
    source = find_source(str(folder / "labels.csv"), reading=Reading(corrections=folder / "corrections.csv"))
    return {split: list(_rows(listing)) for split, listing in source.listings.items()}


LABELED: dict[str, Reader] = {
    "corrections": Reader(make_corrections, read_corrected, {"corrections.csv": "csv"}),
    "labels": Reader(
        make_labels,
        partial(look_through, name="labels.csv"),
        {"labels.csv": "csv"},
        share=2,
        command=checked("labels.csv"),
    ),
    "parquet": Reader(
        make_parquet,
        partial(look_through, name="data.parquet"),
        {"data.parquet": "parquet"},
        share=2,
        command=checked("data.parquet"),
    ),
    "shards": Reader(
        partial(make_tar, name="data.tar"),
        partial(look_through, name="data.tar"),
        {"data.tar": "tar"},
        share=2,
        command=checked("data.tar"),
    ),
    "tar": Reader(
        partial(make_tar, name="data.tar", folders=True),
        partial(look_through, name="data.tar"),
        {"data.tar": "tar"},
        command=checked("data.tar"),
    ),
    "tar.gz": Reader(
        partial(make_tar, name="data.tar.gz", folders=True),
        partial(look_through, name="data.tar.gz"),
        {"data.tar.gz": "bytes"},
        share=0.5,
        command=checked("data.tar.gz"),
    ),
    "zip": Reader(make_zip, partial(look_through, name="data.zip"), {"data.zip": "zip"}, command=checked("data.zip")),
    "folders": Reader(
        made("data"), partial(look_through, name="data"), {"data/*/*.png": "png"}, command=checked("data")
    ),
    "taxonomy": Reader(
        make_taxonomy,
        read_taxonomies,
        {"levels.json": "json", "levels.yaml": "yaml", "levels.csv": "csv"},
        share=2,
        command=lambda _, folder: ("check", folder / "data", "--json", "--taxonomy", folder / "levels.json"),
    ),
    "real labels": Reader(
        make_real, lambda _, folder: read_real_labels(folder / "real.json"), {"real.json": "json"}, share=0.5
    ),
}
