"""Images per second and memory from tar shards: patchloom, WebDataset and litdata, from a disk and from an S3 server.

    pip install webdataset litdata ministack
    python benchmarks/shards.py --pictures imagenette160-train.parquet --workers 2 --batch 64 --rounds 5

patchloom and WebDataset read the same shards; litdata reads chunks made of the same JPEGs. All crop at random to
224 pixels, flip, and end with normalised float32 batches in the main process. "+ our transform" is WebDataset with
patchloom's decoding and transform, so that only the reading differs. Each side runs in processes of its own, one per
round, in turn; an epoch that starts workers and fills caches comes before the one that is measured. The server
(MiniStack) is on this machine and takes its part of the cores. patchloom reads it with and without its cache, litdata
with the cache that it always has, WebDataset has none. Memory is that of the main process and its workers, shared
pages counted once (PSS), without the page cache.
"""

import argparse
import http.client
import importlib.util
import io
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch
from loader import IMAGE_SIZE, images_per_second, torchvision_transform, write_jpegs
from PIL import Image

from patchloom.data.augmentation.augment import train_transform
from patchloom.data.batches.loader import Loader
from patchloom.data.datasets import ClassTable, LabeledImages
from patchloom.data.images.image_batch import normalize
from patchloom.data.packing import pack
from patchloom.data.sources.source import find_source
from patchloom.recipes.parts import AugmentPart
from patchloom_runtime.images.decode import decode
from patchloom_runtime.images.samples import Sample

BUCKET = "benchmark"
SHARD_MIB = 4
Epoch = Callable[[], Iterable[torch.Tensor]]


def patchloom_epochs(place: str, workers: int, batch: int) -> Epoch:
    listing = find_source(f"{place}/shards").train
    dataset = LabeledImages(listing.images, listing.rows, listing.labels, ClassTable(listing.names))
    loader = Loader(dataset, train_transform(AugmentPart(), IMAGE_SIZE), batch_size=batch, workers=workers)
    epochs = iter(range(1_000))
    return lambda: (normalize(each.images) for each in loader.epoch(next(epochs)))


def webdataset_epochs(place: str, workers: int, batch: int, *, ours: bool = False) -> Epoch:
    import webdataset

    shards = sorted(path.name for path in Path(os.environ["SHARDS"]).glob("train-*.tar"))
    if place.startswith("s3://"):
        place = f"{os.environ['AWS_ENDPOINT_URL']}/{BUCKET}"
    urls = [f"pipe:curl -s -f {place}/shards/{name}" if "://" in place else f"{place}/shards/{name}" for name in shards]
    transform = partial(_our_array if ours else _their_tensor, train_transform(AugmentPart(), IMAGE_SIZE))
    # A buffer of 1,000 images; its shards are shuffled too. Its documentation advises both.
    dataset = webdataset.WebDataset(urls, shardshuffle=100, nodesplitter=webdataset.split_by_node)
    dataset = dataset.shuffle(1000).to_tuple("jpg").map_tuple(transform).batched(batch, partial=False)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: (normalize(images.permute(0, 3, 1, 2)) if ours else images for (images,) in loader)


def _their_tensor(_: object, data: bytes) -> torch.Tensor:
    return _v2()(Image.open(io.BytesIO(data)).convert("RGB"))


def _our_array(transform: object, data: bytes) -> torch.Tensor:
    arrays = transform.arrays(Sample(decode(data, "")), random)  # type: ignore[attr-defined]
    return torch.from_numpy(arrays["image"])


_made: list[Callable] = []


def _v2() -> Callable[[Image.Image], torch.Tensor]:
    if not _made:
        _made.append(torchvision_transform({}))
    return _made[0]


def litdata_epochs(place: str, workers: int, batch: int) -> Epoch:
    import litdata

    class Pictures(litdata.StreamingDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return _v2()(Image.open(io.BytesIO(super().__getitem__(index)["image"])).convert("RGB"))

    options = {}
    if place.startswith("s3://"):
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without encryption
        options = {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    dataset = Pictures(f"{place}/chunks", shuffle=True, drop_last=True, **options)
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers, persistent_workers=True)
    return lambda: iter(loader)


SIDES: dict[str, Callable[[str, int, int], Epoch]] = {
    "patchloom": patchloom_epochs,
    "patchloom without cache": patchloom_epochs,
    "webdataset": webdataset_epochs,
    "webdataset + our transform": partial(webdataset_epochs, ours=True),
    "litdata": litdata_epochs,
}


def tree_mib() -> float:
    """Return the memory of this process and those it started, shared pages counted once."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    inside = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in inside} - inside:
        inside |= more
    total = 0
    for process in inside:
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(text.partition("\nPss:")[2].split()[0])
    return total / 2**10


def measure(side: str, place: str, workers: int, batch: int) -> None:
    torch.set_num_threads(1)
    epoch = SIDES[side](place, workers, batch)
    images_per_second(epoch())

    def watched() -> Iterator[torch.Tensor]:
        nonlocal most
        for number, images in enumerate(epoch()):
            if number % 8 == 4:
                most = max(most, tree_mib())
            yield images

    most = 0.0
    rate = images_per_second(watched())
    print(json.dumps({"images_per_s": rate, "mib": most}), flush=True)
    os._exit(0)  # without waiting for the workers of others


def _bytes_of(path: str) -> dict[str, bytes]:
    return {"image": Path(path).read_bytes()}


def make_data(folder: Path, parquet: Path | None, count: int, side: int) -> None:
    photos = folder / "photos" / "train"
    photos.mkdir(parents=True)
    write_jpegs(photos, parquet, count, side)
    pack(folder / "photos", out=folder / "shards", shard_size=SHARD_MIB)
    if importlib.util.find_spec("litdata"):
        import litdata

        paths = [str(path) for path in sorted(photos.glob("*/*.jpg"))]
        litdata.optimize(_bytes_of, paths, str(folder / "chunks"), chunk_bytes=f"{SHARD_MIB}MB", num_workers=1)


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Yield the address of an S3 server with the shards and chunks of a folder."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    settings = {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "HOME": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "ministack"],
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        _put(port, f"/{BUCKET}", b"")
        for kind in ("shards", "chunks"):
            for file in sorted((folder / kind).glob("*")):
                _put(port, f"/{BUCKET}/{kind}/{file.name}", file.read_bytes())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _put(port: int, path: str, body: bytes) -> None:
    scope = "Credential=a/20261118/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("PUT", path, body, {"Authorization": f"AWS4-HMAC-SHA256 {scope}"})
        status = connection.getresponse().status
        if status != 200:
            raise RuntimeError(f"PUT {path}: {status}")


def compare(title: str, place: str, sides: list[str], args: argparse.Namespace, environment: dict[str, str]) -> None:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(args.rounds):
        for side in sides:
            with tempfile.TemporaryDirectory() as cache:
                own = {"XDG_CACHE_HOME": cache, "HOME": cache, "TQDM_DISABLE": "1"} | environment
                if side == "patchloom without cache":
                    own["PATCHLOOM_CACHE_GIB"] = "0"
                command = [sys.executable, *sys.argv, "--side-only", side, "--place", place]
                done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
            lines = done.stdout.strip().splitlines()
            if not lines or not lines[-1].startswith("{"):
                print(f"  {side} failed: {done.stderr.strip()[-300:]}", flush=True)
                continue
            found[side].append(json.loads(lines[-1]))
            print(f"  round {number + 1}, {side}: {lines[-1]}", file=sys.stderr, flush=True)
    print(f"{title}, {args.workers} workers: images/s, median (min … max), and MiB", flush=True)
    for side, numbers in found.items():
        rates = [each["images_per_s"] for each in numbers]
        if rates:
            memory = max(each["mib"] for each in numbers)
            print(f"  {side}: {statistics.median(rates):.0f} ({min(rates):.0f} … {max(rates):.0f}), {memory:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", type=Path, help="parquet with encoded images; random pictures without it")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--side", type=int, default=256, help="pixels of the JPEGs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side-only", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side_only:
        measure(args.side_only, args.place, args.workers, args.batch)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, args.pictures, args.count, args.side)
        shards = {"SHARDS": str(folder / "shards")}
        local = [side for side in SIDES if side != "patchloom without cache"]
        compare("from a disk", name, local, args, shards)
        with server(folder) as address:
            own = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "a"}
            own |= {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
            compare("from an S3 server", f"s3://{BUCKET}", list(SIDES), args, shards | own)


if __name__ == "__main__":
    main()
