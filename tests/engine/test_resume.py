"""A run that is stopped and goes on is, bit for bit, the run that was not."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.loop import train
from patchloom.engine.optimization import make_optimizer
from patchloom.engine.run import Run
from patchloom.engine.signals import Stopped
from patchloom.engine.state import load_optimizer_state, optimizer_state, random_state, restore, set_random_state
from patchloom.runs.checkpoints import find_checkpoint
from patchloom_runtime.errors import CheckpointError, ResourceError, UsageError
from tests.engine.test_optimization import OPTIMIZERS
from tests.engine.toys import STEPS, ToyImages, classify, evaluator, make_run, network, optim_part


def stopping_at(step: int) -> Any:
    """`classify`, with a SIGTERM in the middle of the update that follows `step` others."""

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int, at: int = step) -> dict[str, Tensor]:
        values = classify(model, batch, epoch=epoch, step=step)
        if epoch * STEPS + step == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return values

    return objective


def without_times(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def resumed(folder: Path, stops: list[int], **fields: Any) -> Run:
    """A run stopped at each of `stops`, every time continued by objects made afresh."""
    for stop in stops:
        result = find_checkpoint(folder)
        with pytest.raises(Stopped):
            train(make_run(folder, objective=stopping_at(stop), **fields), result and result.snapshot)
        torch.rand(5)
    run = make_run(folder, **fields)
    result = find_checkpoint(folder)
    assert result is not None
    train(run, result.snapshot)
    return run


def interrupted(at: int, what: Any) -> Any:
    """`evaluator`, with `what` in the middle of its call number `at`."""
    calls = iter(range(99))

    def evaluate(model: nn.Module) -> Iterator[tuple[str, float]]:
        result = dict(evaluator(model))
        if next(calls) == at:
            what()
        yield from result.items()

    return evaluate


def told_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def without_data() -> None:
    raise ResourceError("Worker 7 was killed")


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5], ids=["model", "average", "model, later", "average, later", "the last"])
@pytest.mark.parametrize(("what", "raised"), [(told_to_stop, Stopped), (without_data, ResourceError)])
def test_an_evaluation_given_up_is_made_again_and_nothing_else_changes(
    tmp_path: Path, at: int, what: Any, raised: type[Exception]
) -> None:
    whole = make_run(tmp_path / "whole", ema_decay=0.9)
    train(whole)
    folder = tmp_path / "hurt"
    with pytest.raises(raised):
        train(make_run(folder, ema_decay=0.9, evaluators=[interrupted(at, what)]))
    result = find_checkpoint(folder)
    assert result is not None
    assert result.snapshot.step == STEPS * (at // 2 + 1)  # none is lost
    continued = make_run(folder, ema_decay=0.9)
    train(continued, result.snapshot)
    assert_equal_runs(whole, continued)
    assert without_times(folder) == without_times(tmp_path / "whole")
    weights = [(path / "weights.safetensors").read_bytes() for path in (folder, tmp_path / "whole")]
    assert weights[0] == weights[1]


def assert_equal_runs(a: Run, b: Run) -> None:
    for name, value in a.model.state_dict().items():
        assert torch.equal(b.model.state_dict()[name], value), name
    if a.average:
        for name, value in a.average.model.state_dict().items():
            assert torch.equal(b.average.model.state_dict()[name], value), name


@pytest.mark.parametrize("optim", ["adamw", "lamb"])
def test_resume_is_bit_equal_wherever_a_run_stops(tmp_path: Path, optim: str) -> None:
    fields: dict[str, Any] = {"optim": optim, "ema_decay": 0.9, "accumulate": 2, "clip_norm": 1.0}
    whole = make_run(tmp_path / "whole", **fields)
    outcome = train(whole)
    # In the first epoch, at its last step, right after it, and twice in one epoch.
    for number, stops in enumerate([[1], [STEPS - 2], [STEPS - 1], [2, 3, 11]]):
        folder = tmp_path / str(number)
        continued = resumed(folder, stops, **fields)
        assert_equal_runs(whole, continued)
        assert without_times(folder) == without_times(tmp_path / "whole")
        result = find_checkpoint(folder)
        assert result is not None
        assert result.snapshot.values["progress"]["best"] == outcome.progress.best
        weights = [(tmp_path / name / "weights.safetensors").read_bytes() for name in (str(number), "whole")]
        assert weights[0] == weights[1]


def test_torchrun_may_send_ctrl_c_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        return classify(model, batch, epoch=epoch, step=step)

    with pytest.raises(Stopped) as stopped:
        train(make_run(tmp_path, objective=objective))
    assert stopped.value.exit_code == 130
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert result.snapshot.step == 1


def test_lines_written_after_the_checkpoint_are_not_there_twice(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole")
    train(whole)
    folder = tmp_path / "killed"
    with pytest.raises(Stopped):
        train(make_run(folder, objective=stopping_at(6)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "kind": "train"}\n{"step": 10, "ki')
    result = find_checkpoint(folder)
    assert result is not None
    train(make_run(folder), result.snapshot)
    assert without_times(folder) == without_times(tmp_path / "whole")


def test_a_finished_run_stays_as_it_is_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    train(make_run(tmp_path))
    result = find_checkpoint(tmp_path)
    assert result is not None
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert train(make_run(tmp_path), result.snapshot).progress.step == 3 * STEPS
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert train(make_run(tmp_path, epochs=4), result.snapshot).progress.step == 4 * STEPS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_round_trip_is_exact(name: str) -> None:
    part = optim_part(name)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    model, other = network(), network()
    optimizer, fresh = make_optimizer(model, part), make_optimizer(other, part)
    for seed in range(3):
        step(model, optimizer, seed)
    other.load_state_dict(model.state_dict())
    tensors, values = optimizer_state(optimizer)
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    load_optimizer_state(fresh, tensors, json.loads(json.dumps(values)))
    assert len(tensors) + len(values["plain"]) > 0
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, fresh, seed)
    for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), key


def test_random_state_round_trip() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(1).item()]

    cpu = torch.device("cpu")
    draw()
    state = random_state(cpu)
    first = draw() + draw()
    set_random_state(state, cpu)
    assert draw() + draw() == first


def stopped(folder: Path, at: int = 2, **fields: Any) -> Any:
    with pytest.raises(Stopped):
        train(make_run(folder, objective=stopping_at(at), **fields))
    result = find_checkpoint(folder)
    assert result is not None
    return result.snapshot


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    snapshot = stopped(tmp_path)
    with pytest.raises(UsageError) as error:
        train(make_run(tmp_path, optim="lamb"), snapshot)
    for fact in ("AdamW", "Lamb"):
        assert fact in str(error.value)


def test_with_other_data_the_epoch_starts_again(tmp_path: Path) -> None:
    snapshot = stopped(tmp_path, at=7)
    run = make_run(tmp_path, loader=ToyImages(steps=6))
    progress, notes = restore(run, snapshot)
    (note,) = notes
    assert {"5", "6", "2"} <= set(re.findall(r"\b\d+\b", note))
    assert (progress.epoch, progress.step) == (1, 6)
    assert train(make_run(tmp_path, loader=ToyImages(steps=6)), snapshot).progress.step == 6 * run.epochs


def test_another_network_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    snapshot = stopped(tmp_path)
    with pytest.raises(CheckpointError) as error:
        train(make_run(tmp_path, model=network(num_classes=4)), snapshot)
    for fact in ("classifier.weight", "(3, 16)", "(4, 16)"):
        assert fact in str(error.value)


def test_another_number_of_processes_is_said(tmp_path: Path) -> None:
    snapshot = stopped(tmp_path)
    snapshot.values["world"] = 2
    run = make_run(tmp_path)
    notes: list[str] = []
    run.records.note = notes.append  # type: ignore[method-assign]
    train(run, snapshot)
    (note,) = notes
    assert {"2", "1"} <= set(re.findall(r"\b\d+\b", note))


def test_an_average_may_be_added_on_resume(tmp_path: Path) -> None:
    snapshot = stopped(tmp_path)
    run = make_run(tmp_path, ema_decay=0.9)
    notes: list[str] = []
    run.records.note = notes.append  # type: ignore[method-assign]
    assert train(run, snapshot).ended == "finished"
    assert len(notes) == 1  # that the checkpoint has none
