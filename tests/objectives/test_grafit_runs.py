"""Grafit in the engine: a stopped run goes on exactly, and several processes keep one memory."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from patchloom.engine.loop import train
from patchloom.engine.signals import Stopped
from patchloom.runs.checkpoints import find_checkpoint
from tests.forked import forked_ranks
from tests.objectives.grafit_runs import grafit_run, keep_states


def test_a_stopped_run_goes_on_exactly(tmp_path: Path) -> None:
    whole = grafit_run(tmp_path / "whole", "grafit", accumulate=2)
    train(whole)
    stopped = grafit_run(tmp_path / "stopped", "grafit", accumulate=2)
    after_update = stopped.objective.after_update

    def stop(model, step):
        after_update(model, step)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped.objective.after_update = stop
    with pytest.raises(Stopped):
        train(stopped)
    result = find_checkpoint(tmp_path / "stopped")
    assert result is not None
    continued = grafit_run(tmp_path / "stopped", "grafit", accumulate=2)
    train(continued, result.snapshot)
    for mine, theirs in ((continued.model, whole.model), (continued.objective, whole.objective)):
        for name, value in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[name], value), name


def test_two_processes_keep_one_memory(tmp_path: Path) -> None:
    workers = forked_ranks(partial(keep_states, tmp_path), 2)
    for worker in workers:
        output = worker.communicate(timeout=120)
        assert worker.returncode == 0, output
    for method in ("snca", "grafit"):
        states = [torch.load(tmp_path / f"{method}-{rank}.pt") for rank in range(2)]
        assert torch.equal(states[0]["memory.slots"], states[1]["memory.slots"])
    # SNCA has no batch statistics, so two processes learn what one learns.
    alone = grafit_run(None, "snca")
    train(alone)
    snca = torch.load(tmp_path / "snca-0.pt")
    for name, value in alone.objective.state_dict().items():
        torch.testing.assert_close(snca[name], value, rtol=1e-4, atol=1e-5, msg=name)
