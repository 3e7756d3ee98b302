"""A run's folder that is removed or renamed while the run writes to it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchloom.disk import locked
from patchloom.engine.distribution import Processes
from patchloom.engine.reporter import Reporter
from patchloom.runs.checkpoints import CheckpointFolder, find_checkpoint
from patchloom.runs.metrics import read_metrics
from patchloom.runs.weights import read_weights
from patchloom.tasks.verify import verify
from patchloom_runtime.errors import UsageError
from tests.reliability.commands import OPTIONS, class_folders, command
from tests.runs.test_checkpoints import snapshot


def acting_after(records: int, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have somebody `act` in the midst of the run, once so many records are written."""
    write, calls = Reporter.write, []

    def fake(self: Reporter, *arguments: Any) -> None:
        write(self, *arguments)
        calls.append(arguments)
        if len(calls) == records:
            act()

    monkeypatch.setattr(Reporter, "write", fake)


@pytest.mark.parametrize("how", ["removed", "renamed"])
@pytest.mark.parametrize("after", [2, 6, 9])  # after an evaluation, an epoch, the last of all
def test_a_run_outlives_its_folder(how: str, after: int, tmp_path: Path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"
    acts = {"removed": lambda: shutil.rmtree(run), "renamed": lambda: run.rename(tmp_path / "other")}
    arguments = ("train", class_folders(tmp_path / "data"), "--out", run, *OPTIONS, "--epochs", 3)
    with monkeypatch.context() as patched:
        acting_after(after, acts[how], patched)
        done = command(arguments, patched, capsys)
    assert done.code == 0, done.errors
    assert len([line for line in done.output.splitlines() if line.startswith("warning: ") and str(run) in line]) == 1
    assert done.errors == ""
    assert (verify(run).wrong, verify(run).missing) == ({}, [])
    assert (run / "report.html").is_file()
    found = find_checkpoint(run)
    assert found is not None
    assert found.snapshot.values["progress"]["ended"] == "finished"
    assert len(read_metrics(run / "metrics.jsonl")) == 9
    assert command(("evaluate", run), monkeypatch, capsys).code == 0
    before = read_metrics(run / "metrics.jsonl")
    assert command((*arguments, "--epochs", 4), monkeypatch, capsys).code == 0
    after = read_metrics(run / "metrics.jsonl")
    assert (after[:9], after[-1]["epoch"]) == (before, 4)


def test_the_best_weights_are_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saver, weights = CheckpointFolder(run), snapshot(3).tensors["weights"]
    with locked(run) as lock:
        saver.guard(lock, lambda: None)
        assert saver.restore() == ""
        saver.save_weights(weights, {"step": 3}, Processes(device="cpu"))
        before = (run / "weights.safetensors").read_bytes()
        for _ in range(2):
            shutil.rmtree(run)
            assert str(run) in saver.restore()
            assert (run / "weights.safetensors").read_bytes() == before
            assert saver.restore() == ""
        assert read_weights(run / "weights.safetensors").keys() == weights.keys()
        with pytest.raises(UsageError, match=rf"\b{os.getpid()}\b"), locked(run):
            pass


def test_a_folder_that_another_run_has_now_is_left_to_it(tmp_path: Path) -> None:
    run, saver = tmp_path / "run", CheckpointFolder(tmp_path / "run")
    with locked(run) as lock:
        saver.guard(lock, lambda: None)
        shutil.rmtree(run)
        with locked(run), pytest.raises(UsageError, match=rf"\b{os.getpid()}\b"):
            saver.restore()
        assert [path.name for path in run.iterdir()] == [".lock"]
