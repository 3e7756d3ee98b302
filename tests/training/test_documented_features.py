"""The Python examples of docs/evaluation.md, fewer_labels.md, regression.md and training.md, at small size."""

import csv
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import patchloom
from tests.reliability.commands import class_folders, command

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = re.compile(r"<!-- run by tests/training/test_documented_features\.py -->\n```python\n(.*?)```", re.DOTALL)
TINY = {"model.options.depth": 1, "model.options.dim": 16, "model.options.patch_size": 8}
SMALL: dict[str, Any] = {"epochs": 1, "batch": 4, "size": 16, "workers": 0, "device": "cpu"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with photos/ and two runs, in which `patchloom.train` is small."""
    train = patchloom.train

    def small(data: Any, **options: Any) -> Any:
        fresh = {"model": "resmlp_s12", "set": TINY | options.pop("set", {})} if "init" not in options else {}
        return train(data, **SMALL | {"init": "none"} | options | fresh)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patchloom, "train", small)
    class_folders(tmp_path / "photos", pictures=15)
    return tmp_path


def run_examples(page: str) -> list[dict[str, Any]]:
    """Run the examples of a page and return the names that each defines."""
    blocks = EXAMPLE.findall((DOCS / page).read_text("utf-8"))
    results: list[dict[str, Any]] = [{} for _ in blocks]
    for block, names in zip(blocks, results, strict=True):
        exec(compile(block, f"docs/{page}", "exec"), names)
    return results


def test_cross_validation_and_soups(place: Path) -> None:
    start = patchloom.train("photos/", out="start")
    for seed in (0, 1):
        shutil.copytree(start.folder, place / "runs" / f"photos-{seed}")
    folds, soups = run_examples("evaluation.md")
    assert len(folds["result"].runs) == 5
    assert folds["result"].predictions.probabilities.shape == (30, 2)
    assert set(soups["soup"].used) == {"photos-0", "photos-1"}  # equal runs do not lower the accuracy


def test_features_and_what_learns(place: Path) -> None:
    patchloom.train("photos/", out="runs/large")
    (features,) = run_examples("fewer_labels.md")
    assert features["run"].metric.startswith("knn")
    assert "top1" in features["tuned"].metrics
    (light,) = run_examples("training.md")
    assert {"top1"} <= light["lora"].metrics.keys() & light["thawed"].metrics.keys()


def test_regression(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    with open(place / "photos" / "labels.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "age", "length", "weight", "stars"))
        for number in range(20):
            Image.fromarray(rng.integers(0, 4 * number + 9, (16, 16, 3), np.uint8)).save(place / f"photos/{number}.png")
            rows.writerow((f"{number}.png", number + 0.5, number / 2 + 0.1, 9.5 - number, 1 + number % 5))
    shutil.rmtree(place / "photos" / "red")
    shutil.rmtree(place / "photos" / "blue")
    Image.new("RGB", (16, 16)).save(place / "new.jpg")
    (names,) = run_examples("regression.md")
    assert [name for name, _ in names["model"].predict("new.jpg")] == ["age"]
    shutil.rmtree("runs")
    (block,) = re.findall(r"```bash\n(.*?)```", (DOCS / "regression.md").read_text("utf-8"), re.DOTALL)
    lines = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert [line[0] for line in lines] == ["train", "train", "train", "predict", "evaluate"]
    small = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    small += [f"--set={key}={value}" for key, value in TINY.items()] + ["--model", "resmlp_s12", "--init", "none"]
    for line in lines:
        done = command((*line, *(small if line[0] == "train" else ())), monkeypatch, capsys)
        assert done.code in (0, None), f"{line}: {done.errors}"
