"""Readers of what `patchloom export` leaves."""

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.untrusted import own_sha256
from tests.reliability.readers.reader import CLASSES, Reader, queries
from tests.reliability.readers.runs import verified

SIDE = 16
FILES = {"artifact/artifact.json": "json", "artifact/labels.json": "json", "artifact/model.onnx": "bytes"}


def make_artifact(seeds: Path, folder: Path) -> None:
    """As an export leaves one; the graph is the means of two colours."""
    from onnx import TensorProto, helper

    del seeds
    nodes = [
        helper.make_node("Cast", ["pixels"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["values", "axes"], ["embedding"], keepdims=0),
        helper.make_node("Gather", ["embedding", "two"], ["logits"], axis=1),
    ]
    values = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "colours",
        [values("pixels", TensorProto.UINT8, ["batch", SIDE, SIDE, 3])],
        [values("logits", TensorProto.FLOAT, ["batch", 2]), values("embedding", TensorProto.FLOAT, ["batch", 3])],
        [
            helper.make_tensor("axes", TensorProto.INT64, [2], [1, 2]),
            helper.make_tensor("two", TensorProto.INT64, [2], [2, 0]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    artifact = folder / "artifact"
    artifact.mkdir()
    (artifact / "model.onnx").write_bytes(model.SerializeToString())
    (artifact / "labels.json").write_text(json.dumps(CLASSES))
    shown = {"image_size": [SIDE, SIDE], "crop_ratio": 1.0, "interpolation": "bicubic", "resize": "short_side"}
    about = {"format": 1, "to": "onnx", "precision": "float32", "task": "classification", "network": "colours"}
    about |= {"outputs": ["logits", "embedding"], "preprocessing": shown, "parts": ["model"], "files": {}}
    (artifact / "artifact.json").write_text(json.dumps(about))
    for name in ("model.onnx", "labels.json"):
        _repair(artifact, artifact / name)


def read_artifact(seeds: Path, folder: Path) -> Any:
    """Classes of two pictures."""
    return load(folder / "artifact", threads=1).predict(queries(seeds), top=2)


def repair_artifact(folder: Path, file: Path) -> None:
    """Checksums made right; not of the graph, where another number is another answer (test_hostile_artifacts.py)."""
    if file.suffix != ".onnx":
        _repair(folder / "artifact", file)


def _repair(artifact: Path, file: Path) -> None:
    path = artifact / "artifact.json"
    about = json.loads(path.read_bytes())
    if file != path:
        about["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    path.write_text(json.dumps(about | {"own_sha256": own_sha256(about)}))


ARTIFACTS: dict[str, Reader] = {
    "artifact": Reader(
        make_artifact,
        read_artifact,
        FILES,
        repair_artifact,
        ours=True,
    ),
    "artifact verified": Reader(
        make_artifact,
        verified,
        FILES,
        repair_artifact,
        ours=True,
        notices=True,
        share=0.5,
        command=lambda _, folder: ("verify", folder / "artifact"),
    ),
} if all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))) else {}  # fmt: skip
