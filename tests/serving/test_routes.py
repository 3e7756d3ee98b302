"""What is asked over HTTP is answered as the model does, and what cannot be is one plain line and a 4xx."""

import base64
import importlib
import json
import re
import sys

import numpy as np
import PIL
import pytest

import patchloom.serving
from patchloom.serving.app import App
from patchloom.serving.limits import INPUTS, Limits
from patchloom.serving.served_model import ServedModel, ServedVerb, served_verbs
from patchloom.tasks.task import Task
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.decode import MAX_PIXELS
from tests.data.bad_images import READ, REFUSED
from tests.serving.clients import get, post, send_all
from tests.serving.conftest import IMAGE_FILES, in_this_process

PNG = IMAGE_FILES[0]


def in_base64(*image_files: bytes) -> list[str]:
    return [base64.b64encode(image_file).decode() for image_file in image_files]


def test_classes_are_those_of_predict(app: App, classifier) -> None:
    reply = post(app, "/predict", PNG, query="top=2")
    assert reply.status == 200
    expected = [{"label": name, "probability": share} for name, share in classifier.predict(PNG, top=2)]
    assert reply.json == {"results": [{"answers": expected, "abstained": ""}]}
    assert [part.split(";")[0] for part in reply.headers["server-timing"].split(", ")] == [
        "upload", "queue", "batch", "model"]  # fmt: skip


def test_many_pictures_of_one_request_and_many_requests_of_one_batch(app: App, classifier) -> None:
    reply = post(app, "/predict", {"images": in_base64(*IMAGE_FILES), "top": 1})
    first = [classifier.predict(image_file, top=1)[0][0] for image_file in IMAGE_FILES]
    assert [one["answers"][0]["label"] for one in reply.json["results"]] == first
    requests = [("POST", "/predict", image_file, {}, f"top={top}") for image_file in IMAGE_FILES for top in (1, 2)]
    requests.insert(2, ("POST", "/predict", PNG[:50], {}, "top=1"))
    together = send_all(app, *requests)
    assert [one.status for one in together] == [200, 200, 422, 200, 200, 200, 200]
    good = [one for one in together if one.status == 200]
    assert [len(one.json["results"][0]["answers"]) for one in good] == [1, 2] * 3
    assert [one.json["results"][0]["answers"][0]["label"] for one in good[::2]] == first
    assert 'patchloom_batch_inputs_bucket{le="8.0"}' in get(app, "/metrics").body.decode()


def test_vectors_are_those_of_embed(app: App, classifier) -> None:
    reply = post(app, "/embed", {"images": in_base64(*IMAGE_FILES)})
    vectors = np.array([one["vector"] for one in reply.json["results"]], np.float32)
    np.testing.assert_allclose(vectors, classifier.embed(IMAGE_FILES).numpy(), rtol=1e-5, atol=1e-6)


def test_every_bad_picture_is_answered_or_refused_with_its_reason(app: App, tmp_path) -> None:
    left_out = {"more than 256 MiB", *(["YCbCr TIFF"] if PIL.__version__ < "13" else [])}  # older Pillows refuse those
    kinds = {name: kind for name, kind in (READ | REFUSED).items() if name not in left_out}
    files = []
    for kind in kinds.values():
        kind.write(tmp_path / kind.file)
        files.append((tmp_path / kind.file).read_bytes())
    answers = send_all(app, *(("POST", "/predict", file) for file in files[:60]))
    answers += send_all(app, *(("POST", "/predict", file) for file in files[60:]))
    for (name, kind), reply in zip(kinds.items(), answers, strict=True):
        assert reply.status == (422 if kind.refused else 200), (name, reply)
        if kind.refused:
            assert reply.error, name
            assert "\n" not in reply.error
            assert str(tmp_path) not in reply.error


def test_a_request_that_cannot_be_read(app: App) -> None:
    image = in_base64(PNG)
    cases = [
        ({"image": image}, ["'images'"]),
        ({"images": image[0]}, ["'images'"]),
        ({"images": []}, ["'images'"]),
        ({"images": [3]}, ["'images'"]),
        ({"images": ["%%%"]}, ["0", "base64"]),
        ({"images": image * (INPUTS + 1)}, [str(INPUTS)]),
        ({"images": image, "topp": 3}, ["'topp'", "top"]),
        *(({"images": image, "top": top}, ["top", "1000"]) for top in (0, True, 2.5, "3", 10**400)),
    ]
    for body, facts in cases:
        reply = post(app, "/predict", body)
        assert reply.status == 422, (body, reply)
        for fact in facts:
            assert fact in reply.error, body
    raw = [
        *((body, 400, "JSON") for body in (b"{", b"\xff", b'{"a":' + b"9" * 5000 + b"}", b"")),
        (b"[" * 10_000, 400, ""),
        (b'{"images": NaN}', 400, "NaN"),
        (b"[]", 422, ""),
    ]
    for body, status, fact in raw:
        reply = post(app, "/predict", body, "application/json")
        assert (reply.status, fact in reply.error) == (status, True), (body[:40], reply)
    for query, status in (("top=0", 422), ("top=x", 422), ("top=1&top=2", 422), ("a=1", 422), ("top=%ff", 422),
                          ("&".join(f"a{n}=1" for n in range(99)), 400), ("top=１", 400)):  # fmt: skip
        assert post(app, "/predict", PNG, query=query).status == status, query
    for kind in ("text/plain", "multipart/form-data", "application/xml", "video/mp4", "x" * 5000, "image"):
        reply = post(app, "/predict", PNG, kind)
        assert (reply.status, "\n" in reply.error) == (415, False)
    assert post(app, "/predict", PNG, **{"content-encoding": "gzip"}).status == 415


def test_the_size_of_a_body_and_of_a_picture_is_limited(classifier) -> None:
    limits = Limits(body_bytes=len(PNG), pixels=100)
    app = App(in_this_process(classifier, limits=limits), "small")
    reply = post(app, "/predict", PNG + b"x")
    assert (reply.status, reply.headers["connection"]) == (413, "close")
    reply = post(app, "/predict", b"", **{"content-length": "99999999999999999999"})
    assert (reply.status, "99999999999999999999" in reply.error) == (413, True)
    assert app.admission.held_bytes == 0
    reply = post(app, "/predict", PNG)
    assert (reply.status, bool(re.search(r"\b100\b", reply.error))) == (422, True)
    assert Limits().pixels == MAX_PIXELS


def test_a_path_or_method_that_is_not_there(app: App) -> None:
    tricks = "/../etc/passwd /predict/ //predict /predict/../embed /%2e%2e/x /search /models/load /v2/repository/index"
    for path in (*tricks.split(), "/v2/models/other", "/v2/models/golden/../golden", "/\x00", "/\n" * 2000):
        reply = get(app, path)
        assert (reply.status, "\n" in reply.error) == (404, False)
    (reply,) = send_all(app, ("PUT", "/predict", PNG))
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    (reply,) = send_all(app, ("HEAD", "/health"))
    assert (reply.status, reply.body, reply.headers["content-length"]) == (200, b"", str(len(b'{"live": true}')))


def test_a_key_is_asked_of_all_but_probes(classifier) -> None:
    app = App(in_this_process(classifier), "golden", api_key="secret")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}, {"x-api-key": "secre"}):
        reply = post(app, "/predict", PNG, **headers)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        assert post(app, "/predict", PNG, **headers).status == 200
    assert get(app, "/metrics").status == get(app, "/nothing").status == 401
    assert get(app, "/health").status == get(app, "/ready").status == get(app, "/v2/health/live").status == 200


def test_what_is_told_of_the_server(app: App) -> None:
    assert get(app, "/").json["verbs"] == ["predict", "embed", "explain"]
    schema = get(app, "/openapi.json").json
    assert set(schema["paths"]) == set(get(app, "/").json["routes"])
    assert schema["paths"]["/predict"]["post"]["parameters"][0]["schema"]["maximum"] == 1000
    post(app, "/predict", PNG)
    post(app, "/predict", b"")
    lines = get(app, "/metrics").body.decode().splitlines()
    assert 'patchloom_requests_total{route="/predict",status="200"} 1.0' in lines
    assert 'patchloom_requests_total{route="/predict",status="422"} 1.0' in lines
    for reason in ("upload", "queue", "batch", "model"):
        assert f'patchloom_wait_seconds_count{{reason="{reason}"}} 1.0' in lines
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert names == {line.split()[2] for line in lines if line.startswith("# HELP")}
    app.is_ending = True
    assert get(app, "/ready").status == post(app, "/predict", PNG).status == 503


def test_an_answer_that_is_not_finite_is_no_answer(app: App) -> None:
    app.processes._answers = {
        "predict": ServedVerb(lambda image_files, _: [{"answers": [float("nan")]} for _ in image_files])
    }
    reply = post(app, "/predict", PNG)
    assert (reply.status, "nan" in reply.body.decode().lower()) == (422, False)


def test_what_cannot_be_served_is_said() -> None:
    task = Task(name="guessing", training="", model="", report="")
    with pytest.raises(UsageError, match=r"\bguessing\b"):
        served_verbs(ServedModel(task, None))
    assert json.dumps(Limits().body_bytes) == "20000000"
    with pytest.raises(UsageError, match=r"\bqueue\b.*\b0\b.*\b1\b"):
        Limits(queue=0)


@pytest.mark.parametrize("package", ["starlette", "prometheus_client"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"\b{package}\b.*patchloom\[serve\]"):
        importlib.reload(patchloom.serving)
