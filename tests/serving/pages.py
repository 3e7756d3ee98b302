"""Models of every task, tiny and mostly untrained, behind the page of `patchloom app`, in this process."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import patchloom
from patchloom.inference.index_build import index
from patchloom.models.dense.detector import make_detector
from patchloom.models.dense.upernet import SegmentationConfig, SegmentationNetwork
from patchloom.runs.config import Preprocessing, RunFiles
from patchloom.serving.hosts import Hosts
from patchloom.serving.page import PageApp
from patchloom.serving.served_model import ServedModel, describe, load_served, served_verbs, thumbnail_verbs
from patchloom.tasks.detection.model import ObjectDetector
from patchloom.tasks.segmentation.model import Segmenter
from patchloom.tasks.table import task_named
from patchloom_runtime.artifacts.artifact import ArtifactClassifier, ArtifactMetadata
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from tests.serving.clients import InThisProcess, send_all
from tests.serving.conftest import GOLDEN

LABELS = ("ground", "red", "blue")
SHOWN = Preprocessing(image_size=(32, 32), crop_ratio=1.0, interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
FILES = RunFiles("resmlp_s12", {}, SHOWN, None, LABELS)
BACKBONE: dict[str, Any] = {"depth": 2, "dim": 16, "patch_size": 8, "image_size": (32, 32), "num_classes": 0}
COLORS = {"crimson": "warm", "tomato": "warm", "navy": "cold"}


def classifier(_: Path) -> ServedModel:
    return load_served(str(GOLDEN / "classifier"), device="cpu")


def artifact(_: Path) -> ServedModel:
    def means(pixels: np.ndarray) -> dict[str, np.ndarray]:
        return {"logits": pixels.astype(np.float32).mean(axis=(1, 2)) / 255}

    transform = EvaluationTransform((32, 32), 1.0)
    settings = ArtifactClassifier.read_settings({})
    about = ArtifactMetadata("onnx", "float32", "classification", "resmlp_s12", ("logits",), transform, {}, settings)
    return ServedModel(task_named("classification"), ArtifactClassifier(Path("artifact"), about, LABELS, means))


def segmenter() -> Segmenter:
    options: dict[str, Any] = {"backbone": BACKBONE, "channels": 8, "auxiliary_channels": 0}
    config = SegmentationConfig(name="resmlp_s12", num_classes=3, image_size=(32, 32), **options)
    return Segmenter(SegmentationNetwork(config).eval(), FILES)


def detector() -> ObjectDetector:
    backbone = patchloom.create_model("resmlp_s12", **BACKBONE)
    network = make_detector(backbone, 3, masks=True, channels=8, hidden=16, min_score=0.0)
    return ObjectDetector(network.eval(), FILES)


def translator(_: Path) -> ServedModel:
    return load_served(str(GOLDEN / "translator"), device="cpu")


def without_classes(_: Path) -> ServedModel:
    return load_served(str(GOLDEN / "dino"), device="cpu")


def of_index(folder: Path) -> ServedModel:
    """Three colours at two levels, four pictures each."""
    rng = np.random.default_rng(0)
    (folder / "files").mkdir()
    rows = "".join(f"{name},{kind}\n" for name, kind in COLORS.items())
    (folder / "files" / "taxonomy.csv").write_text(f"class,temperature\n{rows}")
    for name in COLORS:
        (folder / "files" / name).mkdir()
        for number in range(4):
            noise = rng.integers(0, 40, (200, 300, 3))
            pixels = np.asarray(Image.new("RGB", (300, 200), name)).astype(int) + noise
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "files" / name / f"{number}.jpg")
    index(str(GOLDEN / "classifier"), [str(folder / "files")], out=folder / "index", device="cpu")
    return load_served(str(folder / "index"), device="cpu")


MODELS: dict[str, Callable[[Path], ServedModel]] = {
    "classifier": classifier,
    "artifact": artifact,
    "segmenter": lambda _: ServedModel(task_named("segmentation"), segmenter()),
    "detector": lambda _: ServedModel(task_named("detection"), detector()),
    "translator": translator,
    "without classes": without_classes,
    "index": of_index,
}


LOCAL = Hosts("127.0.0.1", "127.0.0.1", 8000)


def page_of(served: ServedModel, source: str = "", images: Path | None = None, hosts: Hosts = LOCAL) -> PageApp:
    processes = InThisProcess(served_verbs(served), describe(served))
    processes.source = source
    thumbnails = None if images is None else InThisProcess(thumbnail_verbs([str(images)]), {})
    return PageApp(processes, "model", hosts=hosts, thumbnails=thumbnails)


@contextmanager
def over_http(app: PageApp) -> Iterator[str]:
    """The application at an address of this machine."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            path, _, query = self.path.partition("?")
            with turn:
                (reply,) = send_all(app, (self.command, path, body, dict(self.headers), query))
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    app.hosts = Hosts("127.0.0.1", "127.0.0.1", server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
