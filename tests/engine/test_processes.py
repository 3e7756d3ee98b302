"""Several processes, and signals from outside."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from patchloom.engine.distribution import Processes
from patchloom.engine.loop import train
from patchloom.engine.rendezvous import ProcessPlace, first_host, meet, place_from
from patchloom.runs.checkpoints import find_checkpoint
from patchloom_runtime.errors import ResourceError, UsageError
from tests.engine import worker
from tests.engine.toys import make_run, network
from tests.forked import Forked, forked_ranks, free_port

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(mode: str, folder: Path) -> Forked:
    return Forked(lambda: sys.exit(worker.work(mode, folder)))


def wait_for(printed: str, process: Forked) -> None:
    while printed not in process.so_far():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def run_two(mode: str, folder: Path) -> list[tuple[int | None, str]]:
    processes = forked_ranks(lambda: sys.exit(worker.work(mode, folder)), 2)
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, "".join(output)) for process, output in zip(processes, outputs, strict=True)]


def values(folder: Path) -> list[tuple[int, str, str, dict[str, float]]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["kind"], r["weights"], r["values"]) for r in lines]


def test_two_processes_learn_as_one_stop_together_and_one_goes_on(tmp_path: Path) -> None:
    fields = {"accumulate": 2, "ema_decay": 0.9}
    whole = make_run(tmp_path / "whole", model=network(drop_path=0.0), **fields)
    train(whole)

    folder = tmp_path / "two"
    for code, output in run_two("one rank is told to stop", folder):
        assert code == 143, output
        assert re.search(r"\bSIGTERM\b.*\b8\b.*\b15\b", output)
    result = find_checkpoint(folder)
    assert result is not None
    assert result.snapshot.step == 8
    assert {"random-0", "random-1"} <= set(result.snapshot.tensors)

    continued = make_run(folder, model=network(drop_path=0.0), **fields)
    train(continued, result.snapshot)
    for inputs, expected in zip(values(folder), values(tmp_path / "whole"), strict=True):
        assert inputs[:3] == expected[:3]
        assert inputs[3] == pytest.approx(expected[3], abs=1e-5, rel=1e-5)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(continued.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_bad_loss_on_one_rank_stops_all_of_them(tmp_path: Path) -> None:
    for code, output in run_two("one rank has a bad loss", tmp_path):
        assert code == 5, output
        assert re.search(r"\bnan\b.*\b7\b", output)


def assert_close(tensors: dict[str, torch.Tensor], expected: torch.nn.Module | None) -> None:
    assert expected is not None
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_weights_split_over_ranks_learn_as_whole_ones_and_resume(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", model=network(drop_path=0.0), accumulate=2, ema_decay=0.9)
    train(whole)
    folder = tmp_path / "split"
    for code, output in run_two("sharded, stopped", folder):
        assert code == 143, output
    for code, output in run_two("sharded, to the end", folder):
        assert code == 0, output
    result = find_checkpoint(folder)
    assert result is not None
    assert_close(result.snapshot.tensors["weights"], whole.model)
    assert_close(result.snapshot.tensors["ema"], whole.averaged)
    assert result.snapshot.values["progress"]["best_step"] > 0


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("sharded lamb, clipped", {"optim": "lamb", "clip_norm": 0.5}),
        ("sharded, each tensor clipped", {"clip_each": 0.1, "clip_norm": 0.5}),
    ],
)
def test_norms_of_split_weights_are_those_of_whole_ones(tmp_path: Path, mode: str, fields: dict[str, Any]) -> None:
    whole = make_run(tmp_path / "whole", model=network(drop_path=0.0), accumulate=2, ema_decay=0.9, **fields)
    train(whole)
    for code, output in run_two(mode, tmp_path / "split"):
        assert code == 0, output
    result = find_checkpoint(tmp_path / "split")
    assert result is not None
    assert_close(result.snapshot.tensors["weights"], whole.model)


def test_sigterm_saves_and_exits_143(tmp_path: Path) -> None:
    process = start("long", tmp_path)
    wait_for("step\n" * 5, process)
    process.send_signal(signal.SIGTERM)
    printed = "".join(process.communicate())
    assert process.returncode == 143, printed
    result = find_checkpoint(tmp_path)
    assert result is not None
    assert re.search(rf"\bSIGTERM\b.*\b{result.snapshot.step}\b", printed)


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    process = start("hang", tmp_path)
    wait_for("hanging\n", process)
    for _ in range(1000):
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    process.communicate()
    assert process.returncode == -signal.SIGINT


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("clean_environment")
def test_a_missing_rank_is_named() -> None:
    port = free_port()
    with pytest.raises(ResourceError) as error:
        meet(ProcessPlace(0, 3, 0, "127.0.0.1", port), "gloo", 0.5)
    assert error.value.exit_code == 6
    for fact in ("1, 2", "3", "0.5 s", f"127.0.0.1:{port}"):
        assert fact in str(error.value)


@pytest.mark.usefixtures("clean_environment")
def test_a_missing_first_rank_is_named() -> None:
    port = free_port()
    with pytest.raises(ResourceError) as error:
        meet(ProcessPlace(1, 2, 1, "127.0.0.1", port), "gloo", 0.5)
    for fact in ("rank 0", "2", "0.5 s", f"127.0.0.1:{port}"):
        assert fact in str(error.value)


def test_places() -> None:
    assert place_from({}) == ProcessPlace()
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert place_from(torchrun) == ProcessPlace(3, 4, 1, "a", 7)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "42"}
    assert place_from(slurm | {"SLURM_NODELIST": "gpu[07-09]"}) == ProcessPlace(5, 8, 1, "gpu07", 15042)
    assert place_from(slurm | {"MASTER_ADDR": "b", "MASTER_PORT": "9"}) == ProcessPlace(5, 8, 1, "b", 9)
    assert place_from({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == ProcessPlace()
    assert place_from(slurm | torchrun) == ProcessPlace(3, 4, 1, "a", 7)
    with pytest.raises(UsageError, match=r"\bRANK\b.*\b4\b.*\bWORLD_SIZE\b.*\b4\b"):
        place_from(torchrun | {"RANK": "4"})
    with pytest.raises(UsageError, match="MASTER_ADDR"):
        place_from(slurm)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12],cpu1", "gpu07"), ("a[3]-ib,b", "a3-ib"), ("x-y.z[10]", "x-y.z10")],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_precision_is_chosen_by_the_device() -> None:
    assert Processes("auto", device="cpu").precision == "fp32"
    assert Processes("bf16", device="cpu").precision == "bf16"
    with pytest.raises(UsageError, match=r"\bfp16\b.*\bcpu\b"):
        Processes("fp16", device="cpu")


def test_bf16_trains_with_float32_weights_and_losses() -> None:
    run = make_run(processes=Processes("bf16", device="cpu"), epochs=1)
    train(run)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    plain = make_run(epochs=1)
    train(plain)
    assert not torch.equal(run.model.classifier.weight, plain.model.classifier.weight)
