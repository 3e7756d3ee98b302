"""What a network saw in given pictures, and in those it got wrong."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from patchloom.deployment.classifier import load
from patchloom.errors import DataError, UsageError
from patchloom.judging.look_page import look_at
from patchloom.models.registry import create_model
from patchloom.runs.predictions import load_predictions
from tests.reliability.commands import command


def test_pictures_with_answers_and_maps(trained: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"")
    page = look_at(str(trained / "vit"), [str(trained / "data" / "red"), str(bad)], out=tmp_path / "look.html")
    assert len(page.looks) == 30
    assert page.notes == [f"{bad}: empty file"]
    name, _, one = page.looks[0]
    (said,) = load(trained / "vit", device="cpu").predict_files([name], top=2)
    assert [label for label, _ in one.answers] == [label for label, _ in said.answers]
    assert [share for _, share in one.answers] == pytest.approx([share for _, share in said.answers], abs=1e-5)
    text = page.path.read_text("utf-8")
    assert text.count("<h2>") == 30
    assert "rollout" in text
    assert "empty file" in text


def test_without_pictures_the_surest_mistakes_come_first(run, tmp_path: Path) -> None:
    folder = run("a")
    worst = load_predictions(folder).report.worst(24)
    assert worst, "the run makes no mistake, so this test shows nothing"
    page = look_at(str(folder), out=tmp_path / "look.html")
    assert len(page.looks) == len(worst)
    labels = load(folder, device="cpu").labels
    assert page.looks[0][1] == f"{labels[worst[0].label]}, taken for {labels[worst[0].prediction]}"
    assert page.looks[0][2].answers[0][0] == labels[worst[0].prediction]


def test_published_weights(trained: Path, tmp_path: Path) -> None:
    save_file(create_model("resmlp_s12").state_dict(), tmp_path / "weights.safetensors")
    picture = str(trained / "data" / "red" / "0.png")
    page = look_at(f"resmlp_s12@{tmp_path / 'weights.safetensors'}", [picture], out=tmp_path / "look.html")
    assert page.looks[0][2].seen.size == (224, 224)
    assert page.looks[0][2].answers[0][0].startswith("class ")


def test_what_cannot_be_looked_at(trained: Path, run, tmp_path: Path) -> None:
    out = tmp_path / "look.html"
    with pytest.raises(UsageError, match=r"is not the folder of a run; give one, or NAME@FILE"):
        look_at(str(tmp_path), ["a.png"], out=out)
    with pytest.raises(DataError, match=r"none of 1 pictures can be read; the first: .*gone\.png"):
        look_at(str(trained / "a"), [str(tmp_path / "gone.png")], out=out)
    with pytest.raises(UsageError, match="top is 0, expected a whole number of at least 1"):
        look_at(str(trained / "a"), [str(trained / "data" / "red" / "0.png")], out=out, top=0)
    folder = run("a")
    (folder / "predictions.safetensors").unlink()
    with pytest.raises(UsageError, match="kept no decisions"):
        look_at(str(folder), out=out)
    (folder / "weights.safetensors").unlink()
    with pytest.raises(UsageError, match="has no weights that can be read"):
        look_at(str(folder), ["a.png"], out=out)
    assert not out.exists()


def test_of_too_many_pictures_the_first_are_shown(trained: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("patchloom.judging.look_page.PICTURES", 3)
    page = look_at(str(trained / "a"), [str(trained / "data" / "red")], out=tmp_path / "look.html")
    assert len(page.looks) == 3
    assert page.notes == ["the first 3 of 30 pictures are shown"]


def test_the_command(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    picture, out = trained / "data" / "red" / "0.png", tmp_path / "page.html"
    done = command(("look", trained / "a", picture, "--out", out), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert done.output.splitlines()[0].startswith(f"{picture}  ")
    assert done.output.splitlines()[-1] == str(out)
    done = command(("look", trained / "a", picture, "--out", out, "--json"), monkeypatch, capsys)
    assert json.loads(done.output)["pictures"][0]["name"] == str(picture)
