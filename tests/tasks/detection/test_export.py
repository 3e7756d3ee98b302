"""A detector as graphs and rules in numpy finds what the network finds; its artifact is a detector."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import batched_nms

import patchloom
from patchloom.exporters.artifact import Exported
from patchloom.exporters.formats import format_named
from patchloom.models.dense.detector import Detector
from patchloom.runs.config import Preprocessing
from patchloom.tasks.detection.export import OBJECTS, DetectorSubject, as_array, box_limits, pairs
from patchloom.tasks.detection.graph import detector_parts
from patchloom.tasks.detection.look import look_at_detected
from patchloom.tasks.detection.page import evaluate_detectors
from patchloom.tasks.export import export
from patchloom.tasks.plan import TrainingSettings
from patchloom.training.run import run_training
from patchloom_runtime.artifacts.artifact import load
from patchloom_runtime.artifacts.detector import RegionBoxes, suppress_overlaps
from patchloom_runtime.engines.engine import ENGINES
from patchloom_runtime.errors import CheckpointError, UsageError
from patchloom_runtime.untrusted import own_sha256
from tests.export.test_export import needs_onnx
from tests.models.test_detector import BACKBONES, SIDE, detector
from tests.tasks.detection.test_detection import TINY

ROOT = Path(__file__).parents[3]
PREPROCESSING = Preprocessing((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), (SIDE, SIDE), 1.0)


def canvases(count: int = 3) -> np.ndarray:
    """Canvases of noise, partly filled by images."""
    rows = np.zeros(count, [("pixels", np.uint8, (SIDE, SIDE, 3)), ("extent", np.int64, (4,))])
    rows["pixels"] = np.random.default_rng(0).integers(0, 256, rows["pixels"].shape)
    rows["extent"] = [(40, SIDE, 80, 128), (SIDE, 30, 128, 60), (20, 20, 20, 20)][:count]
    return rows


def subject_of(network: Detector) -> DetectorSubject:
    made = DetectorSubject.__new__(DetectorSubject)
    made.model, made.preprocessing, made.rows = network, PREPROCESSING, canvases()
    made.limits = box_limits(network, type("View", (), {"short": None, "long": None}))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("to", ENGINES)
@pytest.mark.parametrize("name", BACKBONES)
def test_graphs_and_rules_find_what_the_network_finds(name: str, to: str, tmp_path: Path) -> None:
    form = format_named(to)
    for package in form.packages:
        pytest.importorskip(package, reason=f"{package} is not installed: {form.install}")
    network = detector(name, masks=name != "mixer_s16", min_score=0.2, most=20).eval()
    with torch.no_grad():
        for module in (network.rpn.head, network.roi_heads):
            for parameter in module.parameters():
                parameter.normal_(0, 0.05 if parameter.ndim > 1 else 0.3)
    subject = subject_of(network)
    for part in detector_parts(network, PREPROCESSING, subject.rows[:2]):
        form.write(part, tmp_path)
    graph = subject.open(form, tmp_path, 1)
    for rows in (subject.rows, subject.rows[2:]):
        outputs, expected = graph(rows), subject.run(rows)
        assert sum(len(one.scores) for one in expected[OBJECTS]) > len(rows)
        assert subject.agreement(outputs, expected) == 100.0
        pixels, share = subject.differences(outputs, expected)
        assert pixels <= 1e-3
        assert share <= 1e-4


def test_overlaps_are_left_out_as_torchvision_does() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(900, 2, generator=generator) * 50
    boxes = torch.cat([corners, corners + 5 + torch.rand(900, 2, generator=generator) * 20], 1)
    scores, groups = torch.rand(900, generator=generator), torch.randint(0, 4, (900,), generator=generator)
    expected = batched_nms(boxes, scores, groups, 0.5).tolist()
    for most in (1000, 20):
        assert suppress_overlaps(boxes.numpy(), scores.numpy(), groups.numpy(), 0.5, most).tolist() == expected[:most]
    assert suppress_overlaps(np.zeros((0, 4), np.float32), np.zeros(0), np.zeros(0), 0.5, 9).tolist() == []


def test_objects_are_paired_once_and_by_class() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 10.1], [20, 20, 30, 30]], np.float32)
    ours = RegionBoxes(boxes, np.array([1, 1, 2]), np.array([0.9, 0.8, 0.7], np.float32))
    assert sorted(map(tuple, pairs(ours, ours).tolist())) == [(0, 0), (1, 1), (2, 2)]
    assert len(pairs(ours, replace(ours, labels=np.array([1, 1, 1])))) == 2
    assert len(pairs(ours, RegionBoxes(boxes[:0], ours.labels[:0], ours.scores[:0]))) == 0


# A run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detection") / "run"
    options: dict[str, Any] = {"task": "detect", "level": "coarse", "model": "resmlp_s12", "epochs": 1, "size": 32}
    small = TINY | {"detect.min_score": 0.05}
    data = "shapes:count=16,size=32"
    run_training(TrainingSettings(data=data, out=str(folder), changes=small, workers=0, batch=4, **options))
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Exported:
    needs_onnx()
    return export(str(run), str(run.parent / "artifact"))


def test_an_artifact_is_a_detector(run: Path, exported: Exported) -> None:
    _, file = exported.rows
    assert (exported.measure, exported.images) == ("box AP", 16)
    assert (file.agreement, file.accuracy) == (100.0, exported.rows[0].accuracy)
    artifact, detector = patchloom.load(exported.folder), patchloom.load(run, device="cpu")
    image = np.random.default_rng(0).integers(0, 256, (32, 24, 3), dtype=np.uint8)  # of the canvas' scale
    outputs, wanted = (model.predict([image, image[:20]], min_score=0.0) for model in (artifact, detector))
    assert [len(each) for each in outputs] == [len(each) for each in wanted]
    for one, other in zip(outputs[0] + outputs[1], wanted[0] + wanted[1], strict=True):
        assert (one.name, pytest.approx(one.score, abs=1e-4)) == (other.name, other.score)
        assert np.allclose(one.box, other.box, atol=1e-2)
        assert (one.mask((32, 24)) == other.mask((32, 24))).mean() > 0.99
    assert isinstance(artifact.predict(image), list)
    with pytest.raises(UsageError) as error:
        artifact.predict(image, min_score=2)
    assert "min_score" in str(error.value)
    assert "2" in str(error.value)


def test_the_runtime_finds_objects_without_torch(exported: Exported, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'runtime')!r})\n"
        "import numpy, patchloom_runtime\n"
        f"model = patchloom_runtime.load({str(exported.folder)!r})\n"
        "print(len(model.predict(numpy.full((50, 40, 3), 90, numpy.uint8), min_score=0.0)) > 0)\n"
        "print({'torch', 'patchloom', 'timm', 'torchvision'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["True", "set()"]


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"parts": ["model"]}, r"artifact\.json.*regions"),
        ({"detection": {"anchors": []}}, r"artifact\.json"),
        ({"files": {}}, r"artifact\.json.*model\.onnx"),
    ],
)
def test_an_artifact_that_does_not_tell_all_is_refused(
    exported: Exported, tmp_path: Path, changed: dict[str, Any], pattern: str
) -> None:
    about = json.loads((exported.folder / "artifact.json").read_text()) | changed
    (tmp_path / "artifact.json").write_text(json.dumps(about | {"own_sha256": own_sha256(about)}))
    with pytest.raises(CheckpointError, match=pattern):
        load(tmp_path)


def test_boxes_that_are_off_or_missing_are_a_difference() -> None:
    subject = subject_of(detector("resmlp_s12", min_score=0.2).eval())
    expected = subject.run(subject.rows)
    moved = [replace(one, boxes=one.boxes + np.float32(0.1)) for one in expected[OBJECTS]]
    assert subject.differences({OBJECTS: as_array(moved)}, expected)[1] > 1e-3
    less = [RegionBoxes(one.boxes[::2], one.labels[::2], one.scores[::2]) for one in expected[OBJECTS]]
    assert subject.differences({OBJECTS: as_array(less)}, expected)[1] > 1e-2


def test_int8_of_a_detector_is_refused_first(run: Path, tmp_path: Path) -> None:
    for option in ("int8", "half"):
        with pytest.raises(UsageError, match=f"--{option}"):
            export(str(run), str(tmp_path / "x"), **{option: True})
    assert list(tmp_path.iterdir()) == []


def test_evaluate_and_look_take_it_where_they_take_a_run(exported: Exported, run: Path, tmp_path: Path) -> None:
    data = "shapes:count=16,size=32"
    scores = evaluate_detectors({"run": run, "file": exported.folder}, data, split=None, device="cpu").values
    assert scores["file"]["ap50"] == pytest.approx(scores["run"]["ap50"], abs=0.5)
    assert scores["file"]["images"] == scores["run"]["images"]
    with pytest.raises(UsageError, match="DATA"):
        evaluate_detectors({"file": exported.folder}, None, split=None, device="cpu")
    Image.new("RGB", (32, 32), "red").save(tmp_path / "a.png")
    page = look_at_detected(exported.folder, [str(tmp_path / "a.png")], out=tmp_path / "look.html")
    assert [name for name, _, _ in page.looks] == [str(tmp_path / "a.png")]
