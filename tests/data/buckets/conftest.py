"""A bucket with shards for each test, on an S3 server of this machine."""

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from patchloom.data.buckets.objects import end_helper
from patchloom.data.packing import pack
from tests.data.buckets.servers import FaultProxy, faults_before, ministack, request

CLASSES = ("10", "9", "rose", "tulip")
_numbers = itertools.count()


def make_images(folder: Path, splits: dict[str, int], size: int = 32) -> Path:
    """Write images in class folders; names that WebDataset would cut at the first dot are among them."""
    rng = np.random.default_rng(0)
    for split, count in splits.items():
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (size, size, 3), dtype=np.uint8)
                file = f"{number}.v2.png" if number % 2 else f"{number}.jpg"
                Image.fromarray(pixels).save(folder / split / name / file)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    return make_images(tmp_path_factory.mktemp("photos") / "flowers", {"train": 12, "val": 3})


@pytest.fixture(scope="session")
def packed(photos, tmp_path_factory) -> Path:
    """The photos as shards of a local folder, with a second shard for train."""
    folder = tmp_path_factory.mktemp("packed") / "flowers"
    pack(
        make_images(tmp_path_factory.mktemp("larger") / "larger", {"train": 60, "val": 3}, 96), out=folder, shard_size=1
    )
    return folder


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> Iterator[str]:
    for name in ("obstore", "ministack"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    with ministack(tmp_path_factory.mktemp("s3")) as address:
        yield address


@dataclass
class Bucket:
    """An empty bucket, behind a proxy."""

    url: str
    name: str
    server: str
    proxy: FaultProxy

    def upload(self, folder: Path, to: str) -> str:
        """Copy the files of a folder, behind the proxy's back. Return the address of the copy."""
        for file in sorted(folder.iterdir()):
            assert request(self.server, "PUT", f"/{self.name}/{to}/{file.name}", file.read_bytes())[0] == 200
        return f"{self.url}/{to}"


@pytest.fixture
def bucket(s3, monkeypatch, tmp_path) -> Iterator[Bucket]:
    name = f"bucket-{next(_numbers)}"
    assert request(s3, "PUT", f"/{name}")[0] == 200
    with faults_before(s3) as (address, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("PATCHLOOM_BUCKET_TIMEOUT_S", "20")
        end_helper()
        yield Bucket(f"s3://{name}", name, s3, proxy)
        end_helper()
