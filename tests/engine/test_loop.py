"""The loop: accumulation, bad losses, stopping, limits, evaluation and records."""

import json
import math
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from patchloom.data.images.image_batch import ImageBatch
from patchloom.engine.loop import train
from patchloom.engine.signals import Stopped
from patchloom.objectives.objective import Objective
from patchloom.runs.checkpoints import find_checkpoint
from patchloom.runs.weights import read_weights
from patchloom_runtime.errors import NumericalError, ResourceError, UsageError
from tests.engine.toys import BATCH, STEPS, ToyImages, classify, make_run, network


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_says_how_it_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, model=network(drop_path=0.0), epochs=40, evaluate_every=40, loader=ToyImages(steps=1))
    run.loader.epoch = lambda _, start: ToyImages(steps=1).epoch(0, start)  # the same batch every time
    outcome = train(run)
    assert (outcome.ended, outcome.progress.step, outcome.progress.epoch) == ("finished", 40, 40)
    losses = [r["values"]["loss"] for r in records(tmp_path) if r["kind"] == "train"]
    assert losses[-1] < 0.3 * losses[0]


def test_four_micro_batches_equal_one_batch() -> None:
    whole, parts = (make_run(model=network(drop_path=0.0), accumulate=n, clip_norm=0.5) for n in (1, 4))
    train(whole)
    train(parts)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_uneven_micro_batches_are_weighted_by_their_size() -> None:
    whole, parts = (make_run(model=network(drop_path=0.0), accumulate=n, optim="sgd") for n in (1, 3))
    train(whole)
    train(parts)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(parts.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_micro_batches_keep_mirrored_pairs_together() -> None:
    observed: list[list[int]] = []

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        observed.append(batch.index.tolist())
        return classify(model, batch, epoch=epoch, step=step)

    train(make_run(accumulate=2, objective=objective, epochs=1, loader=ToyImages(steps=1)))
    assert sorted(observed[0] + observed[1]) == list(range(BATCH))
    for part in observed:
        assert all(a + b == BATCH - 1 for a, b in zip(part, reversed(part), strict=True))


def test_more_micro_batches_than_examples_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"\b9\b") as error:
        train(make_run(accumulate=9))
    assert "--micro-batches 8" in str(error.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_loss_stops_before_the_update(tmp_path: Path, bad: float) -> None:
    weights: dict[str, Tensor] = {}

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        values = classify(model, batch, epoch=epoch, step=step)
        if (epoch, step) == (1, 2):
            weights.update({name: value.clone() for name, value in model.state_dict().items()})
            values["loss"] = values["loss"] + bad
        return values

    run = make_run(tmp_path, objective=objective, save_every_s=0.0, ema_decay=0.9)
    with pytest.raises(NumericalError) as error:
        train(run)
    for fact in (str(bad), "7", "2"):
        assert re.search(rf"\b{fact}\b", str(error.value))
    assert error.value.exit_code == 5
    assert error.value.index == [1000 + row for row in range(BATCH)]
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert result.snapshot.step == 7


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    def overflow(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        values = classify(model, batch, epoch=epoch, step=step)
        if step == 2:
            values["loss"].register_hook(lambda grad: grad * math.inf)
        return values

    with pytest.raises(NumericalError, match=r"\bNaN\b"):
        train(make_run(tmp_path, objective=overflow, save_every_s=0.0))
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert result.snapshot.step == 2


def test_out_of_memory_says_what_to_change() -> None:
    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ResourceError) as error:
        train(make_run(objective=objective, accumulate=2))
    assert {"8", "2"} <= set(re.findall(r"\b\d+\b", str(error.value)))
    assert "--micro-batches 4" in str(error.value)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_after_the_step_and_carries_its_code(tmp_path: Path, number: int, code: int) -> None:
    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        if (epoch, step) == (0, 2):
            os.kill(os.getpid(), number)
        return classify(model, batch, epoch=epoch, step=step)

    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Stopped, match=r"\b3\b.*\b15\b") as stopped:
        train(make_run(tmp_path, objective=objective))
    assert stopped.value.exit_code == code
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert result.snapshot.step == 3
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_time_limit_ends_evaluated_and_saved(tmp_path: Path) -> None:
    outcome = train(make_run(tmp_path, time_limit_s=0.0))
    assert (outcome.ended, outcome.progress.step) == ("time limit", 1)
    assert [r["kind"] for r in records(tmp_path)] == ["evaluation"]
    assert (tmp_path / "weights.safetensors").exists()
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert train(make_run(tmp_path), result.snapshot).ended == "finished"


def scores(values: list[float]) -> Any:
    numbers = iter(values)

    def evaluator(model: nn.Module) -> Iterator[tuple[str, float]]:
        yield "score", next(numbers)

    return evaluator


def test_patience_ends_a_run_and_the_best_weights_stay(tmp_path: Path) -> None:
    remaining = {}
    run = make_run(tmp_path, epochs=9, patience=2)
    values = scores([1.0, 3.0, 2.0, math.nan, 9.0])

    def evaluator(model: nn.Module) -> Iterator[tuple[str, float]]:
        remaining[len(remaining) + 1] = model.state_dict()["classifier.bias"].clone()
        yield from values(model)

    run.evaluators = [evaluator]
    outcome = train(run)
    assert (outcome.ended, outcome.progress.epoch) == ("no better", 4)
    assert (outcome.progress.best, outcome.progress.best_step) == (3.0, 2 * STEPS)
    assert torch.equal(read_weights(tmp_path / "weights.safetensors")["classifier.bias"], remaining[2])
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert train(make_run(tmp_path, epochs=9), result.snapshot).ended == "no better"


def judged(values: list[tuple[float, float]]) -> Any:
    numbers = iter(values)

    def evaluator(model: nn.Module) -> Iterator[tuple[str, float]]:
        score, loss = next(numbers)
        yield "score", score
        yield "loss", loss

    return evaluator


def test_of_equal_metrics_the_lower_tie_breaker_is_kept(tmp_path: Path) -> None:
    values = [(3.0, 0.9), (3.0, 0.5), (3.0, math.nan), (3.0, 0.7), (2.0, 0.1)]
    plain = train(make_run(tmp_path / "plain", epochs=5, evaluators=[judged(values)])).progress
    assert (plain.best_step, plain.best_tie) == (1 * STEPS, None)
    run = make_run(tmp_path / "tie", epochs=5, evaluators=[judged(values)], tie_breaker="loss")
    progress = train(run).progress
    assert (progress.best, progress.best_tie, progress.best_step) == (3.0, 0.5, 2 * STEPS)
    assert progress.not_better == 4  # nothing was better than the first


def test_a_tie_is_broken_after_a_resume_as_without_one(tmp_path: Path) -> None:
    values = [(3.0, 0.5), (3.0, 0.7), (3.0, 0.6), (3.0, 0.4)]
    train(make_run(tmp_path, epochs=2, evaluators=[judged(values[:2])], tie_breaker="loss"))
    result = find_checkpoint(tmp_path)
    assert result is not None
    again = make_run(tmp_path, epochs=4, evaluators=[judged(values[2:])], tie_breaker="loss")
    assert train(again, result.snapshot).progress.best_step == 4 * STEPS
    del result.snapshot.values["progress"]["best_tie"]  # as older versions saved it: what cannot be compared stays
    again = make_run(tmp_path / "old", epochs=4, evaluators=[judged(values[2:])], tie_breaker="loss")
    assert train(again, result.snapshot).progress.best_step == STEPS


@pytest.mark.parametrize("steps", [0, 2])
def test_fewer_epochs_than_are_trained_end_and_say_so(tmp_path: Path, steps: int) -> None:
    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        if (epoch, step) == (3, steps):
            os.kill(os.getpid(), signal.SIGTERM)
        return classify(model, batch, epoch=epoch, step=step)

    with pytest.raises(Stopped):
        train(make_run(tmp_path, epochs=9, objective=objective))
    result = find_checkpoint(tmp_path)
    assert result is not None
    output: list[str] = []
    run = make_run(epochs=2)
    run.records.begin = lambda remaining, notes: output.extend(notes) or remaining  # type: ignore[method-assign,func-returns-value]
    outcome = train(run, result.snapshot)
    assert (outcome.ended, outcome.progress.epoch) == ("finished", 3)
    assert outcome.progress.step == result.snapshot.step
    (note,) = output
    assert {"3", "2"} <= set(re.findall(r"\b\d+\b", note))


def test_what_is_done_after_an_epoch_leaves_no_trace(tmp_path: Path) -> None:
    observed = []

    def draw(model: nn.Module, epoch: int) -> None:
        torch.rand(5)
        observed.append((epoch, model.training, torch.is_grad_enabled()))

    trained = []
    for after_epoch in (None, draw):
        run = make_run(tmp_path / str(after_epoch), epochs=3, after_epoch=after_epoch)  # sets the seed
        train(run)
        trained.append(run.model)
    assert observed == [(1, False, False), (2, False, False), (3, False, False)]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in trained), strict=True))


def test_lower_may_be_better_and_the_average_may_win(tmp_path: Path) -> None:
    run = make_run(tmp_path, epochs=2, lower_is_better=True, ema_decay=0.9, evaluators=[scores([5.0, 4.0, 3.0, 6.0])])
    outcome = train(run)
    assert (outcome.progress.best, outcome.progress.best_weights) == (3.0, "model")
    run = make_run(tmp_path / "b", epochs=1, ema_decay=0.9, evaluators=[scores([5.0, 6.0])])
    assert train(run).progress.best_weights == "ema"
    saved = read_weights(tmp_path / "b" / "weights.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in run.average.model.state_dict().items())


def test_without_a_metric_the_newest_average_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path, epochs=1, metric=None, evaluators=(), ema_decay=0.9)
    train(run)
    saved = read_weights(tmp_path / "weights.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in run.average.model.state_dict().items())


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(UsageError) as error:
        train(make_run(metric="top1"))
    for fact in ("'top1'", "score"):
        assert fact in str(error.value)


def test_evaluation_every_second_epoch_and_at_the_end(tmp_path: Path) -> None:
    train(make_run(tmp_path, epochs=3, evaluate_every=2, ema_decay=0.9))
    result = [(r["epoch"], r["weights"]) for r in records(tmp_path) if r["kind"] == "evaluation"]
    assert result == [(2, "model"), (2, "ema"), (3, "model"), (3, "ema")]


def test_records_hold_means_over_their_steps(tmp_path: Path) -> None:
    losses: list[float] = []

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        values = classify(model, batch, epoch=epoch, step=step)
        losses.append(values["loss"].item())
        return values

    run = make_run(tmp_path, objective=objective, epochs=1)
    train(run)
    lines = [r for r in records(tmp_path) if r["kind"] == "train"]
    assert [(r["step"], r["epoch"]) for r in lines] == [(2, 0), (4, 0), (5, 0)]
    assert lines[1]["values"]["loss"] == pytest.approx(sum(losses[2:4]) / 2, rel=1e-6)
    assert lines[1]["values"]["lr"] == run.schedule.lr(3)


def test_evaluating_more_often_does_not_change_training() -> None:
    train(often := make_run(evaluate_every=1))
    train(seldom := make_run(evaluate_every=3))
    assert torch.equal(often.model.classifier.weight, seldom.model.classifier.weight)


def test_eval_mode_trains_without_stochastic_depth() -> None:
    observed = set()

    def objective(model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        observed.add(model.training)
        return classify(model, batch, epoch=epoch, step=step)

    train(make_run(objective=objective, eval_mode=True))
    assert observed == {False}
    train(make_run(objective=objective))
    assert observed == {False, True}


class FollowedByTeacher(nn.Module, Objective):
    """An objective with a state of its own that moves after every update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, model: nn.Module, batch: ImageBatch, *, epoch: int, step: int) -> dict[str, Tensor]:
        logits = model(batch.images) - self.centre
        return {"loss": F.cross_entropy(logits, batch.labels)}

    def after_update(self, model: Any, step: int) -> None:
        self.centre.lerp_(model.classifier.bias.detach(), 0.1)


def test_an_objective_with_state_is_saved_and_told_of_updates(tmp_path: Path) -> None:
    run = make_run(tmp_path, objective=FollowedByTeacher())
    train(run)
    assert run.objective.centre.abs().sum() > 0
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert torch.equal(result.snapshot.tensors["objective"]["centre"], run.objective.centre)
