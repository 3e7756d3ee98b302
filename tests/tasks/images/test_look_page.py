"""`patchloom look` on images and on the mistakes of a run."""

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import save_file

from patchloom.inference.classifier import load
from patchloom.models.registry import create_model
from patchloom.report.pictures.look import head_sheet, network_inputs
from patchloom.runs.predictions import load_predictions
from patchloom.tasks.export import export
from patchloom.tasks.images.look_page import across, look_at, true_class
from patchloom_runtime.errors import DataError, UsageError
from tests.reliability.commands import command


def test_images_with_predictions_and_maps(trained: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    paths = [str(trained / "data" / "red"), str(bad)]
    page = look_at(str(trained / "vit"), paths, out=tmp_path / "look.html", count=31)
    assert len(page.looks) == 30
    (note,) = page.notes
    assert note.startswith(f"{bad}: ")
    name, _, one = page.looks[0]
    (expected,) = load(trained / "vit", device="cpu").predict_files([name], top=2)
    assert [label for label, _ in one.answers] == [label for label, _ in expected.answers]
    assert [share for _, share in one.answers] == pytest.approx([share for _, share in expected.answers], abs=1e-5)
    text = page.path.read_text("utf-8")
    assert text.count("<figcaption>as the network sees it") == 30
    assert "rollout" in text
    assert str(bad) in text


def test_attention_has_a_map_per_head_of_own_images(trained: Path, tmp_path: Path) -> None:
    paths = [str(trained / "data" / "red" / "0.png")]
    vit, mlp = (look_at(str(trained / run), paths, out=tmp_path / f"{run}.html") for run in ("vit", "a"))
    sheet = re.search(r'id="heads".*?src="data:image/png;base64,([^"]+)"', vit.path.read_text("utf-8"), re.DOTALL)
    assert sheet is not None
    classifier = load(trained / "vit", device="cpu")
    expected = head_sheet(network_inputs(classifier.model, classifier.preprocessing, [Image.open(paths[0])]))
    assert Image.open(io.BytesIO(base64.b64decode(sheet[1]))).tobytes() == expected.tobytes()
    assert 'id="heads"' not in mlp.path.read_text("utf-8")


def test_an_artifact_is_looked_at_without_maps(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    export(str(trained / "vit"), out=str(tmp_path / "artifact"))
    page = look_at(str(tmp_path / "artifact"), [str(trained / "data" / "red" / "0.png")], out=tmp_path / "look.html")
    ((name, _, one),) = page.looks
    (expected,) = load(trained / "vit", device="cpu").predict_files([name], top=2)
    assert [label for label, _ in one.answers] == [label for label, _ in expected.answers]
    assert one.maps == []
    assert re.search(r"<h1>[^<]*artifact[^<]*\b1\b", page.path.read_text("utf-8"))


def test_without_images_the_most_confident_mistakes_come_first(run, tmp_path: Path) -> None:
    folder = run("a")
    worst = load_predictions(folder).report.worst(24)
    assert worst, "the run makes no mistake, so this test shows nothing"
    page = look_at(str(folder), out=tmp_path / "look.html")
    assert len(page.looks) == len(worst)
    labels = load(folder, device="cpu").labels
    first = page.looks[0][2]
    assert (first.truth, first.answers[0][0]) == (labels[worst[0].label], labels[worst[0].prediction])
    assert first.right is False
    assert re.search(rf"<p>[^<]*\b0\b[^<]*\b{len(worst)}\b", page.path.read_text("utf-8"))


def test_published_weights(trained: Path, tmp_path: Path) -> None:
    save_file(create_model("resmlp_s12").state_dict(), tmp_path / "weights.safetensors")
    image = str(trained / "data" / "red" / "0.png")
    page = look_at(f"resmlp_s12@{tmp_path / 'weights.safetensors'}", [image], out=tmp_path / "look.html")
    assert page.looks[0][2].seen.size == (224, 224)
    assert page.looks[0][2].answers[0][0].startswith("class ")


def test_inputs_that_look_refuses(trained: Path, run, tmp_path: Path) -> None:
    out = tmp_path / "look.html"
    with pytest.raises(UsageError) as error:
        look_at(str(tmp_path), ["a.png"], out=out)
    assert str(tmp_path) in str(error.value)
    assert "NAME@FILE" in str(error.value)
    with pytest.raises(DataError, match=r"gone\.png"):
        look_at(str(trained / "a"), [str(tmp_path / "gone.png")], out=out)
    with pytest.raises(UsageError) as error:
        look_at(str(trained / "a"), [str(trained / "data" / "red" / "0.png")], out=out, top=0)
    assert "top" in str(error.value)
    assert "0" in str(error.value)
    folder = run("a")
    (folder / "predictions.safetensors").unlink()
    with pytest.raises(UsageError, match=str(folder)):
        look_at(str(folder), out=out)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(UsageError, match=r"weights\.safetensors"):
        look_at(str(folder), ["a.png"], out=out)
    assert not out.exists()


def test_images_of_every_class_of_a_folder_are_shown_with_their_truth(trained: Path, tmp_path: Path) -> None:
    page = look_at(str(trained / "a"), [str(trained / "data")], out=tmp_path / "look.html", count=6)
    classes = sorted(path.name for path in (trained / "data").iterdir())
    assert [one.truth for _, _, one in page.looks] == [classes[0]] * 3 + [classes[1]] * 3
    assert all(Path(name).parent.name == one.truth for name, _, one in page.looks)
    (note,) = page.notes
    assert "6 of 60" in note
    text = page.path.read_text("utf-8")
    assert re.search(r"<title>[^<]*\b6\b", text)
    assert len(re.findall(r'class="(?:good|bad)"', text)) == 6


@pytest.mark.parametrize(
    ("path", "truth"),
    [
        ("photos/val/cat/1.jpg", "cat"),
        ("photos/cat/fluffy/1.jpg", "cat"),
        ("fruit/apple/1.jpg", "fruit/apple"),
        ("x/dog/cat/1.jpg", "cat"),
        ("cat.jpg", ""),
        ("photos/cow/1.jpg", ""),
    ],
)
def test_the_true_class_of_a_file_is_the_folder_above_it(path: str, truth: str) -> None:
    assert true_class(path, {"cat", "dog", "fruit/apple"}) == truth


def test_items_are_chosen_in_turn_from_every_group() -> None:
    groups = ["a"] * 50 + ["b"] * 2 + ["c"] * 20
    places = across(range(72), groups, 12)
    assert len(places) == 12
    assert {group: [groups[place] for place in places].count(group) for group in "abc"} == {"a": 5, "b": 2, "c": 5}
    assert max(places) > 65
    assert across(range(100), [str(i) for i in range(100)], 4) == [0, 25, 50, 75]


def test_the_terminal_gets_a_screenful(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    done = command(("look", trained / "a", trained / "data", "--page", tmp_path / "page.html"), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert len(done.output.splitlines()) <= 24
    assert any(re.fullmatch(r"\D*\b4\b\D*", line) for line in done.output.splitlines())


def test_the_command(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    image, out = trained / "data" / "red" / "0.png", tmp_path / "page.html"
    done = command(("look", trained / "a", image, "--page", out), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert done.output.splitlines()[0].startswith(f"{image}  ")
    assert done.output.splitlines()[-1] == str(out)
    done = command(("look", trained / "a", image, "--page", out, "--json"), monkeypatch, capsys)
    assert json.loads(done.output)["pictures"][0]["name"] == str(image)
