"""Parts of shards: any number of machines make the same files, and those of earlier versions still count."""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import patchloom
from patchloom.data.sources.source import list_shards
from patchloom.inference import ray_engine, shard_parts
from patchloom.inference.index_files import StoredVectors, read_about
from patchloom.inference.shard_parts import ShardJob
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import own_sha256
from tests.forked import Forked
from tests.messages import refused

OPTIONS: dict[str, Any] = {"device": "cpu", "batch": 8}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def in_turns(trained: Path, shards: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards in another order, by the tasks of three Ray workers that take turns."""
    job, files = ShardJob(str(trained / "a"), str(out), "cpu", batch=8), list_shards(str(shards))
    for worker in (2, 0, 1):
        monkeypatch.setattr(ray_engine, "_open", None)  # a process of its own
        for shard in files[worker::3]:
            ray_engine._embed(job, shard)


def by_shares(trained: Path, shards: Path, out: Path, _: pytest.MonkeyPatch) -> None:
    for number in (3, 1, 2):
        patchloom.index(str(trained / "a"), shards, out=out, part=f"{number}/3", **OPTIONS)


def embed_until_killed(marker: Path, line: Callable[[], Any]) -> None:
    write, calls = shard_parts.atomic_write, []

    def third_record_is_long(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 3:
            marker.touch()
            time.sleep(600)
        write(path, data)

    shard_parts.atomic_write = third_record_is_long
    line()


def killed_first(trained: Path, shards: Path, out: Path, _: pytest.MonkeyPatch) -> None:
    marker = out.parent / "marker"
    line = partial(patchloom.index, str(trained / "a"), shards, out=out, **OPTIONS)
    process = Forked(partial(embed_until_killed, marker, line))
    while not marker.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(out.glob("*.parquet"))) == 3
    assert len(list(out.glob("shard-*.json"))) == 2


@pytest.mark.parametrize("make", [in_turns, by_shares, killed_first])
def test_any_machines_make_the_same_index_part_for_part(make: Any, trained, shards, tmp_path, monkeypatch) -> None:
    alone = patchloom.index(str(trained / "a"), shards, out=tmp_path / "alone", **OPTIONS)
    assert len(alone.index.about.parts) > 6
    assert {part.rows_file[-8:] for part in alone.index.about.parts} == {".parquet"}
    make(trained, shards, tmp_path / "index", monkeypatch)
    patchloom.index(str(trained / "a"), shards, out=tmp_path / "index", join=True, **OPTIONS)
    assert contents(tmp_path / "index") == contents(tmp_path / "alone")


def as_earlier(folder: Path) -> None:
    """Change an index to what the previous version wrote: rows in JSON."""
    about = read_about(folder)
    stored = StoredVectors(folder, about)
    digests: dict[str, str] = {}
    for part in about.parts:
        listed = json.dumps(stored.rows_of(part)).encode()
        (folder / part.rows_file).unlink()
        (folder / f"{part.name}.json").write_bytes(listed)
        digests[part.name] = hashlib.sha256(listed).hexdigest()
    for path in (*folder.glob("shard-*.json"), folder / "index.json"):
        values = json.loads(path.read_text())
        del values["own_sha256"]
        for part in values.get("parts", [values]):
            del part["parquet"]
            part["rows_sha256"] = digests[part.get("name", part.get("part"))]
        values["format"] -= 1
        path.write_text(json.dumps(values | {"own_sha256": own_sha256(values)}))


def test_an_index_of_an_earlier_version_goes_on(trained, shards, tmp_path, monkeypatch) -> None:
    query, out = trained / "data" / "red" / "3.png", tmp_path / "index"
    new = patchloom.index(str(trained / "a"), shards, out=out, **OPTIONS).index.search(query, top=60).hits
    as_earlier(out)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert patchloom.search(out, query, top=60, device="cpu").hits == new
    monkeypatch.undo()
    again = patchloom.index(str(trained / "a"), shards, out=out, **OPTIONS)
    assert (again.embedded, again.index.search(query, top=60).hits) == (0, new)
    assert list(out.glob("*.parquet")) == []
    os.utime(sorted(shards.glob("*.tar"))[0], ns=(1, 1))  # has changed, as far as anybody knows
    mixed = patchloom.index(str(trained / "a"), shards, out=out, **OPTIONS)
    assert mixed.embedded == again.index.about.parts[0].rows
    assert [part.parquet for part in mixed.index.about.parts if len(part)].count(True) == 1
    assert len(mixed.index) == 60
    reds = mixed.index.search(query, top=60, label="red").hits
    assert sorted(reds) == sorted(hit for hit in new if hit.label == "red")


def test_shards_need_pyarrow_and_image_files_do_not(trained, shards, tmp_path, monkeypatch) -> None:
    query = trained / "data" / "red" / "3.png"
    patchloom.index(str(trained / "a"), shards, out=tmp_path / "made", **OPTIONS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused(UsageError, "patchloom[parquet]"):
        patchloom.index(str(trained / "a"), shards, out=tmp_path / "index", **OPTIONS)
    assert not (tmp_path / "index").exists()
    with refused(UsageError, "patchloom[parquet]", tmp_path / "made"):
        patchloom.open_index(tmp_path / "made", device="cpu")
    built = patchloom.index(str(trained / "a"), trained / "data", out=tmp_path / "index", **OPTIONS)
    assert built.index.search(query).hits[0].path == str(query)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: bytes([*data[:40], data[40] ^ 1, *data[41:]])])
def test_damaged_rows_of_a_shard_are_named(trained, shards, tmp_path, change: Callable[[bytes], bytes]) -> None:
    opened = patchloom.index(str(trained / "a"), shards, out=tmp_path / "index", **OPTIONS).index
    path = tmp_path / "index" / opened.about.parts[0].rows_file
    path.write_bytes(change(path.read_bytes()))
    with refused(CheckpointError, path):
        patchloom.search(tmp_path / "index", trained / "data" / "red" / "3.png", top=60, device="cpu")
    assert list(patchloom.verify(tmp_path / "index").wrong) == [path.name]
