"""Run folders and an index that an earlier patchloom wrote (tests/golden) load, resume, evaluate and report."""

import json
import shutil
from pathlib import Path

import pytest

import patchloom
from patchloom.inference.shard_parts import read_record
from patchloom.layers import projector
from patchloom.runs.metrics import read_metrics
from tests.golden import make
from tests.reliability.commands import command

GOLDEN = Path(make.__file__).parent
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in."""
    shutil.copytree(GOLDEN, tmp_path / "golden", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.chdir(tmp_path / "golden")
    monkeypatch.setattr(projector, "HIDDEN_DIM", make.SMALL_HIDDEN)
    return tmp_path / "golden"


@pytest.mark.parametrize("name", make.COMMANDS)
def test_a_run_goes_on_as_it_would_have(name: str, golden: Path, monkeypatch, capsys) -> None:
    first = read_metrics(golden / name / "metrics.jsonl")[0]
    done = command((*make.COMMANDS[name], "--epochs", "3", "--out", name), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert read_metrics(golden / name / "metrics.jsonl")[0] == first  # with its time: the run did not begin again
    expected = EXPECTED[name]
    found = make.evaluations(golden / name)
    assert [row[:2] for row in found] == [row[:2] for row in expected["evaluations"]]
    for (*_, values), (*_, wanted) in zip(found, expected["evaluations"], strict=True):
        known = {metric: values[metric] for metric in wanted}  # later versions measure more
        assert known == pytest.approx(wanted, rel=1e-4)
    assert make.size_of_weights(golden / name) == pytest.approx(expected["weights"], rel=1e-5)
    assert (golden / name / "report.html").is_file()


@pytest.mark.parametrize("name", make.COMMANDS)
def test_a_run_is_reported_and_verified(name: str, golden: Path, monkeypatch, capsys) -> None:
    for line in (("report", name), ("verify", name)):
        done = command(line, monkeypatch, capsys)
        assert done.code == 0, done.errors
    assert (golden / name / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "line",
    [
        ("evaluate", "classifier", make.SHAPES),
        ("evaluate", "distilled"),
        ("probe", "dino", make.SHAPES, "--knn"),
        ("probe", "grafit", make.SHAPES, "--levels"),
        ("evaluate", "translator", "--text", "numbers:count=150"),
        ("train", make.SHAPES, "--init", "dino", "--epochs", "1", "--out", "next", "--device", "cpu", "--workers", "0"),
    ],
    ids=lambda line: "-".join(line[:2]),
)
def test_a_run_is_used(line: tuple[str, ...], golden: Path, monkeypatch, capsys) -> None:
    done = command(line, monkeypatch, capsys)
    assert done.code == 0, done.errors


def test_a_classifier_answers_as_it_did(golden: Path) -> None:
    found = patchloom.load("classifier").predict("pictures", top=16)
    for answers, wanted in zip(found, EXPECTED["predict"], strict=True):
        assert dict(answers) == pytest.approx(dict(wanted), rel=1e-4)


def test_an_index_finds_what_it_found(golden: Path) -> None:
    index = patchloom.open_index("index", model="classifier")
    found = [[Path(hit.path).name, hit.score] for hit in index.search("pictures/0.png", top=3).hits]
    assert [name for name, _ in found] == [name for name, _ in EXPECTED["search"]]
    assert [score for _, score in found] == pytest.approx([score for _, score in EXPECTED["search"]], abs=1e-5)


def test_an_index_of_shards_finds_what_it_found(golden: Path) -> None:
    index = patchloom.open_index("index_of_shards", model="classifier")
    order = {f"shards/train-00000{i // 3}.tar, {i:09d}.png": f"{name}.png" for i, name in enumerate((0, 2, 4, 1, 3, 5))}
    hits = index.search("pictures/0.png", top=3).hits
    assert [order[hit.path] for hit in hits] == [name for name, _ in EXPECTED["search"]]
    assert [hit.score for hit in hits] == pytest.approx([score for _, score in EXPECTED["search"]], abs=1e-5)
    assert index.search("pictures/0.png", label="square").hits == [
        hit for hit in index.search("pictures/0.png").hits if hit.label == "square"
    ]
    records = [read_record(index.folder, part.name[len("part-") : -len("-00000000")]) for part in index.about.parts]
    assert tuple(record.indexed for record in records) == index.about.parts
    assert patchloom.verify("index_of_shards").wrong == {}
