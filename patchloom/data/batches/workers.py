"""The processes behind a torch `DataLoader`: how they start, which signals they handle, and how their end is reported.

A signal for a run often reaches its workers too: Ctrl-C and a closed terminal signal the whole process group, a batch
system's SIGTERM every process. The run needs its workers to finish its step.
"""

import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from time import monotonic
from types import FrameType
from typing import Any

from patchloom.machine import STOP_SIGNALS

# Interval at which a wait for a worker checks that all are alive.
CHECKED_EVERY_S = 1.0


@contextmanager
def no_core_warning() -> Iterator[None]:
    """Suppress torch's warning about more workers than cores: `decoded_dataset.make_loader` has its own note."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield


@contextmanager
def workers_started() -> Iterator[None]:
    """Fork workers in this context: no signal reaches them before `keep_working`.

    torch's SIGCHLD handler is removed: it raises wherever the main thread is when a worker dies, even in the middle of
    an update of the weights.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield  # torch sets no handler here, and none on Windows
        return
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def keep_working() -> None:
    """Keep a worker running when the whole group is told to stop; it ends with the process that started it.

    Only its first SIGTERM is ignored, because multiprocessing ends leftover workers with a second.
    """

    def first(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, first)
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class Workers:
    """The worker processes of a `DataLoader`'s iterator, if any."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._processes = getattr(iterator, "_workers", [])

    def end(self) -> None:
        """Ask the workers to end, and wait for it."""
        shutdown = getattr(self._iterator, "_shutdown_workers", None)
        if shutdown:
            shutdown()

    def kill(self) -> None:
        """Kill the workers: a stopped or stuck one would be waited for at exit, forever."""
        for process in self._processes:
            process.kill()

    def what_happened(self, timeout_s: float) -> str:
        """Return which worker died, and why; else which one the main process waited for."""
        for process in self._processes:
            if not process.is_alive():
                return _cause_of_death(process.pid, process.exitcode)
        if stopped := [process.pid for process in self._processes if is_stopped(process.pid)]:
            who, why = f"Worker {stopped[0]}", "It is stopped, as by SIGSTOP"
        elif task := self._iterator._task_info.get(self._iterator._rcvd_idx):
            who, why = f"Worker {self._processes[task[0]].pid}", "A disk that does not answer may be why"
        else:  # between two epochs, when each worker reports once
            pids = ", ".join(str(process.pid) for process in self._processes)
            who, why = f"One of the workers {pids}", "A disk that does not answer may be why"
        return (
            f"{who}, which prepares images, returned nothing for {timeout_s:g} s. {why}; "
            "--worker-timeout sets the time."
        )


class _WatchedQueue:
    """The queue of results. torch checks that workers live only after its whole timeout; here, every second."""

    def __init__(self, queue: Any, processes: Sequence[Any]) -> None:
        self._queue, self._processes = queue, processes

    def get(self, timeout: float) -> Any:
        waited = 0.0
        while True:
            before = monotonic()
            try:
                return self._queue.get(timeout=max(0.0, min(CHECKED_EVERY_S, timeout - waited)))
            except Empty:
                # A much longer wait than requested means that this process itself was stopped, and its workers with it.
                waited += min(monotonic() - before, 2 * CHECKED_EVERY_S)
                if waited >= timeout or not all(process.is_alive() for process in self._processes):
                    raise


def watched(iterator: Any) -> Any:
    """Return a `DataLoader`'s iterator whose waits end soon after a worker's death."""
    queue = getattr(iterator, "_data_queue", None)
    if queue is not None and not isinstance(queue, _WatchedQueue):
        iterator._data_queue = _WatchedQueue(queue, iterator._workers)
    return iterator


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, e.g. by SIGSTOP; False if that is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "T"
    except OSError:  # not Linux
        return False


def _cause_of_death(pid: int, code: int) -> str:
    if code >= 0:
        how, advice = f"ended with exit code {code}", "See its output above."
    elif (name := signal.Signals(-code).name) == "SIGBUS":
        how = "was killed by SIGBUS"
        advice = "Shared memory ran out: use fewer workers or a smaller batch, or give the container more of it."
    else:
        how = f"was killed by {name}"
        advice = "If nobody did that, memory ran out: use fewer workers or a smaller batch."
    return f"Worker {pid}, which prepares images, {how}. {advice}"
