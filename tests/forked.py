"""A function in a process of its own that begins as a copy of this one: nothing is imported again, which saves seconds.

What a fresh interpreter would do is tested where that is the question (`tests/architecture`, `tests/cli/test_help.py`,
signals in `tests/reliability/test_runs.py`).
"""

import atexit
import io
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import IO

import torch

# Autograd counts the devices once, at its first use. Fake tensors, such as those of an export, pose as a CUDA device,
# for which it would start a thread; a process forked after that cannot train.
torch.ones((), requires_grad=True).backward()


class Forked:
    """The process, with what tests ask of `subprocess.Popen`; what it writes goes into files."""

    def __init__(self, work: Callable[[], object], env: Mapping[str, str] | None = None, terminal: int = -1) -> None:
        """Do `work` in a session of its own with these variables too, on a terminal or into files."""
        self._written = (tempfile.TemporaryFile(), tempfile.TemporaryFile())  # noqa: SIM115 (closed when read)
        places = (terminal,) * 3 if terminal >= 0 else (os.open(os.devnull, os.O_RDONLY), *map(_number, self._written))
        self._process = multiprocessing.get_context("fork").Process(target=_alone, args=(work, places, env or {}))
        with warnings.catch_warnings():
            # Of Python 3.12 and later: threads, such as those of pytest-xdist, are not copied. None is needed.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        atexit.register(self._end)  # multiprocessing would wait for what a failed test left behind
        if terminal < 0:
            os.close(places[0])

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended: an exit code, or less than 0 by a signal."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """How it ended, if it did."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """How it ends; it is killed when it does not."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._end()
            raise subprocess.TimeoutExpired([], timeout, *self._read())
        return self._process.exitcode

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """What it wrote to stdout and stderr, once it has ended."""
        self.wait(timeout)
        return self._read()

    def so_far(self) -> str:
        """What it has written to stdout until now."""
        return os.pread(_number(self._written[0]), 1 << 20, 0).decode()

    def send_signal(self, number: int) -> None:
        """To the process, not to those that it started."""
        os.kill(self.pid, number)

    def _end(self) -> None:
        if self._process.exitcode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()

    def _read(self) -> tuple[str, str]:
        found = []
        for file in self._written:
            file.seek(0)
            found.append(file.read().decode())
            file.close()
        return found[0], found[1]


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_places(world: int) -> list[dict[str, str]]:
    """What torchrun would tell each of so many processes."""
    meeting = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def forked_ranks(work: Callable[[], object], world: int) -> list[Forked]:
    """Processes that meet as ranks and do the same work."""
    return [Forked(work, place) for place in rank_places(world)]


def _number(file: IO[bytes]) -> int:
    return file.fileno()


def _alone(work: Callable[[], object], places: tuple[int, ...], env: Mapping[str, str]) -> None:
    os.setsid()
    for number, place in enumerate(places):
        os.dup2(place, number)
    os.environ.update({"OMP_NUM_THREADS": "1", **env})
    torch.set_num_threads(1)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8:strict").partition(":")
    for name, number, strictness in (("stdout", 1, errors), ("stderr", 2, "backslashreplace")):
        bare = io.FileIO(number, "w", closefd=False)
        lines = os.isatty(number) or name == "stderr"
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(bare), encoding, strictness, line_buffering=lines))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding, errors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    work()
