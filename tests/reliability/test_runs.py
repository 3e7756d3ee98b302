"""Runs that are hurt while they train: what was learned is on disk, the exit code says why, the command goes on."""

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patchloom import disk
from patchloom.disk import locked
from patchloom.engine import loop
from patchloom.engine.state import Snapshot
from patchloom.runs import checkpoints
from patchloom.runs.checkpoints import find_checkpoint
from patchloom.runs.weights import load_network
from patchloom_runtime.errors import ResourceError
from tests.forked import Forked
from tests.reliability.commands import OPTIONS, WORKERS, Done, class_folders, command, forked, started


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "data")


Process = subprocess.Popen[str] | Forked


def wait_until(there: Any, process: Process, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def long_run(data: Path, out: Path, *options: Any, start: Callable[..., Any] = started) -> Any:
    """A run that has made steps and would go on for minutes."""
    metrics = out / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    process = start("train", data, "--out", out, *OPTIONS, "--epochs", 100_000, *options)
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > before, process)
    return process


def ended(process: Process, seconds: float = 30) -> tuple[int, str]:
    errors = process.communicate(timeout=seconds)[1]
    assert process.returncode is not None
    return process.returncode, errors


def records_of(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def step_of(out: Path) -> int:
    found = find_checkpoint(out)
    assert found is not None
    assert not found.notes
    return found.snapshot.step


# Signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_signal_to_the_whole_group_saves(data: Path, tmp_path: Path, number: int, code: int) -> None:
    # As a terminal, a batch system and a container send it: the workers get it too.
    process = long_run(data, tmp_path / "run", *WORKERS)
    os.killpg(process.pid, number)
    returned, errors = ended(process)
    assert returned == code, errors
    step = step_of(tmp_path / "run")
    assert errors.count("\n") == 1
    assert re.search(rf"{signal.Signals(number).name}.*\b{step}\b", errors)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=lambda v: str(v))
def test_a_signal_before_the_first_step_is_one_line(
    data: Path, tmp_path: Path, monkeypatch, capsys, number: int, code: int
) -> None:
    from patchloom.training import run

    monkeypatch.setattr(run, "make_plan", lambda *_: os.kill(os.getpid(), number))
    before = signal.getsignal(signal.SIGINT)
    try:
        done = command(("train", data, "--out", tmp_path / "run", *OPTIONS), monkeypatch, capsys)
    finally:
        after = signal.signal(signal.SIGINT, before)
    assert done.code == code
    assert signal.Signals(number).name in done.errors
    assert done.errors.count("\n") == 1
    assert after is signal.SIG_DFL  # a second one ends it without a traceback
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_and_loses_nothing(data: Path, tmp_path: Path) -> None:
    process = long_run(data, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    before = step_of(tmp_path / "run")
    process = started("train", data, "--out", tmp_path / "run", *OPTIONS, "--epochs", 100_000)
    wait_until(lambda: len(records_of(tmp_path / "run")) > before // 50 + 2, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert ended(process)[0] in (-signal.SIGINT, 130)
    assert step_of(tmp_path / "run") >= before


def on_a_terminal(data: Path, out: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A run that has made steps, and the keyboard's side of the terminal it is shown on."""
    keyboard, screen = os.openpty()
    process = subprocess.Popen(
        started_line(data, out), stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    os.close(screen)
    os.set_blocking(keyboard, False)
    shown = b""
    while b"loss" not in shown:
        shown += read_now(keyboard)
        assert process.poll() is None, shown
    return process, keyboard


def read_now(terminal: int) -> bytes:
    time.sleep(0.05)
    try:
        return os.read(terminal, 1 << 20)
    except (BlockingIOError, OSError):
        return b""


@pytest.mark.slow
def test_a_closed_terminal_saves(data: Path, tmp_path: Path) -> None:
    process, keyboard = on_a_terminal(data, tmp_path / "run")
    os.close(keyboard)
    assert process.wait(30) == 129
    assert step_of(tmp_path / "run") > 0


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_on_a_terminal_is_one_line(data: Path, tmp_path: Path, times: int) -> None:
    process, keyboard = on_a_terminal(data, tmp_path / "run")
    shown = b""
    for _ in range(times):
        os.write(keyboard, b"\x03")
        shown += read_now(keyboard)
    while process.poll() is None:
        shown += read_now(keyboard)
    shown += read_now(keyboard)
    os.close(keyboard)
    assert process.returncode in ((130,) if times == 1 else (130, -signal.SIGINT))
    assert b"Traceback" not in shown
    if times == 1:
        assert re.search(rf"SIGINT.*\b{step_of(tmp_path / 'run')}\b".encode(), shown)


@pytest.mark.slow
def test_a_run_outlives_its_terminal_under_nohup(data: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        ["nohup", *started_line(data, tmp_path / "run")],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), process)
    assert process.stdout
    process.stdout.close()  # nobody reads what it says any more
    process.send_signal(signal.SIGHUP)
    before = len(records_of(tmp_path / "run"))
    wait_until(lambda: len(records_of(tmp_path / "run")) > before + 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


def started_line(data: Path, out: Path) -> list[str]:
    words = [sys.executable, "-m", "patchloom.cli", "train", data, "--out", out, *OPTIONS, "--epochs", 100_000]
    return [str(word) for word in words]


@pytest.mark.slow
def test_a_killed_run_frees_its_folder_though_its_workers_live(data: Path, tmp_path: Path) -> None:
    process = long_run(data, tmp_path / "run", *WORKERS)
    process.kill()
    process.wait()
    with locked(tmp_path / "run"):
        pass
    process.communicate(timeout=30)


# Data and memory ----------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_worker_is_named_and_the_run_saved(data: Path, tmp_path: Path) -> None:
    process = long_run(data, tmp_path / "run", *WORKERS, start=forked)
    worker = children(process.pid)[-1]
    os.kill(worker, signal.SIGKILL)
    code, errors = ended(process)
    assert code == 6, errors
    for fact in (str(worker), "SIGKILL"):
        assert fact in errors
    assert errors.count("\n") == 1
    assert step_of(tmp_path / "run") > 0


@pytest.mark.slow
def test_a_stopped_worker_is_named_within_the_set_time_and_the_run_saved(data: Path, tmp_path: Path) -> None:
    process = long_run(data, tmp_path / "run", *WORKERS, "--worker-timeout", 10)
    worker = children(process.pid)[-1]
    os.kill(worker, signal.SIGSTOP)
    code, errors = ended(process, 60)
    assert code == 6, errors
    for fact in (str(worker), "10 s", "--worker-timeout"):
        assert fact in errors
    assert errors.count("\n") == 1
    assert step_of(tmp_path / "run") > 0


@pytest.mark.slow
def test_data_deleted_while_it_trains_is_an_error_and_the_run_saved(data: Path, tmp_path: Path) -> None:
    process = long_run(data, tmp_path / "run", *WORKERS)
    data.rename(tmp_path / "moved")
    code, errors = ended(process)
    assert code == 3, errors
    assert str(data) in errors
    assert errors.count("\n") == 1
    step = step_of(tmp_path / "run")
    (tmp_path / "moved").rename(data)
    process = long_run(data, tmp_path / "run", *WORKERS)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert step_of(tmp_path / "run") > step


def test_a_bad_loss_names_step_and_files_and_leaves_no_bad_checkpoint(
    data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    from patchloom.objectives.classification import ClassificationObjective

    call = ClassificationObjective.__call__

    def bad(self: Any, *arguments: Any, epoch: int, step: int) -> dict[str, torch.Tensor]:
        values = call(self, *arguments, epoch=epoch, step=step)
        return values | {"loss": values["loss"] * (torch.nan if (epoch, step) == (1, 2) else 1)}

    monkeypatch.setattr(ClassificationObjective, "__call__", bad)
    done = command(("train", data, "--out", tmp_path / "run", *OPTIONS), monkeypatch, capsys)
    assert done.code == 5
    for fact in (r"\bnan\b", r"\b6\b", r"\b2\b", re.escape(f"{data}/") + r"(red|blue)/\d\.png"):
        assert re.search(fact, done.errors)
    assert done.errors.count("\n") == 1
    assert find_checkpoint(tmp_path / "run") is None


def test_memory_that_runs_out_on_a_cpu_names_the_batch(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def full(self: Any, *arguments: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(loop._Loop, "_add_gradients", full)
    done = command(("train", data, "--out", tmp_path / "run", *OPTIONS), monkeypatch, capsys)
    assert done.code == 6
    assert re.search(r"\b4\b", done.errors)
    assert "--micro-batches 2" in done.errors


# The disk -----------------------------------------------------------------------------------------------------------


def refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("full", ["lock", "metrics", "checkpoint"])
def test_a_full_disk_is_one_line_and_keeps_what_was_saved(
    full: str, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    arguments = ("train", data, "--out", tmp_path / "run", *OPTIONS)
    assert command(arguments, monkeypatch, capsys).code == 0
    before = step_of(tmp_path / "run")
    place = {
        "lock": (disk, "open_lock"),
        "metrics": (disk.os, "replace"),
        "checkpoint": (checkpoints, "write_new"),
    }
    with monkeypatch.context() as patched:
        patched.setattr(*place[full], refuse)
        done = command((*arguments, "--epochs", 3), patched, capsys)
    assert done.code == 6
    assert str(tmp_path / "run") in done.errors
    assert done.errors.count("\n") == 1
    assert step_of(tmp_path / "run") == before
    assert command((*arguments, "--epochs", 3), monkeypatch, capsys).code == 0
    assert step_of(tmp_path / "run") > before


def test_a_used_up_quota_is_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(ResourceError), disk.disk_errors(tmp_path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_used(
    data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    run = tmp_path / "run"
    for epochs in (1, 2):
        command(("train", data, "--out", run, *OPTIONS, "--epochs", epochs), monkeypatch, capsys)
    whole = (run / "weights.safetensors").read_bytes()
    _, new = sorted((run / "checkpoints").iterdir())
    weights = bytearray((new / "weights.safetensors").read_bytes())
    weights[-9] ^= 1
    (new / "weights.safetensors").write_bytes(weights)
    done = command(("train", data, "--out", run, *OPTIONS), monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert any(new.name in note for note in notes_of(done))
    assert re.search(rf"{re.escape(str(run))}.*\b4\b.*\b8\b", done.output)
    assert (run / "weights.safetensors").read_bytes() == whole
    for path in (run / "checkpoints").iterdir():
        (path / "state.json").write_bytes(b"")
    done = command(("train", data, "--out", run, *OPTIONS), monkeypatch, capsys)
    assert done.code == 4
    assert done.errors.count("\n") == 1
    assert new.name in done.errors


def test_a_damaged_checkpoint_is_not_one_of_the_two_kept(tmp_path: Path) -> None:
    def save(step: int) -> None:
        checkpoints.save_checkpoint(tmp_path, Snapshot({}, {"progress": {"step": step}}))

    save(4)
    save(8)
    (tmp_path / "checkpoints" / "step-00000008" / "state.json").write_bytes(b"")
    save(5)
    save(6)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]


# The folder of a run ------------------------------------------------------------------------------------------------


def trained(data: Path, run: Path, epochs: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    return command(("train", data, "--out", run, *OPTIONS, "--epochs", epochs), monkeypatch, capsys)


def notes_of(done: Done) -> list[str]:
    return [line for line in done.output.splitlines() if "note: " in line]


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_lost_best_weights_are_replaced_by_the_newest(
    damage: str, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    run = tmp_path / "run"
    trained(data, run, 2, monkeypatch, capsys)
    for epochs in (2, 3):  # a finished run, and one that goes on
        weights = run / "weights.safetensors"
        weights.unlink() if damage == "missing" else weights.write_bytes(weights.read_bytes()[:-9])
        done = trained(data, run, epochs, monkeypatch, capsys)
        assert done.code == 0, done.errors
        assert any("weights.safetensors" in note for note in notes_of(done))
        assert load_network(run)
    done = trained(data, run, 3, monkeypatch, capsys)
    assert not any("weights.safetensors" in note for note in notes_of(done))


@pytest.mark.parametrize("content", [None, b"", b"\xaa\xbb\n{\n[]\n"], ids=["missing", "empty", "garbage"])
def test_lost_metrics_do_not_stop_a_run(content: bytes | None, data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"
    trained(data, run, 1, monkeypatch, capsys)
    for epochs in (1, 2):
        (run / "metrics.jsonl").unlink(missing_ok=True)
        if content is not None:
            (run / "metrics.jsonl").write_bytes(content)
        done = trained(data, run, epochs, monkeypatch, capsys)
        assert done.code == 0, done.errors
    assert [line["epoch"] for line in records_of(run) if line["kind"] == "evaluation"] == [2, 2]


def test_a_damaged_recipe_is_named_and_a_lost_config_written_again(
    data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    run = tmp_path / "run"
    trained(data, run, 1, monkeypatch, capsys)
    (run / "recipe.yaml").write_text("a: [")
    done = trained(data, run, 1, monkeypatch, capsys)
    assert done.code == 4
    assert str(run / "recipe.yaml") in done.errors
    assert done.errors.count("\n") == 1
    for name in ("recipe.yaml", "config.json", "labels.json"):
        (run / name).unlink()
    assert trained(data, run, 2, monkeypatch, capsys).code == 0
    assert load_network(run)[1].labels == ("blue", "red")


def test_changed_data_are_said_and_other_classes_refused(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"
    before = notes_of(trained(data, run, 1, monkeypatch, capsys))
    os.utime(data / "red" / "7.png", (1, 1))
    assert set(notes_of(trained(data, run, 2, monkeypatch, capsys))) <= set(before)
    (data / "red" / "3.png").rename(data / "red" / "33.png")
    done = trained(data, run, 3, monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert any(re.search(r"\b16\b.*\b16\b.*\b4\b.*\b4\b", note) for note in notes_of(done) if note not in before)
    (run / "data.json").write_bytes(b"{")
    assert any(str(run / "data.json") in note for note in notes_of(trained(data, run, 3, monkeypatch, capsys)))


def test_a_renamed_class_is_refused(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    trained(data, tmp_path / "run", 1, monkeypatch, capsys)
    (data / "red").rename(data / "amber")  # which would come before blue
    done = trained(data, tmp_path / "run", 2, monkeypatch, capsys)
    assert done.code == 3
    for fact in ("blue, red", "amber, blue"):
        assert fact in done.errors
    assert done.errors.count("\n") == 1


@pytest.mark.parametrize("encoding", [pytest.param("utf-8:strict", marks=pytest.mark.slow), "ascii:strict"])
def test_names_that_are_not_utf8_and_terminals_that_are_not(data: Path, tmp_path: Path, encoding: str) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    data.rename(odd)
    (odd / "red").rename(Path(os.fsdecode(os.fsencode(odd) + b"/r\xf4ge")))
    env = {"PYTHONIOENCODING": encoding, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = odd.with_name(odd.name + "-run")
    for arguments in (
        ("train", odd, "--out", run, *OPTIONS, "--epochs", 1),
        ("evaluate", run, odd),
        ("predict", run, odd),
        ("check", odd, "--page", tmp_path / "check.html"),
    ):
        code, errors = ended(forked(*arguments, env=env))
        assert (code, errors) == (0, ""), arguments


def test_the_same_command_from_another_folder_goes_on(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    before = notes_of(trained(Path("data"), Path("run"), 1, monkeypatch, capsys))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    done = trained(Path("../data"), Path("../run"), 2, monkeypatch, capsys)
    assert done.code == 0, done.errors
    assert re.search(r"\.\./run\b.*\b4\b.*\b8\b", done.output)
    assert set(notes_of(done)) <= set(before)


# Several processes --------------------------------------------------------------------------------------------------


def two_ranks(data: Path, out: Path, *options: Any) -> list[subprocess.Popen[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        started(
            "train", data, "--out", out, *OPTIONS, "--epochs", 100_000, *options,
            env=place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_dead_rank_is_named(data: Path, tmp_path: Path, dead: int) -> None:
    processes = two_ranks(data, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, processes[0])
    processes[dead].kill()
    code, errors = ended(processes[1 - dead])
    processes[dead].communicate()
    assert code == 6, errors
    said = errors.splitlines()[-1]
    assert said.startswith("error: ")
    assert re.search(rf"\brank {dead}\b", said)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_ranks_with_workers_save_together_when_every_process_is_told_to_stop(data: Path, tmp_path: Path) -> None:
    # As a batch system does it: SIGTERM to all ranks and all of their workers.
    processes = two_ranks(data, tmp_path / "run", *WORKERS)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, processes[0])
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
    said = [ended(process) for process in processes]
    assert [code for code, _ in said] == [143, 143], said
    step = step_of(tmp_path / "run")
    assert all(re.search(rf"SIGTERM.*\b{step}\b", errors) for _, errors in said)
    assert all("Traceback" not in errors for _, errors in said)


@pytest.mark.slow
def test_another_number_of_processes_is_said(data: Path, tmp_path: Path) -> None:
    processes = two_ranks(data, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, processes[0])
    for process in processes:
        process.send_signal(signal.SIGTERM)
    assert [ended(process)[0] for process in processes] == [143, 143]
    step = step_of(tmp_path / "run")
    process = long_run(data, tmp_path / "run")
    wait_until(lambda: len(records_of(tmp_path / "run")) > step // 50 + 1, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    assert any(sorted(re.findall(r"\d+", line)) == ["1", "2"] for line in output.splitlines())
