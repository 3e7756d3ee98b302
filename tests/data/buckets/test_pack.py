"""`pack` writes shards that are read as the dataset they were made of, the same bytes for the same data."""

import json
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

import patchloom
from patchloom.data.packing import pack
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import open_data
from patchloom.runs.provenance import provenance_of
from patchloom_runtime.errors import DataError, UsageError
from tests.data.buckets.conftest import make_images
from tests.data.buckets.test_buckets import contents
from tests.messages import refused


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_are_the_dataset_they_were_made_of(photos, tmp_path):
    packed = pack(photos, out=tmp_path / "shards")
    before, after = open_data(photos), open_data(tmp_path / "shards")
    assert packed.classes == tuple(before.classes.names) == tuple(after.classes.names) == ("10", "9", "rose", "tulip")
    assert packed.splits == {"train": 48, "val": 12}
    for split in ("train", "val"):
        assert contents(getattr(before, split)) == contents(getattr(after, split))
    assert provenance_of(before).rows == provenance_of(after).rows


def test_the_same_images_are_held_out(tmp_path):
    data = make_images(tmp_path / "flowers", {"": 6})
    pack(data, out=tmp_path / "shards")
    before, after = open_data(data), open_data(tmp_path / "shards")
    assert len(before.val) > 0
    assert contents(before.val) == contents(after.val)


def test_the_same_data_give_the_same_bytes_and_a_second_run_writes_nothing(photos, tmp_path):
    first = pack(photos, out=tmp_path / "a", shard_size=1)
    pack(photos, out=tmp_path / "b", shard_size=1)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    again = pack(photos, out=tmp_path / "a", shard_size=1)
    assert [shard.written for shard in first.shards] == [True, True]
    assert [shard.written for shard in again.shards] == [False, False]
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}


def test_an_unfinished_folder_is_refused_and_continued(photos, tmp_path):
    pack(photos, out=tmp_path / "whole")
    pack(photos, out=tmp_path / "part")
    for name in ("shards.json", "classes.txt", "val-000000.tar"):
        os.unlink(tmp_path / "part" / name)
    with refused(DataError, tmp_path / "part", "not finished"):
        open_data(tmp_path / "part")
    again = pack(photos, out=tmp_path / "part")
    assert [shard.written for shard in again.shards] == [False, True]
    assert files(tmp_path / "whole") == files(tmp_path / "part")


def test_other_content_is_not_replaced(photos, tmp_path):
    pack(photos, out=tmp_path / "shards")
    before = files(tmp_path / "shards")
    other = make_images(tmp_path / "other", {"train": 3, "val": 1})
    with refused(UsageError, tmp_path / "shards" / "train-000000.tar", "--out"):
        pack(other, out=tmp_path / "shards")
    assert files(tmp_path / "shards") == before


def test_a_shard_that_is_missing_or_changed_is_named_locally_too(photos, tmp_path):
    pack(photos, out=tmp_path / "shards")
    shard = tmp_path / "shards" / "val-000000.tar"
    content = shard.read_bytes()
    shard.write_bytes(content + bytes(512))
    with refused(DataError, "val-000000.tar", len(content), len(content) + 512):
        open_data(tmp_path / "shards")
    shard.unlink()
    with refused(DataError, "val-000000.tar", "missing"):
        open_data(tmp_path / "shards")


def test_shards_hold_pairs_that_others_read(photos, tmp_path):
    pack(photos, out=tmp_path / "shards", shard_size=1)
    with tarfile.open(tmp_path / "shards" / "train-000000.tar") as archive:
        names = archive.getnames()
        assert names[:4] == ["000000000.jpg", "000000000.json", "000000001.png", "000000001.json"]
        about = json.load(archive.extractfile("000000001.json"))
    assert about == {"label": 0, "class": "10", "original_path": "train/10/1.v2.png"}
    index = json.loads((tmp_path / "shards" / "train-000000.tar.index.json").read_text())
    member, offset, size, label, _ = index["samples"][1]
    data = (tmp_path / "shards" / "train-000000.tar").read_bytes()[offset : offset + size]
    assert (member, label, data) == ("000000001.png", "0", (photos / "train/10/1.v2.png").read_bytes())


def test_a_dry_run_counts(photos, tmp_path):
    packed = patchloom.pack(photos, out=tmp_path / "shards", dry_run=True)
    assert (packed.splits, packed.shards) == ({"train": 48, "val": 12}, ())
    assert not (tmp_path / "shards").exists()


def test_progress_and_corrections(photos, tmp_path):
    (tmp_path / "fixed.csv").write_text("path,action,label\ntrain/rose/0.jpg,relabel,tulip\ntrain/9/1.v2.png,drop,\n")
    calls = []
    reading = Reading(corrections=tmp_path / "fixed.csv")
    pack(photos, out=tmp_path / "shards", reading=reading, progress=lambda *numbers: calls.append(numbers))
    assert calls == [(47, 59), (59, 59)]
    classes = {key: name for key, name, _ in contents(open_data(tmp_path / "shards").train)}
    assert classes["train/rose/0.jpg"] == "tulip"
    assert "train/9/1.v2.png" not in classes


def test_images_without_files_are_packed_as_png(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (8, 5, 6, 3), dtype=np.uint8)
    pack((pixels, [0, 1] * 4), out=tmp_path / "shards")
    data = open_data(tmp_path / "shards")
    images = {data.train.key(i): np.asarray(data.train.read(i)) for i in range(len(data.train))}
    assert all(any(np.array_equal(image, one) for one in pixels) for image in images.values())


def test_data_without_one_class_per_image_are_refused(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "labels.csv").write_text("path,label\n" + "".join(f"{n}.png,a|b\n" for n in range(4)))
    with refused(UsageError, "pack"):
        pack(tmp_path / "images", out=tmp_path / "shards", reading=Reading(labels=tmp_path / "labels.csv"))


@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_a_bucket_gets_the_files_of_a_folder_and_the_list_last(bucket, photos, tmp_path, killed_after, monkeypatch):
    from patchloom.data import packing

    original, calls = packing.put, []

    def stopping(address, data):
        if len(calls) == killed_after:
            raise KeyboardInterrupt
        calls.append(address)
        return original(address, data)

    monkeypatch.setattr(packing, "put", stopping)
    with pytest.raises(KeyboardInterrupt):
        pack(photos, out=f"{bucket.url}/flowers")
    monkeypatch.setattr(packing, "put", original)
    packed = pack(photos, out=f"{bucket.url}/flowers")
    assert sum(not shard.written for shard in packed.shards) == (killed_after > 1)
    pack(photos, out=tmp_path / "shards")
    assert contents(open_data(f"{bucket.url}/flowers").val) == contents(open_data(tmp_path / "shards").val)
    other = make_images(tmp_path / "other", {"train": 3, "val": 1})
    with refused(UsageError, f"{bucket.url}/flowers/train-000000.tar"):
        pack(other, out=f"{bucket.url}/flowers")
