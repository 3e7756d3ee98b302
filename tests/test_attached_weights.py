"""`tools/weights.py`: archives of trained networks for a release."""

import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

import patchloom
from tests.conftest import REPOSITORY


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Path) -> ModuleType:
    """The tool, with a leaderboard that lists run a."""
    spec = importlib.util.spec_from_file_location("weights", REPOSITORY / "tools" / "weights.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    networks = tmp_path / "networks"
    networks.mkdir()
    log = module.sha256(trained / "a" / "metrics.jsonl")
    (networks / "photos_resmlp.json").write_text(json.dumps({"log_sha256": log}))
    monkeypatch.setattr(module, "NETWORKS", networks)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_an_archive_is_a_run_that_works(tool: ModuleType, trained: Path, tmp_path: Path) -> None:
    tool.collect([trained / "a"], tmp_path / "out")
    first = (tmp_path / "out" / "SHA256SUMS").read_bytes()
    tool.collect([trained / "a"], tmp_path / "out")
    assert (tmp_path / "out" / "SHA256SUMS").read_bytes() == first
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    with tarfile.open(tmp_path / "out" / "photos_resmlp.tar") as archive:
        archive.extractall(tmp_path, filter="data")
    names = {file.name for file in (tmp_path / "photos_resmlp").iterdir()}
    assert {"weights.safetensors", "recipe.yaml", "metrics.jsonl", "checksums.json"} <= names
    assert not {"checkpoints", "report.html", "predictions.safetensors", ".lock"} & names
    image = next((trained / "data").rglob("*.png"))
    of_run, of_archive = (patchloom.load(run).predict(image) for run in (trained / "a", tmp_path / "photos_resmlp"))
    assert str(of_run) == str(of_archive)


def test_a_run_that_is_not_listed_is_refused(tool: ModuleType, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="add it first"):
        tool.collect([trained / "a", trained / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_changed_archive_is_not_uploaded(
    tool: ModuleType, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(tool.subprocess, "run", lambda line, **_: calls.append(line))
    tool.collect([trained / "a"], tmp_path / "out")
    tool.upload(tmp_path / "out", "v1")
    out = str(tmp_path / "out")
    assert calls == [
        ["gh", "release", "upload", "v1", f"{out}/photos_resmlp.tar", f"{out}/SHA256SUMS", "--clobber"],
    ]
    with (tmp_path / "out" / "photos_resmlp.tar").open("ab") as archive:
        archive.write(b"0")
    with pytest.raises(ValueError, match="collect it again"):
        tool.upload(tmp_path / "out", "v1")


def test_the_command_line_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    line = [sys.executable, str(REPOSITORY / "tools" / "weights.py"), "collect", str(tmp_path), "--out", "x"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no network in benchmarks/results/networks")
    assert done.stderr.count("\n") == 1
