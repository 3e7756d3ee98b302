"""A device without memory, one that failed and a kernel that gives NaN, as the commands and a server tell of them."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from patchloom.engine.loop import Step
from patchloom.models.network import Network
from patchloom.models.resmlp import ResMLP
from patchloom.runs.metrics import read_metrics
from patchloom.serving import model_process
from patchloom.serving.served_model import ServedVerb
from tests.forked import Forked
from tests.golden import make
from tests.reliability.commands import OPTIONS, command

GOLDEN = Path(make.__file__).parent
RUN, PICTURES = GOLDEN / "classifier", sorted((GOLDEN / "pictures").iterdir())
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
FAILED = torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure'")


def failing(error: Exception) -> Callable[..., Any]:
    def forward(*_: Any, **__: Any) -> None:
        raise error

    return forward


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two classes, by the names of the golden classifier."""
    rng = np.random.default_rng(0)
    names = json.loads((RUN / "labels.json").read_text())[:2]
    for number in range(16):
        path = tmp_path / "data" / names[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    return tmp_path / "data"


def arguments(verb: str, data: Path, tmp_path: Path) -> tuple[Any, ...]:
    return {
        "predict": ("predict", RUN, *PICTURES[:2], "--device", "cpu"),
        "evaluate": ("evaluate", RUN, data, "--device", "cpu", "--batch", "4"),
        "index": ("index", RUN, data, "--out", tmp_path / "index", "--device", "cpu"),
    }[verb]


@pytest.mark.parametrize("verb", ["predict", "evaluate", "index"])
@pytest.mark.parametrize(("error", "facts"), [(NO_MEMORY, ["2.00 GiB"]), (FAILED, ["unspecified launch failure"])])
def test_a_verb_tells_of_it_in_one_line(
    verb: str, error: Exception, facts: list[str], data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(ResMLP, "features", failing(error))
    done = command(arguments(verb, data, tmp_path), monkeypatch, capsys)
    line = done.errors.strip().splitlines()[-1]
    assert done.code == 6, done.errors
    assert "Traceback" not in done.errors
    for fact in [*facts, "--device cpu"]:
        assert fact in line
    if error is NO_MEMORY and verb != "predict":
        assert "--batch" in line
    assert "Search for" not in line


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_answers_that_are_not_finite_are_an_error(
    verb: str, data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    head = Network.head

    def overflow(self: Network, features: torch.Tensor) -> torch.Tensor:
        return head(self, features) * torch.nan

    monkeypatch.setattr(Network, "head", overflow)
    done = command(arguments(verb, data, tmp_path), monkeypatch, capsys)
    assert done.code == 5, done.errors
    assert (PICTURES[0].name if verb == "predict" else "16") in done.errors


@pytest.mark.parametrize(("error", "last"), [(NO_MEMORY, 5), (FAILED, 0)])
def test_training_tells_of_it_and_the_same_command_resumes(
    error: Exception, last: int, data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    def train(out: Path) -> Any:
        return command(("train", data, "--out", out, *OPTIONS), monkeypatch, capsys)

    assert train(tmp_path / "whole").code == 0
    forward, calls = Step.forward, iter(range(99))

    def faulty(self: nn.Module, *given: Any) -> Any:
        if next(calls) == 5:
            raise error
        return forward(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Step, "forward", faulty)
        done = train(tmp_path / "a")
    assert done.code == 6, done.errors
    assert "Traceback" not in done.errors
    assert ("--micro-batches 2" in done.errors) == (error is NO_MEMORY)
    again = train(tmp_path / "a")
    assert again.code == 0, again.errors
    steps = {line["step"] for line in read_metrics(tmp_path / "whole" / "metrics.jsonl")}
    resumed_at = rf"{re.escape(str(tmp_path / 'a'))}.*\b{last}\b.*\b{max(steps)}\b"
    assert bool(re.search(resumed_at, again.output)) == bool(last)
    whole, resumed = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("whole", "a"))
    assert whole == resumed


def test_a_sweep_ends_with_its_device(data: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(Step, "forward", failing(FAILED))
    line = ("sweep", data, "--grid", "seed=0,1", "--out", tmp_path / "sweep", *OPTIONS)
    done = command(line, monkeypatch, capsys)
    assert done.code == 6, done.errors
    assert "unspecified launch failure" in done.errors
    assert not (tmp_path / "sweep" / "sweep.json").exists()


# A server's model process ---------------------------------------------------------------------------------------------


def asked(
    answer: Callable[[Sequence[Any], Mapping[str, Any]], Any], requests: int = 3
) -> tuple[list[int], list[bytes]]:
    """Statuses and bodies of a batch of requests with a picture each."""
    header = {"requests": [{"verb": "predict", "options": {}, "inputs": 1}] * requests}
    parts = [PICTURES[number].read_bytes() for number in range(requests)]
    return model_process.run_batch({"predict": ServedVerb(answer)}, header, parts, pixels=10**6)


def test_a_batch_without_memory_is_answered_one_by_one() -> None:
    sizes: list[int] = []

    def answer(pictures: Sequence[Any], _: Mapping[str, Any]) -> list[int]:
        sizes.append(len(pictures))
        if len(pictures) > 1:
            raise NO_MEMORY
        return [1]

    assert asked(answer) == ([200] * 3, [b"[1]"] * 3)
    assert sizes == [3, 1, 1, 1]


def test_a_request_without_memory_is_refused_for_now_and_the_others_are_answered() -> None:
    calls = iter(range(9))

    def answer(pictures: Sequence[Any], _: Mapping[str, Any]) -> list[int]:
        if len(pictures) > 1 or next(calls) == 1:
            raise NO_MEMORY
        return [1]

    assert asked(answer)[0] == [200, 503, 200]


def test_the_memory_of_a_batch_is_free_when_it_is_answered_one_by_one() -> None:
    class Held:
        alive = 0

        def __init__(self) -> None:
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    held_later: list[int] = []

    def answer(pictures: Sequence[Any], _: Mapping[str, Any]) -> list[int]:
        if len(pictures) > 1:
            activations = Held()
            raise torch.OutOfMemoryError(f"CUDA out of memory with {activations.alive}")
        held_later.append(Held.alive)
        return [1]

    asked(answer)
    assert held_later == [0, 0, 0]


def test_a_model_process_ends_with_its_device() -> None:
    """Another is started in its place, and gets the batch: `tests/serving/test_server.py` kills one."""
    process = Forked(lambda: asked(failing(FAILED)))
    _, said = process.communicate()
    assert process.returncode == model_process.DEVICE_FAILED
    assert "unspecified launch failure" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("error", [NO_MEMORY, FAILED])
def test_a_model_that_the_device_refuses_is_told_in_one_line(error: Exception, monkeypatch: Any) -> None:
    import socket

    from patchloom.serving.messages import Connection

    own, other = socket.socketpair()
    monkeypatch.setattr(model_process, "_load", failing(error))
    process = Forked(lambda: model_process.main(other.dup(), {}))
    other.close()
    told = Connection(own)
    message = told.read()
    told.close()
    _, said = process.communicate()
    assert message is not None
    assert message[0]["kind"] == "ResourceError"
    assert str(error).splitlines()[0].rstrip(".") in message[0]["error"]
    assert "Traceback" not in said
