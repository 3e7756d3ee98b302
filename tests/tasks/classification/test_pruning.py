"""Pruned and quantized matrices: exact numbers of zeros, and a usable run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import patchloom
from patchloom.layers.matrices import matrices_of, prune_, quantized
from patchloom.tasks.classification.pruning import Pruning, prune, write_pruning_page
from patchloom.tasks.plan import TrainingSettings
from patchloom.tasks.verify import verify
from patchloom.training.assemble import silent
from patchloom.training.run import run_training
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import class_folders, command

CHANGES = {"model.options.depth": 2, "model.options.dim": 16, "model.options.patch_size": 4}
GIVEN: dict[str, Any] = {"recipe": "small_images", "epochs": 1, "batch": 4, "size": 16, "workers": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two layers and its data."""
    root = tmp_path_factory.mktemp("pruning")
    class_folders(root / "data")
    settings = TrainingSettings(data=str(root / "data"), out=str(root / "run"), changes=CHANGES, **GIVEN)
    run_training(settings, say=silent)
    return root


def pruned(place: Path, data: str | None = "data", **requested: Any) -> Pruning:
    return prune(str(place / "run"), data and str(place / data), device="cpu", **requested)


def test_the_smallest_weights_are_zero_and_no_others() -> None:
    weight = torch.tensor([[0.5, -0.1, 0.2], [-0.05, 3.0, -2.0]])
    prune_(weight, 0.5)
    assert weight.tolist() == torch.tensor([[0.5, 0.0, 0.0], [0.0, 3.0, -2.0]]).tolist()
    prune_(weight, 0.0)
    assert int((weight == 0).sum()) == 3


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_are_rounded_to_as_many_steps_as_bits_have(sign: int) -> None:
    exact = sign * torch.linspace(-0.9, 1.0, 1000)
    weight = quantized(exact, 4)
    assert len(weight.unique()) <= 16
    assert weight.abs().max() == 1.0  # the largest stays
    # ResMLP, section 3.3: with 4 bits, what is below 6.25 % of the largest becomes zero.
    assert torch.equal(weight == 0, exact.abs() < 0.0625)
    inside = sign * exact > -0.9375 + 0.0625  # beyond, the side with a step less ends
    assert ((weight - exact).abs()[inside] <= 0.0625 + 1e-6).all()
    assert quantized(torch.zeros(3), 4).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("network", "options", "letters"),
    [
        ("resmlp_s12", {"depth": 2, "dim": 16}, "ABCABC"),
        ("mixer_s32", {"depth": 1, "dim": 16}, "AABC"),
        ("smlpnet_t", {}, None),
        ("deit_ti", {"depth": 1}, "BC"),
    ],
)
def test_matrices_are_found_in_every_family(network: str, options: dict[str, int], letters: str | None) -> None:
    with torch.device("meta"):
        model = patchloom.create_model(network, **options)
    wanted = "BC" if letters == "BC" else "ABC"
    result = matrices_of(model, wanted)
    assert letters in (None, "".join(matrix.letter for matrix in result))
    assert {matrix.name for matrix in result} <= {name for name, _ in model.named_parameters()}
    assert len({matrix.name for matrix in result}) == len(result)
    if letters == "BC":
        with pytest.raises(UsageError, match=r"\bA\b.*\bB, C\b"):
            matrices_of(model)


def test_every_point_has_the_share_of_zeros_of_each_matrix(place: Path) -> None:
    result = pruned(place, shares=[0.5, 0.9], bits=[8, 2])
    assert result.groups == ["A", "B", "C", "ABC"]
    assert len(result.points) == 16
    for point in result.points:
        assert {each.letter for each in point.matrices} == set(point.letters)
        if point.share is not None:
            assert [each.zeros for each in point.matrices] == [round(point.share * m.weights) for m in point.matrices]
    assert result.whole.zeros == 0.0
    columns, rows = result.table("share")
    assert [re.findall(r"\b[ABC]\b", column) for column in columns] == [[], ["A"], ["B"], ["C"], ["A", "B", "C"]]
    assert [row[0] for row in rows] == ["0", "50", "90"]
    assert [re.findall(r"\b[ABC]\b", column) for column in result.table("bits")[0][-3:]] == [["A"], ["B"], ["C"]]


def test_the_network_is_as_it_was_after_each_point(place: Path) -> None:
    result = pruned(place, shares=[0.99, 0.0], matrices="A")
    assert dict(result.points[1].values) == dict(result.whole.values)


def test_a_pruned_network_is_saved_as_a_run(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "sparse"
    result = pruned(place, shares=[0.75], bits=[8], matrices="A", out=str(out))
    model = patchloom.load(out, device="cpu").model
    assert [matrix.zeros / matrix.weight.numel() >= 0.75 for matrix in matrices_of(model, "A")] == [True, True]
    assert [matrix.zeros for matrix in matrices_of(model, "BC")] == [0] * 4
    assert all(len(matrix.weight.unique()) <= 256 for matrix in matrices_of(model, "A"))
    both = patchloom.evaluate([str(place / "run"), str(out)])  # by what each decided about val
    assert both.values()["sparse"]["top1"] == result.points[0].values["top1"]
    again = patchloom.evaluate(str(out), str(place / "data"), device="cpu")
    assert again.values()["sparse"]["top1"] == result.points[0].values["top1"]
    looked = verify(out)
    assert (looked.wrong, looked.missing) == ({}, [])
    notes = json.loads((out / "run.json").read_text())["notes"]
    assert re.search(r"\brun\b.*\bA\b.*\b75 %.*\b8\b", notes[-1])
    with pytest.raises(UsageError, match=str(out)):
        pruned(place, None, shares=[0.5], out=str(out))


def test_without_data_a_network_can_be_saved(place: Path, tmp_path: Path) -> None:
    result = pruned(place, None, bits=[4], out=str(tmp_path / "small"))
    assert (result.points[0].letters, result.points[0].values) == ("ABC", {})
    assert not (tmp_path / "small" / "predictions.safetensors").exists()


def test_the_page_shows_both_curves(place: Path, tmp_path: Path) -> None:
    write_pruning_page(pruned(place, shares=[0.5], bits=[4]), tmp_path / "prune.html")
    html = (tmp_path / "prune.html").read_text()
    assert html.count("<svg") == 2


def test_the_command(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("prune", place / "run", place / "data", "--device", "cpu", "--matrices", "A")
    done = command((*line, "--shares", "0.5,0.9"), monkeypatch, capsys)
    assert (done.code, done.errors) == (0, "")
    assert re.search(r"\b50\b", done.output)
    assert re.search(r"\b90\b", done.output)
    assert str(place / "run" / "prune.html") in done.output
    answer = json.loads(command((*line, "--bits", "4", "--json"), monkeypatch, capsys).output)
    assert [each["matrix"] for each in answer["points"][0]["each"]] == ["A", "A"]
    saved = command((*line, "--shares", "0.9", "--out", place / "thin"), monkeypatch, capsys)
    assert "230" in saved.output  # of 256 weights
    assert "89.84" in saved.output
    shutil.rmtree(place / "thin")


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"matrices": "AD"}, "--matrices.*AD"),
        ({"shares": [1.0]}, "--shares.*1"),
        ({"bits": [1]}, "--bits.*1"),
        ({"shares": [0.5, 0.9], "out": "x"}, r"--out.*0\.5.*0\.9"),
        ({"out": "x"}, "--out"),
        ({"data": None}, "--out"),
    ],
)
def test_invalid_settings_are_refused_first(place: Path, requested: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pruned(place, **requested)
