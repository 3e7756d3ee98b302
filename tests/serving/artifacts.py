"""A tiny artifact that names the colour of a picture: served without torch, its processes start in a moment."""

import hashlib
import json
from pathlib import Path

import pytest

from patchloom_runtime.untrusted import own_sha256

LABELS = ["red", "green", "blue"]
SIZE = 16


def write_artifact(folder: Path) -> Path:
    """As `patchloom export` leaves one; its graph is the mean of each colour."""
    onnx = pytest.importorskip("onnx", reason="pip install 'patchloom[export]'")
    pytest.importorskip("onnxruntime", reason="pip install 'patchloom[export]'")
    helper, number = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Cast", ["pixels"], ["values"], to=number.FLOAT),
        helper.make_node("ReduceMean", ["values", "axes"], ["embedding"], keepdims=0),
        helper.make_node("Div", ["embedding", "scale"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "colours",
        [helper.make_tensor_value_info("pixels", number.UINT8, ["batch", SIZE, SIZE, 3])],
        [helper.make_tensor_value_info(name, number.FLOAT, ["batch", 3]) for name in ("logits", "embedding")],
        [
            helper.make_tensor("axes", number.INT64, [2], [1, 2]),
            helper.make_tensor("scale", number.FLOAT, [], [16.0]),
        ],
    )
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "labels.json").write_text(json.dumps(LABELS))
    about = {
        "format": 1,
        "to": "onnx",
        "precision": "float32",
        "task": "classification",
        "network": "colours",
        "outputs": ["logits", "embedding"],
        "preprocessing": {
            "image_size": [SIZE, SIZE],
            "crop_ratio": 1.0,
            "interpolation": "bicubic",
            "resize": "short_side",
        },
        "files": {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("model.onnx", "labels.json")
        },
    }
    (folder / "artifact.json").write_text(json.dumps(about | {"own_sha256": own_sha256(about)}))
    return folder
