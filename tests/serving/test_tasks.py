"""Models of every task are served as they answer from Python; untrained networks do."""

import base64
import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from patchloom.serving.app import App
from patchloom.serving.served_model import ServedModel, describe, load_served, served_verbs, warm_up
from patchloom.tasks.table import task_named
from patchloom_runtime.artifacts.artifact import ArtifactClassifier, ArtifactMetadata
from patchloom_runtime.artifacts.segmenter import ArtifactSegmenter, WindowSettings
from patchloom_runtime.errors import UsageError
from patchloom_runtime.images.evaluation_transform import EvaluationTransform
from tests.serving.clients import InThisProcess, get, post
from tests.serving.conftest import GOLDEN, IMAGE_FILES
from tests.serving.pages import LABELS, detector, segmenter


def app_of(served: ServedModel) -> App:
    verbs = served_verbs(served)
    warm_up(served.task, verbs)
    return App(InThisProcess(verbs, describe(served)), "model")


def app_for(task: str, model: Any) -> App:
    return app_of(ServedModel(task_named(task), model))


def test_classes_of_pixels() -> None:
    model = segmenter()
    (reply,) = post(app_for("segmentation", model), "/segment", IMAGE_FILES[0]).json["results"]
    mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(reply["mask"]))))
    assert (mask == model.predict(IMAGE_FILES[0])).all()
    assert mask.shape == (reply["height"], reply["width"])
    assert sum(one["share"] for one in reply["classes"]) == pytest.approx(1)
    assert {one["label"]: (mask == one["number"]).mean() for one in reply["classes"]} == pytest.approx(
        {one["label"]: one["share"] for one in reply["classes"]}
    )


def test_artifacts() -> None:
    transform = EvaluationTransform((32, 32), 1.0)

    def means(pixels: np.ndarray) -> dict[str, np.ndarray]:
        shades = pixels.astype(np.float32) / 255
        vectors = shades.mean(axis=(1, 2))
        return {"logits": vectors, "embedding": vectors, "maps": shades[:, 2::4, 2::4].transpose(0, 3, 1, 2)}

    def artifact(kind: Any, task: str, *outputs: str) -> App:
        settings = WindowSettings((16, 16)) if kind is ArtifactSegmenter else kind.read_settings({})
        about = ArtifactMetadata("onnx", "float32", task, "resmlp_s12", outputs, transform, {}, settings)
        return app_for(task, kind(Path("artifact"), about, LABELS, means))

    image = io.BytesIO()
    Image.new("RGB", (40, 36), (10, 200, 30)).save(image, "PNG")
    classifier = artifact(ArtifactClassifier, "classification", "logits", "embedding")
    (reply,) = post(classifier, "/predict", image.getvalue(), query="top=1").json["results"]
    assert reply["answers"][0]["label"] == "red"
    assert len(post(classifier, "/embed", image.getvalue()).json["results"][0]["vector"]) == 3
    assert get(classifier, "/").json["network"] == "resmlp_s12"
    (reply,) = post(artifact(ArtifactSegmenter, "segmentation", "maps"), "/segment", image.getvalue()).json["results"]
    assert reply["classes"] == [{"number": 1, "label": "red", "share": 1.0}]
    assert (reply["height"], reply["width"]) == (36, 40)


def test_objects() -> None:
    model = detector()
    app = app_for("detection", model)
    assert post(app, "/detect", IMAGE_FILES[0], query="min_score=1.5").status == 422
    (reply,) = post(app, "/detect", IMAGE_FILES[0], query="min_score=0").json["results"]
    objects = model.predict(IMAGE_FILES[0], min_score=0.0)
    assert [(one["label"], one["box"]) for one in reply["objects"]] == [(one.name, list(one.box)) for one in objects]
    assert reply["objects"]
    assert set(reply["objects"][0]["mask"]) == {"size", "counts"}


def test_translations() -> None:
    pytest.importorskip("sentencepiece")
    served = load_served(str(GOLDEN / "translator"), device="cpu")
    model, app = served.model, app_of(served)
    lines = ["one two", ""]
    expected = [[each.text for each in of_line] for of_line in model.translate(lines, n_best=2)]
    reply = post(app, "/translate", {"lines": lines, "n_best": 2})
    assert [[each["text"] for each in one["translations"]] for one in reply.json["results"]] == expected
    plain = post(app, "/translate", b"one two\n\n", "text/plain")
    assert [one["translations"][0]["text"] for one in plain.json["results"]] == [one[0] for one in expected]
    for body, kind, status in (
        (b'{"lines": ["\\ud800"]}', "application/json", 422),
        (b"\xff", "text/plain", 422),
        (b"a" * 5001, "text/plain", 422),
        (IMAGE_FILES[0], "image/png", 415),
    ):
        assert post(app, "/translate", body, kind).status == status
    infer = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2], "data": lines}]}
    (text, score) = post(app, "/v2/models/model/infer", infer).json["outputs"]
    assert (text["data"], text["shape"], len(score["data"])) == ([one[0] for one in expected], [2, 1], 2)


def test_an_index_and_what_its_model_does(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "index", tmp_path / "index")
    served = load_served(str(tmp_path / "index"), device="cpu", model=str(GOLDEN / "classifier"))
    index, app = served.index, app_of(served)
    assert get(app, "/").json["verbs"] == ["search", "predict", "embed", "explain"]
    (reply,) = post(app, "/search", IMAGE_FILES[0], query="top=2").json["results"]
    assert [hit["path"] for hit in reply["hits"]] == [hit.path for hit in index.search(IMAGE_FILES[0], top=2).hits]
    assert post(app, "/search", IMAGE_FILES[0], query="level=genus").status == 422
    assert post(app, "/v2/models/model-predict/infer", {"inputs": []}).status == 422
    with pytest.raises(UsageError, match="--model"):
        load_served(str(GOLDEN / "classifier"), model="x")


def test_a_model_without_a_classifier_has_vectors_alone() -> None:
    app = app_of(load_served(str(GOLDEN / "dino"), device="cpu"))
    assert get(app, "/").json["verbs"] == ["embed", "explain"]
    assert post(app, "/predict", IMAGE_FILES[0]).status == 404
    assert len(post(app, "/embed", IMAGE_FILES[0]).json["results"][0]["vector"]) > 0


def test_no_task_needs_torch_to_serve_its_artifacts() -> None:
    code = """
import sys
from patchloom.tasks.table import TASKS
assert all(task.serving for task in TASKS.values())
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
