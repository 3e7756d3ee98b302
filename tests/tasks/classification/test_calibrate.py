"""`calibrate` and everything that shows its probabilities and abstentions: one model, one behavior everywhere."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load, save

import patchloom
from patchloom.evaluation.classification import ClassificationReport
from patchloom.runs.calibration import FILE, read_calibration
from patchloom.runs.predictions import load_predictions
from patchloom.runs.weights import WEIGHTS
from patchloom.tasks.classification.report import _calibration_lines
from patchloom.tasks.classification.serving import ClassifierServing
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.table import task_named
from patchloom.tasks.verify import verify
from patchloom.training.run import run_training
from patchloom_runtime.errors import CheckpointError, DataError, UsageError
from tests.messages import missing
from tests.reliability.commands import command

COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "none": (60, 60, 60)}
TRAINED = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 4, "optim.lr": 0.01}


def noisy(color: tuple[int, int, int], rng: np.random.Generator) -> Image.Image:
    pixels = np.clip(np.array(color) + rng.normal(0, 30, (16, 16, 3)) + rng.normal(0, 25, 3), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/ with images of two colors and of neither, and a run on them."""
    folder, rng = tmp_path_factory.mktemp("calibrated"), np.random.default_rng(0)
    for split, images in (("train", 40), ("val", 150), ("test", 100)):
        for name, color in COLORS.items():
            target = folder / "data" / split / name
            target.mkdir(parents=True)
            for number in range(images):
                noisy(color, rng).save(target / f"{number}.png")
    lines: list[str] = []
    settings = TrainingSettings(
        data=str(folder / "data"), out=str(folder / "run"), model="resmlp_s12", size=16, epochs=3, batch=16, workers=0,
        device="cpu", init="none", changes=TRAINED, max_error="10%", negatives=("none",),
    )  # fmt: skip
    run_training(settings, say=lines.append)
    (folder / "lines.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "run", tmp_path / "run"))


def test_training_fits_the_temperature_and_the_promise(root: Path) -> None:
    calibration = read_calibration(root / "run")
    assert calibration.before is not None
    assert calibration.after is not None
    assert calibration.after.loss < calibration.before.loss
    assert calibration.rules.promise is not None
    assert calibration.rules.promise.max_error == 0.1
    assert calibration.rules.negatives == ("none",)
    lines = (root / "lines.txt").read_text()
    assert re.search(r"(?<![\d.])10 %", lines)
    assert calibration.fit is not None
    assert f"{calibration.fit.loss_without:.4g} → {calibration.fit.loss_with:.4g}" in lines
    report = (root / "run" / "report.html").read_text()
    assert "Before calibration" in report
    assert f"{calibration.before.calibration_error:.2f} %" in report
    assert not verify(root / "run").wrong


def test_the_stored_predictions_are_those_of_an_evaluation(root: Path) -> None:
    stored = load_predictions(root / "run").report
    measured = patchloom.load(root / "run", device="cpu").evaluate(str(root / "data")).report
    np.testing.assert_allclose(measured.confidence, stored.confidence, atol=1e-5)
    np.testing.assert_array_equal(measured.ranks, stored.ranks)
    assert measured.temperature == stored.temperature == read_calibration(root / "run").rules.temperature


def test_calibration_changes_no_prediction(run: Path, root: Path) -> None:
    files = sorted((root / "data" / "test" / "red").iterdir())
    calibrated = patchloom.load(run, device="cpu").predict(files)
    (run / FILE).unlink()
    plain = patchloom.load(run, device="cpu").predict(files)
    assert [[name for name, _ in scores] for scores in plain] == [[name for name, _ in scores] for scores in calibrated]
    assert not any(scores.abstained for scores in plain)
    assert [scores[0][1] for scores in plain] != [scores[0][1] for scores in calibrated]


def test_the_promise_holds_on_test_images(root: Path) -> None:
    evaluation = patchloom.load(root / "run", device="cpu").evaluate(str(root / "data"), split="test")
    values = evaluation.values()
    assert 0 < values["answered"] < 80  # a third of the images are negatives
    assert values["answered_error"] <= 10


def test_one_behavior_everywhere(run: Path, root: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install 'patchloom[export]'")
    patchloom.calibrate(run, max_error="10%", max_rejected="20%", negatives=["none"], device="cpu")
    exported = patchloom.export(run, to="onnx", out=str(tmp_path / "onnx"), images=8)
    model, artifact = patchloom.load(run, device="cpu"), patchloom.load(exported.folder)
    blue = Image.new("RGB", (16, 16), (0, 0, 255))
    images = [blue, *(path for name in COLORS for path in sorted((root / "data" / "test" / name).iterdir())[:12])]
    expected = model.predict(images)
    reasons = [scores.abstained for scores in expected]
    assert "" in reasons
    assert any(reason.startswith("unlike the training images") for reason in reasons)
    assert any(reason.startswith("most like the negatives (none ") for reason in reasons)
    assert [look.abstained for look in model.look(images)] == reasons
    assert [scores.abstained.split(" (")[0] for scores in artifact.predict(images)] == [
        reason.split(" (")[0] for reason in reasons
    ]
    for scores, same in zip(artifact.predict(images), expected, strict=True):
        assert [name for name, _ in scores] == [name for name, _ in same]
        assert [share for _, share in scores] == pytest.approx([share for _, share in same], abs=1e-4)
    serving = task_named("classification").serving
    assert isinstance(serving, ClassifierServing)
    for served in (model, artifact):
        for verb, function in serving.functions(served).items():
            if verb != "embed":
                results = function(images, {"top": 2, "label": None})
                assert [result["abstained"] == "" for result in results] == [reason == "" for reason in reasons]
    of_files = patchloom.predict(run, [str(path) for path in images[1:]], device="cpu")
    assert [(bool(one.answers), one.reason) for one in of_files] == [(not reason, reason) for reason in reasons[1:]]


def test_a_page_has_the_temperature_and_the_threshold(run: Path, tmp_path: Path) -> None:
    patchloom.export(run, to="html", out=str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text()
    described = json.loads(text.partition('id="described">')[2].partition("</script>")[0])
    rules = read_calibration(run).rules
    assert rules.promise is not None
    assert described["calibration"] == {
        "temperature": rules.temperature, "threshold": rules.promise.threshold, "negatives": [1]}  # fmt: skip


def test_calibrating_again_replaces_the_rules(run: Path) -> None:
    result = patchloom.calibrate(run, max_rejected=0, device="cpu")
    rules = read_calibration(run).rules
    assert (rules.promise, rules.distance, rules.negatives) == (None, None, ())
    assert rules == result.calibration.rules
    assert load_predictions(run).report.temperature == rules.temperature


def test_a_calibration_of_weights_without_a_checksum_is_not_dropped(run: Path) -> None:
    weights = run / WEIGHTS
    weights.write_bytes(save(load(weights.read_bytes())))  # without the header
    with pytest.raises(CheckpointError, match="calibrate"):
        read_calibration(run)


def test_what_cannot_be_promised_is_refused_and_changes_nothing(run: Path) -> None:
    before = (run / FILE).read_bytes()
    with pytest.raises(DataError, match=r"0\.1 %"):
        patchloom.calibrate(run, max_error="0.1%", device="cpu")
    assert (run / FILE).read_bytes() == before


def test_training_tells_what_a_promise_takes(run: Path) -> None:
    patchloom.calibrate(run, max_rejected=0, device="cpu")  # no promise
    plan = SimpleNamespace(folder=run, settings=SimpleNamespace(max_error="1%"))
    *_, line = _calibration_lines(plan)
    assert missing(line, 230, 300, "patchloom calibrate") == []  # of 450 images of val, 300 are tested


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"max_error": 5}, "5"),
        ({"max_error": "much"}, "much"),
        ({"confidence": 1.5}, "1.5"),
        ({"negatives": ["nome"]}, "none"),
        ({"split": "train"}, "train"),
    ],
)
def test_wrong_options_are_refused(run: Path, options: dict[str, object], fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        patchloom.calibrate(run, **options, device="cpu")  # type: ignore[arg-type]


def test_test_time_augmentation_averages_probabilities(root: Path) -> None:
    model = patchloom.load(root / "run", device="cpu")
    image = Image.open(root / "data" / "test" / "red" / "0.png").convert("RGB")
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    one, other = (dict(model.predict(view)) for view in (image, mirrored))
    both = dict(model.predict(image, tta=True))
    assert both == pytest.approx({name: (one[name] + other[name]) / 2 for name in one}, abs=1e-6)
    assert both == pytest.approx(dict(model.predict(mirrored, tta=True)), abs=1e-6)
    report = model.evaluate(str(root / "data"), split="test", tta=True).report
    assert isinstance(report, ClassificationReport)
    assert report.confidence[list(report.labels).index(2)] == pytest.approx(max(both.values()), abs=1e-5)


def test_the_commands_and_the_python_of_the_page_run(
    run: Path, root: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reliable_predictions.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "shapes")
    shutil.copyfile(root / "data" / "test" / "red" / "0.png", "photo.png")
    exec(compile(block, "docs/reliable_predictions.md", "exec"), {})
    assert re.search(r"(?<![\d.])20 %", capsys.readouterr().out)
    lines = {
        ("calibrate", "runs/shapes", "--max-error", "10%", "--negatives", "none", "--split", "test"): "10 %",
        ("predict", "runs/shapes", str(root / "data" / "test" / "none")): "none of these: most like the negatives",
        ("predict", "runs/shapes", "photo.png", "--tta"): "red",
        ("evaluate", "runs/shapes", str(root / "data"), "--split", "test"): "answered_error",
        ("calibrate", "runs/shapes", "--max-rejected", "0", "--json"): '"temperature"',
    }
    for arguments, fact in lines.items():
        done = command(arguments, monkeypatch, capsys)
        assert done.code == 0, done
        assert fact in done.output
