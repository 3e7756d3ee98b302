"""A server of files on this machine, with the faults of real ones, and a small network as if it had been published."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from patchloom.models.pretrained import table as weights_table
from patchloom.models.pretrained.table import Weights
from tests.networks import SMALL, small

SHOWN: dict[str, Any] = {"crop_ratio": 0.9, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@dataclass
class Shelf:
    """What a server has, how it fails, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)  # bytes after which each answer in turn breaks off
    ranges: bool = True
    hub: bool = False  # answer as the Hugging Face hub does
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    address: str = ""


@contextmanager
def served(shelf: Shelf) -> Iterator[Shelf]:
    """Serve the files until the end."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            wanted = self.headers.get("Range", "")
            shelf.requests.append((self.command, self.path, wanted))
            self.close_connection = True
            data = shelf.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            digest = hashlib.sha256(data).hexdigest()
            begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
            same = self.headers.get("If-Range", f'"{digest}"') == f'"{digest}"'
            partial = shelf.ranges and bool(wanted) and same
            if partial and begin >= len(data):
                self.send_error(416)
                return
            body = data[begin:] if partial else data
            self.send_response(206 if partial else 200)
            if partial:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{digest}"')
            if shelf.hub:
                self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if with_body:
                cut = shelf.cut_after.pop(0) if shelf.cut_after else None
                self.wfile.write(body[:cut])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    shelf.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield shelf
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tiny(tag: str = "tiny", **more: Any) -> tuple[Weights, torch.nn.Module]:
    """A row for a ResMLP of 32 pixels with 1,000 classes, and the network."""
    network = small("resmlp_s12", num_classes=1000)
    options = {key: value for key, value in SMALL[type(network)].items() if key != "image_size"}
    given = {"url": f"https://weights.example/deit/resmlp_{tag}.pth", "counted": 40_000} | more
    return Weights(variant="resmlp_s12", tag=tag, image_size=32, options=options, **given, **SHOWN), network


def published(monkeypatch: Any, *rows: Weights) -> None:
    """Add rows to the table of published weights."""
    monkeypatch.setattr(weights_table, "WEIGHTS", (*weights_table.WEIGHTS, *rows))


def caches(monkeypatch: Any, folder: Path) -> None:
    """The user's caches in an empty folder, no mirror, no endpoint, and online."""
    from huggingface_hub import constants

    for name in ("PATCHLOOM_MIRROR", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))


def in_hub_cache(folder: Path, repository: str, file: bytes) -> Path:
    """A file as huggingface_hub keeps it in its cache."""
    home = folder / "hub" / f"models--{repository.replace('/', '--')}"
    blob = home / "blobs" / hashlib.sha256(file).hexdigest()
    link = home / "snapshots" / ("0" * 40) / "model.safetensors"
    for each in (blob.parent, link.parent, home / "refs"):
        each.mkdir(parents=True)
    blob.write_bytes(file)
    link.symlink_to(blob)
    (home / "refs" / "main").write_text("0" * 40)
    return link
