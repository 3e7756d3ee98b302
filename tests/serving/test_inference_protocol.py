"""The Open Inference Protocol: as JSON, and with tensors after it as Triton's clients send them."""

import base64
import io
import json
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchloom.serving.app import App
from tests.serving.clients import get, post, send_all
from tests.serving.conftest import IMAGE_FILES

INFER = "/v2/models/golden/infer"


def tensor(**changes: Any) -> dict[str, Any]:
    data = [base64.b64encode(image_file).decode() for image_file in IMAGE_FILES[:2]]
    return {"name": "image", "datatype": "BYTES", "shape": [2], "data": data} | changes


def test_the_server_and_its_models_are_describe(app: App) -> None:
    assert get(app, "/v2").json["extensions"] == ["binary_tensor_data"]
    assert get(app, "/v2/health/live").status == get(app, "/v2/models/golden-embed/ready").status == 200
    about = get(app, "/v2/models/golden").json
    assert about["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert [(one["name"], one["datatype"]) for one in about["outputs"]] == [
        ("label", "BYTES"), ("probability", "FP32"), ("abstained", "BYTES")]  # fmt: skip


def test_json_tensors(app: App, classifier) -> None:
    reply = post(app, INFER, {"id": "7", "inputs": [tensor()], "parameters": {"top": 2}}).json
    assert (reply["model_name"], reply["id"]) == ("golden", "7")
    label, probability, abstained = reply["outputs"]
    assert (abstained["shape"], abstained["data"]) == ([2], ["", ""])
    expected = classifier.predict(IMAGE_FILES[:2], top=2)
    assert label["data"] == [name for one in expected for name, _ in one]
    assert probability["data"] == pytest.approx([share for one in expected for _, share in one])
    assert label["shape"] == probability["shape"] == [2, 2]
    (vector,) = post(app, "/v2/models/golden-embed/infer", {"inputs": [tensor()]}).json["outputs"]
    assert vector["shape"] == [2, len(vector["data"]) // 2]


def test_pixels_are_a_picture_too(app: App, classifier) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(IMAGE_FILES[0])).convert("RGB"))
    fields = tensor(datatype="UINT8", shape=[1, *pixels.shape], data=pixels.tolist())
    reply = post(app, INFER, {"inputs": [fields], "outputs": [{"name": "label"}], "parameters": {"top": 1}}).json
    assert reply["outputs"][0]["data"] == [classifier.predict(pixels, top=1)[0][0]]
    raw = pixels.tobytes()
    head = {"inputs": [tensor(datatype="UINT8", shape=list(pixels.shape), parameters={"binary_data_size": len(raw)})]}
    assert binary(app, head, raw).json["outputs"][0]["data"][0] == reply["outputs"][0]["data"][0]


def binary(app: App, head: dict[str, Any], rest: bytes) -> Any:
    head["inputs"][0].pop("data", None)
    text = json.dumps(head).encode()
    headers = {"inference-header-content-length": str(len(text))}
    return post(app, INFER, text + rest, "application/octet-stream", **headers)


def test_tensors_that_follow_the_json(app: App, classifier) -> None:
    rest = b"".join(struct.pack("<I", len(image_file)) + image_file for image_file in IMAGE_FILES[:2])
    head = {"inputs": [tensor(parameters={"binary_data_size": len(rest)})], "parameters": {"binary_data_output": True}}
    reply = binary(app, head, rest)
    length = int(reply.headers["inference-header-content-length"])
    label, probability, _ = json.loads(reply.body[:length])["outputs"]
    size = label["parameters"]["binary_data_size"]
    words, rest_of_reply = reply.body[length : length + size], reply.body[length + size :]
    shares = rest_of_reply[: probability["parameters"]["binary_data_size"]]
    expected = classifier.predict(IMAGE_FILES[:2])
    assert words == b"".join(struct.pack("<I", len(name)) + name.encode() for one in expected for name, _ in one)
    np.testing.assert_allclose(np.frombuffer(shares, "<f4"), [share for one in expected for _, share in one], rtol=1e-5)
    for cut in (rest[:-1], rest[:3], b""):
        head = {"inputs": [tensor(parameters={"binary_data_size": len(cut)})]}
        assert binary(app, head, cut).status == 422


def test_what_is_wrong_is_said(app: App) -> None:
    pixels = {"datatype": "UINT8", "data": [1, 2, 3]}
    for body, facts in (
        ({}, ["'inputs'"]),
        ({"inputs": [tensor(), tensor()]}, ["'inputs'"]),
        ({"inputs": [tensor(name="x")]}, ["'x'", "'image'"]),
        ({"inputs": [tensor(shape=[3])]}, ["2", "[3]"]),
        ({"inputs": [tensor(shape=[])]}, ["'shape'"]),
        ({"inputs": [tensor(shape=[True, 2])]}, ["'shape'"]),
        ({"inputs": [tensor(shape=[1 << 40])]}, ["'shape'"]),
        ({"inputs": [tensor(datatype="FP32")]}, ["BYTES", "UINT8"]),
        ({"inputs": [tensor(data=None)]}, ["'data'"]),
        ({"inputs": [tensor(data=["%", "%"])]}, ["0", "base64"]),
        ({"inputs": [tensor(parameters={"binary_data_size": 9})]}, ["9", "0"]),
        ({"inputs": [tensor(parameters=[])]}, ["'parameters'"]),
        ({"inputs": [tensor(shape=[1, 1, 1, 3], **pixels)]}, ["4"]),
        ({"inputs": [tensor(shape=[1, 9, 9, 3], **pixels)]}, ["3", "[1, 9, 9, 3]"]),
        ({"inputs": [tensor(shape=[3], **pixels)]}, ["[N, H, W, 3]"]),
        ({"inputs": [tensor()], "parameters": {"tip": 1}}, ["'tip'", "top"]),
        ({"inputs": [tensor()], "outputs": [{"name": "y"}]}, ["'y'"]),
        ({"inputs": [tensor()], "outputs": [{"name": ["label"]}]}, ["label"]),
        ({"inputs": [tensor()], "outputs": 3}, ["'outputs'"]),
        ({"inputs": [tensor()], "id": 3}, ["'id'"]),
    ):
        reply = post(app, INFER, body)
        assert reply.status == 422, (body, reply.error)
        for fact in facts:
            assert fact in reply.error, body
    assert post(app, INFER, b"{}", "image/png").status == 415
    assert post(app, INFER, b"{}", "application/octet-stream").status == 415
    for length in ("3", "-1", "x", "９"):
        headers = {"inference-header-content-length": length}
        assert post(app, INFER, b"{}", "application/octet-stream", **headers).status == 400


def test_what_tritons_client_sends(app: App, classifier) -> None:
    """The bytes of tritonclient 2.73, as it sends them by default: no Content-Type, tensors after the JSON."""
    head = (
        b'{"id":"7","inputs":[{"name":"image","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":%d}}],'
        b'"outputs":[{"name":"label","parameters":{"binary_data":true}},'
        b'{"name":"probability","parameters":{"binary_data":true}}],"parameters":{"top":2}}' % (4 + len(IMAGE_FILES[0]))
    )
    body = head + struct.pack("<I", len(IMAGE_FILES[0])) + IMAGE_FILES[0]
    headers = {"inference-header-content-length": str(len(head)), "user-agent": "python/gevent-http-client-2.6.1"}
    (reply,) = send_all(app, ("POST", INFER, body, headers))
    assert reply.status == 200
    length = int(reply.headers["inference-header-content-length"])
    expected = classifier.predict(IMAGE_FILES[0], top=2)
    words = b"".join(struct.pack("<I", len(name)) + name.encode() for name, _ in expected)
    assert reply.body[length:] == words + np.array([share for _, share in expected], "<f4").tobytes()
    assert [one["shape"] for one in json.loads(reply.body[:length])["outputs"]] == [[1, 2], [1, 2]]
    fields = {"inputs": [tensor()], "outputs": [{"name": "label", "parameters": {"binary_data": False}}]}
    (reply,) = send_all(app, ("POST", INFER, json.dumps(fields).encode(), {"user-agent": headers["user-agent"]}))
    assert (reply.status, reply.json["outputs"][0]["shape"]) == (200, [2, 3])
