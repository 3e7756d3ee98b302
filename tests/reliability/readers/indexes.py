"""Readers of an index, of the parts of a check, and of the cache in which `check` keeps what it has seen."""

import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from patchloom.data.checking.check import check
from patchloom.data.packing import pack
from patchloom.inference.index import open_index
from patchloom.inference.index_build import index
from tests.reliability.readers.reader import Reader, copy, made, pixels, queries
from tests.reliability.readers.repairs import repair_index, repair_part
from tests.reliability.readers.runs import verified

INDEX_FILES = {"index/index.json": "json", "index/*.npy": "npy", "index/part-*.json": "json"}


def search(seeds: Path, folder: Path) -> Any:
    """What is found for two pictures."""
    return open_index(folder / "index", device="cpu").search(queries(seeds), top=5)


def grow(seeds: Path, folder: Path) -> Any:
    """What is found once a picture was added."""
    Image.fromarray(pixels(500)).save(folder / "new.png")
    built = index(str(seeds / "run"), [seeds / "data", folder / "new.png"], out=folder / "index", device="cpu")
    return built.embedded, built.unchanged, [found.hits for found in built.index.search(queries(seeds), top=5)]


def make_shard_index(seeds: Path, folder: Path) -> None:
    """An index of a shard, made when it is first asked for."""
    if not (seeds / "shard-index").exists():
        pack(str(seeds / "data"), out=seeds / "shards")
        index(str(seeds / "run"), seeds / "shards", out=seeds / "shard-index", device="cpu")
    shutil.copytree(seeds / "shard-index", folder / "index", copy_function=shutil.copyfile)


def make_cache(seeds: Path, folder: Path) -> None:
    """Pictures, one of them damaged, and what a look at them left."""
    copy("data", seeds, folder)
    (folder / "data" / "red" / "7.png").write_bytes(b"damaged")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    check(str(folder / "data"), workers=1)
    cache = next((folder / "cache" / "patchloom" / "check").glob("*.sqlite"))
    cache.rename(cache.with_suffix(".x"))  # a later look begins a new file, and this one is put back
    cache.with_suffix(".x").rename(cache)


def read_cached(seeds: Path, folder: Path) -> Any:
    """What `check` says, twice: what it makes of the cache must not last."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    first, second = (
        {name: value for name, value in check(str(folder / "data"), workers=1).to_dict().items() if name != "decoded"}
        for _ in range(2)
    )
    return first, second


def make_parts(seeds: Path, folder: Path) -> None:
    """Pictures, one of them damaged, and the parts of a check of them."""
    copy("data", seeds, folder)
    (folder / "data" / "red" / "7.png").write_bytes(b"damaged")
    check(folder / "data", out=folder / "check", workers=1)


def join(seeds: Path, folder: Path) -> Any:
    """What `check` says of its parts."""
    report = check(folder / "data", out=folder / "check", join=True)
    return report.to_dict(), {name: (folder / "check" / file).read_text() for name, file in report.lists.items()}


INDEXES: dict[str, Reader] = {
    "index": Reader(
        made("index"),
        search,
        INDEX_FILES,
        repair_index,
        ours=True,
        share=2,
        command=lambda seeds, folder: ("search", folder / "index", *queries(seeds)),
    ),
    "index of shards": Reader(
        make_shard_index,
        search,
        {"index/index.json": "json", "index/part-*.parquet": "parquet"},
        repair_index,
        ours=True,
        command=lambda seeds, folder: ("search", folder / "index", *queries(seeds)),
    ),
    "index grown": Reader(
        made("index"),
        grow,
        INDEX_FILES,
        repair_index,
        ours=True,
        writes=True,
        command=lambda seeds, folder: ("index", seeds / "run", seeds / "data", "--out", folder / "index"),
    ),
    "index verified": Reader(
        made("index"),
        verified,
        INDEX_FILES,
        repair_index,
        ours=True,
        notices=True,
        share=0.5,
        command=lambda _, folder: ("verify", folder / "index"),
    ),
    "check in parts": Reader(
        make_parts,
        join,
        {"check/*.part": "bytes"},
        lambda _, file: repair_part(file),
        ours=True,
        writes=True,
        share=0.5,
        command=lambda _, folder: ("check", folder / "data", "--out", folder / "check", "--join"),
    ),
    "cache": Reader(make_cache, read_cached, {"cache/patchloom/check/*.sqlite": "sqlite"}, ours=True, writes=True),
}
