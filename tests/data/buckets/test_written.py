"""Runs, artifacts and indexes that are written to a bucket and used from there on another machine."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import patchloom
from patchloom.data import packing
from patchloom.data.buckets.mirror import Mirror
from patchloom.data.buckets.objects import list_tree
from patchloom.data.packing import pack
from patchloom.data.sources.source import list_shards
from patchloom.engine.signals import Stopped
from patchloom.inference import shard_parts
from patchloom.inference.shard_parts import ShardEmbedder, ShardJob
from patchloom.runs.upload import Uploader
from patchloom_runtime.errors import BucketError, CheckpointError, UsageError
from tests.data.buckets.test_runs import OPTIONS, Interrupt
from tests.messages import refused


@pytest.fixture
def run(photos, tmp_path) -> Path:
    options = OPTIONS | {"epochs": 1}
    patchloom.train(str(photos), out=str(tmp_path / "run"), **options)
    return tmp_path / "run"


@pytest.fixture
def shards(bucket, photos, tmp_path, monkeypatch) -> str:
    monkeypatch.setattr(packing, "_shards", _small())
    pack(photos, out=tmp_path / "shards")
    return bucket.upload(tmp_path / "shards", "flowers")


def _small() -> Any:
    original = packing._shards
    return lambda listing, classes, most_bytes: original(listing, classes, most_bytes >> 13)


def another_machine(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def test_a_run_is_continued_on_another_machine(bucket, photos, tmp_path, monkeypatch) -> None:
    here = patchloom.train(str(photos), out=str(tmp_path / "here"), **OPTIONS)
    Interrupt.after = 7
    with pytest.raises(Stopped):
        patchloom.train(str(photos), out=f"{bucket.url}/runs/a", callbacks=[Interrupt()], **OPTIONS)
    another_machine(monkeypatch, tmp_path / "other")
    bucket.proxy.faults.extend(["", "500", "cut"])
    there = patchloom.train(str(photos), out=f"{bucket.url}/runs/a", callbacks=[Interrupt()], **OPTIONS)
    assert there.metrics == here.metrics
    another_machine(monkeypatch, tmp_path / "third")
    copy = Mirror(f"{bucket.url}/runs/a").pull()
    assert (copy / "weights.safetensors").read_bytes() == (tmp_path / "here" / "weights.safetensors").read_bytes()
    assert len(list((copy / "checkpoints").iterdir())) == 2
    image = next(photos.rglob("*.jpg"))
    assert patchloom.load(f"{bucket.url}/runs/a").predict(image) == patchloom.load(tmp_path / "here").predict(image)


def test_a_checkpoint_is_uploaded_before_the_run_ends(bucket, photos, monkeypatch) -> None:
    monkeypatch.setattr(Uploader, "finish", lambda self: self._thread.shutdown())  # a machine that is lost then
    patchloom.train(str(photos), out=f"{bucket.url}/runs/a", **OPTIONS)
    names = Mirror(f"{bucket.url}/runs/a").names()
    assert "checkpoints/step-00000012/manifest.json" in names
    assert "report.html" not in names


def test_a_network_that_fails_during_the_run_does_not_end_it(bucket, tmp_path, capfd, monkeypatch) -> None:
    folder = Mirror(f"{bucket.url}/runs/a")
    (folder.pull() / "a").write_bytes(b"1")
    uploader, push = Uploader(folder), Mirror.push

    def fails(self: Mirror, **_: Any) -> None:
        raise BucketError("no connection")

    monkeypatch.setattr(Mirror, "push", fails)
    uploader.start()
    uploader._running.exception()
    monkeypatch.setattr(Mirror, "push", push)
    uploader.start()
    assert "no connection" in capfd.readouterr().err
    uploader.finish()
    assert folder.names() == ["a"]


def test_an_artifact_in_a_bucket(bucket, run, photos) -> None:
    exported = patchloom.export(str(run), f"{bucket.url}/models/a", to="torch", images=4)
    assert sorted(Mirror(f"{bucket.url}/models/a").names()) == sorted(
        path.relative_to(exported.folder).as_posix() for path in exported.folder.rglob("*") if path.is_file()
    )
    with refused(UsageError, f"{bucket.url}/models/a"):
        patchloom.export(str(run), f"{bucket.url}/models/a", to="torch", images=4)
    image = next(photos.rglob("*.jpg"))
    there, here = (patchloom.load(one).predict(image) for one in (f"{bucket.url}/models/a", run))
    assert there[0][0] == here[0][0]
    assert len(patchloom.predict(f"{bucket.url}/models/a", [image])) == 1


def test_a_run_in_a_bucket_is_evaluated(bucket, run, photos) -> None:
    copy = Mirror(f"{bucket.url}/runs/a")
    shutil.copytree(run, copy.folder)
    copy.push()
    shutil.rmtree(copy.folder)
    there, here = (patchloom.evaluate(one, str(photos), device="cpu").values() for one in (f"{bucket.url}/runs/a", run))
    assert list(there.values()) == list(here.values())
    assert not (copy.folder / "checkpoints").exists()


def test_shares_of_an_index_over_a_bad_network(bucket, run, shards, tmp_path, monkeypatch) -> None:
    alone = patchloom.index(str(run), tmp_path / "shards", out=tmp_path / "alone", device="cpu", batch=8)
    assert len(alone.index) == 60
    assert len(alone.index.about.parts) > 4
    out = f"{bucket.url}/flowers.index"
    for number in (2, 1, 3):
        another_machine(monkeypatch, tmp_path / f"machine-{number}")
        bucket.proxy.faults.extend(["", "500", "cut", ""])
        patchloom.index(str(run), shards, out=out, part=f"{number}/3", device="cpu", batch=8)
    again = patchloom.index(str(run), shards, out=out, part="3/3", device="cpu", batch=8)
    assert again.embedded == 0
    monkeypatch.setattr(ShardEmbedder, "embed", None)  # nothing is embedded again
    joined = patchloom.index(str(run), shards, out=out, join=True, device="cpu", batch=8)
    assert len(joined.index) == 60
    assert joined.index.labels == alone.index.labels
    digests = [[part.vectors_sha256 for part in one.index.about.parts] for one in (alone, joined)]
    assert digests[0] == digests[1]
    another_machine(monkeypatch, tmp_path / "searching")
    query = Image.linear_gradient("L").convert("RGB").resize((32, 32))
    there, here = (patchloom.search(one, query, device="cpu").hits for one in (out, tmp_path / "alone"))
    assert [(hit.score, hit.label) for hit in there] == [(hit.score, hit.label) for hit in here]
    assert all(hit.path.startswith(f"{shards}/") for hit in there)


def test_shares_of_a_check_over_a_bad_network(bucket, shards, tmp_path, monkeypatch) -> None:
    alone = patchloom.check(tmp_path / "shards")
    out = f"{bucket.url}/flowers.check"
    for number in (2, 1, 3):
        another_machine(monkeypatch, tmp_path / f"machine-{number}")
        bucket.proxy.faults.extend(["", "500", "cut", ""])
        patchloom.check(shards, out=out, part=f"{number}/3", workers=1)
    assert patchloom.check(shards, out=out, part="3/3").decoded == 0
    another_machine(monkeypatch, tmp_path / "joining")
    report = patchloom.check(shards, out=out, join=True)
    assert report.decoded == 0
    assert (report.splits, report.classes, report.problems()) == (alone.splits, alone.classes, alone.problems())
    places = [[(place.where.rpartition("/")[2], place.label) for place in group] for group in report.near_duplicates]
    assert places == [[(p.where.rpartition("/")[2], p.label) for p in group] for group in alone.near_duplicates]
    stored = {facts.url.rpartition("/")[2] for facts in list_tree(out)}
    assert {"check.json", "duplicates.csv"} < stored
    assert len([name for name in stored if name.endswith(".part")]) == len(list_shards(shards)) > 4


def test_a_share_that_is_cut_off_keeps_its_finished_parts(bucket, run, shards, tmp_path, monkeypatch) -> None:
    out = f"{bucket.url}/flowers.index"
    embed, calls = ShardEmbedder.embed, []

    def cut(self: ShardEmbedder, shard: Any) -> Any:
        if len(calls) == 2:
            raise BucketError("cut")
        calls.append(shard)
        return embed(self, shard)

    monkeypatch.setattr(ShardEmbedder, "embed", cut)
    with pytest.raises(BucketError):
        patchloom.index(str(run), shards, out=out, device="cpu", batch=8)
    another_machine(monkeypatch, tmp_path / "other")
    monkeypatch.setattr(ShardEmbedder, "embed", embed)
    built = patchloom.index(str(run), shards, out=out, device="cpu", batch=8)
    assert 0 < built.embedded < len(built.index) == 60


def test_machines_whose_vectors_differ_do_not_mix_them(bucket, run, shards, tmp_path, monkeypatch) -> None:
    job = ShardJob(str(run), f"{bucket.url}/flowers.index", "cpu", batch=8)
    shard = list_shards(shards)[0]
    records = []
    original = shard_parts.embed_files

    def differing(*inputs: Any, **options: Any) -> Any:
        for files in original(*inputs, **options):
            yield files._replace(vectors=files.vectors * (1 + 1e-7 * len(records)))

    monkeypatch.setattr(shard_parts, "embed_files", differing)
    for name in ("one", "two"):
        another_machine(monkeypatch, tmp_path / name)
        records.append(ShardEmbedder(job).embed(shard))
    assert records[0] == records[1]


def test_parts_of_changed_and_removed_shards(run, photos, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(packing, "_shards", _small())
    pack(photos, out=tmp_path / "shards")
    options: dict[str, Any] = {"out": tmp_path / "index", "device": "cpu", "batch": 8}
    first = patchloom.index(str(run), tmp_path / "shards", **options)
    (tmp_path / "shards" / "shards.json").unlink()
    files = sorted((tmp_path / "shards").glob("train-*.tar"))
    for file in (tmp_path / "shards").glob("*.index.json"):
        file.unlink()
    shutil.copy(files[0], files[1])  # has changed: now the images of the first
    files[2].unlink()
    second = patchloom.index(str(run), tmp_path / "shards", **options)
    assert second.embedded == first.index.about.parts[0].rows
    kept = patchloom.index(str(run), tmp_path / "shards", **options)
    assert (kept.embedded, len(kept.index)) == (0, len(second.index))
    pruned = patchloom.index(str(run), tmp_path / "shards", prune=True, **options)
    assert len(second.index) - len(pruned.index) == pruned.gone > 0
    whole = patchloom.index(str(run), tmp_path / "shards", **options | {"out": tmp_path / "whole"})
    assert pruned.index.about.labels == whole.index.about.labels
    assert len(pruned.index) == len(whole.index)
    pack(photos, out=tmp_path / "others")
    both = patchloom.index(str(run), tmp_path / "others", **options)
    assert len(both.index) == len(pruned.index) + 60
    assert len(patchloom.index(str(run), tmp_path / "shards", prune=True, **options).index) == len(both.index)


def test_levels_of_shards_are_those_of_a_taxonomy(run, photos, tmp_path) -> None:
    pack(photos, out=tmp_path / "shards")
    (tmp_path / "levels.csv").write_text("class,kind\n10,number\n9,number\nrose,flower\ntulip,flower\n")
    reading = patchloom.Reading(taxonomy=tmp_path / "levels.csv")
    options: dict[str, Any] = {"out": tmp_path / "index", "device": "cpu", "reading": reading}
    built = patchloom.index(str(run), tmp_path / "shards", level="kind", **options)
    assert built.index.labels == {"flower": 30, "number": 30}
    query = next(photos.rglob("*.jpg"))
    (result,) = patchloom.search(tmp_path / "index", [query], label="flower", top=60, device="cpu")
    assert [hit.label for hit in result.hits] == ["flower"] * 30


def test_a_damaged_record_is_named(run, photos, tmp_path) -> None:
    pack(photos, out=tmp_path / "shards")
    patchloom.index(str(run), tmp_path / "shards", out=tmp_path / "index", device="cpu")
    record = next((tmp_path / "index").glob("shard-*.json"))
    record.write_bytes(record.read_bytes().replace(b'"rows": ', b'"rows": 1'))
    with refused(CheckpointError, record.name):
        patchloom.index(str(run), tmp_path / "shards", out=tmp_path / "index", device="cpu")


def test_data_in_a_bucket_are_not_downloaded_as_a_run_or_an_index(bucket, shards) -> None:
    bucket.proxy.reads.clear()
    for use in (patchloom.load, patchloom.open_index, lambda url: patchloom.evaluate(url, url)):
        with refused(UsageError, shards):
            use(shards)
    assert not [path for path in bucket.proxy.reads if path.partition("?")[0].endswith(".tar")]
